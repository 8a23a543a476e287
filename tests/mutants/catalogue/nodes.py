"""Nodes that break gc/PROTOCOL.md: rules V, H, A and P, and those of C that nodes keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.mutants.catalogue.interfaces import GC_STATE, HOLDS, KNOWN, META, SESSION, VIEW, at, giving
from tests.mutants.mutant import Mutant, mutant
from tests.mutants.planters import several


def comparing_less(is_dropped: Callable[[Any, Any], bool]) -> Any:
    """A store whose transactions leave out the compares for which ``is_dropped(compare, operations)`` is true."""

    def txn(real: Any, self: Any, compares: Any, operations: Any, timeout_s: float | None = None) -> Any:
        kept = [one for one in compares if not is_dropped(one, operations)]
        return real(self, kept, operations, timeout_s)

    return at(META, "txn", txn)


def puts(operations: Any, part: str) -> bool:
    """True if a transaction writes a key with this part."""
    return any(part in one.key and hasattr(one, "value") for one in operations)


def deletes(operations: Any, part: str) -> bool:
    """True if a transaction deletes a key with this part."""
    return any(part in one.key and not hasattr(one, "value") for one in operations)


# V: the session and its view.

_early: dict[str, Any] = {}


def _grant(real: Any, self: Any, *rest: Any, **how: Any) -> Any:
    _early["gc"] = self.list("/kv/")
    return real(self, *rest, **how)


def _list_early(real: Any, self: Any, prefix: str, *rest: Any) -> Any:
    found = real(self, prefix, *rest)
    early = _early.pop("gc", None) if prefix.endswith("/gc/") else None
    return type(found)(tuple(kv for kv in early.items if kv.key.startswith(prefix)), early.revision) if early else found


SESSIONS = [
    mutant(
        "v1-view-of-before-the-session",
        several(at(META, "grant", _grant), at(META, "list", _list_early)),
        "contract/test_node_rules.py",
    ),
    mutant(
        "v2-holds-outlive-the-session",
        several(at(HOLDS, "drop_all", giving(None)), at(HOLDS, "drop_protecting", giving(None))),
        "node/test_follower.py",
    ),
    mutant("v2-session-never-dies", at(SESSION, "alive", giving(True)), "meta/test_meta_session.py"),
    mutant("v2-lost-lease-unnoticed", at(META, "keep_alive", giving(True)), "meta/test_meta_session.py"),
    mutant("v2-view-outlives-the-session", at(VIEW, "end", giving(None)), "node/test_view.py node/test_follower.py"),
    mutant("v3-holds-keep-their-births", at(HOLDS, "age_all", giving(None)), "node/test_follower.py"),
    mutant("v3-chain-not-checked", at(SESSION, "check_chain", giving(None)), "node/test_follower.py"),
    mutant("v3-keeps-the-view-of-a-lost-watch", at(VIEW, "reread", giving(None)), "contract/test_node_rules.py"),
    mutant("v3-silent-watch-believed", at(VIEW, "is_last", giving(True)), "node/test_follower.py"),
    mutant("v3-knows-what-lost-events-condemned", at(KNOWN, "clear", giving(None)), "node/test_view.py"),
]


# H: holds.


def _look_before_hold(
    real: Any, self: Any, chain: Any, ttl_s: float | None = None, deadline_s: float | None = None, **_: Any
) -> Any:
    found = chain.leading(self.match(chain, deadline_s))
    taken = self.holds.take(found, ttl_s)
    taken.count = len(taken.chain)
    return taken


def _late_add(real: Any, self: Any, *what: Any, epoch: int, **how: Any) -> Any:
    return real(self, *what, epoch=self.epoch, **how)


def _forget_at_the_start(real: Any, self: Any, events: Any) -> Any:
    """Only the beginning of a sweep makes its chunks forgotten: the end of one is a deletion."""
    from unittest.mock import patch

    from kvstore.engine.chunk_store import PresenceCache

    events = list(events)
    if any("/condemned/" in one.key and one.kv is None for one in events):
        with patch.object(PresenceCache, "forget_each", lambda *rest: None):
            return real(self, events)
    return real(self, events)


def _renew_for_ever(real: Any, self: Any, hold: Any, lease_s: float) -> Any:
    is_live = real(self, hold, lease_s)
    if is_live:
        hold.ends_s += lease_s
    return is_live


def _keep_counting(real: Any, self: Any) -> None:
    before = len(self)
    real(self)
    self.holds_max -= before - len(self)


HOLDING = [
    mutant(
        "h1-condemned-is-a-hit",
        at(GC_STATE, "leading", lambda real, self, wanted: len(wanted)),
        "node/test_view.py gc/test_protocol.py",
    ),
    mutant(
        "h1-condemned-blocks-are-hits",
        several(
            at(GC_STATE, "condemns", giving(False)),
            at(GC_STATE, "leading", lambda real, self, wanted: len(wanted)),
            at(GC_STATE, "allowed", lambda real, self, addresses: range(len(addresses))),
            at(GC_STATE, "unswept", lambda real, self, wanted: real(self, wanted) | True),
        ),
        "contract/test_node_rules.py",
    ),
    mutant("h2-look-before-hold", at("kvstore.engine.engine:Engine", "hold", _look_before_hold), "gc/test_rules.py"),
    mutant(
        "h2-hold-of-a-look-begins-empty",
        at(HOLDS, "take", lambda real, self, chain, ttl_s=None, **whatever: real(self, chain, ttl_s)),
        "gc/test_block_holds.py",
    ),
    mutant(
        "h2-hold-is-not-registered",
        at(HOLDS, "take", lambda real, self, *what, **how: (hold := real(self, *what, **how), self.release(hold))[0]),
        "gc/test_protocol.py",
    ),
    mutant("h3-sweep-forgets-nothing", at(KNOWN, "forget_each", giving(None)), "node/test_view.py"),
    mutant("h3-end-of-a-sweep-forgets-nothing", at(VIEW, "apply", _forget_at_the_start), "node/test_view.py"),
    mutant(
        "h3-look-outlives-a-sweep",
        several(at(KNOWN, "add", _late_add), at(KNOWN, "add_all", _late_add), at(KNOWN, "add_run", _late_add)),
        "node/test_view.py native/test_looks.py",
    ),
    mutant("h4-ended-hold-is-read", at(HOLDS, "check", giving(None)), "node/test_follower.py node/test_outage.py"),
    mutant("h4-renewed-past-its-end", at(HOLDS, "renew", _renew_for_ever), "worker/test_leased_holds.py"),
    mutant(
        "h4-client-holds-never-expire",
        at("kvstore.worker.context:ClientHolds", "expire", giving(None)),
        "worker/test_leased_holds.py",
    ),
    mutant(
        "h4-hold-ended-during-its-lookup-keeps-memory",
        at(HOLDS, "keep", lambda real, self, hold, slots: setattr(hold, "slots", slots)),
        "tiers/test_keeping.py",
    ),
    mutant(
        "h4-expired-holds-stay-counted",
        at("kvstore.worker.context:ClientHolds", "expire", _keep_counting),
        "contract/test_faults.py -k ended",
    ),
    mutant(
        "h4-lagging-node-keeps-alive",
        at("kvstore.engine.follower:GcFollower", "keeps_up", giving(True)),
        "node/test_follower.py",
    ),
]


# A: announcements.


def _announce_ahead(real: Any, self: Any, view: Any) -> Any:
    due = real(self, view)
    return due._replace(revision=due.revision + 8)  # the next revisions may be of its own writes


def _half_of_a_transaction(real: Any, self: Any, events: Any) -> Any:
    events = list(events)
    condemned = [one for one in events if "/condemned/" in one.key and one.kv is not None]
    return real(self, [one for one in events if one not in condemned[1:]])


ANNOUNCING = [
    mutant("a1-announces-ahead-of-its-view", at(HOLDS, "announcement", _announce_ahead), "node/test_follower.py"),
    mutant(
        "a1-applies-half-of-a-transaction", at(VIEW, "apply", _half_of_a_transaction), "contract/test_node_rules.py"
    ),
    mutant(
        "a2-names-nothing",
        at(HOLDS, "announcement", lambda real, self, view: real(self, view)._replace(held=b"", on=())),
        "node/test_follower.py",
    ),
    mutant(
        "a2-hold-between-two-sweeps-is-not-named",
        at(VIEW, "stamps", lambda real, self, **how: sorted(real(self, **how))[:1]),
        "node/test_follower.py",
    ),
    mutant(
        "a2-write-drops-the-names",
        at(SESSION, "txn", lambda real, self, *what, held=b"", **how: real(self, *what, **how)),
        "node/test_follower.py",
    ),
    mutant(
        "a2-look-counts-as-empty",
        at(
            HOLDS,
            "take",
            lambda real, self, *what, whatever=False, **how: _found_nothing(
                real(self, *what, whatever=whatever, **how)
            ),
        ),
        "node/test_follower.py",
    ),
    mutant("a2-held-is-not-renewed", at(HOLDS, "announced", giving(None)), "node/test_follower.py"),
    mutant(
        "a3-announces-off-the-chain",
        at(SESSION, "txn", lambda real, self, compares=(), *rest, **how: real(self, (), *rest, **how)),
        "node/test_follower.py",
    ),
]


def _found_nothing(hold: Any) -> Any:
    if hold.whatever:
        hold.found = ()
    return hold


# P: pins.


def _txn_without_names(real: Any, self: Any, compares: Any, operations: Any, timeout_s: float | None = None) -> Any:
    import json
    from dataclasses import replace

    if puts(operations, "/refs/"):
        changed = []
        for one in operations:
            if "/sessions/" in one.key and hasattr(one, "value"):
                record = json.loads(one.value)
                record["held"] = ""
                one = replace(one, value=json.dumps(record).encode())
            changed.append(one)
        operations = changed
    return real(self, compares, operations, timeout_s)


PINNING = [
    mutant(
        "p1-pin-without-a-hold",
        several(
            at(
                HOLDS,
                "take",
                lambda real, self, *what, **how: (hold := real(self, *what, **how), self.release(hold))[0],
            ),
            at(HOLDS, "check", giving(None)),
        ),
        "node/test_pins.py -k p1",
    ),
    mutant("p1-pin-ignores-its-lost-hold", at(HOLDS, "check", giving(None)), "node/test_pins.py -k p1"),
    mutant(
        "p2-pin-of-a-dead-session",
        comparing_less(lambda one, operations: "/sessions/" in one.key and puts(operations, "/refs/")),
        "meta/test_pins.py meta/test_meta_nouns.py",
    ),
    mutant("p2-pin-drops-the-names", at(META, "txn", _txn_without_names), "contract/test_node_rules.py"),
    mutant("p3-lost-pin-keeps-its-lease", at(META, "revoke", giving(None)), "meta/test_pins.py -k p3"),
    mutant(
        "p3-unpins-blindly",
        comparing_less(lambda one, operations: deletes(operations, "/refs/")),
        "meta/test_pins.py -k p3",
    ),
    mutant(
        "p4-pin-counts-what-is-missing",
        at("kvstore.engine.writer:Writer", "present_leading", lambda real, self, wanted: len(wanted)),
        "node/test_pins.py",
    ),
    mutant(
        "p5-pin-ignores-a-clear",
        at("kvstore.meta.clears:Clears", "in_progress", giving(())),
        "node/test_pin_and_clear.py",
    ),
    mutant(
        "p6-disk-was-away",
        at("kvstore.tiers.disk:DiskTier", "refill", lambda real, self, cleared=(): real(self)),
        "census/test_clearing.py host/test_clears.py -k away",
    ),
    mutant(
        "p5-clear-outlives-its-order",
        at("kvstore.meta.clears:PublishedClear", "check", giving(None)),
        "node/test_pin_and_clear.py",
    ),
]


# C: a store that went back in time, or is another cluster's.


def _continue_any_chain(real: Any, self: Any, events: Any) -> Any:
    from kvstore.engine.gc_state import ChainBroken

    try:
        return real(self, events)
    except ChainBroken:
        return None


class _AnyNonce:
    """Equals every nonce."""

    def __ne__(self, other: object) -> bool:
        return False


def _link_to_anything(real: Any, cls: Any, value: bytes) -> Any:
    from dataclasses import replace

    return replace(real(cls, value), prev=_AnyNonce())


def _any_checksum(real: Any, cls: Any, value: bytes, where: str) -> Any:
    return real(cls, value.replace(b'"checksum"', b'"CHECKSUM"', 1), where)


def _agree(real: Any, *what: Any, read_root: Any, **how: Any) -> Any:
    from kvstore.meta.cluster import Agreed

    standing = real(*what, read_root=read_root, **how)
    return standing if isinstance(standing, Agreed) else Agreed(read_root())


RESTORED = [
    mutant("c1-any-event-is-applied", at(VIEW, "apply", _continue_any_chain), "node/test_view.py"),
    mutant(
        "c1-node-ignores-the-chain",
        several(
            at("kvstore.meta.sweeps:Seq", "from_json", _link_to_anything),
            at(VIEW, "is_last", giving(True)),
            at(SESSION, "txn", lambda real, self, compares=(), *rest, **how: real(self, (), *rest, **how)),
        ),
        "node/test_view.py",
    ),
    mutant(
        "c2-lost-write-unnoticed",
        several(
            comparing_less(lambda one, operations: "/sessions/" in one.key), at(SESSION, "check_chain", giving(None))
        ),
        "meta/test_meta_session.py",
    ),
    mutant(
        "c4-starts-without-a-fence",
        at("kvstore.engine.follower:StartFence", "lift_unnamed", giving(None)),
        "gc/test_protocol.py",
    ),
    mutant("c5-pin-without-a-twin", at("kvstore.host.pins:PinTwins", "write", giving(None)), "node/test_pins.py"),
    mutant("c5-twin-stays-after-its-pin", at("kvstore.root.fences", "remove_twin", giving(None)), "node/test_pins.py"),
    mutant(
        "c5-damaged-pin-is-read", at("kvstore.meta.pins:StoredPin", "from_bytes", _any_checksum), "meta/test_pins.py"
    ),
    mutant(
        "c6-protects-on-a-foreign-store",
        at("kvstore.meta.cluster", "join_generation", _agree),
        "node/test_follower.py -k c6",
    ),
]


MUTANTS: list[Mutant] = [*SESSIONS, *HOLDING, *ANNOUNCING, *PINNING, *RESTORED]
