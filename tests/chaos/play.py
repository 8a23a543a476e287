"""One chaos run from beginning to end, and what must be true afterwards."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import kvstore
from kvstore.census.walk import read_fixed, walk
from kvstore.core.address import NO_PARENT
from kvstore.core.clock import SystemClock
from kvstore.format import places
from kvstore.format.header import FIXED_BYTES
from kvstore.fsck import fsck
from kvstore.meta.keys import Keys
from kvstore.root.identity import RootIdentity, read_identity
from kvstore.root.interface import Root
from kvstore.root.posix import PosixRoot
from kvstore_gc.execute import Sweeper
from kvstore_gc.leftovers import Orphans
from kvstore_gc.site import Site
from tests.chaos.cast import SHARD_BITS, Cast, Part, cast, host_cast
from tests.chaos.journal import VIOLATION
from tests.chaos.pins import LivePins
from tests.chaos.saboteur import Saboteur
from tests.kit.etcd import eventually
from tests.kit.patience import PATIENCE_S

MIB = 1 << 20
NODES = 3
HOST_NODES = 2
PROMPTS = 400
MAX_BYTES = 6 * MIB
"""All prompts together take about three times as much, so that there is something to collect all the time."""
CALM_S = 3.0


@dataclass(slots=True)
class Outcome:
    """The outcome of a run, in numbers."""

    attacks: Counter[str]
    counts: Counter[str]
    rounds: Counter[str]
    used_bytes: int
    pins_checked: int
    unreachable_count: int

    def __str__(self) -> str:
        def line(title: str, numbers: Counter[str]) -> str:
            return f"{title}: " + ", ".join(f"{name} {count}" for name, count in sorted(numbers.items()) if count)

        return "\n".join(
            (
                line("attacks", self.attacks),
                line("nodes", self.counts),
                line("collectors", self.rounds),
                f"used bytes at the end: {self.used_bytes:,} of {MAX_BYTES:,}",
                f"pins in force at the end: {self.pins_checked}; chunks without parent: {self.unreachable_count}",
            )
        )


def play(mount: Path, folder: Path, *, seconds: float, seed: int) -> Outcome:
    """Runs nodes, collectors and etcd under attack for a time; asserts the protocol's promises."""
    root = mount / "root"
    kvstore.open(str(root), shard_bits=SHARD_BITS).close()
    with cast(root, folder) as players:
        limits = ["--max-bytes", str(MAX_BYTES)]
        nodes = [players.node(f"node{number}", PROMPTS) for number in range(NODES)]
        pauses_s = dict.fromkeys((node.name for node in nodes), 20.0)
        pauses_s |= {players.collector(name, "--interval", "1s", *limits).name: 10.0 for name in ("gc0", "gc1")}
        # Takes every chunk that is not in use now, so that sweeps meet holds and pins, not only forgotten chunks.
        pauses_s |= {players.collector("cron", "--once", "--ttl", "0s").name: 5.0, "etcd": 15.0}
        auditor = players.auditor()
        return _attacked(players, seconds, Saboteur(players, seed, pauses_s), [*nodes, auditor])


def play_on_host(folder: Path, *, seconds: float, seed: int, breath_s: float) -> Outcome:
    """Runs processes of one host. ``breath_s`` is the time between two actions of a node."""
    root = folder / "root"
    kvstore.open(str(root), shard_bits=SHARD_BITS).close()
    with host_cast(root, folder) as players:
        nodes = [players.node(f"node{number}", PROMPTS, "--breath", str(breath_s)) for number in range(HOST_NODES)]
        pauses_s = dict.fromkeys((node.name for node in nodes), 20.0)
        limits = ["--ttl", "0s", "--max-bytes", str(MAX_BYTES)]
        pauses_s[players.collector("gc", "--interval", "1s", *limits).name] = 10.0
        auditor = players.auditor()
        return _attacked(players, seconds, Saboteur(players, seed, pauses_s), [*nodes, auditor])


def _attacked(players: Cast, seconds: float, saboteur: Saboteur, promising: Sequence[Part]) -> Outcome:
    """Plays, and then asks everybody; no promise may have been broken."""
    saboteur.play(seconds)
    time.sleep(CALM_S)
    all_kept(players, promising)
    left = nothing_is_left(players) if players.has_etcd else pins_are_left(players)
    return Outcome(
        saboteur.done,
        players.counts(),
        players.rounds(),
        left.used_bytes,
        left.pins_checked,
        left.unreachable_count,
    )


