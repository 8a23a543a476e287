"""The log of segments: puts of others are known, whatever is lost and whoever writes at once (SEGMENTS.md, S10)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvstore.errors import Unavailable
from kvstore.segments.search import windows
from kvstore.segments.segments import HOUR_S, LOOK_S, STRIDE, Log
from tests.kit.cases import for_each

SIZE = 4
START_S = 1000 * HOUR_S + HOUR_S / 2


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self, now_s: float = START_S) -> None:
        self.at_s = now_s

    def now_s(self) -> float:
        return self.at_s

    def monotonic_s(self) -> float:
        return self.at_s


class Blocks:
    """The blocks of a namespace, of which the first writer wins."""

    def __init__(self) -> None:
        self.stored: dict[bytes, bytes] = {}
        self.read_count = 0
        self.before_put: Callable[[], object] = lambda: None

    def put(self, keys: Sequence[bytes], images: Sequence[bytes]) -> list[bool]:
        before, self.before_put = self.before_put, lambda: None
        before()
        self.stored.setdefault(keys[0], images[0])
        return [True]

    def get(self, keys: Sequence[bytes], images: Sequence[Any]) -> list[bool]:
        hits = [key in self.stored for key in keys]
        for key, image in zip(keys, images, strict=True):
            if key in self.stored:
                image.reshape(-1).view(np.uint8)[:] = np.frombuffer(self.stored[key], np.uint8)
        self.read_count += sum(hits)
        return hits


class Down(Blocks):
    """A store that does not answer."""

    def put(self, keys: Sequence[bytes], images: Sequence[bytes]) -> list[bool]:
        raise Unavailable("no answer")

    def get(self, keys: Sequence[bytes], images: Sequence[Any]) -> list[bool]:
        raise Unavailable("no answer")


def text(number: int) -> Any:
    """The first chunk of a segment."""
    return np.full(SIZE, number, np.uint32)


def add(log: Log, blocks: Any, *numbers: int) -> None:
    for number in numbers:
        log.add(blocks, text(number), number % 5 + 1)


def known(log: Log, numbers: Sequence[int]) -> list[int]:
    """Those of the segments that the index has with their length."""
    firsts = np.array([windows(text(number), SIZE)[0] for number in numbers], np.uint64)
    return [
        number for number, chunks in zip(numbers, log.index.lengths(firsts), strict=True) if chunks == number % 5 + 1
    ]


def followed(blocks: Any, clock: Clock) -> Log:
    """A process that begins now."""
    log = Log(clock)
    log.follow(blocks)
    return log


def test_segments_of_another_process_are_known_after_a_look() -> None:
    blocks: Any = Blocks()
    clock, writer = Clock(), Log(Clock())
    add(writer, blocks, 1, 2)
    reader = followed(blocks, clock)
    assert known(reader, range(1, 5)) == [1, 2]
    add(writer, blocks, 3)
    reader.follow(blocks)
    assert known(reader, range(1, 5)) == [1, 2], "looks have a distance"
    clock.at_s += LOOK_S
    reader.follow(blocks)
    assert known(reader, range(1, 5)) == [1, 2, 3]


@for_each("others", [1, 5, 100])
def test_writers_that_race_lose_no_record(others: int) -> None:
    blocks: Any = Blocks()
    one, two = Log(Clock()), Log(Clock())
    blocks.before_put = lambda: add(two, blocks, *range(1, others + 1))
    add(one, blocks, 1000)
    assert sorted(known(followed(blocks, Clock()), [*range(1, others + 1), 1000])) == [*range(1, others + 1), 1000]


def test_a_process_that_begins_late_reads_few_blocks() -> None:
    blocks: Any = Blocks()
    count = 3000
    add(Log(Clock()), blocks, *range(1, count + 1))
    assert len(blocks.stored) == count
    blocks.read_count = 0
    assert len(known(followed(blocks, Clock()), range(1, count + 1))) == count
    assert blocks.read_count <= count / STRIDE + 60


def test_lost_blocks_cost_no_record_that_a_later_one_repeats() -> None:
    blocks: Any = Blocks()
    add(Log(Clock()), blocks, *range(1, 201))
    newest = list(blocks.stored)[-1]
    first = list(blocks.stored)[:4]
    for key in [key for key in blocks.stored if key not in (newest, *first)]:
        del blocks.stored[key]
    assert len(known(followed(blocks, Clock()), range(1, 201))) >= 4
    add(Log(Clock()), blocks, 1000)
    assert 1000 in known(followed(blocks, Clock()), [1000])


def test_a_store_that_does_not_answer_costs_no_error() -> None:
    down: Any = Down()
    log = followed(down, Clock())
    add(log, down, 1)
    assert known(log, [1]) == [1], "its own"
