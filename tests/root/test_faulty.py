"""The fault-injecting root: each fault does what it says, and nothing else."""

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
from tests.kit.faulty_root import (
    EIO,
    ENOSPC,
    EROFS,
    OPERATIONS,
    Fails,
    FaultyRoot,
    Flipped,
    Hang,
    Missing,
    Rule,
    Torn,
)
from tests.kit.roots import WAIT_S, content_of, publish, stage

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
def test_an_error_is_the_one_that_a_real_root_raises_with_its_cause(
    fault: Fails, error: type[Exception], code: int
) -> None:
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


def test_a_missing_file_is_the_value_for_it(root: FaultyRoot) -> None:
    for operation, missing in (
        ("open", None),
        ("stat", None),
        ("look", None),
        ("touch", False),
        ("move", False),
        ("remove", False),
        ("list", []),
        ("read", 0),
        ("map", None),
    ):
        root.set_rules([Rule(operation, Missing())])
        assert calls(root)[operation]() == missing
        root.set_rules([])
        assert content_of(root, A) == CONTENT


def test_a_torn_file_is_published_as_if_nothing_had_happened() -> None:
    for zeros, expected in ((False, CONTENT[:100]), (True, CONTENT[:100] + bytes(100))):
        root = with_a()
        root.set_rules([Rule("stage", Torn(zeros))])
        assert publish(root, B, CONTENT) is True
        assert content_of(root, B) == expected


def test_one_byte_is_flipped_wherever_the_read_begins_and_not_on_the_root(root: FaultyRoot) -> None:
    for position in (0, 99, 100, 199):
        root.set_rules([Rule("read", Flipped(position))])
        wrong = bytearray(CONTENT)
        wrong[position] ^= 0xFF
        for start, size in ((0, 200), (50, 100), (100, 100), (199, 1)):
            reader = root.open(A)
            assert reader is not None
            memory = bytearray(size)
            view = memoryview(memory)
            reader.read([view[: size // 2], view[size // 2 :]], start, Borrowed())
            assert memory == wrong[start : start + size]
        root.set_rules([])
        assert content_of(root, A) == CONTENT


def test_a_call_hangs_until_it_is_released() -> None:
    def run_case(operation: str) -> None:
        root, hang = with_a(), Hang()
        root.set_rules([Rule(operation, hang)])
        done = threading.Event()

        def call() -> None:
            calls(root)[operation]()
            done.set()

        thread = threading.Thread(target=call)
        thread.start()
        assert hang.reached.wait(WAIT_S)
        assert not done.is_set()
        hang.release.set()
        assert done.wait(WAIT_S)
        thread.join(WAIT_S)

    for operation in ("stat", "stage", "publish", "list", "map"):
        run_case(operation)


def test_a_read_that_hangs_writes_nothing_after_the_caller_took_its_memory_back(root: FaultyRoot) -> None:
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


def test_a_rule_strikes_from_the_nth_matching_call_on_as_often_as_it_says(root: FaultyRoot) -> None:
    root.set_rules([Rule("stat", Missing(), lambda name: name == A, nth=2, times=2)])
    publish(root, B, b"x")
    seen = []
    for _ in range(5):
        assert root.stat(B) is not None
        seen.append(root.stat(A) is not None)
    assert seen == [True, False, False, True, True]
    assert root.struck["stat", "Missing"] == 2
    assert root.calls["stat"] == 10


def test_random_faults_are_the_same_for_the_same_seed() -> None:
    def run(seed: int) -> list[bool]:
        root = FaultyRoot(MemoryRoot(), [Rule("stat", Missing(), probability=0.5)], seed=seed)
        publish(root.inner, A, b"x")
        return [root.stat(A) is None for _ in range(200)]

    assert run(1) == run(1) != run(2)
    assert 50 < sum(run(1)) < 150
