"""A folder of one host without etcd: hold tables, an eviction log and pin records, in every interleaving.

The root has one prompt of two chunks, 0 and its child 1. Process ``a`` holds and matches; process ``b`` puts the child,
or pins. A collector deletes; it may die at any step, and another one takes over. Processes share mapped files:

- each process has a *table* of what it holds, which grows; the kernel drops it when the process ends,
- the *log* is a ring of chunk names with two counters: ``tail`` (appended) and ``settled`` (dealt with). A process that
  remembers which chunks exist forgets what the log names, or all of it if the ring has been overrun.

Each load and store of shared memory and each system call is one step. ``RULES`` are the parts of the protocol; a search
without one of them finds a violation: a chunk that is held or pinned but has no file, or a child without its parent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.model.search import no_cycles

RULES = {
    "table_before_tail": "a hold writes its table before it reads the tail",
    "unsettled_is_a_miss": "a chunk that the log names and that is not settled is a miss",
    "matches_mind_unsettled": "so it is for a match, which takes no hold and remembers its look",
    "log_clears_cache": "a process forgets what the log names",
    "overrun_clears_cache": "a process that may have read overwritten entries forgets everything",
    "append_before_tables": "the collector appends its victims before it reads the tables",
    "append_before_sizes": "... and before it reads how large the tables are",
    "tables_before_pins": "it reads the tables before the pins",
    "reads_pins": "it reads the pins at all",
    "settles_last": "a batch is settled once its last file is deleted",
    "takeover_settles": "a new collector deletes nothing that the last one chose",
    "children_first": "a batch deletes children before their parents",
    "skips_ancestors": "what is skipped keeps its ancestors",
    "skips_for_the_ranking": "... for the rest of its ranking",
    "stat_after_tables": "the last use is read after the tables",
    "put_holds_parent": "a put holds its parent until the child is linked",
    "put_renews_parent": "a put renews the last use of its parent after it has linked the child",
}


class Process(NamedTuple):
    """One process; all but ``size`` and ``table`` is its own memory. ``seen``: the log is applied up to here."""

    step: str = "idle"
    act: str = ""
    tail: int = 0
    at: int = 0
    entries: frozenset[tuple[int, int]] = frozenset()
    unsettled: frozenset[int] = frozenset()
    seen: int = 0
    cached: frozenset[int] = frozenset()
    depth: int = 0
    size: int = 0
    table: frozenset[int] = frozenset()


class Collector(NamedTuple):
    """``listed``: the chunks of its listing; ``victims`` in the order of deletion; ``kept``: found to be in use."""

    step: str = "list"
    listed: frozenset[int] = frozenset()
    victims: tuple[int, ...] = ()
    at: int = 0
    sizes: tuple[int, int] = (0, 0)
    kept: frozenset[int] = frozenset()


class State(NamedTuple):
    """``used``: chunks used since the listing; ``pinned``: how many leading chunks a pin record names."""

    files: frozenset[int] = frozenset({0, 1})
    used: frozenset[int] = frozenset()
    ring: tuple[int, ...] = ()
    tail: int = 0
    settled: int = 0
    pinned: int = 0
    orphaned: bool = False
    a: Process = Process()
    b: Process = Process()
    collector: Collector = Collector()


Step = tuple[str, State]
DEPTHS = {"hold": 2, "match": 2, "put": 1, "pin": 2}


def process_steps(s: State, me: str, acts: tuple[str, ...], remembers: bool, dropped: str) -> Iterator[Step]:
    """The steps of a process that holds, matches, puts or pins."""
    p: Process = getattr(s, me)

    def to(label: str, new: Process, **more: object) -> Step:
        return f"{me}: {p.act or new.act}: {label}", s._replace(**{me: new}, **more)  # type: ignore[arg-type]

    if p.step != "idle" or p.cached:
        # A writer that dies between the link and the renewal may leave an orphan: the next listing finds it.
        orphaned = s.orphaned or p.step == "renew"
        yield to("dies", Process(seen=s.tail, size=0 if remembers else 2), orphaned=orphaned)
    wanted = DEPTHS.get(p.act, 0)
    if p.step == "idle":
        for act in acts:
            if act == "pin" and s.pinned:
                continue
            holds = act != "match" and not (act == "put" and dropped == "put_holds_parent")
            late = dropped == "table_before_tail"
            yield to("begins", p._replace(act=act, step="table" if holds and not late else "settled"))
    elif p.step == "table":
        following = "judge" if dropped == "table_before_tail" else "settled"
        at = len(p.table)
        if p.size <= at:
            yield to("grows its table", p._replace(size=at + 1))
        else:
            step = following if at + 1 == wanted else p.step
            yield to(f"writes {at} to its table", p._replace(table=p.table | {at}, step=step))
    elif p.step == "settled":
        yield to("reads settled", p._replace(step="tail", at=s.settled))
    elif p.step == "tail":
        first = min(p.seen, p.at) if remembers else p.at
        yield to("reads the tail", p._replace(step="entries" if first < s.tail else "validate", tail=s.tail, at=first))
    elif p.step == "entries":
        entries = p.entries | {(p.at, s.ring[p.at % len(s.ring)])}
        step = "entries" if p.at + 1 < p.tail else "validate"
        yield to(f"reads entry {p.at}", p._replace(at=p.at + 1, entries=entries, step=step))
    elif p.step == "validate":
        overrun = s.tail + len(s.ring) // 2 - p.seen > len(s.ring) and dropped != "overrun_clears_cache"
        cached = frozenset() if overrun else p.cached - {name for at, name in p.entries if at >= p.seen}
        if dropped == "log_clears_cache":
            cached = p.cached
        yield to("reads the tail again", p._replace(step="reread", cached=cached, seen=p.tail, tail=0, at=0))
    elif p.step == "reread":
        # What is unsettled now was not overwritten: a batch begins when the one before is settled.
        unsettled = frozenset(name for at, name in p.entries if at >= s.settled)
        if dropped == "unsettled_is_a_miss" or (dropped == "matches_mind_unsettled" and p.act == "match"):
            unsettled = frozenset()
        late = dropped == "table_before_tail" and p.act != "match"
        step = "table" if late else "judge"
        yield to("reads settled again", p._replace(step=step, unsettled=unsettled, entries=frozenset()))
    elif p.step == "judge":
        if p.depth in p.unsettled or not (p.depth in p.cached or p.depth in s.files):
            yield to(f"misses {p.depth}", p._replace(step="done", unsettled=frozenset()))
        else:
            word = "remembers" if p.depth in p.cached else "finds"
            new = p._replace(depth=p.depth + 1, cached=p.cached | {p.depth} if remembers else p.cached)
            is_done = new.depth == wanted
            yield to(f"{word} {p.depth}", new._replace(step="done", unsettled=frozenset()) if is_done else new)
    elif p.step == "done":
        if p.act == "put" and p.depth:
            yield to("links 1", p._replace(step="renew"), files=s.files | {1}, used=s.used | {1})
        elif p.act == "pin" and p.depth:
            yield to("writes its pin", p._replace(step="release"), pinned=p.depth)
        else:
            yield to("ends", Process(seen=p.seen, cached=p.cached, size=p.size))
    elif p.step == "renew":
        renewed = s.used | {0} if dropped != "put_renews_parent" else s.used
        yield to("renews the use of 0", p._replace(step="release"), used=renewed)
    elif p.step == "release":
        yield to("clears its table", Process(seen=p.seen, cached=p.cached, size=p.size))


def collector_steps(s: State, tail_max: int, dropped: str) -> Iterator[Step]:
    """The steps of the collector, and of the one that takes over when it dies."""
    c = s.collector
    order = ["append", "tail", "sizes", "tables", "pins", "stat", "delete", "settle"]
    if dropped == "append_before_tables":
        order = ["sizes", "tables", "append", "tail", "pins", "stat", "delete", "settle"]
    elif dropped == "append_before_sizes":
        order = ["sizes", "append", "tail", "tables", "pins", "stat", "delete", "settle"]
    elif dropped == "tables_before_pins":
        order = ["append", "tail", "pins", "sizes", "tables", "stat", "delete", "settle"]
    elif dropped == "stat_after_tables":
        order = ["stat", "append", "tail", "sizes", "tables", "pins", "delete", "settle"]
    elif dropped == "settles_last":
        order = ["append", "tail", "sizes", "tables", "pins", "stat", "settle", "delete"]
    following = dict(zip(["choose", *order], [*order, "choose"], strict=True))

    def to(label: str, new: Collector, **more: object) -> Step:
        return f"collector: {label}", s._replace(collector=new, **more)  # type: ignore[arg-type]

    if c.step != "list":
        if dropped == "takeover_settles" and c.step in ("delete", "settle"):
            yield "collector: dies, another goes on", s._replace(collector=Collector("delete", victims=c.victims))
        else:
            yield "collector: dies, another settles", s._replace(collector=Collector(), settled=s.tail)
    step, victims = following.get(c.step, ""), frozenset(c.victims)
    if c.step == "list":
        yield to("lists", Collector("choose", listed=s.files), used=frozenset())
    elif c.step == "choose":
        yield to("its ranking has ended", Collector())
        for chosen in _choices(c.listed, dropped):
            if len(chosen) <= len(s.ring) // 2 and s.tail + len(chosen) <= tail_max:
                yield to(f"chooses {chosen}", c._replace(step=step, victims=chosen, kept=frozenset(), at=0))
    elif c.step == "append":
        at = (s.tail + c.at) % len(s.ring)
        ring = (*s.ring[:at], c.victims[c.at], *s.ring[at + 1 :])
        new = c._replace(at=c.at + 1) if c.at + 1 < len(c.victims) else c._replace(step=step, at=0)
        yield to(f"writes {c.victims[c.at]} to the log", new, ring=ring)
    elif c.step == "tail":
        yield to("advances the tail", c._replace(step=step), tail=s.tail + len(c.victims))
    elif c.step == "sizes":
        yield to("reads the sizes of tables", c._replace(step=step, sizes=(s.a.size, s.b.size)))
    elif c.step == "tables":
        sizes = zip((s.a, s.b), c.sizes, strict=True)
        held = {c.at} if c.at in victims and any(c.at in p.table and c.at < size for p, size in sizes) else set()
        new = c._replace(step=step, at=0, sizes=(0, 0)) if c.at else c._replace(at=1)
        yield to(f"reads the tables for {c.at}", new._replace(kept=c.kept | held))
    elif c.step == "pins":
        pinned = frozenset(range(s.pinned)) if dropped != "reads_pins" else frozenset()
        yield to("reads the pins", c._replace(step=step, kept=c.kept | (pinned & victims)))
    elif c.step == "stat":
        yield to("reads when the victims were used", c._replace(step=step, kept=c.kept | (s.used & victims)))
    elif c.step == "delete":
        victim = c.victims[c.at]
        keeps = victim in c.kept or (victim == 0 and 1 in c.kept and dropped != "skips_ancestors")
        files = s.files if keeps else s.files - {victim}
        new = c._replace(at=c.at + 1) if c.at + 1 < len(c.victims) else c._replace(step=step, at=0)
        yield to(f"{'skips' if keeps else 'deletes'} {victim}", new, files=files)
    elif c.step == "settle":
        # The rest of a ranking knows nothing of a child that stays.
        stays = 1 in c.victims and 1 in c.kept and dropped != "skips_for_the_ranking"
        left = c.listed - {*c.victims} - ({0} if stays else set())
        yield to("settles", Collector(step, listed=left, victims=c.victims if step == "delete" else ()), settled=s.tail)


def _choices(listed: frozenset[int], dropped: str) -> Iterator[tuple[int, ...]]:
    """Batches of a ranking: a parent only after, or without, its child."""
    if 1 in listed:
        yield (1,)
    if listed == {0, 1}:
        yield (0, 1) if dropped == "children_first" else (1, 0)
    if listed == {0}:
        yield (0,)


def canonical(s: State) -> State:
    """Merges states that differ in memory that is never read."""
    for me in ("a", "b"):
        p: Process = getattr(s, me)
        if not p.cached and p.step in ("idle", "table", "settled") and p.seen != s.tail:
            s = s._replace(**{me: p._replace(seen=s.tail)})  # type: ignore[arg-type]
    oldest = min(s.settled, *(min(p.seen, p.at) if p.step == "entries" else p.seen for p in (s.a, s.b)))
    written = {"append": s.collector.at, "tail": len(s.collector.victims)}.get(s.collector.step, 0)
    read = {at % len(s.ring) for at in range(oldest, s.tail + written)}
    ring = tuple(entry if at in read else -1 for at, entry in enumerate(s.ring))
    return s if ring == s.ring else s._replace(ring=ring)


def broken(s: State) -> str:
    """The promise that a state breaks; empty if none."""
    for p in (s.a, s.b):
        if p.act in ("hold", "pin") and p.step in ("done", "release") and not s.files.issuperset(range(p.depth)):
            return "a held chunk has no file"
    if not s.files.issuperset(range(s.pinned)):
        return "a pinned chunk has no file"
    if s.files == {1} and not s.orphaned:
        return "a chunk outlives its parent"
    return ""


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search; ``trace`` leads to the violation."""

    states_count: int
    broken: str = ""
    trace: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class World:
    """What the processes ``a`` and ``b`` do, the entries of the ring (a batch has half of them at most), those
    that are appended, and whether processes remember what exists."""

    a: tuple[str, ...]
    b: tuple[str, ...]
    ring: int
    tail_max: int
    remembers: bool = False