def all_kept(players: Cast, promising: Sequence[Part]) -> None:
    """Ends everybody; no promise may have been broken, and nobody may have failed."""
    for part in (*promising, *players.parts.values()):
        part.end()
    assert not players.facts(VIOLATION), f"promises were broken: {players.facts(VIOLATION)}"
    assert all(code == 0 for part in promising for code in part.codes), _said(players)
    assert not any("Traceback" in path.read_text() for path in players.folder.glob("*.log")), _said(players)


def used_bytes(root: Path) -> int:
    """The sum of all chunk files; 0 before the first put."""
    total, chunks = 0, root / "chunks"
    for folder in os.scandir(chunks) if chunks.exists() else ():
        for entry in os.scandir(folder.path):
            try:
                total += entry.stat().st_size
            except OSError:
                pass  # swept since it was listed
    return total


@dataclass(frozen=True, slots=True)
class Left:
    """The chunks and pins on the root after a run."""

    used_bytes: int
    pins_checked: int
    unreachable_count: int


def nothing_is_left(players: Cast) -> Left:
    """Every session is over: one round more, and nothing else may be left of all that."""
    root = PosixRoot(players.root)
    identity = read_identity(root)
    assert identity is not None
    keys, meta = Keys(identity.root), players.meta()
    try:
        eventually(lambda: not meta.count(keys.sessions), "the sessions end")
        last = players.collector("last", "--once", "--max-bytes", str(MAX_BYTES))
        assert last.process is not None
        code = last.process.wait(PATIENCE_S)
        pins = LivePins(players.root, identity.shard_bits, players.folder)
        in_force = pins.in_force()
        broken = [found for pin in in_force if (found := pins.broken(pin))]
        assert not broken, f"pins in force whose chunks are gone: {broken}"
        assert not list(root.list(places.TRASH)), "trash is left"
        assert not meta.count(keys.condemned), "sweeps are left"
        report = fsck(root, identity)
        assert report.is_clean, f"fsck: {report.findings}"
        unreachable_count = _unreachable_count(root, identity)
        used = used_bytes(players.root)
        assert code == 0, f"the last round ended with {code}: {players.tail('last')}"
        assert used <= MAX_BYTES
        _remove_leftovers(Site(root, identity, meta))
        for place in (places.STAGING, places.PLANS, places.TRASH, places.QUARANTINE):
            assert not list(root.list(place)), f"{place} is not empty"
    finally:
        meta.close()
    return Left(used, len(in_force), unreachable_count)


def pins_are_left(players: Cast) -> Left:
    """All processes of a host have ended: one listing more, and pins in force are all that may be left."""
    root = PosixRoot(players.root)
    identity = read_identity(root)
    assert identity is not None
    last = players.collector("last", "--once", "--ttl", "0s")
    assert last.process is not None
    code = last.process.wait(PATIENCE_S)
    assert code == 0, f"the last listing ended with {code}: {players.tail('last')}"
    pins = LivePins(players.root, identity.shard_bits, players.folder)
    in_force = pins.in_force()
    broken = [found for pin in in_force if (found := pins.broken(pin))]
    assert not broken, f"pins in force whose chunks are gone: {broken}"
    report = fsck(root, identity)
    assert report.is_clean, f"fsck: {report.findings}"
    assert _unreachable_count(root, identity) == 0
    return Left(used_bytes(players.root), len(in_force), 0)


def _unreachable_count(root: Root, identity: RootIdentity) -> int:
    """The number of chunks without their parent."""
    seen = [root.look(each.name, FIXED_BYTES) for each in walk(root, identity.shard_bits)]
    found = [fixed for each in seen if each is not None and (fixed := read_fixed(each.prefix)) is not None]
    there = {each.address for each in found}
    return sum(each.parent != NO_PARENT and each.parent not in there for each in found)


def _remove_leftovers(site: Site) -> None:
    """Removes at once what collectors remove in minutes or a day: nobody is left who could still be using it."""
    orphans = Orphans(replace(site, clock=_Later(2 * site.timings.quarantine_age_s)))
    for _ in range(2):  # an empty folder must have been empty in the round before
        orphans.remove()
    assert not Sweeper(site).lift_unnamed()


class _Later(SystemClock):
    """The system's clock, ahead."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s

    def now_s(self) -> float:
        return super().now_s() + self._ahead_s


def _said(players: Cast) -> str:
    said = [f"{name}: ended with {part.codes}\n{players.tail(name)}" for name, part in players.parts.items()]
    return "\n".join(said)
