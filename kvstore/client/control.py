"""Control of workers: ``store.control`` of a connected store (proto/kvstore/v1/control.proto).

Separate from caches, because it is about workers and what they hold, not about one model's KV. Long-running operations
go on at a worker even if this client ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from kvstore.brief import brief
from kvstore.census.selection import Selection
from kvstore.checks import checked_flag, checked_timeout
from kvstore.client.caller import Caller, CallFailed
from kvstore.client.control_arguments import (
    HasNamespace,
    check_heard,
    checked_changes,
    checked_chunks_max,
    checked_seconds,
    checked_ticket,
    checked_ticket_id,
    checked_worker,
    namespace_of,
    packed_prompts,
)
from kvstore.client.control_values import limits_of, place_of, plain, selection_message, ticket_of
from kvstore.client.endpoint import Endpoint
from kvstore.client.endpoints import Endpoints
from kvstore.client.limits import ClientLimits
from kvstore.client.remote_move import move_message
from kvstore.client.spreading import Marking, marks_of
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.node.looking import ChunkPlace
from kvstore.node.moves import Act, AheadName, Level, LevelName
from kvstore.results import Draining, LimitValue
from kvstore.sources import Clock
from kvstore.tickets import Ticket
from kvstore.tokens import Tokens, token_array
from kvstore.v1 import control_pb2 as pb
from kvstore.wire.messages import pack_tokens, sealed
from kvstore.wire.statuses import Busy, NoTicket

T = TypeVar("T")

HEALTH_S = 8.0
"""Time for a health call: the worker waits up to two seconds for its root, and two for its etcd."""
BUSY_S = 1.0
"""Pause before asking a busy worker about a ticket again."""
WATCH_S = 300.0
"""Maximum length of one watch of a ticket; a new watch follows it."""


class ControlTicket:
    """A long-running operation at one worker. Thread-safe."""

    def __init__(self, control: Control, ticket: Ticket) -> None:
        self._control = control
        self.last = ticket
        """The ticket as last seen."""

    def __repr__(self) -> str:
        return f"<kvstore.client.control.ControlTicket {self.id} {self.last.act} {self.last.state.value}>"

    @property
    def id(self) -> str:
        """The id for ``Control.ticket`` and ``kvstore tickets``."""
        return self.last.id

    def follow(self, heard: Callable[[Ticket], object], timeout: float | None = None) -> Ticket:
        """Calls ``heard`` with the ticket now and after each change until it ends, at most ``timeout`` seconds.

        Returns the last ticket heard. Raises NoTicket if the worker was restarted, Unavailable.
        """

        check_heard(heard)

        def keep(ticket: Ticket) -> None:
            self.last = ticket
            heard(ticket)

        self._control.follow(self.last, keep, timeout)
        return self.last

    def wait(self, timeout: float | None = None) -> Ticket:
        """Waits until it ends, at most ``timeout`` seconds; returns the ticket. Raises as ``follow`` does."""
        return self.follow(lambda ticket: None, timeout)

    def cancel(self) -> Ticket:
        """Cancels the operation, which ends within about a second; work done stays. Returns the ticket. Idempotent."""
        self.last = self._control.cancel(self.last)
        return self.last


class Control:
    """Controls the workers that a store is connected to. Made by ``Store.control``. Thread-safe.

    ``worker``, if given, is the address of the worker to ask; otherwise the best one is asked.
    """

    def __init__(self, port: object, caller: Caller, endpoints: Endpoints, limits: ClientLimits, clock: Clock) -> None:
        self._port = port  # kept alive: a dropped port closes the connections
        self._caller = caller
        self._endpoints = endpoints
        self._limits = limits
        self._clock = clock

    def __repr__(self) -> str:
        return f"<kvstore.client.control.Control {self._endpoints.place}>"

    def workers(self) -> list[str]:
        """The addresses of all workers."""
        self._endpoints.check()
        return [endpoint.address for endpoint in self._endpoints.every()]

    # Places of chunks

    def lookup(
        self, cache: HasNamespace, tokens: Tokens, chunks_max: int = 0, worker: str | None = None
    ) -> list[ChunkPlace]:
        """Returns the places of each leading chunk of a prompt, as one worker sees them, up to the first missing one.

        Returns at most ``chunks_max`` chunks, all for 0. Does not count as a use of the chunks. Raises Unavailable.
        """
        ids, namespace, chunks_max = token_array(tokens), namespace_of(cache), checked_chunks_max(chunks_max)
        packed = pack_tokens(ids[: len(ids) // namespace.layout.chunk_tokens * namespace.layout.chunk_tokens])
        request = sealed(pb.LookupRequest(namespace=namespace.digest, tokens=packed, chunks_max=chunks_max))
        # At the worker that the prompt would be read from: its memory is the one to look into.
        raw = self._at(
            worker,
            lambda at, left_s: list(at.stream_in("Control.Lookup")(request, timeout=left_s)),
            self._limits.read_s,
            partial(marks_of, namespace, ids),
        )
        return [place_of(each) for message in raw for each in pb.LookupResponse.FromString(message).chunks]

    # Long-running operations

    def clear(
        self,
        selection: Selection,
        *,
        dry_run: bool = False,
        pinned: bool = False,
        deadline: float = 0.0,
        worker: str | None = None,
    ) -> ControlTicket:
        """Deletes selected chunks on the root and in the memory and disks of all workers. Counted in the ticket.

        ``dry_run`` only counts. Pinned chunks stay unless ``pinned``. Raises InvalidRequest.
        """
        request = pb.ClearSelectedRequest(
            selection=selection_message(selection),
            dry_run=checked_flag("dry_run", dry_run),
            pinned=checked_flag("pinned", pinned),
            deadline_s=checked_seconds("deadline", deadline),
        )
        return ControlTicket(self, self._ticket_of("ClearSelected", request, worker))

    def prefetch(
        self,
        cache: HasNamespace,
        prompts: Sequence[Tokens],
        tier: AheadName = "memory",
        *,
        deadline: float = 0.0,
        worker: str | None = None,
    ) -> ControlTicket:
        """Prefetches several prompts as ``Cache.prefetch`` does; goes on if this client ends. Raises as that does."""
        return self._move(cache, prompts, Act.PREFETCH, Level.of(tier), deadline, worker)

    def move(
        self,
        cache: HasNamespace,
        prompts: Sequence[Tokens],
        tier: LevelName,
        *,
        deadline: float = 0.0,
        worker: str | None = None,
    ) -> ControlTicket:
        """Moves several prompts as ``Cache.move`` does; goes on if this client ends."""
        return self._move(cache, prompts, Act.MOVE, Level.of(tier), deadline, worker)

    def release(
        self, cache: HasNamespace, prompts: Sequence[Tokens], *, deadline: float = 0.0, worker: str | None = None
    ) -> ControlTicket:
        """Releases several prompts as ``Cache.release`` does; goes on if this client ends."""
        return self._move(cache, prompts, Act.RELEASE, Level.MEMORY, deadline, worker)

    def tickets(self) -> list[Ticket]:
        """Returns the tickets of all workers that answer, newest first. Raises Unavailable if none answers."""
        found: list[Ticket] = []
        error: KVStoreError | None = None
        answered = False
        for endpoint in self._endpoints.every():
            try:
                raw = self._caller.at(
                    endpoint,
                    lambda at=endpoint: list(  # type: ignore[misc]
                        at.stream_in("Control.ListTickets")(b"", timeout=self._limits.pin_s)
                    ),
                )
            except CallFailed as failed:
                error = failed.failed.error
                continue
            answered = True
            found += [ticket_of(pb.TicketResponse.FromString(each).ticket, endpoint.address) for each in raw]
        if not answered:
            raise error or self._endpoints.none_known()
        return sorted(found, key=lambda each: each.began_s, reverse=True)

    def ticket(self, ticket_id: str) -> ControlTicket:
        """Finds the ticket with this id at any worker. Raises NoTicket if no worker has it, Unavailable."""
        wanted = checked_ticket_id(ticket_id)
        for ticket in self.tickets():
            if ticket.id == wanted:
                return ControlTicket(self, ticket)
        raise NoTicket(
            f"no worker has a ticket {ticket_id!r}: list tickets with kvstore tickets (a restarted worker has none)"
        )

    def follow(self, ticket: Ticket, heard: Callable[[Ticket], object], timeout_s: float | None) -> None:
        """Implements ``ControlTicket.follow``."""
        check_heard(heard)
        request = sealed(pb.WatchTicketRequest(id=checked_ticket(ticket).id))
        timeout_s = checked_timeout(timeout_s)
        ends_s = float("inf") if timeout_s is None else self._clock.monotonic_s() + timeout_s
        ended, raised = False, list[Exception]()

        def listen(endpoint: Endpoint, left_s: float) -> None:
            nonlocal ended
            call = endpoint.stream_in("Control.WatchTicket")(request, timeout=left_s)
            try:
                for message in call:
                    now = ticket_of(pb.TicketResponse.FromString(message).ticket, endpoint.address)
                    ended = now.state.ended
                    try:
                        heard(now)
                    except Exception as error:  # noqa: BLE001 - the caller's: no worker is set aside for it
                        raised.append(error)
                        return
            except grpc.RpcError as error:
                code: Any = error
                if code.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:  # a deadline of ours is not an error
                    raise
            finally:
                call.cancel()

        while not ended and (left_s := ends_s - self._clock.monotonic_s()) > 0:
            try:
                self._at(ticket.worker, listen, min(left_s, WATCH_S))
            except Busy:  # a busy worker says nothing about the ticket
                time.sleep(min(left_s, BUSY_S))
            if raised:
                raise raised[0]

    def cancel(self, ticket: Ticket) -> Ticket:
        """Implements ``ControlTicket.cancel``."""
        return self._ticket_of("CancelTicket", pb.CancelTicketRequest(id=checked_ticket(ticket).id), ticket.worker)

    # Workers

    def drain(self, worker: str | None = None, within: float = 0.0) -> Draining:
        """Stops a worker in good order, as SIGTERM does. Returns before it has stopped.

        Calls in progress get ``within`` seconds; 0 means the time that the worker was started with. ``worker`` must be
        given if there are several.

        Raises InvalidRequest if it is unclear which worker is meant, or if its program cannot be drained.
        """
        request = sealed(pb.DrainRequest(within_s=checked_seconds("within", within)))
        raw = self._unary("Drain", request, _only(self.workers(), worker))
        answer = pb.DrainResponse.FromString(raw)
        return Draining(answer.calls, answer.behind_bytes, answer.tickets, answer.within_s)

    def limits(self) -> dict[str, list[LimitValue] | KVStoreError]:
        """Returns the limits of each worker that can change while it runs, or why it did not answer."""
        return self._each("GetLimits", b"", self._limits.pin_s, limits_of)

    def set_limits(
        self, changes: Mapping[str, object], worker: str | None = None
    ) -> dict[str, list[LimitValue] | KVStoreError]:
        """Changes limits of one worker, or of all, until they stop. Each worker changes all of them or none.

        Returns the new limits by worker, or why a worker refused.
        """
        request = sealed(pb.SetLimitsRequest(limits=checked_changes(changes)))
        if worker is not None:
            return {worker: limits_of(self._unary("SetLimits", request, worker))}
        return self._each("SetLimits", request, self._limits.pin_s, limits_of)

    def health(self) -> dict[str, dict[str, Any] | KVStoreError]:
        """Returns the fields of ``HealthResponse`` (control.proto) of each worker, or why it did not answer."""
        return self._each("Health", b"", HEALTH_S, lambda raw: plain(pb.HealthResponse.FromString(raw)))

    # Calls

    def _move(
        self,
        cache: HasNamespace,
        prompts: Sequence[Tokens],
        act: Act,
        level: Level,
        deadline_s: float,
        worker: str | None,
    ) -> ControlTicket:
        one = move_message(namespace_of(cache).digest, b"", act, level)
        request = pb.BeginMoveRequest(
            namespace=one.namespace,
            prompts=packed_prompts(prompts),
            act=one.act,
            tier=one.tier,
            deadline_s=checked_seconds("deadline", deadline_s),
        )
        return ControlTicket(self, self._ticket_of("BeginMove", request, worker))

    def _ticket_of(self, name: str, request: Message, worker: str | None) -> Ticket:
        raw = sealed(request)

        def send(endpoint: Endpoint, left_s: float) -> Ticket:
            answer = endpoint.unary(f"Control.{name}")(raw, timeout=left_s)
            return ticket_of(pb.TicketResponse.FromString(answer).ticket, endpoint.address)

        # Sent twice, it would make two tickets, and nobody would follow one of them.
        return self._at(worker, send, self._limits.pin_s, may_repeat=False)

    def _each(
        self, name: str, request: bytes, timeout_s: float, read: Callable[[bytes], T]
    ) -> dict[str, T | KVStoreError]:
        """Asks every worker. Raises Unavailable if none is known."""
        answers = self._caller.each(f"Control.{name}", request, timeout_s)
        if not answers:
            raise self._endpoints.none_known()
        return {at: raw if isinstance(raw, KVStoreError) else read(raw) for at, raw in answers.items()}

    def _unary(self, name: str, request: bytes, worker: str | None) -> bytes:
        def send(endpoint: Endpoint, left_s: float) -> bytes:
            answer: bytes = endpoint.unary(f"Control.{name}")(request, timeout=left_s)
            return answer

        return self._at(worker, send, self._limits.pin_s, may_repeat=False)

    def _at(
        self,
        worker: str | None,
        send: Callable[[Endpoint, float], T],
        timeout_s: float,
        marking: Marking | None = None,
        *,
        may_repeat: bool = True,
    ) -> T:
        """Makes a call at one worker, or at the best. Raises what it raised."""
        if checked_worker(worker) is None:
            return self._caller.anywhere(send, timeout_s, marking, may_repeat=may_repeat, even_aside=True)
        endpoint = next((each for each in self._endpoints.every() if each.address == worker), None)
        if endpoint is None:
            raise InvalidRequest(f"worker {brief(worker)} is not one of {', '.join(self.workers()) or 'none'}")
        try:
            return self._caller.at(endpoint, lambda: send(endpoint, timeout_s))
        except CallFailed as failed:
            raise failed.failed.error from failed


def _only(known: list[str], worker: str | None) -> str | None:
    """Returns the worker that was named, or the only one there is; None if there is none. Raises InvalidRequest."""
    if checked_worker(worker) is None and len(known) > 1:
        raise InvalidRequest(f"which worker? there are {len(known)}: give one of {', '.join(known)}")
    return worker or next(iter(known), None)