WORLDS = {
    "put": World(("hold",), ("put",), 4, 2),
    "pin": World((), ("pin",), 4, 2),
    "match": World(("hold", "match"), (), 4, 3, remembers=True),
    "overrun": World(("hold", "match"), (), 2, 3, remembers=True),
}
_WORLD_OF = {
    "put": ("put_holds_parent", "put_renews_parent", "stat_after_tables"),
    "pin": ("tables_before_pins", "reads_pins"),
    "overrun": ("overrun_clears_cache",),
}
DROPPED = {rule: next((w for w, rules in _WORLD_OF.items() if rule in rules), "match") for rule in RULES}
"""The world in which the absence of each rule shows."""


def search(world: str, dropped: str = "") -> Found:
    """Searches every interleaving of a world without the rule ``dropped``; a counterexample is a shortest one."""
    k = WORLDS[world]
    start = State(ring=(-1,) * k.ring)
    if not k.remembers:
        full = Process(size=2)  # tables that grow are searched in the worlds of one process
        start = start._replace(a=full, b=full)
    parents: dict[State, tuple[State, str] | None] = {start: None}
    queue = deque([start])
    with no_cycles():
        while queue:
            s = queue.popleft()
            if why := broken(s):
                return Found(len(parents), why, _trace(parents, s))
            for steps in (
                process_steps(s, "a", k.a, k.remembers, dropped),
                process_steps(s, "b", k.b, k.remembers, dropped),
                collector_steps(s, k.tail_max, dropped),
            ):
                for label, after in steps:
                    new = canonical(after)
                    if new not in parents:
                        parents[new] = (s, label)
                        queue.append(new)
    return Found(len(parents))


def _trace(parents: dict[State, tuple[State, str] | None], s: State) -> tuple[str, ...]:
    labels: list[str] = []
    while (before := parents[s]) is not None:
        s, label = before
        labels.append(label)
    return tuple(labels[::-1])
