"""The fault-injecting root fails as a real one does."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.buffers import Borrowed, Withdrawn
from kvstore.errors import PermissionDenied, StoreFull, Unavailable
from kvstore.format.places import Name
from kvstore.root.interface import Seen, Stat
from kvstore.root.memory import MemoryRoot
from kvstore.testing.roots import WAIT_S, publish, stage
from tests.kit.faulty_root import (
    EIO,
    ENOSPC,
    EROFS,
    OPERATIONS,
    Fails,
    FaultyRoot,
    Hang,
    Rule,
)

A = Name("chunks/0001/a")
B = Name("chunks/0001/b")
CONTENT = bytes(range(200))


def with_a() -> FaultyRoot:
    root = FaultyRoot(MemoryRoot())
    publish(root, A, CONTENT)
    return root


@pytest.fixture
def root() -> FaultyRoot:
    return with_a()


def calls(root: FaultyRoot) -> dict[str, Callable[[], Any]]:
    """Each operation, once."""

    def read() -> int:
        reader = root.open(A)
        assert reader is not None
        return reader.read([memoryview(bytearray(10))], 0, Borrowed())

    def mapped() -> object:
        reader = root.open(A)
        assert reader is not None
        return reader.map()

    return {
        "stage": lambda: stage(root, b"x"),
        "publish": lambda: root.publish(Name("chunks/0001/a"), B, durable=False),
        "discard": lambda: root.discard(Name("staging/x")),
        "open": lambda: root.open(A),
        "stat": lambda: root.stat(A),
        "look": lambda: root.look(A, 10),
        "touch": lambda: root.touch(A, 5),
        "move": lambda: root.move(A, B),
        "make_folder": lambda: root.make_folder(Name("trash/a")),
        "remove": lambda: root.remove(A),
        "remove_if": lambda: root.remove_if(A, Seen(Stat(200, 0), b"", None)),
        "remove_folder": lambda: root.remove_folder(Name("nothing")),
        "list": lambda: list(root.list(Name("chunks/0001"))),
        "space": root.space,
        "read": read,
        "map": mapped,
    }


@pytest.mark.parametrize(
    ("fault", "error", "code"),
    [(ENOSPC, StoreFull, errno.ENOSPC), (EIO, Unavailable, errno.EIO), (EROFS, PermissionDenied, errno.EROFS)],
    ids=["ENOSPC", "EIO", "EROFS"],
)
def test_fault_raises_the_error_of_a_real_root(fault: Fails, error: type[Exception], code: int) -> None:
    for operation in sorted(OPERATIONS):
        root = FaultyRoot(MemoryRoot(objects=operation == "remove_if"))
        publish(root, A, CONTENT)
        root.set_rules([Rule(operation, fault)])
        with pytest.raises(error) as caught:
            calls(root)[operation]()
        assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == code
        assert root.struck[operation, "Fails"] == 1
        root.set_rules([])
        calls(root)[operation]()


def test_hanging_read_never_writes_withdrawn_memory(root: FaultyRoot) -> None:
    def run_case(after_bytes: int) -> None:
        hang, borrowed = Hang(after_bytes), Borrowed()
        root.set_rules([Rule("read", hang)])
        memory, outcome = bytearray(200), []

        def read() -> None:
            reader = root.open(A)
            assert reader is not None
            try:
                reader.read([memoryview(memory)], 0, borrowed)
            except Withdrawn:
                outcome.append("withdrawn")

        thread = threading.Thread(target=read)
        thread.start()
        assert hang.reached.wait(WAIT_S)
        assert memory == CONTENT[:after_bytes] + bytes(200 - after_bytes)
        borrowed.withdraw()  # must not wait for the hanging read
        memory[:] = b"\xee" * 200
        hang.release.set()
        thread.join(WAIT_S)
        assert outcome == ["withdrawn"]
        assert memory == b"\xee" * 200

    for after_bytes in (0, 1, 100, 199):
        run_case(after_bytes)
