"""The calls of kvstore.v1.Control, each a few lines between a message and the code that does it."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import grpc
from google.protobuf.message import Message

from kvstore.census.selection import Selection
from kvstore.core.executor import Deadline
from kvstore.core.operations import NoOperation, OperationRun, OperationStatus
from kvstore.core.results import ChunkPlace, RootCopy
from kvstore.core.validate import checked_tier
from kvstore.engine import settings as node_limits
from kvstore.engine.coordination import ClusterMember, Coordination
from kvstore.engine.settings import Limits
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.format.header import Encoding
from kvstore.root.interface import StorageSpace
from kvstore.security.access import Role
from kvstore.transport.limits import CONTROL
from kvstore.transport.messages import hints_message
from kvstore.v1 import control_pb2 as pb
from kvstore.worker.context import Call, UnaryCall
from kvstore.worker.limits import WorkerLimits
from kvstore.worker.service import WorkerService

# A worker's health in one answer: itself, its root, its etcd, memory and queues, and a list of problems.
#
# It looks at root and etcd with short deadlines, so it answers even if both are gone.


log = logging.getLogger(__name__)
_LOGGER = logging.getLogger("kvstore")

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


def _worker_health(about: About, gauges: Mapping[str, float], uptime_s: float) -> pb.WorkerHealth:
    return pb.WorkerHealth(
        address=about.address,
        version=about.version,
        host=socket.gethostname(),
        pid=os.getpid(),
        uptime_s=uptime_s,
        serving=about.serving,
        draining=bool(gauges["draining"]),
        log_level=logging.getLevelName(_LOGGER.getEffectiveLevel()).lower(),
    )


def _root_health(member: ClusterMember, gauges: Mapping[str, float]) -> pb.RootHealth:
    node, space = member.node, StorageSpace(None, None)
    began_s = time.monotonic()
    try:
        space = node.space(LOOK_S)
        answers = True
    except KVStoreError:
        answers = False
    return pb.RootHealth(
        url=node.root.url,
        id=node.identity.root,
        answers=answers,
        look_s=time.monotonic() - began_s,
        total_bytes=space.total_bytes or 0,
        free_bytes=space.free_bytes or 0,
        full=bool(gauges["root_full"]),
    )


def _etcd_health(member: ClusterMember, gauges: Mapping[str, float]) -> pb.EtcdHealth:
    if member.sharing is not Coordination.CLUSTER:
        return pb.EtcdHealth()
    began_s = time.monotonic()
    try:
        member.meta.get(member.keys.gc_seq, LOOK_S)
        answers = True
    except KVStoreError:
        answers = False
    return pb.EtcdHealth(
        used=True,
        answers=answers,
        look_s=time.monotonic() - began_s,
        session_alive=bool(gauges["session_alive"]),
        protected=bool(gauges["protected"]),
        lease_margin_s=gauges["lease_margin_seconds"],
    )


def _queue_health(member: ClusterMember, limits: WorkerLimits, gauges: Mapping[str, float]) -> pb.QueueHealth:
    tiers = member.node.tiers
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


def _memory_health(gauges: Mapping[str, float]) -> pb.MemoryHealth:
    return pb.MemoryHealth(
        size_bytes=int(gauges["memory_size_bytes"]),
        held_bytes=int(gauges["memory_held_bytes"]),
        dirty_bytes=int(gauges["memory_dirty_bytes"]),
        referenced_bytes=int(gauges["memory_referenced_bytes"]),
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
        (not root.answers, f"the root is gone, or silent for {LOOK_S:g} s: check the mount (kvstore check-root)"),
        (root.full, "a collector says that the root is full: puts are refused; check kvstore-gc"),
        (etcd.used and not etcd.answers, f"etcd does not answer within {LOOK_S:g} s: nothing can be pinned"),
        (
            etcd.used and not etcd.session_alive,
            "the session in etcd is lost: holds protect nothing, and pins are refused, until it is back",
        ),
        (etcd.used and not etcd.protected, "collectors ignore the holds and pins of this worker (deploy/RUNBOOK.md)"),
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


# The limits that can change while a worker runs: their names, their values, and changes of several, all or none.


LOG_LEVEL = "log_level"
LOG_LEVELS = ("debug", "info", "warning", "error")

OF_WORKER = ("calls_max", "bytes_in_flight_max", "holds_max", "hold_tokens_max")
OF_NODE = node_limits.CHANGEABLE
CHANGEABLE = (*OF_WORKER, *OF_NODE, LOG_LEVEL)


class LiveLimits:
    """The changeable limits of one worker. Thread-safe."""

    def __init__(self, member: ClusterMember, service: WorkerService) -> None:
        self._member = member
        self._service = service
        self._lock = threading.Lock()
        self._calls_max = service.worker.limits.calls_max * WorkerLimits.RAISE_MAX

    def change(self, wanted: Mapping[str, str]) -> None:
        """Changes several limits, all or none. Raises InvalidRequest, which says what is wrong with which."""
        with self._lock:
            before = self.values()
            unknown = sorted(set(wanted) - set(CHANGEABLE))
            if unknown:
                raise InvalidRequest(
                    f"limit {', '.join(unknown)}: not one that can change while the worker runs; expected one of "
                    + ", ".join(CHANGEABLE)
                )
            # Check everything before any change; the changes themselves cannot fail.
            worker, node = self._checked_worker(wanted), self._checked_node(wanted)
            level = self._checked_level(wanted.get(LOG_LEVEL))
            self._service.worker.adjust(worker)
            self._member.adjust(node)
            if level is not None:
                _LOGGER.setLevel(level)
            for name, now in self.values().items():
                if now != before[name]:
                    log.warning("worker.limit_changed name=%s before=%s now=%s", name, before[name], now)

    def _checked_worker(self, wanted: Mapping[str, str]) -> WorkerLimits:
        limits = self._service.worker.limits
        new = replace(limits, **_parsed(WorkerLimits, OF_WORKER, wanted))
        if new.calls_max > self._calls_max:
            raise InvalidRequest(
                f"calls_max={new.calls_max}: this worker has threads for at most {self._calls_max}, "
                f"{WorkerLimits.RAISE_MAX} times what it was started with"
            )
        return new

    def _checked_node(self, wanted: Mapping[str, str]) -> Limits:
        return replace(self._member.node.limits, **_parsed(Limits, OF_NODE, wanted))

    def _checked_level(self, level: str | None) -> str | None:
        if level is not None and level not in LOG_LEVELS:
            raise InvalidRequest(f"log_level={level!r}: expected one of {', '.join(LOG_LEVELS)}")
        return level.upper() if level is not None else None

    def values(self) -> dict[str, str]:
        """Returns every limit that can change, as text."""
        worker, node = self._service.worker.limits, self._member.node.limits
        return {
            **{name: _text(getattr(worker, name)) for name in OF_WORKER},
            **{name: _text(getattr(node, name)) for name in OF_NODE},
            LOG_LEVEL: logging.getLevelName(_LOGGER.getEffectiveLevel()).lower(),
        }


def _parsed(kind: type[object], names: Iterable[str], wanted: Mapping[str, str]) -> dict[str, Any]:
    """Returns the wanted values of these names as numbers, whole ones if the limit is whole."""
    whole = {each.name for each in fields(kind) if each.type == "int"}  # type: ignore[arg-type]
    found: dict[str, Any] = {}
    for name in names:
        if name in wanted:
            text = wanted[name].strip()
            try:
                found[name] = int(text) if name in whole else float(text)
            except ValueError:
                expected = "a whole number" if name in whole else "a number"
                raise InvalidRequest(f"limit {name}={text!r}: expected {expected}") from None
    return found


def _text(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# The places of a prompt's chunks, as messages.


def _place_message(place: ChunkPlace, pins: int | None) -> pb.ChunkPlace:
    memory = place.memory
    return pb.ChunkPlace(
        index=place.index,
        address=place.address,
        root=None if place.root is None else _root_message(place.root),
        memory=None
        if memory is None
        else pb.MemoryCopy(bytes=memory.size_bytes, dirty=memory.is_dirty, users=memory.users_count),
        disk=place.on_disk,
        peers=place.peers,
        pins=pins,
    )


def _root_message(copy: RootCopy) -> pb.RootCopy:
    return pb.RootCopy(
        bytes=copy.size_bytes,
        last_use_s=copy.last_use_s,
        uses=copy.uses,
        hints=hints_message(copy.hints),
        compressed=Encoding.COMPRESSED in copy.encoding,
        encrypted=Encoding.ENCRYPTED in copy.encoding,
        key_id=copy.key_id,
        condemned=copy.is_condemned,
    )


CLOSE_S = 2.0
WAIT_S_MAX = 10.0
"""Longest wait of one GetOperation."""


class ControlService:
    """Controls one worker."""

    def __init__(self, member: ClusterMember, service: WorkerService, about: Callable[[], About]) -> None:
        self._member = member
        self._node = member.node
        self._service = service
        self._about = about
        self._operations = member.node.operations
        self._tenant_share = 1.0 if service.calls.guard.is_open else 0.5
        """The share of the unfinished operations that one tenant may have, if the guard distinguishes tenants."""
        self._waiters = threading.Semaphore(max(1, service.worker.limits.calls_max // 2))
        self._limits = LiveLimits(member, service)
        self._began_s = time.monotonic()

    def handler(self) -> grpc.GenericRpcHandler:
        calls: dict[str, UnaryCall[Any]] = {
            "Prefetch": UnaryCall(pb.PrefetchRequest, self._prefetch),
            "EvictFirst": UnaryCall(pb.EvictFirstRequest, self._evict_first),
            "ClearSelected": UnaryCall(pb.ClearSelectedRequest, self._clear_selected),
            "GetOperation": UnaryCall(pb.GetOperationRequest, self._get_operation, light=True),
            "CancelOperation": UnaryCall(pb.CancelOperationRequest, self._cancel_operation, light=True),
            "GetLimits": UnaryCall(pb.GetLimitsRequest, self._get_limits, light=True),
            "SetLimits": UnaryCall(pb.SetLimitsRequest, self._set_limits, light=True),
            "Health": UnaryCall(pb.HealthRequest, self._health, light=True),
        }
        handlers = self._service.handlers
        found = {name: handlers.unary(f"Control.{name}", call) for name, call in calls.items()}
        found["Lookup"] = handlers.many("Control.Lookup", pb.LookupRequest, self._lookup)
        found["ListOperations"] = handlers.many(
            "Control.ListOperations", pb.ListOperationsRequest, self._list_operations
        )
        return grpc.method_handlers_generic_handler(CONTROL, found)

    def close(self) -> None:
        """Cancels all operations. Idempotent."""
        self._operations.close(CLOSE_S, "the worker drains or stops: begin it again at another worker")

    # Places of chunks

    def _lookup(self, request: pb.LookupRequest, call: Call) -> Iterator[bytes]:
        chain = self._service.worker.chain(request.namespace, request.tokens, call, request.chunks_max)
        node = self._node
        deadline = Deadline(node.clock, call.left_s(node.limits.read_deadline_s))
        try:
            pins: Sequence[int] | None = self._member.pins_of(chain)
        except KVStoreError:
            pins = None  # without etcd they are left out
        for places in node.looking.places(chain, deadline):
            yield pb.LookupResponse(
                chunks=[_place_message(place, None if pins is None else pins[place.index]) for place in places]
            ).SerializeToString()

    # Operations

    def _prefetch(self, request: pb.PrefetchRequest, call: Call) -> Message:
        tier = checked_tier(request.tier or "memory")
        chain = self._service.worker.chain(request.namespace, request.tokens, call)
        return self._message(
            self._node.begin_prefetch(chain, tier, call.visit.identity.name, self._tenant_share).status
        )

    def _evict_first(self, request: pb.EvictFirstRequest, call: Call) -> Message:
        self._node.evict_first(self._service.worker.chain(request.namespace, request.tokens, call))
        return pb.EvictFirstResponse()

    def _clear_selected(self, request: pb.ClearSelectedRequest, call: Call) -> Message:
        selection, about, tenant = self._selected(request.selection, call)
        run = self._member.begin_clear(
            selection,
            dry_run=request.dry_run,
            pinned=request.pinned,
            about=about,
            identity=call.visit.identity.name,
            tenant=tenant,
            tenant_share=self._tenant_share,
        )
        return self._message(run.status)

    def _selected(self, message: pb.Selection, call: Call) -> tuple[Selection, str, str | None]:
        """Returns a selection that ``call`` may use, its text for people, and its tenant (None: all tenants)."""
        selection = _selection_of(message)
        if selection.namespace is not None:
            namespace = self._service.worker.namespace(selection.namespace, call)
            return selection, f"{namespace.name}: {selection.describe()}", namespace.tenant
        if selection.tenant is not None:
            call.allow(selection.tenant)
        else:
            call.allow_every()
        return selection, selection.describe(), selection.tenant

    def _list_operations(self, _: pb.ListOperationsRequest, call: Call) -> Iterator[bytes]:
        for run in self._operations.every():
            tenant = run.status.tenant
            if call.visit.sees_every if tenant is None else call.may_see(tenant):
                yield self._message(run.status).SerializeToString()

    def _get_operation(self, request: pb.GetOperationRequest, call: Call) -> Message:
        if not 0 <= request.wait_s < math.inf:
            raise InvalidRequest(f"wait_s is {request.wait_s}: expected 0 or more")
        run = self._found(request.id, call)
        # A waiter keeps a thread of a call: beyond so many, the answer comes immediately.
        if request.wait_s and self._waiters.acquire(blocking=False):
            try:
                return self._message(run.poll(min(request.wait_s, WAIT_S_MAX)))
            finally:
                self._waiters.release()
        return self._message(run.status)

    def _cancel_operation(self, request: pb.CancelOperationRequest, call: Call) -> Message:
        run = self._found(request.id, call, changes=True)
        return self._message(run.cancel(f"cancelled by {call.visit.identity.name}"))

    def _found(self, id: str, call: Call, *, changes: bool = False) -> OperationRun:
        run = self._operations.find(id)
        if run is None:
            raise NoOperation(
                f"this worker has no operation {id!r}: kvstore ops lists them (a restarted worker has none)"
            )
        status = run.status
        role = Role.ADMIN if changes and status.kind == "clear" else None
        if status.tenant is None:
            call.allow_every(role)
        else:
            call.allow(status.tenant, role=role)
        return run

    def _message(self, status: OperationStatus) -> pb.OperationResponse:
        return pb.OperationResponse(
            operation=pb.Operation(
                id=status.id,
                kind=status.kind,
                about=status.about,
                identity=status.identity,
                state=status.state.value,
                began_s=status.began_s,
                ended_s=status.ended_s,
                done=status.done,
                total=status.total,
                unit=status.unit,
                message=status.message,
                counts=status.counts,
                worker=self._about().address,
            )
        )

    # The worker

    def _get_limits(self, _: pb.GetLimitsRequest, call: Call) -> Message:
        call.allow_every()
        return pb.LimitsResponse(limits=self._limits.values())

    def _set_limits(self, request: pb.SetLimitsRequest, call: Call) -> Message:
        call.allow_every()
        self._limits.change(dict(request.limits))
        return pb.LimitsResponse(limits=self._limits.values())

    def _health(self, _: pb.HealthRequest, call: Call) -> Message:
        """Takes about two looks' time at most."""
        call.allow_every()
        gauges = self._service.gauges()
        found = pb.HealthResponse(
            worker=_worker_health(self._about(), gauges, time.monotonic() - self._began_s),
            root=_root_health(self._member, gauges),
            etcd=_etcd_health(self._member, gauges),
            queues=_queue_health(self._member, self._service.worker.limits, gauges),
        )
        if "memory_size_bytes" in gauges:
            found.memory.CopyFrom(_memory_health(gauges))
        found.problems.extend(problems_of(found))
        found.healthy = not found.problems
        return found


def _selection_of(message: pb.Selection) -> Selection:
    """Returns the selection in a message. Raises InvalidRequest if it is empty or invalid."""
    return Selection(
        namespace=message.namespace or None,
        tenant=message.tenant if message.HasField("tenant") else None,
        fingerprint=message.fingerprint,
    )
