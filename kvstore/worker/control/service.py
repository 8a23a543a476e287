"""The calls of kvstore.v1.Control, each a few lines between a message and the code that does it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from kvstore.census.selection import Selection
from kvstore.counts import WorkerCount
from kvstore.errors import InvalidRequest
from kvstore.node.clearing import resolved
from kvstore.node.member import Member
from kvstore.node.moves import Act, Level
from kvstore.results import LimitValue
from kvstore.sources import Clock
from kvstore.tickets import State, Ticket
from kvstore.tokens import TOKENS_MAX
from kvstore.v1 import control_pb2 as pb
from kvstore.wire.limits import CONTROL
from kvstore.wire.messages import unpack_tokens
from kvstore.wire.statuses import NoTicket
from kvstore.worker.call import Call
from kvstore.worker.calls import UnaryCall
from kvstore.worker.control.book import TENANT_TICKETS_MAX, Book
from kvstore.worker.control.clearing import clear_selected, selection_of
from kvstore.worker.control.health import About, Examination
from kvstore.worker.control.limits import LiveLimits
from kvstore.worker.control.lookups import lookup
from kvstore.worker.control.moves import move_prompts
from kvstore.worker.control.runner import SPARE_THREADS, Runner, Step, Work
from kvstore.worker.control.watches import Watches
from kvstore.worker.moves import ACTS, LEVELS
from kvstore.worker.service import Service

Request = TypeVar("Request", bound=Message)
Context = grpc.ServicerContext

PROMPTS_MAX = 1024
CLOSE_S = 2.0
DRAIN_S_MAX = 86_400.0
"""Limit of ``within_s``: locks accept no endless wait, and a drain that fails would lose what only memory has."""

_STATES = {
    State.WAITING: pb.TICKET_WAITING,
    State.RUNNING: pb.TICKET_RUNNING,
    State.DONE: pb.TICKET_DONE,
    State.FAILED: pb.TICKET_FAILED,
    State.CANCELLED: pb.TICKET_CANCELLED,
}

_ENDED = {
    State.DONE: WorkerCount.TICKETS_DONE,
    State.FAILED: WorkerCount.TICKETS_FAILED,
    State.CANCELLED: WorkerCount.TICKETS_CANCELLED,
}

Drain = Callable[[float | None], float]
"""Ends the worker's program as SIGTERM does, with this many seconds for calls in progress.

