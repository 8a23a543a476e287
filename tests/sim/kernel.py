"""A program of many processes in one thread: actors are greenlets, and a seed says who runs next and what time it is.

Separate from what runs in it: nothing here knows of roots or metadata. An actor yields only at a *point*. Every call to
the root and to the metadata has one before its effect and one after. So any interleaving of single effects can occur,
and the same seed gives the same run.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from zlib import crc32

from greenlet import GreenletExit, getcurrent, greenlet  # type: ignore[import-untyped]

Effect = Callable[[], object]

WALL_S = 1_700_000_000.0
"""The wall clock when a run begins."""
UNRANKED = 0.02
"""How often anybody runs although ranks decide, so that who asks again and again starves nobody."""


class Process:
    """A program on a host: its actors die together, and its clocks are its own."""

    def __init__(self, kernel: Kernel, name: str, *, ahead_s: float = 0.0, is_collector: bool = False) -> None:
        self.name = name
        self.is_collector = is_collector
        self.alive = True
        self.actors: list[Actor] = []
        self.faults_count = 0
        self._kernel = kernel
        self._started_s = kernel.random() * 1e6
        self._ahead_s = ahead_s

    def now_s(self) -> float:
        """Wall time of this host, which is ``ahead_s`` of the others'."""
        return WALL_S + self._kernel.now_s + self._ahead_s

    def monotonic_s(self) -> float:
        """The clock of one actor: everybody's speed, with its own start."""
        return self._started_s + self._kernel.now_s


class Actor:
    """One thread of a process."""

    __slots__ = (
        "awaits",
        "ended",
        "greenlet",
        "name",
        "paused_until",
        "paused_until_s",
        "pending",
        "process",
        "queued",
        "rank",
        "thread",
        "wake_s",
        "weight",
    )

    def __init__(self, process: Process, name: str, work: Callable[[], object], weight: float, hub: greenlet) -> None:
        self.process = process
        self.name = f"{process.name}.{name}"
        self.weight = weight
        self.greenlet = greenlet(work, hub)
        self.ended = False
        self.queued: list[Actor] | None = None
        self.wake_s = math.inf
        self.paused_until = 0
        self.paused_until_s = 0.0
        self.awaits: tuple[Sequence[str], int] | None = None
        self.rank = 0.0
        """Where the schedule goes by ranks, the highest of those who are ready runs."""
        self.pending: Effect | None = None
        """What is on its way to the root or the metadata, and may arrive although its sender dies."""
        self.thread: object = None


