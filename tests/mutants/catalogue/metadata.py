"""Metadata stores that break their contract (kvstore/meta/store.py): compares, leases, revisions, watches."""

from __future__ import annotations

from typing import Any

from tests.mutants.catalogue.interfaces import MEMORY_STORE, META, WATCH, at, giving
from tests.mutants.mutant import Mutant, mutant

CONTRACT = ("meta/test_meta_conformance.py -k 'not etcd'",)
MEMORY, ETCD_META = META


def _split(real: Any, self: Any, timeout_s: float) -> Any:
    batch = real(self, timeout_s)
    return batch and batch[:1]


def _drop_one(real: Any, self: Any, timeout_s: float) -> Any:
    batch = real(self, timeout_s)
    return batch and (batch[:-1] or None)


def _hide_loss(real: Any, self: Any, timeout_s: float) -> Any:
    from kvstore.meta.store import WatchLost

    try:
        return real(self, timeout_s)
    except WatchLost:
        return None


def _resend(real: Any, self: Any, *rest: Any, resend: bool = True) -> Any:
    return real(self, *rest, resend=True)


MUTANTS: list[Mutant] = [
    mutant(
        "meta-txn-compares-nothing",
        at(MEMORY_STORE, "txn", lambda real, self, compares, operations: real(self, (), operations)),
        *CONTRACT,
    ),
    mutant(
        "meta-txn-applies-half",
        at(MEMORY_STORE, "txn", lambda real, self, compares, operations: real(self, compares, operations[:1])),
        *CONTRACT,
    ),
    mutant("meta-txn-without-limits", at("kvstore.meta.store", "check_request", giving(None)), *CONTRACT),
    mutant(
        "meta-list-hides-the-last",
        at(
            MEMORY,
            "list",
            lambda real, self, prefix, timeout_s=None: type(found := real(self, prefix))(
                found.items[:-1], found.revision
            ),
        ),
        *CONTRACT,
    ),
    mutant(
        "meta-put-without-lease",
        at(MEMORY, "put", lambda real, self, key, value, lease=0, timeout_s=None: real(self, key, value)),
        *CONTRACT,
    ),
    mutant(
        "meta-lease-never-ends",
        at(MEMORY_STORE, "grant", lambda real, self, ttl_s: real(self, 1000 * ttl_s)),
        *CONTRACT,
    ),
    mutant("meta-lease-always-alive", at(MEMORY, "keep_alive", giving(True)), *CONTRACT),
    mutant("meta-revoke-keeps-keys", at(META, "revoke", giving(None)), *CONTRACT),
    mutant("meta-watch-drops-an-event", at(WATCH, "next", _drop_one), *CONTRACT),
    mutant("meta-watch-splits-a-revision", at(WATCH, "next", _split), *CONTRACT),
    mutant("meta-watch-hides-its-loss", at(WATCH, "next", _hide_loss), *CONTRACT),
    mutant(
        "etcd-transaction-sent-again",
        at("kvstore.meta.etcd.client:EndpointPool", "call", _resend),
        "meta/test_meta_etcd.py -k transaction",
    ),
]
