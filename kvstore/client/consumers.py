"""Consumers of a run in other processes of this host: a socket through which each of them takes groups.

Each connection has a thread in the process of the run, which is the consumer there. A process that ends, in whatever
way, closes its connection, and so gives its group back (rule H3 of kvstore/planning/PLANNING.md).

A consumer sends one byte for each group that it wants, which also says that the one before is done. It gets 8 bytes,
the size of what follows, and the group as JSON; size 0 once every group is done or has failed.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, BinaryIO, Protocol

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.parsing import parse_json
from kvstore.planning import Group

NEXT = b"n"
_SIZE = struct.Struct("!Q")
LOOK_S = 0.2
"""Interval at which a thread looks whether its consumer is still there, and whether the run is still shared."""
CONSUMERS_MAX = 1024
"""More connections are closed at once."""
CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class SharedRun:
    """A run of another process of this host, made by ``Run.share``. Give it to consumers: it can be pickled.

    ``for group in shared`` yields groups, as ``Run`` does: the one before is done when the next is asked for. If the
    iterator is closed before that, or the process ends, the group goes out again. Raises Unavailable if the process of
    the run has ended, or shares it no more.
    """

    path: str
    """The socket. Only the account that shares the run reaches it."""

    def __iter__(self) -> Iterator[Group]:
        with socket.socket(socket.AF_UNIX) as link:
            try:
                link.connect(self.path)
            except OSError as cause:
                raise Unavailable(
                    f"nobody shares a run at {self.path} ({cause.strerror or cause}): it ended, or is of another host "
                    "or account"
                ) from cause
            with link.makefile("rb") as answers:
                while (group := _asked(link, answers)) is not None:
                    yield group


class Taking(Protocol):
    """A group in the hands of a consumer, given back if its context ends by an error."""

    group: Group

    def __enter__(self) -> object: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...


class Source(Protocol):
    """A run."""

    @property
    def is_over(self) -> bool:
        """True once nobody gets a group any more."""
        ...

    def try_take(self, wait_s: float, is_alive: Callable[[], bool]) -> Taking | None:
        """See ``Run``."""
        ...


class Sharing(AbstractContextManager[SharedRun]):
    """Hands the groups of a run to other processes while its context lasts."""

    def __init__(self, run: Source) -> None:
        self._run = run
        self._folder = ""
        self._ended = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._threads: set[threading.Thread] = set()  # a plain set: each change is one step

    def __enter__(self) -> SharedRun:
        self._folder = tempfile.mkdtemp(prefix="kvstore-run-")  # of mode 0700
        path = os.path.join(self._folder, "run")
        try:
            self._listener.bind(path)
        except OSError as cause:
            self.__exit__()
            raise InvalidRequest(
                f"cannot share a run at {path} ({cause.strerror or cause}): set TMPDIR to a short path"
            ) from cause
        self._listener.listen()
        self._listener.settimeout(LOOK_S)
        self._begin(self._accept)
        return SharedRun(path)

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in list(self._threads):
            thread.join(CLOSE_S)
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _begin(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="kvstore-run", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                link, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return  # out of descriptors: those that are connected go on
            self._threads = {each for each in self._threads if each.is_alive()}
            if len(self._threads) > CONSUMERS_MAX:
                link.close()
            else:
                self._begin(partial(self._serve, link))

    def _serve(self, link: socket.socket) -> None:
        """The consumer of this process: takes groups for the one at the other end."""
        with link, suppress(OSError):
            while self._is_asked(link):
                taken = self._take(link)
                if taken is None:
                    if self._run.is_over:
                        link.sendall(_SIZE.pack(0))
                    return
                with taken:
                    raw = json.dumps(asdict(taken.group)).encode()
                    link.sendall(_SIZE.pack(len(raw)) + raw)
                    if not self._is_asked(link, peeks=True):
                        raise ConnectionError  # so the group goes out again

    def _take(self, link: socket.socket) -> Taking | None:
        me = threading.current_thread()
        while not (self._run.is_over or self._ended.is_set() or _is_gone(link)):
            taken = self._run.try_take(LOOK_S, me.is_alive)
            if taken is not None:
                return taken
        return None

    def _is_asked(self, link: socket.socket, *, peeks: bool = False) -> bool:
        """Waits until the consumer asks for the next group; False if it has gone, or the run is shared no more."""
        link.settimeout(LOOK_S)
        try:
            while not self._ended.is_set():
                with suppress(TimeoutError):
                    return bool(link.recv(1, socket.MSG_PEEK if peeks else 0))
            return False
        finally:
            link.settimeout(None)


def _is_gone(link: socket.socket) -> bool:
    try:
        return link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


def _asked(link: socket.socket, answers: BinaryIO) -> Group | None:
    """Asks for the next group; None once there is none."""
    try:
        link.sendall(NEXT)
        head = answers.read(_SIZE.size)
        size = _SIZE.unpack(head)[0] if len(head) == _SIZE.size else 0
        raw = answers.read(size)
    except OSError as cause:
        raise _ended() from cause
    if len(head) < _SIZE.size or len(raw) < size:
        raise _ended()
    if not size:
        return None
    fields: dict[str, Any] = parse_json(raw)
    found: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return Group(**found)


def _ended() -> Unavailable:
    return Unavailable("the run is shared no more: its process ended, or left the context of share()")
