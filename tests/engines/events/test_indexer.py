"""What Dynamo's indexer makes of a stream: the facts that our events rest on, shown with its real code."""

from __future__ import annotations

import pytest

from tests.engines.events.indexer import BLOCK_TOKENS, Indexer, until
from tests.engines.events.publisher import CLEARED, Publisher, encoded, removed, stored, tokens

ONE = BLOCK_TOKENS


def heard(indexer: Indexer, publisher: Publisher, instance: int = 1, rank: int = 0) -> None:
    """Registers a stream, and returns once batches arrive."""
    indexer.register(instance, *publisher.ports, rank=rank)

    mark = 999 - rank  # its own, because the index may know that of another stream

    def marked() -> bool:
        publisher.send(stored(mark))
        return bool(indexer.tokens(tokens(mark)).get(instance))

    until(marked, "the stream is heard")


def knows(indexer: Indexer, blocks: list[int], count: int, instance: int = 1) -> None:
    """Returns once that many leading blocks of these are known."""
    until(lambda: indexer.tokens(tokens(*blocks)).get(instance, 0) == count * ONE, f"{count} of {blocks} of {instance}")


@pytest.mark.parametrize("medium", ["STORAGE", "DISK", "CPU", "EXTERNAL", "SHARED"])
def test_a_medium_of_ours_is_counted_and_its_removal_too(indexer: Indexer, publisher: Publisher, medium: str) -> None:
    heard(indexer, publisher)
    publisher.send(stored(1, 2, 3, medium=medium))
    until(lambda: indexer.tokens(tokens(1, 2, 3), "longest_matched") == {1: 3 * ONE}, medium)
    publisher.send(removed(2, medium=medium))
    until(lambda: indexer.tokens(tokens(1, 2, 3), "longest_matched") == {1: ONE}, medium)


def test_a_removal_from_another_medium_takes_nothing(indexer: Indexer, publisher: Publisher) -> None:
    heard(indexer, publisher)
    publisher.send(stored(1, 2), removed(2, medium="GPU"), removed(2, medium=None), stored(5))
    knows(indexer, [5], 1)
    knows(indexer, [1, 2], 2)


def test_other_localities_and_media_are_not_counted(indexer: Indexer, publisher: Publisher) -> None:
    heard(indexer, publisher)
    publisher.send(stored(1, locality="REMOTE"), stored(2, medium="OURS"), stored(3, locality="LOCAL"))
    knows(indexer, [3], 1)
    assert indexer.tokens(tokens(1)) == indexer.tokens(tokens(2)) == {}


def test_what_was_lost_is_replayed_with_the_next_batch_even_an_empty_one(
    indexer: Indexer, publisher: Publisher
) -> None:
    heard(indexer, publisher)
    publisher.send(stored(1, 2, 3))
    knows(indexer, [1, 2, 3], 3)
    asked = len(publisher.asked)
    publisher.send(removed(3), lost=True)
    publisher.send(stored(4), lost=True)
    publisher.send()
    knows(indexer, [1, 2, 3], 2)
    knows(indexer, [4], 1)
    assert publisher.asked[asked:] == [publisher.next - 3]


def test_who_comes_late_asks_for_everything_with_the_first_batch(indexer: Indexer, publisher: Publisher) -> None:
    publisher.send(stored(1, 2, 3))
    heard(indexer, publisher)
    assert publisher.asked[:1] == [0]
    knows(indexer, [1, 2, 3], 3)


def test_numbers_that_begin_again_are_not_heard_and_larger_ones_are(indexer: Indexer, publisher: Publisher) -> None:
    heard(indexer, publisher)
    publisher.next, before = 0, publisher.next
    publisher.send(stored(1))
    publisher.next = before + (1 << 40)
    publisher.send(stored(2))
    knows(indexer, [2], 1)
    assert indexer.tokens(tokens(1)) == {}


def test_a_replay_may_be_a_snapshot_with_numbers_below_the_batch_that_asked(
    indexer: Indexer, publisher: Publisher
) -> None:
    heard(indexer, publisher)
    publisher.send(stored(1, 2))
    knows(indexer, [1, 2], 2)
    publisher.next += 5
    publisher.kept = [(publisher.next - 1, encoded([each])) for each in (CLEARED, stored(3), stored(4, parent=3))]
    publisher.send()
    knows(indexer, [3, 4], 2)
    assert indexer.blocks() == {1: {3: 1, 4: 1}}
    publisher.send(stored(5))
    knows(indexer, [5], 1)


def test_a_second_stream_removes_what_the_first_one_stored(indexer: Indexer, publisher: Publisher) -> None:
    """The engine tells what it stored, the publisher what went: the rank in a batch says whose blocks are meant."""
    heard(indexer, publisher)
    with Publisher() as pool:
        heard(indexer, pool, rank=1)
        publisher.send(stored(1, 2, 3))
        knows(indexer, [1, 2, 3], 3)
        pool.send(removed(2), rank=0)
        knows(indexer, [1, 2, 3], 1)


def test_clearing_takes_the_memory_of_the_engine_too(indexer: Indexer, publisher: Publisher) -> None:
    heard(indexer, publisher)
    publisher.send(stored(1, 2), stored(1, 2, medium="GPU"))
    until(lambda: indexer.tokens(tokens(1, 2), "gpu") == {1: 2 * ONE}, "both are known")
    publisher.send(CLEARED)
    until(lambda: not indexer.blocks("device") and not indexer.blocks(), "all is gone")
