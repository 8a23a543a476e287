"""Bugs of taking chunks: the fence (F1 to F3, G6), and telling publications apart in the trash (G5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from kvstore.format import places
from kvstore.format.places import Name
from kvstore.root import fences, memory
from kvstore.root.interface import Root
from kvstore_gc import deletion, execute, ledger
from tests.sim.planting import bug


@bug("relayed")
def no_incarnation_check() -> Iterator[None]:
    """G5: whatever lies in the trash is deleted."""

    def settle(self: deletion.Trash, entry: Name, victim: Any, taken: Any) -> None:
        self._root.remove(entry)

    with patch.object(deletion.Trash, "_settle", settle):
        yield


@bug("relayed")
def fixed_trash_name() -> Iterator[None]:
    """G5: every run gives a chunk the same name in the trash."""

    class SameIds:
        def fresh(self) -> bytes:
            return bytes(16)

    def made(self: deletion.Trash, *rest: Any) -> None:
        real(self, *rest)
        self._site = replace(self._site, ids=SameIds())

    real = deletion.Trash.__init__
    with patch.object(deletion.Trash, "__init__", made):
        yield


@bug("deposed")
def close_before_fence() -> Iterator[None]:
    """G6: the sweep's key is deleted first, and its folder afterwards."""

    def close(self: execute.Sweeper, sweeps: Sequence[ledger.InFlight]) -> None:
        real_close(self, sweeps)
        for sweep in sweeps:
            args = self.later.pop(sweep.sweep, None)  # type: ignore[attr-defined]
            if args is not None:
                real_fence(self._trash, sweep, *args)

    def later_fence(self: deletion.Trash, sweep: ledger.InFlight, *args: Any) -> bool:
        self.later[sweep.sweep] = args  # type: ignore[attr-defined]
        return True

    def made(self: execute.Sweeper, *rest: Any, **named: Any) -> None:
        real_made(self, *rest, **named)
        self.later = self._trash.later = {}  # type: ignore[attr-defined]

    real_close, real_fence, real_made = execute.Sweeper._close, deletion.Trash._fence, execute.Sweeper.__init__
    with (
        patch.object(execute.Sweeper, "_close", close),
        patch.object(deletion.Trash, "_fence", later_fence),
        patch.object(execute.Sweeper, "__init__", made),
    ):
        yield


@bug("deposed")
def no_fence() -> Iterator[None]:
    """F1: taking a chunk makes the sweep's folder if it is gone."""

    def move(self: memory.MemoryRoot, source: Name, name: Name, *, make_folder: bool = True) -> bool:
        return real(self, source, name, make_folder=True)

    real = memory.MemoryRoot.move
    with patch.object(memory.MemoryRoot, "move", move):
        yield


@bug("deposed")
def late_mkdir() -> Iterator[None]:
    """F2: a run that adopts a sweep makes its folder again."""

    def reap(self: deletion.Trash, sweep: ledger.InFlight, *rest: Any) -> bool:
        self.open(sweep.sweep)
        return real(self, sweep, *rest)

    real = deletion.Trash.reap
    with patch.object(deletion.Trash, "reap", reap):
        yield


@bug("relayed")
def restore_overwrites() -> Iterator[None]:
    """G5: what goes back from the trash replaces a newer one that has its name."""

    def restore(root: Root, entry: Name, shard_bits: int) -> bool:
        found = places.parse_trashed(entry.rpartition("/")[2])
        assert found is not None
        return root.move(entry, places.chunk(*found, shard_bits))

    with patch.object(fences, "restore", restore), patch.object(deletion, "restore", restore):
        yield


@bug("relayed")
def fence_drains() -> Iterator[None]:
    """F3: a folder that is not empty is emptied without reading etcd again."""

    def lift(root: Root, sweep: bytes, shard_bits: int, is_named: Callable[[], bool]) -> bool:
        return real(root, sweep, shard_bits, lambda: False)

    real = fences.lift
    with patch.object(fences, "lift", lift):
        yield