None means the time that it was started with. Returns that time at once.
"""


class ControlService:
    """Controls one worker. ``on_drain`` ends its program; without it Drain is refused."""

    def __init__(
        self, member: Member, service: Service, clock: Clock, about: Callable[[], About], on_drain: Drain | None
    ) -> None:
        self._member = member
        self._node = member.node
        self._service = service
        self._about = about
        self._on_drain = on_drain
        self._book = Book() if service.calls.guard.is_open else Book(tenant_tickets_max=TENANT_TICKETS_MAX)
        self._runner = Runner(
            self._book,
            clock,
            member.node.ids,
            lambda state: service.calls.add(_ENDED[state]),
            spare_threads=SPARE_THREADS,
        )
        self._limits = LiveLimits(member, service)
        self._watches = Watches(self._book, lambda: service.limits.calls_max, lambda: service.gate.draining)
        self._examination = Examination(member, service, clock, about)
        service.add_gauges(self._gauges)

    def handler(self) -> grpc.GenericRpcHandler:
        """Returns all calls, for a server."""
        unary, many = self._service.handlers.unary, self._service.handlers.many
        return grpc.method_handlers_generic_handler(
            CONTROL,
            {
                "Lookup": many("Control.Lookup", pb.LookupRequest, self._lookup),
                "ClearSelected": unary(
                    "Control.ClearSelected", UnaryCall(pb.ClearSelectedRequest, self._clear_selected)
                ),
                "BeginMove": unary("Control.BeginMove", UnaryCall(pb.BeginMoveRequest, self._begin_move)),
                "ListTickets": many("Control.ListTickets", pb.ListTicketsRequest, self._list_tickets),
                "WatchTicket": many("Control.WatchTicket", pb.WatchTicketRequest, self._watch_ticket),
                "CancelTicket": unary(
                    "Control.CancelTicket", UnaryCall(pb.CancelTicketRequest, self._cancel_ticket, light=True)
                ),
                "Drain": unary("Control.Drain", UnaryCall(pb.DrainRequest, self._drain, light=True)),
                "GetLimits": unary("Control.GetLimits", UnaryCall(pb.GetLimitsRequest, self._get_limits, light=True)),
                "SetLimits": unary("Control.SetLimits", UnaryCall(pb.SetLimitsRequest, self._set_limits, light=True)),
                "Health": unary("Control.Health", UnaryCall(pb.HealthRequest, self._health, light=True)),
            },
        )

    def close(self) -> None:
        """Ends all tickets. Idempotent."""
        self._runner.close(CLOSE_S)

    # Places of chunks

    def _lookup(self, request: pb.LookupRequest, call: Call) -> Iterator[bytes]:
        chain = self._service.prompts.chain(request.namespace, request.tokens, call, request.chunks_max)
        yield from lookup(self._member, chain, call)

    # Tickets

    def _clear_selected(self, request: pb.ClearSelectedRequest, call: Call) -> Message:
        selection, said, tenant = self._selected(request.selection, call)
        resolved(self._member.node, selection)  # a ticket that failed would not tell that it makes no sense

        def clear(step: Step) -> str:
            return clear_selected(self._member, selection, step, dry_run=request.dry_run, pinned=request.pinned)

        return self._begin("clear", clear, said, "shards", tenant, request.deadline_s, call)

    def _selected(self, message: pb.Selection, call: Call) -> tuple[Selection, str, str | None]:
        """Returns a selection that ``call`` may use, its text for people, and its tenant (None: all tenants)."""
        selection = selection_of(message)
        if selection.namespace is not None:
            namespace = self._service.prompts.namespace(selection.namespace, call)
            return selection, f"{namespace.name}: {selection.describe()}", namespace.tenant
        if selection.tenant is not None:
            call.allow(selection.tenant)
        else:
            call.allow_every()
        return selection, selection.describe(), selection.tenant

    def _begin(
        self,
        act: str,
        work: Work,
        said: str,
        unit: str,
        tenant: str | None,
        deadline_s: float,
        call: Call,
        tokens: int = 0,
    ) -> Message:
        if not 0 <= deadline_s < math.inf:
            raise InvalidRequest(f"deadline_s is {deadline_s}: expected 0 or more")
        return self._message(
            self._runner.begin(
                act,
                work,
                about=said,
                unit=unit,
                identity=call.identity,
                tenant=tenant,
                deadline_s=deadline_s,
                tokens=tokens,
            )
        )

    def _begin_move(self, request: pb.BeginMoveRequest, call: Call) -> Message:
        act, level = ACTS.get(request.act), LEVELS.get(request.tier)
        if act is None or level is None:
            raise InvalidRequest(f"act is {request.act} and tier {request.tier}: expected an act and a tier of Move")
        if not 1 <= len(request.prompts) <= PROMPTS_MAX:
            raise InvalidRequest(f"{len(request.prompts)} prompts: expected 1 to {PROMPTS_MAX}")
        if sum(map(len, request.prompts)) > 4 * TOKENS_MAX:
            raise InvalidRequest(f"the prompts have more than {TOKENS_MAX} tokens together: ask for fewer at once")
        namespace = self._service.prompts.namespace(request.namespace, call)
        prompts = [unpack_tokens(packed) for packed in request.prompts]
        self._node.check_move(act, level)

        def move(step: Step) -> str:
            return move_prompts(self._node, namespace, prompts, act, level, step)

        said = f"{len(prompts)} prompts of {namespace.name}{_to(act, level)}"
        tokens = sum(map(len, prompts))
        return self._begin(act.value, move, said, "chunks", namespace.tenant, request.deadline_s, call, tokens)

    def _list_tickets(self, _: pb.ListTicketsRequest, call: Call) -> Iterator[bytes]:
        for ticket in self._book.every():
            if call.sees_every if ticket.tenant is None else call.may_see(ticket.tenant):
                yield self._message(ticket).SerializeToString()

    def _watch_ticket(self, request: pb.WatchTicketRequest, call: Call) -> Iterator[bytes]:
        for ticket in self._watches.follow(self._found(request.id, call)):
            yield self._message(ticket).SerializeToString()

    def _cancel_ticket(self, request: pb.CancelTicketRequest, call: Call) -> Message:
        ticket = self._found(request.id, call)
        self._runner.cancel(ticket.id)
        return self._message(self._book.find(ticket.id) or ticket)

    def _found(self, ticket_id: str, call: Call) -> Ticket:
        ticket = self._book.find(ticket_id)
        if ticket is None:
            raise NoTicket(
                f"this worker has no ticket {ticket_id!r}: list tickets with kvstore tickets (a restarted "
                "worker has none)"
            )
        if ticket.tenant is None:
            call.allow_every()
        else:
            call.allow(ticket.tenant)
        return ticket

    def _message(self, ticket: Ticket) -> pb.TicketResponse:
        return pb.TicketResponse(
            ticket=pb.Ticket(
                id=ticket.id,
                act=ticket.act,
                about=ticket.about,
                identity=ticket.identity,
                state=_STATES[ticket.state],
                began_s=ticket.began_s,
                ended_s=ticket.ended_s,
                done=ticket.done,
                total=ticket.total,
                unit=ticket.unit,
                message=ticket.message,
                counts=ticket.counts,
                worker=self._about().address,
            )
        )

    def _gauges(self) -> dict[str, float]:
        return {
            "tickets_running": float(self._book.count(State.RUNNING)),
            "tickets_waiting": float(self._book.count(State.WAITING)),
        }

    # The worker

    def _drain(self, request: pb.DrainRequest, call: Call) -> Message:
        call.allow_every()
        if not 0 <= request.within_s <= DRAIN_S_MAX:
            raise InvalidRequest(f"within_s is {request.within_s:g}: expected 0 to {DRAIN_S_MAX:g}")
        if self._on_drain is None:
            raise InvalidRequest("this worker's program cannot be drained by a call: stop the program itself")
        within_s = self._on_drain(request.within_s or None)
        gauges = self._service.gauges()
        return pb.DrainResponse(
            calls=int(gauges["calls_in_flight"]),
            behind_bytes=int(gauges.get("behind_bytes", 0)),
            tickets=int(gauges["tickets_running"] + gauges["tickets_waiting"]),
            within_s=within_s,
        )

    def _get_limits(self, _: pb.GetLimitsRequest, call: Call) -> Message:
        call.allow_every()
        return _limits_message(self._limits.every())

    def _set_limits(self, request: pb.SetLimitsRequest, call: Call) -> Message:
        call.allow_every()
        return _limits_message(self._limits.change(dict(request.limits)))

    def _health(self, _: pb.HealthRequest, call: Call) -> Message:
        call.allow_every()
        return self._examination.answer()


def _limits_message(limits: list[LimitValue]) -> pb.LimitsResponse:
    return pb.LimitsResponse(
        limits=[
            pb.Limit(name=each.name, value=each.value, meaning=each.meaning, started=each.started, before=each.before)
            for each in limits
        ]
    )


def _to(act: Act, level: Level) -> str:
    return "" if act is Act.RELEASE else f" to {level.value}"
