"""A run on one host with a bound: nodes claim room before a collector's word, and obey it after that (rules S1 to S6).

I6: the files never take more than gc/PROTOCOL.md, section 6, allows. The judge adds up the files of the root, and knows
of no key and no counter. It allows what that section says beyond the bound: what a node may write once while it has
lost its session, and, where there was a collector, X of each node that is gone and the rest of a claim of each node.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from unittest.mock import patch

from kvstore.errors import KVStoreError
from kvstore.meta.bounds import CLAIMED_SHARE, Bound
from kvstore.node import claims, usage
from kvstore.node.claims import EARLY_SHARE
from kvstore.node.member import Member
from kvstore.node.opening import claim_room
from kvstore_gc import signs, watch
from kvstore_gc.config import Config
from tests.sim.collector import Collector
from tests.sim.counting import CountingCollector
from tests.sim.host import Host
from tests.sim.host_world import HostWorld
from tests.sim.kernel import Kernel, Process
from tests.sim.profiles import Profile
from tests.sim.world import WIND_UP_STEPS, World

PACE_S = 0.05
"""Nodes put as fast as they may, and fill the root within a run."""
CHUNKS_MAX = 60
"""Chunks that fill the bound."""
FILE_BYTES = 4112
"""The size of each chunk's file."""
CLAIM_SHARE = 1 / 40
"""Of the bound in one claim: about two chunks."""
HIGH, LOW = 0.5, 0.4
"""So X is large enough to matter."""
KEPT_S = 8.0
TICK_S = 1.0


class BoundedWorld(HostWorld):
    """``collectors`` are those that count; they begin late, so that nodes claim first."""

    wind_up_steps = 3 * WIND_UP_STEPS
    """A collector that counts takes many."""

    def __init__(self, kernel: Kernel, profile: Profile) -> None:
        self.bound_bytes = CHUNKS_MAX * FILE_BYTES
        self._ended_count = self._killed_count = 0
        self._most_count = 0
        """The most nodes that there were at once."""
        self._leaving: dict[Host, int] = {}
        """Nodes that end, each with the number of its calls that had failed before."""
        self._has_lent = False
        """A node that had joined was without a session while the files grew."""
        self._unsettled_count = 0
        """Nodes whose calls failed while they ended: what they were lent may be in no level."""
        self._has_counted = profile.collectors > 0
        self._undo = ExitStack()
        for module, name, value in (
            (claims, "CLAIM_SHARE", CLAIM_SHARE),
            (usage, "KEPT_S", KEPT_S),
            (signs, "UNHEARD_S", KEPT_S),
            (watch, "TICK_S", TICK_S),
        ):
            self._undo.enter_context(patch.object(module, name, value))
        super().__init__(kernel, profile)
        self.pace_s = PACE_S
        self.oracle.grew = self._judge

    def close(self) -> None:
        self._undo.close()
        super().close()

    def joined(self, member: Member) -> None:
        claim_room(member, Bound(self.bound_bytes), lambda at_once: None)

    def raised(self, work: str, error: KVStoreError) -> None:
        World.raised(self, work, error)  # without metadata a bounded node stops, and says so

    # The judge.

    @property
    def allowed_bytes(self) -> int:
        """The most that the files may take now."""
        bound = self.bound_bytes
        live = self._most_count = max(self._most_count, len(self.hosts) + len(self._leaving))
        allowed = bound * (1.0 if self._has_counted else CLAIMED_SHARE)
        self._has_lent = self._has_lent or any(map(_lends, (*self.hosts, *self._leaving)))
        if self._has_lent:
            allowed += (live + self._killed_count + self._unsettled_count) * EARLY_SHARE * bound
        if self._has_counted:
            x_bytes = (1 - HIGH) / 2 * bound / (self.profile.nodes + 1)
            allowed += self._ended_count * x_bytes + (live + self._ended_count) * (CLAIM_SHARE * bound)
        return int(allowed)

    def _judge(self) -> None:
        used_bytes = self.oracle.used_bytes
        if used_bytes > self.allowed_bytes:
            self.kernel.fail(
                f"I6: the files take {used_bytes} bytes of {self.bound_bytes}, {self.allowed_bytes} allowed"
            )

    # What happens.

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
        self._leaving[host] = host.process.faults_count
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

    def _bury(self, victim: Host | Collector) -> None:
        if isinstance(victim, Host):
            self._killed_count += 1
            self._ended_count += 1
        super()._bury(victim)

    def _end(self, process: Process) -> None:
        left = [host for host in self._leaving if host.process is process]
        if left:
            self._unsettled_count += process.faults_count > self._leaving.pop(left[0])
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
