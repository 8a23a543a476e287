"""Collectors that break gc/PROTOCOL.md: rules G, F and O, and those of C that collectors keep."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from tests.mutants.catalogue.interfaces import GRACE, LEDGER, META, ROOT, SWEEPER, at, giving
from tests.mutants.catalogue.nodes import comparing_less, deletes, puts
from tests.mutants.mutant import Mutant, mutant
from tests.mutants.planters import several

ANNOUNCED = "kvstore_gc.grace:Announced"
FENCED = ROOT[:2]


# Choosing and condemning.


def _first_key_alone(part: str, is_deletion: bool) -> Any:
    """A store that compares the key of the first shard alone."""

    def txn(real: Any, self: Any, compares: Any, operations: Any, timeout_s: float | None = None) -> Any:
        if (deletes if is_deletion else puts)(operations, part):
            keys = [one.key for one in compares if part in one.key]
            compares = [one for one in compares if part not in one.key or one.key == keys[0]]
        return real(self, compares, operations, timeout_s)

    return at(META, "txn", txn)


def _one_is_used(real: Any, site: Any, plans: Any, spared: Any) -> Any:
    return plans


def _plan_unsynced(real: Any, self: Any, staged: str, name: str, *, durable: bool) -> Any:
    return real(self, staged, name, durable=durable and not name.startswith("plans/"))


CONDEMNING = [
    mutant(
        "g1-condemns-what-was-used-since", at("kvstore_gc.execute", "unused", _one_is_used), "gc/test_protocol.py -k g1"
    ),
    mutant("g1-plan-is-not-synced", at(ROOT, "publish", _plan_unsynced), "contract/test_root_rules.py"),
    mutant(
        "g2-condemns-over-another-sweep",
        comparing_less(lambda one, operations: "/condemned/" in one.key and puts(operations, "/condemned/")),
        "gc/test_ledger.py",
    ),
    mutant(
        "g2-condemning-compares-one-shard", _first_key_alone("/condemned/", False), "gc/test_races.py gc/test_ledger.py"
    ),
    mutant(
        "c1-condemns-off-the-chain",
        comparing_less(lambda one, operations: one.key.endswith("/gc/seq") and puts(operations, "/condemned/")),
        "gc/test_ledger.py",
    ),
    mutant(
        "g2-stamp-is-not-compared",
        at(
            "kvstore_gc.ledger",
            "still_there",
            lambda real, sweeps, found: [
                found[one.part] for one in sweeps if one.part in found and found[one.part].sweep == one.sweep
            ],
        ),
        "gc/test_ledger.py",
    ),
]


# The grace, and the chunks to spare.

_before: dict[str, Any] = {}


def _note_before(part: str) -> Any:
    """Notes what there is under a part of the keys when a sweep is condemned."""

    def txn(real: Any, self: Any, compares: Any, operations: Any, timeout_s: float | None = None) -> Any:
        if puts(operations, "/condemned/"):
            _before[part] = {kv.key for kv in self.list("/kv/").items if part in kv.key}
        return real(self, compares, operations, timeout_s)

    return at(META, "txn", txn)


def _list_of_before(part: str) -> Any:
    """Hides the keys that were put since a sweep was condemned."""

    def listed(real: Any, self: Any, prefix: str, timeout_s: float | None = None) -> Any:
        found = real(self, prefix, timeout_s)
        early = _before.get(part)
        if early is None:
            return found
        return replace(found, items=tuple(kv for kv in found.items if part not in kv.key or kv.key in early))

    return at(META, "list", listed)


def _second_read_alone(real: Any, self: Any, prefix: str, timeout_s: float | None = None) -> Any:
    """What sessions hold is missing in the read of everything, and there in that of the sessions."""
    import json

    found = real(self, prefix, timeout_s)
    if "/sessions/" in prefix or "/gc/" in prefix:
        return found
    items = []
    for kv in found.items:
        if "/sessions/" in kv.key:
            kv = replace(kv, value=json.dumps({**json.loads(kv.value), "held": ""}).encode())
        items.append(kv)
    return replace(found, items=tuple(items))


def _any_plan(real: Any, root: Any, sweep: bytes, checksum: bytes) -> Any:
    """Reads the list of a sweep, whatever its checksum."""
    from hashlib import blake2b

    from kvstore.format import places
    from kvstore.root.identity import read_small

    name = places.plan(sweep, checksum)
    content = read_small(root, name, 1 << 20)
    if content is None:
        return None
    actual = blake2b(content, digest_size=len(checksum), person=b"kvstore.plan.1").digest()

    class Renamed:
        def __getattr__(self, method: str) -> Any:
            found = getattr(root, method)
            return lambda first, *rest, **how: found(
                name if first == places.plan(sweep, actual) else first, *rest, **how
            )

    return real(Renamed(), sweep, actual)


GRACE_AND_SPARED = [
    mutant(
        "g4-no-grace",
        at(ANNOUNCED, "of", lambda real, cls, kv: replace(real(cls, kv), revision=1 << 62)),
        "gc/test_rules.py",
    ),
    mutant(
        "g4-unreadable-session-skipped",
        at(
            ANNOUNCED,
            "of",
            lambda real, cls, kv: replace(found, revision=1 << 62) if (found := real(cls, kv)).revision < 0 else found,
        ),
        "gc/test_rules.py",
    ),
    mutant(
        "g4-takes-what-is-held",
        at(ANNOUNCED, "of", lambda real, cls, kv: replace(real(cls, kv), held=b"")),
        "gc/test_protocol.py",
    ),
    mutant("g4-held-of-the-second-read-alone", at(META, "list", _second_read_alone), "gc/test_races.py"),
    mutant(
        "g4-takes-what-is-pinned",
        at("kvstore_gc.grace:Spared", "of", lambda real, cls, packed: real(cls, ())),
        "gc/test_protocol.py",
    ),
    mutant(
        "g4-pins-of-before-the-sweep",
        several(_note_before("/refs/"), _list_of_before("/refs/"), at("kvstore.root.fences", "list_twins", giving([]))),
        "gc/test_rules.py",
    ),
    mutant(
        "g4-sessions-of-before-the-sweep",
        several(_note_before("/sessions/"), _list_of_before("/sessions/")),
        "gc/test_races.py",
    ),
    mutant("g4-damaged-plan-is-believed", at("kvstore_gc.deletion", "read_victims", _any_plan), "gc/test_rules.py"),
    mutant(
        "c3-sweep-is-not-read-again",
        at("kvstore_gc.ledger", "still_there", lambda real, sweeps, found: list(sweeps)),
        "gc/test_rules.py -k c3",
    ),
    mutant("h4-laggards-are-not-revoked", at(GRACE, "revoke", giving(None)), "gc/test_protocol.py -k h4"),
    mutant("a2-held-is-chosen-again", at(GRACE, "kept", lambda real, self: self.pinned()), "gc/test_cycle.py"),
    mutant("c5-twins-are-not-spared", at("kvstore.root.fences", "list_twins", giving([])), "gc/test_rules.py"),
    mutant(
        "c5-unreadable-twin-skipped", at("kvstore.root.fences", "read_twin", giving(None)), "gc/test_hostile.py -k c5"
    ),
    mutant(
        "c6-runs-on-a-foreign-store",
        at("kvstore.meta.cluster", "read_generation", lambda real, *what: _root_generation()),
        "gc/test_cycle.py gc/test_rules.py",
    ),
]


def _root_generation() -> Any:
    class Same:
        """Equals every generation."""

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 0

    return Same()


# Taking and closing.


def _lose_what_goes_back(real: Any, self: Any, staged: str, name: str, **how: Any) -> Any:
    if staged.startswith("trash/"):
        self.remove(staged)
        return False
    return real(self, staged, name, **how)


def _back_over_a_newer_one(real: Any, self: Any, staged: str, name: str, **how: Any) -> Any:
    return self.move(staged, name) if staged.startswith("trash/") else real(self, staged, name, **how)


def _keep_the_fence_open(real: Any, self: Any, name: str, **how: Any) -> Any:
    return True if name.startswith("trash/") else real(self, name, **how)


def _open_before_reaping(real: Any, self: Any, sweep: Any, *rest: Any) -> Any:
    self.open(sweep.sweep)
    return real(self, sweep, *rest)


def _close_whatever_is_there(real: Any, self: Any, sweeps: Any) -> Any:
    found = self.in_flight()
    return real(self, [found[one.part] for one in sweeps if one.part in found])


def _fail_all(real: Any, self: Any, error: Exception) -> Any:
    raise error


TAKING = [
    mutant("g5-newer-publication-is-lost", at(FENCED, "publish", _lose_what_goes_back), "gc/test_protocol.py"),
    mutant(
        "g5-one-name-in-the-trash",
        at("kvstore.format.places", "trashed", lambda real, sweep, name, run: real(sweep, name, bytes(len(run)))),
        "gc/test_rules.py",
    ),
    mutant(
        "g5-goes-back-over-a-newer-one",
        at(FENCED, "publish", _back_over_a_newer_one),
        "gc/test_races.py fsck/test_adopt.py",
    ),
    mutant("g6-closes-before-the-fence", at(FENCED, "remove_folder", _keep_the_fence_open), "gc/test_rules.py"),
    mutant(
        "g6-closes-another-sweep", at(LEDGER, "close", _close_whatever_is_there), "gc/test_ledger.py gc/test_races.py"
    ),
    mutant(
        "g6-closing-compares-one-shard", _first_key_alone("/condemned/", True), "gc/test_ledger.py gc/test_races.py"
    ),
    mutant("g7-adopts-nothing", at(SWEEPER, "recover", giving(None)), "gc/test_protocol.py"),
    mutant(
        "g8-abandons-a-final-list",
        at(LEDGER, "abandon", lambda real, self, sweeps: self.close(sweeps)),
        "gc/test_ledger.py",
    ),
    mutant(
        "g8-abandons-behind-an-open-fence", at(FENCED, "remove_folder", _keep_the_fence_open), "gc/test_rules.py -k g8"
    ),
    mutant(
        "g5-one-failure-ends-a-sweep",
        at("kvstore_gc.deletion:SweepOutcome", "fail", _fail_all),
        "gc/test_hostile.py gc/test_protocol.py",
    ),
    mutant(
        "f2-makes-the-folder-late", at("kvstore_gc.deletion:Trash", "reap", _open_before_reaping), "gc/test_rules.py"
    ),
    mutant("f3-loses-what-no-key-names", at(FENCED, "publish", _lose_what_goes_back), "gc/test_protocol.py -k f3"),
    mutant(
        "f3-store-is-not-read-again",
        at(
            "kvstore.root.fences",
            "lift",
            lambda real, root, sweep, bits, is_named: real(root, sweep, bits, lambda: False),
        ),
        "gc/test_rules.py gc/test_races.py",
    ),
    mutant(
        "f3-unnamed-folders-stay", at(SWEEPER, "lift_unnamed", giving(None)), "gc/test_protocol.py gc/test_cycle.py"
    ),
    mutant(
        "o1-closes-with-victims-left",
        at("kvstore_gc.deletion:Deleting", "reap", lambda real, self, *what: real(self, *what) or True),
        "gc/test_rules.py",
    ),
    mutant(
        "o1-list-is-not-final",
        at(LEDGER, "settle", lambda real, self, sweep, final: replace(sweep, record=final)),
        "gc/test_rules.py gc/test_races.py",
    ),
]


# Leftovers, order of deletion, capacity.


def _broken(real: Any, self: Any, name: str, **how: Any) -> Any:
    from kvstore.format.header import Damage

    return Damage.MAGIC


KEEPING = [
    mutant(
        "w3-quarantine-is-emptied-unlooked",
        at("kvstore.root.inspect:Inspector", "look", _broken),
        "gc/test_orphans.py fsck/test_fsck.py",
    ),
    mutant(
        "w3-damaged-file-goes-back",
        at(
            "kvstore.root.inspect:Inspector", "look", lambda real, self, name, **how: _Whole.of(real(self, name, **how))
        ),
        "gc/test_orphans.py fsck/test_fsck.py",
    ),
    mutant("leftovers-stay", at("kvstore_gc.leftovers:Orphans", "remove", giving(Counter())), "gc/test_orphans.py"),
    mutant(
        "leftovers-of-the-living",
        at(META, "list", lambda real, self, prefix, *rest: _without_sessions(real(self, prefix, *rest))),
        "gc/test_orphans.py",
    ),
    mutant(
        "timings-that-contradict", at("kvstore.core.validate", "check_limits", giving(None)), "client/test_input.py"
    ),
    mutant(
        "policy-ranks-nothing",
        at("kvstore_gc.policy", "ranks", lambda real, uses, ties, now_s, order: real(uses, ties, now_s, order) * 0),
        "gc/test_policy.py gc/test_ranking.py",
    ),
    mutant(
        "orphans-of-the-ranking-stay",
        at("kvstore_gc.rank:Parents", "check", giving(None)),
        "gc/test_cycle.py -k parent",
    ),
    mutant(
        "puts-have-the-time-of-their-quantum",
        at("kvstore.engine.chunk_store:PresenceCache", "tick", lambda real, self: self.quantum()),
        "gc/test_cycle.py -k older",
    ),
    mutant(
        "policy-ttl-ignored",
        at("kvstore_gc.policy", "expired", lambda real, uses, *when: real(uses, *when) & False),
        "gc/test_policy.py gc/test_ranking.py",
    ),
]


class _Whole:
    """Reports every file as intact, as the last intact one was."""

    last: Any = None

    @classmethod
    def of(cls, found: Any) -> Any:
        if type(found).__name__ == "Header":
            cls.last = found
        return cls.last or found


def _without_sessions(found: Any) -> Any:
    return replace(found, items=tuple(kv for kv in found.items if "/sessions/" not in kv.key))


MUTANTS: list[Mutant] = [*CONDEMNING, *GRACE_AND_SPARED, *TAKING, *KEEPING]
