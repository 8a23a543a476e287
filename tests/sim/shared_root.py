"""The shared root of a run: files whose every change is judged, and one faulty mount of them for each process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from kvstore.core.buffers import BufferLoan, Pieces
from kvstore.format.places import Name
from kvstore.root.interface import FileReader, FolderEntry, Seen, Stat, StorageSpace
from kvstore.root.memory import MemoryFile, MemoryFiles, MemoryRoot
from tests.kit.faulty_root import EIO, ENOSPC
from tests.sim.faults import Call, Faults
from tests.sim.oracle import Oracle

T = TypeVar("T")

JUDGED = ("chunks/", "trash/", "quarantine/")


class SimFiles(MemoryFiles):
    """The files that all mounts share."""

    def __init__(self, oracle: Oracle) -> None:
        super().__init__()
        self._oracle = oracle

    def write(self, name: str, file: MemoryFile) -> None:
        before = self.find(name)
        super().write(name, file)
        if name.startswith(JUDGED):
            self._oracle.wrote(name, before, file)

    def delete(self, name: str) -> MemoryFile | None:
        file = super().delete(name)
        if file is not None and name.startswith(JUDGED):
            self._oracle.deleted(name, file)
        return file


class RootPort:
    """One process's mount: other processes may run before and after each call, which may fail or land late."""

    def __init__(self, inner: MemoryRoot, faults: Faults) -> None:
        self.url = inner.url
        self.traits = inner.traits
        self._inner = inner
        self._faults = faults
        self._kernel = faults.kernel

    def stage(self, name: Name, pieces: Pieces, *, stamp_ns: int, durable: bool) -> None:
        content = [memoryview(b"".join(pieces))]
        if self._faults.strikes(self._faults.rates.root_fails):
            self._fault("stage ENOSPC", name)
            raise ENOSPC.make("stage", name)
        self._change("stage", name, lambda: self._inner.stage(name, content, stamp_ns=stamp_ns, durable=durable))

    def publish(self, staged: Name, name: Name, *, durable: bool) -> bool:
        return self._change(
            "publish", name, lambda: self._inner.publish(staged, name, durable=durable), _publishing(staged, name)
        )

    def discard(self, staged: Name) -> None:
        self._change("discard", staged, lambda: self._inner.discard(staged))

    def open(self, name: Name) -> FileReader | None:
        reader = self._read("open", name, lambda: self._inner.open(name))
        return None if reader is None else ReaderPort(reader, name, self)

    def stat(self, name: Name) -> Stat | None:
        return self._read("stat", name, lambda: self._inner.stat(name))

    def look(self, name: Name, size_bytes: int) -> Seen | None:
        return self._read("look", name, lambda: self._inner.look(name, size_bytes))

    def touch(self, name: Name, stamp_ns: int) -> bool:
        return self._change("touch", name, lambda: self._inner.touch(name, stamp_ns))

    def move(self, source: Name, name: Name, *, make_folder: bool = True) -> bool:
        kind = Call.TAKE if name.startswith("trash/") else Call.SETTLE
        moved = self._change(
            "move", f"{source} {name}", lambda: self._inner.move(source, name, make_folder=make_folder), kind
        )
        if kind is Call.TAKE and moved:
            self._kernel.happened("taken")
        return moved

    def remove(self, name: Name) -> bool:
        removed = self._change("remove", name, lambda: self._inner.remove(name), _removing(name))
        if removed and name.startswith("chunks/"):
            self._kernel.happened("taken")
        return removed

    def remove_if(self, name: Name, seen: Seen) -> bool:
        removed = self._change("remove_if", name, lambda: self._inner.remove_if(name, seen), Call.TAKE)
        if removed:
            self._kernel.happened("taken")
        return removed

    def make_folder(self, name: Name) -> None:
        self._change("make_folder", name, lambda: self._inner.make_folder(name), _fencing(name))

    def remove_folder(self, name: Name, *, durable: bool = False) -> bool:
        if name.startswith("trash/"):
            self._kernel.happened("fence")
        return self._change(
            "remove_folder", name, lambda: self._inner.remove_folder(name, durable=durable), _fencing(name)
        )

    def list(self, folder: Name) -> Iterator[FolderEntry]:
        return iter(self._read("list", folder, lambda: list(self._inner.list(folder))))

    def sync(self) -> None:
        self._inner.sync()

    def space(self) -> StorageSpace:
        return self._read("space", "", self._inner.space)

    def close(self) -> None:
        """Nothing to release."""

    def read(self, operation: str, name: str, call: Callable[[], T]) -> T:
        """A call on an open file."""
        return self._read(operation, name, call)

    def _read(self, operation: str, name: str, call: Callable[[], T]) -> T:
        self._kernel.point()
        if self._faults.strikes(self._faults.rates.root_fails):
            self._fault(operation, name)
            raise EIO.make(operation, name)
        result = call()
        self._kernel.note(f"{operation} {short(name)}{_outcome(result)}")
        self._faults.maybe_pause(Call.LOOK if operation == "stat" else Call.READ)
        self._kernel.point()
        return result

    def _change(self, operation: str, name: str, call: Callable[[], T], kind: Call = Call.OTHER) -> T:
        kernel, actor = self._kernel, self._kernel.current
        assert actor is not None
        actor.pending = call
        self._faults.maybe_pause(kind)
        kernel.point()
        actor.pending = None
        if self._faults.strikes(self._faults.rates.root_fails):
            how = kernel.source.randrange(3)
            self._fault(f"{operation} ({('not done', 'will land late', 'done')[how]})", name)
            if how == 1:
                self._faults.late.append(call)
            elif how == 2:
                call()
            raise EIO.make(operation, name)
        result = call()
        kernel.note(f"{operation} {short(name)}{_outcome(result)}")
        kernel.point()
        return result

    def _fault(self, operation: str, name: str) -> None:
        actor = self._kernel.current
        assert actor is not None
        actor.process.faults_count += 1
        self._faults.count("root calls failed")
        self._kernel.note(f"{operation} {short(name)}: failed")
        self._kernel.point()


class ReaderPort:
    """An open file of a RootPort."""

    __slots__ = ("_inner", "_name", "_root", "stat")

    def __init__(self, inner: FileReader, name: Name, root: RootPort) -> None:
        self._inner = inner
        self._name = name
        self._root = root
        self.stat = inner.stat

    def read(self, pieces: Pieces, offset: int, borrowed: BufferLoan) -> int:
        return self._root.read("read", self._name, lambda: self._inner.read(pieces, offset, borrowed))

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> ReaderPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _publishing(staged: Name, name: Name) -> Call:
    if not name.startswith("chunks/"):
        return Call.OTHER
    return Call.PUBLISH if staged.startswith("staging/") else Call.SETTLE


def _removing(name: Name) -> Call:
    return Call.SETTLE if name.startswith(("trash/", "chunks/")) else Call.OTHER


def _fencing(name: Name) -> Call:
    return Call.FENCE if name.startswith("trash/") else Call.OTHER


def short(name: str) -> str:
    """A name whose ids are cut to their first digits."""
    return " ".join(
        "/".join(".".join(bit[:8] for bit in part.split(".")) for part in one.split("/")) for one in name.split(" ")
    )


def _outcome(result: object) -> str:
    return f" -> {result}" if isinstance(result, bool) else " -> none" if result is None else ""
