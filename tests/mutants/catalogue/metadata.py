"""Metadata stores that break their contract (kvstore/meta/store.py): compares, leases, revisions, watches."""

from __future__ import annotations

from typing import Any

from tests.mutants.catalogue.interfaces import MEMORY_STORE, META, WATCH, at, giving
from tests.mutants.mutant import Mutant, mutant

CONTRACT = ("meta/test_meta_conformance.py", "-k", "not etcd")
ETCD = "meta/test_meta_etcd.py"
MEMORY, ETCD_META = META
ETCD_WATCH = WATCH[1]


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


def _resend(real: Any, self: Any, *rest: Any, resend: bool) -> Any:
    return real(self, *rest, resend=True)


MUTANTS: list[Mutant] = [
    mutant(
        "meta-txn-compares-nothing",
        "Meta: a transaction applies if its compares hold",
        at(MEMORY_STORE, "txn", lambda real, self, compares, operations: real(self, (), operations)),
        *CONTRACT,
    ),
    mutant(
        "meta-txn-applies-half",
        "Meta: a transaction is atomic",
        at(MEMORY_STORE, "txn", lambda real, self, compares, operations: real(self, compares, operations[:1])),
        *CONTRACT,
    ),
    mutant(
        "meta-txn-without-limits",
        "Meta: limits of a transaction",
        at("kvstore.meta.store", "check_request", giving(None)),
        *CONTRACT,
    ),
    mutant(
        "meta-list-hides-the-last",
        "Meta: a list has every key under its prefix",
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
        "Meta: a key ends with its lease",
        at(MEMORY, "put", lambda real, self, key, value, lease=0, timeout_s=None: real(self, key, value)),
        *CONTRACT,
    ),
    mutant(
        "meta-lease-never-ends",
        "Meta: a lease ends unless it is renewed",
        at(MEMORY_STORE, "grant", lambda real, self, ttl_s: real(self, 1000 * ttl_s)),
        *CONTRACT,
    ),
    mutant(
        "meta-lease-always-alive",
        "Meta: a keepalive reports a lease that has ended",
        at(MEMORY, "keep_alive", giving(True)),
        *CONTRACT,
    ),
    mutant(
        "meta-revoke-keeps-keys",
        "Meta: a revoked lease deletes its keys",
        at(META, "revoke", giving(None)),
        *CONTRACT,
    ),
    mutant("meta-watch-drops-an-event", "Meta: a watch has no gap", at(WATCH, "next", _drop_one), *CONTRACT),
    mutant("meta-watch-splits-a-revision", "Meta: a watch splits no revision", at(WATCH, "next", _split), *CONTRACT),
    mutant("meta-watch-hides-its-loss", "Meta: a watch with a gap is lost", at(WATCH, "next", _hide_loss), *CONTRACT),
    mutant(
        "etcd-transaction-sent-again",
        "Meta: a transaction that may have been sent is not sent again",
        at("kvstore.meta.etcd.client:Members", "call", _resend),
        ETCD,
        "-k",
        "transaction",
    ),
]
