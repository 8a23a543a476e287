"""The control of workers, for asyncio."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec

from kvstore.aio.threads import STEP_S
from kvstore.aio.twins import Twin, awaited
from kvstore.client import control
from kvstore.client.control_arguments import check_heard
from kvstore.tickets import Ticket

P = ParamSpec("P")


class ControlTicket(Twin[control.ControlTicket]):
    """As ``kvstore.client.control.ControlTicket``."""

    @property
    def id(self) -> str:
        """The id for ``Control.ticket`` and ``kvstore tickets``."""
        return self._twin.id

    @property
    def last(self) -> Ticket:
        """The ticket as last seen."""
        return self._twin.last

    async def follow(self, heard: Callable[[Ticket], object]) -> Ticket:
        """As the synchronous one; this task calls ``heard``. Use ``asyncio.timeout`` for a limit."""
        check_heard(heard)
        told: Ticket | None = None
        while told is None or not told.state.ended:
            await self._threads.run(functools.partial(self._twin.wait, STEP_S))
            if self.last != told:
                told = self.last
                heard(told)
        return told

    async def wait(self) -> Ticket:
        """Waits until it ends; returns the ticket. Use ``asyncio.timeout`` for a limit."""
        return await self.follow(lambda ticket: None)

    cancel = awaited(control.ControlTicket.cancel)


def _begins(
    method: Callable[Concatenate[control.Control, P], control.ControlTicket],
) -> Callable[Concatenate[Control, P], Coroutine[Any, Any, ControlTicket]]:
    @functools.wraps(method)
    async def call(self: Control, /, *args: P.args, **kwargs: P.kwargs) -> ControlTicket:
        ticket = await self._threads.run(functools.partial(method, self._twin, *args, **kwargs))
        return ControlTicket(ticket, self._threads)

    return call


class Control(Twin[control.Control]):
    """As ``kvstore.client.control.Control``. Made by ``Store.control``."""

    def workers(self) -> list[str]:
        """The addresses of all workers."""
        return self._twin.workers()

    lookup = awaited(control.Control.lookup)
    clear = _begins(control.Control.clear)
    prefetch = _begins(control.Control.prefetch)
    move = _begins(control.Control.move)
    release = _begins(control.Control.release)
    tickets = awaited(control.Control.tickets)
    ticket = _begins(control.Control.ticket)
    drain = awaited(control.Control.drain)
    limits = awaited(control.Control.limits)
    set_limits = awaited(control.Control.set_limits)
    health = awaited(control.Control.health)
