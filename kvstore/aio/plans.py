"""Plans of batches and their runs, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, fields
from functools import partial

from kvstore import planning
from kvstore.aio.threads import Threads
from kvstore.aio.twins import Twin, awaited
from kvstore.planning import Group
from kvstore.planning import run as runs
from kvstore.planning.run import Sharing


class Taken(Twin[runs.Taken]):
    """As ``kvstore.planning.Taken``."""

    @property
    def group(self) -> Group:
        """The group."""
        return self._twin.group

    done = awaited(runs.Taken.done)
    give_back = awaited(runs.Taken.give_back)

    async def __aenter__(self) -> Taken:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await (self.done() if kind is None else self.give_back())


class Run(Twin[runs.Run]):
    """As ``kvstore.Run``; its consumers are tasks. A group is given back if its task ends."""

    @property
    def is_over(self) -> bool:
        """True once every group is done or has failed, or the run was closed."""
        return self._twin.is_over

    @property
    def failed(self) -> list[Group]:
        """Groups that were given back too often; their members may have run in part."""
        return self._twin.failed

    async def take(self) -> Taken | None:
        """Takes the next group, for this task; None once all groups are done. Use it with ``async with``."""
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        while not self._twin.is_over:
            # In steps: a thread of the store waits for each.
            taking = partial(self._twin.try_take, runs.LOOK_S, lambda: not task.done())
            taken = await self._threads.run(taking, _given_back)
            if taken is not None:
                return Taken(taken, self._threads)
        return None

    async def __aiter__(self) -> AsyncIterator[Group]:
        """Yields groups. The one before is done when the next is asked for."""
        while (taken := await self.take()) is not None:
            async with taken:
                yield taken.group

    def share(self) -> Sharing:
        """As the synchronous one, with ``with``: it waits for nothing, but at its end for up to some seconds."""
        return self._twin.share()

    close = awaited(runs.Run.close)

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _given_back(taken: runs.Taken | None) -> None:
    """Undoes a take whose task was cancelled."""
    if taken is not None:
        taken.give_back()


@dataclass(frozen=True, slots=True, repr=False)
class Plan(planning.Plan):
    """As ``kvstore.Plan``."""

    threads: Threads = field(compare=False)
    """The store's threads."""

    @classmethod
    def of(cls, plan: planning.Plan, threads: Threads) -> Plan:
        """The twin of a plan."""
        return cls(**{each.name: getattr(plan, each.name) for each in fields(planning.Plan)}, threads=threads)

    def run(self, *, ahead: int = 2, attempts: int = 3) -> Run:  # type: ignore[override]  # the same, awaited
        """As the synchronous one: ``async with plan.run() as run: async for group in run: ...``."""
        return Run(runs.Run(self, ahead, attempts), self.threads)