class Kernel:
    """The scheduler. ``stay`` is how likely an actor goes on at a point where others could run.

    With ``demotions``, steps in descending order, it goes by ranks instead: the highest runs, and at each of these the
    one that is running becomes the lowest.  A bug that needs d orderings of events is found with d - 1 of them by a
    far better chance than by a random walk (Burckhardt et al., "A randomized scheduler with probabilistic guarantees of
    finding bugs", 2010).
    """

    def __init__(self, seed: int, *, stay: float, demotions: Sequence[int] = (), trace: bool = False) -> None:
        self.source = random.Random(seed)
        self.random = self.source.random
        self.stay = stay
        self.now_s = 0.0
        self.steps = 0
        self.steps_max = sys.maxsize
        self.heard: Callable[[str], object] = lambda what: None
        """Told whatever happens that rules are about; it must not let others run."""
        self.over = False
        self.violation: str | None = None
        self.current: Actor | None = None
        self.digest = 0
        self.coarse_s = 0.0
        """At least so much time passes whenever everybody waits."""
        self.cause: BaseException | None = None
        self.log: list[str] | None = [] if trace else None
        self._demotions = list(demotions)
        self._is_ranked = bool(demotions)
        self._hub = getcurrent()
        self._ready: list[Actor] = []
        self._waiting: list[Actor] = []
        self._paused: list[Actor] = []
        self._graves: list[Actor] = []

    # Called by actors.

    def point(self) -> None:
        """Somebody else may run here."""
        if self.over:
            raise GreenletExit
        self.steps += 1
        if self.random() >= self.stay or self.steps >= self.steps_max:
            self._hub.switch()
            if self.over:
                raise GreenletExit

    def give_way(self) -> None:
        """Somebody else runs here, if there is anybody."""
        self.steps += 1
        self._hub.switch()
        if self.over:
            raise GreenletExit

    def block(self, wake_s: float = math.inf) -> None:
        """Until somebody wakes the actor, or the time has come."""
        actor = self.current
        if self.over or actor is None:
            raise GreenletExit
        self.steps += 1
        if wake_s <= self.now_s:
            self._hub.switch()
        else:
            actor.wake_s = wake_s
            self._queue(actor, self._waiting)
            self._hub.switch()
        if self.over:
            raise GreenletExit

    def sleep(self, seconds: float) -> None:
        """Sleeps like ``time.sleep``; nobody wakes it."""
        wake_s = self.now_s + seconds
        while self.now_s < wake_s:
            self.block(wake_s)

    def pause(self, steps: int, until: tuple[Sequence[str], int] | None = None, seconds: float = math.inf) -> bool:
        """The actor stands still while the others make that many steps, or until so many after certain things have
        happened, one after the other: then True. While all others only wait no more than so much time passes.
        """
        actor = self.current
        if self.over or actor is None:
            raise GreenletExit
        actor.paused_until = self.steps + steps
        actor.paused_until_s = self.now_s + seconds
        actor.awaits = until
        self._queue(actor, self._paused)
        self._hub.switch()
        if self.over:
            raise GreenletExit
        happened, actor.awaits = actor.awaits is None and until is not None, None
        return happened

    # Called by anybody.

    def spawn(self, process: Process, name: str, work: Callable[[], object], weight: float = 1.0) -> Actor:
        """A new actor, which runs when its turn comes."""

        def run() -> None:
            try:
                work()
            except GreenletExit:
                pass
            except BaseException as error:  # noqa: BLE001 - a thread that dies is a finding of its own
                self.fail(f"{actor.name} died of {type(error).__name__}: {error}", error)
            actor.ended = True
            self._queue(actor, None)

        actor = Actor(process, name, run, weight, self._hub)
        if self._is_ranked:
            actor.rank = self.random()
        process.actors.append(actor)
        self._queue(actor, self._ready)
        return actor

    def wake(self, actor: Actor) -> None:
        """Ends a ``block``; nothing for an actor that is in none."""
        if actor.queued is self._waiting:
            actor.wake_s = math.inf
            self._make_ready(actor)

    def kill(self, process: Process) -> list[Effect]:
        """SIGKILL: none of its actors runs again, not even their ``finally``. Calls in flight may still take effect."""
        process.alive = False
        on_their_way = []
        for actor in process.actors:
            if not actor.ended:
                if actor.pending is not None:
                    on_their_way.append(actor.pending)
                self._queue(actor, None)
                self._graves.append(actor)
        process.actors = []
        return on_their_way

    def stop(self, process: Process, steps: int) -> None:
        """SIGSTOP, for a while."""
        for actor in process.actors:
            if not actor.ended:
                actor.paused_until = self.steps + steps
                actor.paused_until_s = math.inf
                if actor.queued is self._ready:
                    self._queue(actor, self._paused)

    def resume_all(self) -> None:
        """Ends every pause."""
        for actor in list(self._paused):
            actor.paused_until = 0
            self._queue(actor, self._ready)
        for actor in self._waiting:
            actor.paused_until = 0

    def even(self) -> None:
        """From here on everybody has the same share."""
        self._is_ranked = False
        for actor in (*self._ready, *self._waiting, *self._paused):
            actor.weight = 1.0

    def advance(self, seconds: float) -> None:
        """Time passes."""
        self.now_s += seconds
        for actor in [one for one in self._waiting if one.wake_s <= self.now_s]:
            actor.wake_s = math.inf
            self._make_ready(actor)

    def happened(self, what: str) -> None:
        """Wakes those who pause until this event, soon."""
        for actor in self._paused:
            if actor.awaits is not None and actor.awaits[0][0] == what:
                rest, delay = actor.awaits[0][1:], actor.awaits[1]
                actor.awaits = (rest, delay) if rest else None
                if not rest:
                    actor.paused_until = self.steps + delay
        self.heard(what)

    def note(self, what: str) -> None:
        """Part of the trace, whose digest tells whether two runs are the same."""
        who = self.current.name if self.current else "-"
        self.digest = crc32(f"{self.steps} {who} {what}".encode(), self.digest)
        if self.log is not None:
            self.log.append(f"{self.steps:6d} {self.now_s:9.3f}  {who:14s} {what}")

    def fail(self, why: str, cause: BaseException | None = None) -> None:
        """A rule was broken: the run ends at the next point."""
        if self.violation is None and not self.over:
            self.violation = why
            self.cause = cause
            self.note(f"VIOLATION {why}")
        self.over = True

    # The loop.

    def run(self, *, steps: int, each: Callable[[], object], until: Callable[[], bool] | None = None) -> None:
        """Runs actors for a number of steps, or until ``until``; calls ``each`` before every switch."""
        self.steps_max = self.steps + steps
        while not self.over and self.steps < self.steps_max and not (until and until()):
            each()
            if self._paused:
                for actor in [one for one in self._paused if one.paused_until <= self.steps]:
                    self._queue(actor, self._ready)
            actor_next = self._pick_ranked() if self._is_ranked else self._pick()
            if actor_next is None:
                if not self._pass_time():
                    break
                continue
            self.current = actor_next
            actor_next.greenlet.switch()
            self.current = None
        self.steps_max = sys.maxsize

    def end(self) -> None:
        """Unwinds every actor; whatever it tries on the way out has no effect."""
        self.over = True
        everybody = [*self._ready, *self._waiting, *self._paused, *self._graves]
        for actor in everybody:
            for _ in range(20):
                if actor.greenlet.dead:
                    break
                self.current = actor
                actor.greenlet.throw(GreenletExit)
            self.current = None
        self._ready, self._waiting, self._paused, self._graves = [], [], [], []

    def _pass_time(self) -> bool:
        """Nobody is ready: moves to the next timer or the end of the next pause. False if there is neither."""
        wake_s = min((actor.wake_s for actor in self._waiting), default=math.inf)
        impatient = [actor for actor in self._paused if actor.paused_until_s < wake_s]
        if impatient:
            self._queue(min(impatient, key=lambda one: one.paused_until_s), self._ready)
            return True
        if wake_s < math.inf:
            self.advance(max(self.coarse_s, wake_s - self.now_s))
            return True
        if self._paused:
            self._queue(min(self._paused, key=lambda one: one.paused_until), self._ready)
            return True
        return False

    def _pick(self) -> Actor | None:
        ready, rand = self._ready, self.random
        while ready:
            actor = ready[int(rand() * len(ready))]
            if actor.weight >= 1.0 or rand() < actor.weight:
                return actor
        return None

    def _pick_ranked(self) -> Actor | None:
        if not self._ready or self.random() < UNRANKED:
            return self._pick()
        actor = max(self._ready, key=lambda one: one.rank)
        if self._demotions and self.steps >= self._demotions[-1]:
            self._demotions.pop()
            actor.rank = -self.steps
            actor = max(self._ready, key=lambda one: one.rank)
        return actor

    def _make_ready(self, actor: Actor) -> None:
        self._queue(actor, self._paused if actor.paused_until > self.steps else self._ready)

    def _queue(self, actor: Actor, queue: list[Actor] | None) -> None:
        if actor.queued is not None:
            actor.queued.remove(actor)
        actor.queued = queue
        if queue is not None:
            queue.append(actor)
