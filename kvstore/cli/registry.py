"""What etcd knows of roots, workers and sessions, for commands that have no store open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.cli.access import EtcdAccess
from kvstore.meta.keys import ID_BYTES, Keys, SessionId
from kvstore.meta.workers import WorkerRecord, Workers

if TYPE_CHECKING:
    from kvstore.meta.interface import Meta

TIMEOUT_S = 10.0
_ROOTS = "/kv/roots/"


def workers_by_root(etcd: EtcdAccess) -> dict[bytes, dict[SessionId, WorkerRecord]]:
    """Live workers by the id of their root. Raises Unavailable, PermissionDenied."""
    meta = etcd.open()
    try:
        return {root: Workers(meta, Keys(root)).list(TIMEOUT_S) for root in root_ids(meta)}
    finally:
        meta.close()


def root_ids(meta: Meta) -> list[bytes]:
    """The ids of all roots that this etcd has seen."""
    values = {kv.value for kv in meta.list(_ROOTS, TIMEOUT_S).items}
    return sorted(value for value in values if len(value) == ID_BYTES)


def live_sessions(etcd: EtcdAccess, root: bytes) -> set[bytes]:
    """The ids of the sessions that live on a root."""
    meta = etcd.open()
    try:
        keys = Keys(root)
        found = (keys.parse_session(kv.key) for kv in meta.list(keys.sessions, TIMEOUT_S).items)
        return {bytes(session) for session in found if session is not None}
    finally:
        meta.close()
