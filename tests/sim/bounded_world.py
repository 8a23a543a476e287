"""A run on one host with a bound: nodes claim room before a collector's word, and obey it after that (rules S1 to S6).

Where nodes cannot rely on the metadata they borrow (rule S8).

I6: the files never take more than gc/PROTOCOL.md, section 6, allows. The judge adds up the files of the root, and knows
of no key and no counter. It allows 0.95 of the bound, and where there was a collector all of it, with what that section
says beyond it: X of each node that is gone and, unless the metadata were lost, the rest of a claim of each node.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

from kvstore.meta.sqlite.loans import end_loans

from kvstore.errors import KVStoreError
from kvstore.format.generation import Generation
from kvstore.format.places import HOST_GENERATIONS, METADATA
from kvstore.meta.bounds import CLAIMED_SHARE, Bound
from kvstore.node import claims, usage
from kvstore.node.member import Member
from kvstore.node.opening import claim_room
from kvstore.root.generations import read_newest
from kvstore_gc import signs, watch
from kvstore_gc.config import Config
from tests.sim import host_world
from tests.sim.collector import Collector
from tests.sim.counting import CountingCollector
from tests.sim.host import Host
from tests.sim.host_world import HostWorld
from tests.sim.kernel import Effect, Kernel, Process
from tests.sim.lending import Lender
from tests.sim.profiles import Profile
from tests.sim.world import WIND_UP_STEPS, World

PACE_S = 0.05
"""Nodes put as fast as they may, and fill the root within a run."""
FILE_BYTES = 4112
"""The size of each chunk's file."""
HIGH, LOW = 0.5, 0.4
"""So X is large enough to matter."""
KEPT_S = 8.0
TICK_S = 1.0
OPERATOR_S = 90.0
"""Until somebody adopts nodes borrow, and count the root again."""
LOCKED_S = 20.0
"""The longest that another program locks the file."""


