"""A worker's health in one answer: itself, its root, its etcd, memory and queues, and a list of problems.

Separate from the standard health service, which answers load balancers yes or no, and from metrics: this is for a
person who asks now. It looks at root and etcd with short deadlines, so it answers even if both are gone.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.errors import KVStoreError
from kvstore.node.member import Member, Sharing
from kvstore.root.interface import Space
from kvstore.sources import Clock
from kvstore.v1 import control_pb2 as pb
from kvstore.worker.service import Service

LOOK_S = 2.0
"""Time for one look at the root, and for one at etcd."""
FREE_SHARE_MIN = 0.02
BEHIND_SHARE_MAX = 0.9
"""Share of the write queue that must be filled before it is reported as a problem."""
SLOW_S = 1.0


@dataclass(frozen=True, slots=True)
class About:
    """A worker's facts about itself."""

    address: str
    version: str
    serving: bool


class Examination:
    """Examines one worker on request. ``about`` returns the worker's facts at that moment."""

    def __init__(self, member: Member, service: Service, clock: Clock, about: Callable[[], About]) -> None:
        self._member = member
        self._service = service
        self._clock = clock
        self._about = about
        self._began_s = clock.monotonic_s()

    def answer(self) -> pb.HealthResponse:
        """Returns the health of the worker; takes about two looks' time at most."""
        gauges = self._service.gauges()
        found = pb.HealthResponse(
            worker=self._worker(gauges), root=self._root(gauges), etcd=self._etcd(gauges), queues=self._queues(gauges)
        )
        if "memory_size_bytes" in gauges:
            found.memory.CopyFrom(_memory(gauges))
        found.problems.extend(problems_of(found))
        found.healthy = not found.problems
        return found

    def _worker(self, gauges: dict[str, float]) -> pb.WorkerHealth:
        about = self._about()
        return pb.WorkerHealth(
            address=about.address,
            version=about.version,
            host=socket.gethostname(),
            pid=os.getpid(),
            uptime_s=self._clock.monotonic_s() - self._began_s,
            serving=about.serving,
            draining=bool(gauges["draining"]),
            log_level=logging.getLevelName(logging.getLogger("kvstore").getEffectiveLevel()).lower(),
        )

    def _root(self, gauges: dict[str, float]) -> pb.RootHealth:
        node = self._member.node
        space = Space(None, None)
        began_s = self._clock.monotonic_s()
        try:
            space = node.space(LOOK_S)
            answers = True
        except KVStoreError:
            answers = False
        return pb.RootHealth(
            url=node.root.url,
            id=node.identity.root,
            answers=answers,
            look_s=self._clock.monotonic_s() - began_s,
            total_bytes=space.total_bytes or 0,
            free_bytes=space.free_bytes or 0,
            full=bool(gauges["root_full"]),
        )

    def _etcd(self, gauges: dict[str, float]) -> pb.EtcdHealth:
        member = self._member
        if member.sharing is not Sharing.CLUSTER:
            return pb.EtcdHealth()
        began_s = self._clock.monotonic_s()
        try:
            member.meta.get(member.keys.gc_seq, LOOK_S)
            answers = True
        except KVStoreError:
            answers = False
        return pb.EtcdHealth(
            used=True,
            answers=answers,
            look_s=self._clock.monotonic_s() - began_s,
            session_alive=bool(gauges["session_alive"]),
            protected=bool(gauges["protected"]),
            lease_margin_s=gauges["lease_margin_seconds"],
        )

    def _queues(self, gauges: dict[str, float]) -> pb.QueueHealth:
        limits, tiers = self._service.limits, self._member.node.tiers
        return pb.QueueHealth(
            calls=int(gauges["calls_in_flight"]),
            calls_max=limits.calls_max,
            bytes_in_flight=int(gauges["bytes_in_flight"]),
            bytes_in_flight_max=limits.bytes_in_flight_max,
            root_queue=int(gauges["lane_queue"]),
            behind_bytes=int(gauges.get("behind_bytes", 0)),
            behind_bytes_max=tiers.behind.bytes_max if tiers is not None else 0,
            holds=int(gauges["client_holds"]),
            operations_running=int(gauges["operations_running"]),
            operations_waiting=int(gauges["operations_waiting"]),
        )


def _memory(gauges: dict[str, float]) -> pb.MemoryHealth:
    return pb.MemoryHealth(
        size_bytes=int(gauges["memory_size_bytes"]),
        held_bytes=int(gauges["memory_held_bytes"]),
        dirty_bytes=int(gauges["memory_dirty_bytes"]),
        referenced_bytes=int(gauges["memory_referenced_bytes"]),
        pinned_bytes=int(gauges["memory_pinned_bytes"]),
        disk_held_bytes=int(gauges.get("disk_held_bytes", 0)),
        disk_bytes_max=int(gauges.get("disk_bytes_max", 0)),
        peers=int(gauges.get("peers_known", 0)),
        peers_aside=int(gauges.get("peers_aside", 0)),
    )


def problems_of(found: pb.HealthResponse) -> list[str]:
    """Returns what is wrong, for people, the worst first."""
    worker, root, etcd, memory, queues = found.worker, found.root, found.etcd, found.memory, found.queues
    free_share = root.free_bytes / root.total_bytes if root.total_bytes else 1.0
    waiting = queues.behind_bytes / queues.behind_bytes_max if queues.behind_bytes_max else 0.0
    rules = (
        (not root.answers, f"the root does not answer within {LOOK_S:g} s: check the mount (kvstore check-root)"),
        (root.full, "a collector says that the root is full: puts are refused; check kvstore-gc"),
        (etcd.used and not etcd.answers, f"etcd does not answer within {LOOK_S:g} s: nothing can be pinned"),
        (
            etcd.used and not etcd.session_alive,
            "the session in etcd is lost: holds protect nothing, and pins are refused, until it is back",
        ),
        (etcd.used and not etcd.protected, "collectors ignore the holds and pins of this worker (gc/RUNBOOK.md)"),
        (worker.draining, "the worker is draining: it ends soon"),
        (not worker.serving and not worker.draining, "the worker reports NOT_SERVING"),
        (free_share < FREE_SHARE_MIN, f"the root has {free_share:.1%} of its room left"),
        (
            queues.calls >= queues.calls_max,
            f"{queues.calls} calls are in progress, which is the limit: more are refused",
        ),
        (
            waiting > BEHIND_SHARE_MAX,
            f"the queue of writes to the root is {waiting:.0%} full: the root is too slow",
        ),
        (root.answers and root.look_s > SLOW_S, f"a look at the root took {root.look_s:.1f} s"),
        (etcd.answers and etcd.look_s > SLOW_S, f"a look at etcd took {etcd.look_s:.1f} s"),
        (memory.peers_aside > 0, f"{memory.peers_aside} of {memory.peers} peers are set aside after errors"),
    )
    return [said for is_so, said in rules if is_so]
