"""The book: the tickets that a worker keeps.

Separate from the runner, which does the work: there are no threads and no clocks here. Tickets live in memory: a worker
that ends forgets them (control.proto tells clients so).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from kvstore.errors import Overloaded
from kvstore.tickets import State, Ticket
from kvstore.tokens import TOKENS_MAX

TICKETS_MAX = 100
"""Tickets kept by one worker, including those not done."""
TENANT_TICKETS_MAX = TICKETS_MAX // 2
"""Tickets not done of one tenant, if tenants are told apart: others, and operators, need some too."""
TOKENS_KEPT_MAX = 16 * TOKENS_MAX
"""Tokens in the prompts of all tickets not done (256 MiB); one tenant gets half of it, if tenants are told apart."""


class Book:
    """The newest ``tickets_max`` tickets of one worker. Thread-safe."""

    def __init__(
        self,
        tickets_max: int = TICKETS_MAX,
        tenant_tickets_max: int = TICKETS_MAX,
        tokens_max: int = TOKENS_KEPT_MAX,
    ) -> None:
        self._tickets_max = tickets_max
        self._tenant_tickets_max = tenant_tickets_max
        self._tokens_max = tokens_max
        self._changed = threading.Condition()
        self._tickets: dict[str, Ticket] = {}

    def add(self, ticket: Ticket) -> None:
        """Adds a ticket, and forgets the oldest ended one if the book is full. Raises Overloaded."""
        with self._changed:
            tenant, most = ticket.tenant, self._tenant_tickets_max
            if tenant is not None and most < self._tickets_max and self._unfinished_count(tenant) >= most:
                raise Overloaded(f"{most} tickets of tenant {tenant!r} are not done yet: wait for some, or cancel some")
            self._check_tokens(ticket)
            if len(self._tickets) >= self._tickets_max:
                gone = next((each.id for each in self._tickets.values() if each.state.ended), None)
                if gone is None:
                    raise Overloaded(f"{self._tickets_max} tickets are not done yet: wait for some, or cancel some")
                del self._tickets[gone]
            self._tickets[ticket.id] = ticket
            self._changed.notify_all()

    def find(self, ticket_id: str) -> Ticket | None:
        """Returns the ticket with this id as it is now, or None."""
        with self._changed:
            return self._tickets.get(ticket_id)

    def every(self) -> list[Ticket]:
        """Returns all tickets, newest first."""
        with self._changed:
            return [*reversed(self._tickets.values())]

    def count(self, state: State) -> int:
        """Returns the number of tickets in a state."""
        with self._changed:
            return sum(each.state is state for each in self._tickets.values())

    def move(self, ticket_id: str, state: State, *, message: str = "", ended_s: float = 0.0) -> bool:
        """Moves a ticket to its next state; False, and no change, if it has ended or is forgotten.

        Two may want to end one, such as a caller that cancels it and its deadline: the first wins.
        """
        with self._changed:
            ticket = self._tickets.get(ticket_id)
            if ticket is None or ticket.state.ended:
                return False
            self._tickets[ticket_id] = ticket.moved(state, message=message, ended_s=ended_s)
            self._changed.notify_all()
            return True

    def advance(self, ticket_id: str, done: int, total: int, counts: Mapping[str, int]) -> None:
        """Records the progress of a running ticket."""
        with self._changed:
            ticket = self._tickets.get(ticket_id)
            if ticket is not None and ticket.state is State.RUNNING:
                self._tickets[ticket_id] = replace(
                    ticket, done=done, total=total, counts=MappingProxyType(dict(counts))
                )
                self._changed.notify_all()

    def wait(self, seen: Ticket, timeout_s: float) -> Ticket | None:
        """Waits until the ticket differs from ``seen``, or time is up; returns it, None if it is forgotten."""
        with self._changed:
            self._changed.wait_for(lambda: self._tickets.get(seen.id) is not seen, timeout_s)
            return self._tickets.get(seen.id)

    def wait_ended(self, ticket: Ticket, timeout_s: float) -> Ticket | None:
        """Waits until the ticket has ended, or time is up; returns it, None if it is forgotten."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended(ticket.id), timeout_s)
            return self._tickets.get(ticket.id)

    def _unfinished_count(self, tenant: str) -> int:
        return sum(each.tenant == tenant and not each.state.ended for each in self._tickets.values())

    def _check_tokens(self, ticket: Ticket) -> None:
        limits: list[tuple[str | None, int]] = [(None, self._tokens_max)]
        if ticket.tenant is not None and self._tenant_tickets_max < self._tickets_max:
            limits.insert(0, (ticket.tenant, self._tokens_max // 2))
        for tenant, most in limits:
            unfinished = (each for each in self._tickets.values() if not each.state.ended)
            kept = sum(each.tokens for each in unfinished if tenant in (None, each.tenant))
            if ticket.tokens and kept + ticket.tokens > most:
                raise Overloaded(
                    f"unfinished tickets have prompts of {kept} tokens, and the limit is {most}: wait for some to end"
                )

    def _has_ended(self, ticket_id: str) -> bool:
        ticket = self._tickets.get(ticket_id)
        return ticket is None or ticket.state.ended