class BoundedWorld(HostWorld):
    """``collectors`` are those that count; they begin late, so that nodes claim first."""

    wind_up_steps = 3 * WIND_UP_STEPS
    """A collector that counts takes many."""

    def __init__(self, kernel: Kernel, profile: Profile) -> None:
        self.bound_bytes = profile.bound_chunks * FILE_BYTES
        self._ended_count = 0
        self._most_count = 0
        """The most nodes that there were at once."""
        self._leaving: list[Host] = []
        self._has_counted = profile.collectors > 0
        self._was_lost = False
        """Loans leave room for what is left of claims."""
        self._undo = ExitStack()
        for module, name, value in (
            (claims, "CLAIM_SHARE", profile.claim_share),
            (usage, "KEPT_S", KEPT_S),
            (signs, "UNHEARD_S", KEPT_S),
            (watch, "TICK_S", TICK_S),
            (host_world, "OPERATOR_S", OPERATOR_S),
        ):
            self._undo.enter_context(patch.object(module, name, value))
        super().__init__(kernel, profile)
        self._lender = Lender(self)
        self.pace_s = PACE_S
        self.oracle.grew = self._judge

    def close(self) -> None:
        self._lender.close()
        self._undo.close()
        super().close()

    def joined(self, member: Member) -> None:
        loans = self._lender.of(member, self.bound_bytes)
        claim_room(member, Bound(self.bound_bytes), lambda at_once: None, loans)

    def raised(self, work: str, error: KVStoreError) -> None:
        World.raised(self, work, error)  # without metadata a bounded node stops, and says so

    # The judge.

    @property
    def allowed_bytes(self) -> int:
        """The most that the files may take now."""
        bound = self.bound_bytes
        live = self._most_count = max(self._most_count, len(self.hosts) + len(self._leaving))
        allowed = bound * (1.0 if self._has_counted else CLAIMED_SHARE)
        if self._has_counted:
            x_bytes = (1 - HIGH) / 2 * bound / (self.profile.nodes + 1)
            allowed += self._ended_count * x_bytes
            if not self._was_lost:
                # S6, of a root that was empty: one X of each node that obeys the word of a killed collector.
                allowed += live * x_bytes + (live + self._ended_count) * self.profile.claim_share * bound
        return int(allowed)

    def _judge(self) -> None:
        used_bytes = self.oracle.used_bytes
        if used_bytes > self.allowed_bytes:
            self.kernel.fail(
                f"I6: the files take {used_bytes} bytes of {self.bound_bytes}, {self.allowed_bytes} allowed"
            )

    # What happens.

    def _operate(self) -> None:
        self._was_lost = True
        super()._operate()

    def _adopted(self) -> None:
        self.kernel.point()
        end_loans(self.store.folder)
        self.kernel.note("adopted: no loans are left")

    def _restore(self) -> bool:
        """Puts back a copy of another generation. One of the same has an old level, which nobody can know."""
        saved: Path | None = self._saved
        if saved is None or self._generation_in(saved) == read_newest(self.root, HOST_GENERATIONS):
            return False
        return super()._restore()

    def _generation_in(self, path: Path) -> Generation | None:
        found = self.store.rows("SELECT value FROM keys WHERE key = ?", self.keys.generation.encode(), path=path)
        return Generation.from_json(found[0][0], METADATA) if found else None

    def _lock_file(self) -> bool:
        """Another program has the file locked for a while."""
        if self.store.is_being_opened:
            return False
        try:
            unlock = self.store.lock()
        except sqlite3.Error:
            return False
        process = Process(self.kernel, "locker")

        def work() -> None:
            self.kernel.sleep(LOCKED_S * self.kernel.random())
            unlock()

        self.kernel.spawn(process, "main", work)
        return True

    def _collector(self) -> CountingCollector:  # type: ignore[override]
        self._made += 1
        config = Config(max_bytes=self.bound_bytes, high=HIGH, low=LOW)
        return CountingCollector(self, f"g{self._made}", config).start()

    def _retire(self) -> bool:
        """A program ends in order, and then another begins."""
        return len(self.hosts) > 1 and self._leaves(self.hosts)

    def _retire_lent(self) -> bool:
        """A program ends in order that writes what it was lent."""
        lent = [host for host in self.hosts if _lends(host)]
        return bool(lent) and len(self.hosts) > 1 and self._leaves(lent)

    def _leaves(self, hosts: Sequence[Host]) -> bool:
        host = self.kernel.source.choice(hosts)
        host.leave(waits=True)
        self._ended_count += 1
        self._leaving.append(host)
        self.hosts.remove(host)
        return True

    def _end_counting(self) -> bool:
        """A collector is told to end, and another begins later."""
        if not self.collectors:
            return False
        ended = self.kernel.source.choice(self.collectors)
        assert isinstance(ended, CountingCollector)
        ended.end()
        return True

    def _kill_counting(self) -> bool:
        """A collector is killed, and another begins later."""
        if self.collectors:
            self._replace(self.kernel.source.choice(self.collectors))
        return bool(self.collectors)

    def _killed(self, process: Process) -> list[Effect]:
        effects = super()._killed(process)
        self._lender.died(process)
        return effects

    def _bury(self, victim: Host | Collector) -> None:
        if isinstance(victim, Host):
            self._ended_count += 1
        super()._bury(victim)

    def _end(self, process: Process) -> None:
        left = [host for host in self._leaving if host.process is process]
        if left:
            self._leaving.remove(left[0])
            self._killed(process)
            self.hosts.append(self._host())
        else:
            super()._end(process)

    def _tidy(self, janitor: Collector) -> None:
        self._has_counted = True
        # Without one, nodes could not put what proves that they are well.
        self.collectors.append(self._collector())  # type: ignore[arg-type]
        super()._tidy(janitor)


def _lends(host: Host) -> bool:
    """True if a node cannot rely on the metadata, and so may write what it is lent."""
    return host.member is not None and not host.member.node.gc_view.protects
