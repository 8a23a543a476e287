"""Attacks on the cast, chosen from a seed: processes and etcd are killed, stopped for a while, started again."""

from __future__ import annotations

import heapq
import itertools
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

from tests.chaos.cast import Cast
from tests.chaos.journal import Journal

STOP_S = (0.1, 25.0)
"""Past the lease of a session, which is 10 s."""
ETCD_STOP_S = (0.1, 20.0)
AWAY_S = (0.0, 3.0)
TICK_S = 0.02


class Saboteur:
    """Plays for a given time. ``pauses_s`` is the mean time between two attacks on each part, etcd included."""

    def __init__(self, cast: Cast, seed: int, pauses_s: Mapping[str, float]) -> None:
        self._cast = cast
        self._chance = random.Random(seed)
        self._pauses_s = dict(pauses_s)
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._starting: threading.Thread | None = None
        self._journal = Journal(cast.folder / "saboteur.journal")
        self.done: Counter[str] = Counter()

    def play(self, seconds: float) -> None:
        """Attacks for a time, then revives everybody. Ends early if a promise was broken."""
        ends_s = time.monotonic() + seconds
        for name in self._pauses_s:
            self._plan(name)
        while (now_s := time.monotonic()) < ends_s and not self._cast.has_failed:
            while self._due and self._due[0][0] <= now_s:
                heapq.heappop(self._due)[2]()
            time.sleep(TICK_S)
        self._due.clear()
        self._heal()

    def _plan(self, name: str) -> None:
        self._at(self._chance.expovariate(1 / self._pauses_s[name]), lambda: self._attack(name))

    def _at(self, in_s: float, act: Callable[[], object]) -> None:
        heapq.heappush(self._due, (time.monotonic() + in_s, next(self._numbers), act))

    def _attack(self, name: str) -> None:
        if name == "etcd" and self._starting is not None and self._starting.is_alive():
            self._plan(name)
            return
        if name != "etcd" and not self._cast.parts[name].is_running:
            self._note(f"{name} started")  # one that ends by itself
            self._then(name, 0.0, self._cast.parts[name].start)
            return
        kill = self._chance.random() < 0.4
        self._note(f"{name} {'killed' if kill else 'stopped'}")
        if name == "etcd":
            self._attack_etcd(kill)
            return
        part = self._cast.parts[name]
        if kill:
            part.kill()
            self._then(name, self._between(*AWAY_S), part.start)
            return
        part.send(signal.SIGSTOP)
        self._then(name, self._long(*STOP_S), lambda: part.send(signal.SIGCONT))

    def _attack_etcd(self, kill: bool) -> None:
        if not kill:
            self._cast.signal_etcd(signal.SIGSTOP)
            self._then("etcd", self._long(*ETCD_STOP_S), lambda: self._cast.signal_etcd(signal.SIGCONT))
            return
        self._cast.kill_etcd()
        # Starting takes a second, in which the others' due attacks must not wait.
        self._starting = threading.Thread(target=self._cast.etcd.start, name="etcd again")
        self._then("etcd", self._between(*AWAY_S), self._starting.start)

    def _note(self, attack: str) -> None:
        self.done[attack] += 1
        self._journal.note("attack", attack=attack)

    def _then(self, name: str, in_s: float, act: Callable[[], object]) -> None:
        def undo() -> None:
            act()
            self._journal.note("again", name=name)
            self._plan(name)

        self._at(in_s, undo)

    def _heal(self) -> None:
        self._heal_metadata()
        for part in self._cast.parts.values():
            part.send(signal.SIGCONT)
            part.start()

    def _heal_metadata(self) -> None:
        if "etcd" not in self._pauses_s:
            return
        self._cast.signal_etcd(signal.SIGCONT)
        if self._starting is not None and self._starting.is_alive():
            self._starting.join()
        self._cast.etcd.start()

    def _between(self, low: float, high: float) -> float:
        return self._chance.uniform(low, high)

    def _long(self, low: float, high: float) -> float:
        """Mostly short, sometimes long: every order of magnitude is as likely."""
        return float(low * (high / low) ** self._chance.random())
