"""A root that fails on purpose, by rule. It wraps any root, even one on a real mount.

A rule says which call fails (operation, name, the how-many-th) and how. The first rule that matches decides; later
rules still count the call.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvstore.core.buffers import BufferLoan, Pieces, skip
from kvstore.errors import KVStoreError, PermissionDenied, StoreFull, Unavailable
from kvstore.format.places import Name
from kvstore.root.interface import FileReader, FolderEntry, Root, Seen, Stat, StorageSpace, Traits

OPERATIONS = frozenset(
    "stage publish discard open stat look touch move make_folder remove remove_if remove_folder list space read".split()
)


@dataclass(frozen=True, slots=True)
class Fails:
    """The call raises, as the rim would for that errno. ``ENOSPC``, ``EIO``, ``EROFS``, ``EACCES`` are ready-made."""

    error: type[KVStoreError]
    code: int

    def make(self, operation: str, name: str) -> KVStoreError:
        """The exception, with its cause attached as a real root does."""
        error = self.error(f"could not {operation} {name}: {_strerror(self.code)} (injected)")
        error.__cause__ = OSError(self.code, _strerror(self.code), name)
        return error


ENOSPC = Fails(StoreFull, errno.ENOSPC)
EIO = Fails(Unavailable, errno.EIO)
EROFS = Fails(PermissionDenied, errno.EROFS)
EACCES = Fails(PermissionDenied, errno.EACCES)


@dataclass(frozen=True, slots=True)
class Missing:
    """The file looks as if it were not there: ``open`` returns None, or ``read`` no bytes."""


@dataclass(frozen=True, slots=True)
class Delay:
    """The call takes ``seconds`` longer."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Hang:
    """The call stands still until ``release`` is set, as on a dead mount; ``reached`` tells that it does.

    For ``read``, ``after_bytes`` of the caller's memory are filled before it hangs.
    """

    after_bytes: int = 0
    reached: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class Flipped:
    """``read`` delivers the byte at ``position`` of the file with all bits turned."""

    position: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Deletes the file first, as if another host had, and then makes the call."""


Fault = Fails | Missing | Delay | Hang | Flipped | Lost


def _any_name(name: Name) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Rule:
    """Strikes ``operation`` on names that ``matches``: from the ``nth`` call on, ``times`` times (None: always)."""

    operation: str
    fault: Fault
    matches: Callable[[Name], bool] = _any_name
    nth: int = 1
    times: int | None = None

    def __post_init__(self) -> None:
        assert self.operation in OPERATIONS, self.operation


class FaultyRoot:
    """``root`` with faults. ``calls`` counts per operation, ``struck`` all faults that were met."""

    def __init__(
        self, root: Root, rules: Sequence[Rule] = (), *, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self.inner = root
        self.url = root.url
        self.traits: Traits = root.traits
        self.calls: Counter[str] = Counter()
        self.struck = 0
        self._sleep = sleep
        self._lock = threading.Lock()
        self._rules: list[_Armed] = []
        self.before_rules: Callable[[bool], object] = lambda has_any: None
        """Called before rules are replaced, with whether there are any from then on."""
        self.set_rules(rules)

    @property
    def has_rules(self) -> bool:
        return bool(self._rules)

    def set_rules(self, rules: Sequence[Rule]) -> None:
        """Replaces all rules and resets their counts; none for a root without faults."""
        self.before_rules(bool(rules))
        with self._lock:
            self._rules = [_Armed(rule) for rule in rules]

    def strike(self, operation: str, name: Name) -> Fault | None:
        """Counts the call; waits, raises or loses the file if a rule says so; returns what is left to do."""
        with self._lock:
            self.calls[operation] += 1
            due = [armed for armed in self._rules if armed.is_due(operation, name)]
            if not due:
                return None
            due[0].struck += 1
            fault = due[0].rule.fault
            self.struck += 1
        if isinstance(fault, Fails):
            raise fault.make(operation, name)
        if isinstance(fault, Delay):
            self._sleep(fault.seconds)
        elif isinstance(fault, Lost):
            self.inner.remove(name)
        elif isinstance(fault, Hang) and operation != "read":
            fault.reached.set()
            fault.release.wait()
        return fault

    def stage(self, name: Name, pieces: Pieces, *, stamp_ns: int, durable: bool) -> None:
        self.strike("stage", name)
        self.inner.stage(name, pieces, stamp_ns=stamp_ns, durable=durable)

    def publish(self, staged: Name, name: Name, *, durable: bool) -> bool:
        self.strike("publish", name)
        return self.inner.publish(staged, name, durable=durable)

    def discard(self, staged: Name) -> None:
        self.strike("discard", staged)
        self.inner.discard(staged)

    def open(self, name: Name) -> FileReader | None:
        if isinstance(self.strike("open", name), Missing):
            return None
        reader = self.inner.open(name)
        return None if reader is None else FaultyReader(self, name, reader)

    def stat(self, name: Name) -> Stat | None:
        self.strike("stat", name)
        return self.inner.stat(name)

    def look(self, name: Name, size_bytes: int) -> Seen | None:
        self.strike("look", name)
        return self.inner.look(name, size_bytes)

    def touch(self, name: Name, stamp_ns: int) -> bool:
        self.strike("touch", name)
        return self.inner.touch(name, stamp_ns)

    def move(self, source: Name, name: Name, *, make_folder: bool = True) -> bool:
        self.strike("move", source)
        return self.inner.move(source, name, make_folder=make_folder)

    def make_folder(self, name: Name) -> None:
        self.strike("make_folder", name)
        self.inner.make_folder(name)

    def remove(self, name: Name) -> bool:
        self.strike("remove", name)
        return self.inner.remove(name)

    def remove_if(self, name: Name, seen: Seen) -> bool:
        self.strike("remove_if", name)
        return self.inner.remove_if(name, seen)

    def remove_folder(self, name: Name, *, durable: bool = False) -> bool:
        self.strike("remove_folder", name)
        return self.inner.remove_folder(name, durable=durable)

    def list(self, folder: Name) -> Iterator[FolderEntry]:
        self.strike("list", folder)
        return self.inner.list(folder)

    def sync(self) -> None:
        self.strike("sync", Name(""))
        self.inner.sync()

    def space(self) -> StorageSpace:
        self.strike("space", Name(""))
        return self.inner.space()

    def close(self) -> None:
        self.inner.close()


class FaultyReader:
    """An open file of a FaultyRoot."""

    __slots__ = ("_inner", "_name", "_root", "stat")

    def __init__(self, root: FaultyRoot, name: Name, inner: FileReader) -> None:
        self._root = root
        self._name = name
        self._inner = inner
        self.stat = inner.stat

    def read(self, pieces: Pieces, offset: int, borrowed: BufferLoan) -> int:
        fault = self._root.strike("read", self._name)
        if isinstance(fault, Missing):
            return 0
        if isinstance(fault, Hang):
            before = _first(pieces, fault.after_bytes)
            done = self._inner.read(before, offset, borrowed) if before else 0
            # Outside borrowed.writing(), like every step that may block: the caller can take its memory back meanwhile.
            fault.reached.set()
            fault.release.wait()
            borrowed.check()
            return done + self._inner.read(skip(pieces, done), offset + done, borrowed)
        done = self._inner.read(pieces, offset, borrowed)
        if isinstance(fault, Flipped) and offset <= fault.position < offset + done:
            with borrowed.writing():
                _flip(pieces, fault.position - offset)
        return done

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> FaultyReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Armed:
    """A rule and how often it has matched and struck."""

    __slots__ = ("matched", "rule", "struck")

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.matched = 0
        self.struck = 0

    def is_due(self, operation: str, name: Name) -> bool:
        rule = self.rule
        if operation != rule.operation or not rule.matches(name):
            return False
        self.matched += 1
        return self.matched >= rule.nth and (rule.times is None or self.struck < rule.times)


def _first(pieces: Pieces, count: int) -> list[memoryview]:
    """The first ``count`` bytes of ``pieces``."""
    head: list[memoryview] = []
    for piece in pieces:
        if count <= 0:
            break
        head.append(piece[:count])
        count -= len(piece)
    return head


def _flip(pieces: Pieces, position: int) -> None:
    for piece in pieces:
        if position < len(piece):
            piece[position] ^= 0xFF
            return
        position -= len(piece)


def _strerror(code: int) -> str:
    return f"{errno.errorcode[code]}"
