"""A cluster takes over a root of one host, once the processes that shared it have ended (rule C6)."""

from __future__ import annotations

import logging
import os

from kvstore.errors import RootMismatch
from kvstore.format.generation import Generation
from kvstore.host.place import FOLDER, is_in_use
from kvstore.root.generations import newest_number, publish
from kvstore.root.interface import Root
from kvstore.root.posix import PosixRoot
from kvstore.root.posix_errors import translated
from kvstore.sources import Clock, Ids

log = logging.getLogger(__name__)


def check_left(root: Root) -> None:
    """Raises RootMismatch while processes of this host share a root without etcd: a cluster does not see their holds.

    Once the root is a cluster's they protect and collect nothing there, so that it need not wait for them.
    """
    if not isinstance(root, PosixRoot) or newest_number(root):
        return
    with translated("read", root.path):
        is_used = os.path.isdir(f"{root.path}/{FOLDER}") and is_in_use(root.path)
    if is_used:
        raise RootMismatch(
            f"{root.url} is in use by processes of this host that share it without etcd, and a cluster would not know "
            "what they hold: end them first, or leave out etcd (is KVSTORE_ETCD set?)"
        )


def publish_first(root: Root, generation: Generation, *, ids: Ids, clock: Clock) -> Generation:
    """Publishes as ``publish`` does, if ``check_left`` allows it at this moment."""
    check_left(root)
    if not newest_number(root) and isinstance(root, PosixRoot) and os.path.isdir(f"{root.path}/{FOLDER}"):
        log.warning("root.taken_over %s was of one host, without etcd: now it belongs to a cluster", root.url)
    return publish(root, generation, ids=ids, clock=clock)
