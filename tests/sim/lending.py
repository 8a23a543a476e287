"""The loans of a run on one host: ``kvstore/node/host_loans.py`` as it is, beside the metadata file (rule S8).

Real: the file of loans with its lock, and all code that reads and writes it, looks whether the metadata are lost, and
counts the root. Simulated: time, and that a killed process lets go of the lock. Others may run whenever somebody has
got it, and while he counts.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import patch

from kvstore.meta.sqlite import loans, making
from kvstore.meta.sqlite.loans import Loans
from kvstore.meta.sqlite.making import locked
from kvstore.node.host_loans import HostLoans

from kvstore.format.places import GENERATIONS, HOST_GENERATIONS, Name
from kvstore.node import astray, host_loans
from kvstore.node.member import Member
from kvstore.root.interface import Entry
from tests.sim.faults import Call
from tests.sim.kernel import Process
from tests.sim.shared_root import RootPort

if TYPE_CHECKING:
    from tests.sim.bounded_world import BoundedWorld


class Lender:
    """Gives each node its loans. One for all processes of a run."""

    def __init__(self, world: BoundedWorld) -> None:
        self._world = world
        self._kernel = kernel = world.kernel
        self._locks: dict[Process, int] = {}
        self._undo = ExitStack()
        time = SimpleNamespace(monotonic=lambda: kernel.now_s, sleep=kernel.sleep)
        for module, name, value in (
            (making, "time", time),
            (loans, "locked", lambda path, timeout_s: self._locked(locked(path, timeout_s))),
            (astray, "SqliteMeta", lambda folder: world.store.port(world.faults)),
            (host_loans, "Loans", self._loans),
        ):
            self._undo.enter_context(patch.object(module, name, value))

    def close(self) -> None:
        """Undoes what it changed."""
        self._undo.close()

    def of(self, member: Member, max_bytes: int) -> HostLoans:
        """Returns the loans of one node."""
        return _NotedLoans(self._world, member, max_bytes)

    def died(self, process: Process) -> None:
        """Lets go of what a killed process had locked."""
        file = self._locks.pop(process, None)
        if file is not None:
            fcntl.flock(file, fcntl.LOCK_UN)

    @contextmanager
    def _locked(self, lock: AbstractContextManager[int]) -> Iterator[int]:
        actor = self._kernel.current
        assert actor is not None
        with lock as file:
            self._locks[actor.process] = file
            try:
                self._kernel.point()
                yield file
            finally:
                self._locks.pop(actor.process, None)

    def _loans(self, folder: str, max_bytes: int, used_bytes: Callable[[], int], _: object) -> Loans:
        store = self._world.store  # whose clock is the host's, as the system's is
        return Loans(folder, max_bytes, used_bytes, store.clock, store.boot)


class _Mount(RootPort):
    """The root, which has a folder."""

    def __init__(self, world: BoundedWorld) -> None:
        super().__init__(world.root, world.faults)
        self.path = world.store.folder

    def list(self, folder: Name) -> Iterator[Entry]:
        found = super().list(folder)
        if folder not in (GENERATIONS, HOST_GENERATIONS):
            self._faults.maybe_pause(Call.COUNT)
        return found


class _NotedLoans(HostLoans):
    """Says in the trace what was lent."""

    def __init__(self, world: BoundedWorld, member: Member, max_bytes: int) -> None:
        super().__init__(member.node, _Mount(world), member.keys, max_bytes)  # type: ignore[arg-type]
        self._world = world

    def lend(self, size_bytes: int, more_bytes: int) -> int | None:
        """See ``Lending``."""
        lent_bytes = super().lend(size_bytes, more_bytes)
        self._world.kernel.note(f"borrows {size_bytes} -> {lent_bytes}")
        self._world.count("loans refused" if lent_bytes is None else "loans")
        return lent_bytes

    def end(self) -> None:
        """See ``Lending``."""
        super().end()
        self._world.kernel.note("ends the loans")
        self._world.count("loans ended by a claim")
