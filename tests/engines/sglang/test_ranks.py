"""SGLang's real controllers of two ranks, which agree over real groups of torch.distributed on what they prefetch.

SGLang takes the minimum of what the ranks have. So a rank whose pages are missing or damaged, or whose store does not
answer, must say so in time, or both ranks wait; and it must never say that it has more than it has.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.engines.sglang.pair import Pair, pair, seated
from tests.engines.sglang.rank import PAGE
from tests.engines.sglang.seat import RANKS
from tests.kit.patience import eventually, slowness
from tests.kit.ports import free_port
from tests.kit.stores import chunk_files
from tests.kit.workers import WorkerProcess, worker_process

pytestmark = pytest.mark.slow

PROMPT = list(range(100, 100 + 5 * PAGE))
OTHER = list(range(9_000, 9_000 + 5 * PAGE))
BATCH_PAGES = 2
"""SGLang reads this many pages at a time, and the ranks agree after each: so it takes the prompt in three steps."""
VICTIM = 3
"""The page that one rank loses: the second one of the second batch."""


@pytest.fixture(scope="module")
def writers() -> Iterator[Pair]:
    with pair() as ranks:
        yield ranks


@pytest.fixture(scope="module")
def readers(writers: Pair) -> Iterator[Pair]:
    """Two other processes, which know nothing of what the writers stored."""
    with pair() as ranks:
        yield ranks


def quick() -> dict[str, float]:
    """Deadlines that end calls to a store that hangs."""
    return {f"{call}_timeout_s": slowness() for call in ("lookup", "load", "store")}


def back_up_all_but(ranks: Pair, number: int, root: Path) -> list[Path]:
    """Backs up PROMPT, and returns the chunk files with page VICTIM of one rank."""
    end = VICTIM * PAGE
    assert ranks.both("back_up", PROMPT[:end]) == [end, end]
    before = set(chunk_files(root))
    assert ranks.one(number, "back_up", PROMPT[: end + PAGE], VICTIM) == PAGE
    victims = sorted(set(chunk_files(root)) - before)
    firsts = [VICTIM + (each == number) for each in range(RANKS)]
    expected = [len(PROMPT) - first * PAGE for first in firsts]
    assert ranks.each("back_up", [(PROMPT, first) for first in firsts]) == expected
    assert victims
    return victims


def damage(path: Path) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[-3] ^= 2
    path.write_bytes(damaged)


@pytest.mark.parametrize("calls", ["in place", "generic"])
@pytest.mark.parametrize("hybrid", [False, True], ids=["base", "hybrid"])
def test_two_new_ranks_prefetch_what_two_ranks_backed_up(
    writers: Pair, readers: Pair, tmp_root: Path, calls: str, hybrid: bool
) -> None:
    extra = {"root": str(tmp_root), "interface_v1": int(calls == "in place")}
    with seated(writers, "mha", extra, hybrid=hybrid):
        assert writers.both("prefetch", PROMPT) == [(0, 0)] * RANKS
        assert writers.both("back_up", PROMPT) == [len(PROMPT)] * RANKS
    with seated(readers, "mha", extra, hybrid=hybrid):
        assert readers.both("prefetch", PROMPT) == [(len(PROMPT), 0)] * RANKS
        assert readers.both("prefetch", [*PROMPT[: 3 * PAGE], *OTHER]) == [(3 * PAGE, 0)] * RANKS


@pytest.mark.parametrize("number", range(RANKS))
def test_a_page_that_one_rank_lacks_is_counted_for_neither(
    writers: Pair, readers: Pair, tmp_root: Path, number: int
) -> None:
    extra, shorter = {"root": str(tmp_root)}, VICTIM * PAGE
    with seated(writers, "mha", extra):
        for victim in back_up_all_but(writers, number, tmp_root):
            victim.unlink()
    with seated(readers, "mha", extra):
        assert readers.both("ask", PROMPT) == [shorter] * RANKS
        assert readers.both("read", PROMPT) == [(shorter, 0)] * RANKS
        assert readers.one(number, "back_up", PROMPT, VICTIM) == len(PROMPT) - shorter
        assert readers.both("prefetch", PROMPT) == [(len(PROMPT), 0)] * RANKS


@pytest.mark.parametrize("number", range(RANKS))
@pytest.mark.parametrize("hybrid", [False, True], ids=["base", "hybrid"])
def test_damage_of_one_rank_that_is_found_when_it_is_read_ends_the_prefetch_of_both(
    writers: Pair, readers: Pair, tmp_root: Path, number: int, hybrid: bool
) -> None:
    extra, shorter = {"root": str(tmp_root)}, VICTIM * PAGE
    with seated(writers, "mha", extra):
        for victim in back_up_all_but(writers, number, tmp_root):
            damage(victim)
    with seated(readers, "mha", extra, hybrid=hybrid, batch_pages=BATCH_PAGES):
        assert readers.both("ask", PROMPT) == [len(PROMPT)] * RANKS, "nobody has read it yet"
        assert readers.both("read", PROMPT) == [(shorter, 0)] * RANKS
        assert readers.both("prefetch", PROMPT) == [(shorter, 0)] * RANKS
        assert readers.one(number, "back_up", PROMPT, VICTIM) == len(PROMPT) - shorter
        assert readers.both("prefetch", PROMPT) == [(len(PROMPT), 0)] * RANKS


def finds(ranks: Pair, count: int) -> Callable[[], bool]:
    """Asks for PROMPT anew each time, for a quick deadline may end a call on a busy machine."""

    def look() -> bool:
        first, second = ranks.both("ask", PROMPT)
        assert first == second
        return bool(first == count)

    return look


def reads_whole(ranks: Pair) -> Callable[[], bool]:
    """Prefetches PROMPT anew each time."""

    def look() -> bool:
        first, second = ranks.both("prefetch", PROMPT)
        assert first == second
        return bool(first == (len(PROMPT), 0))

    return look


@contextmanager
def workers(root: Path) -> Iterator[tuple[WorkerProcess, list[dict[str, Any]]]]:
    """A worker for each rank: yields the second rank's, and both ranks' settings."""
    with worker_process(root) as first, worker_process(root, f"127.0.0.1:{free_port()}") as second:
        yield second, [{"connect": each.address, **quick()} for each in (first, second)]


def test_a_worker_of_one_rank_that_is_killed_ends_the_prefetch_of_both(
    writers: Pair, readers: Pair, tmp_root: Path
) -> None:
    with seated(writers, "mha", {"root": str(tmp_root)}):
        assert writers.both("back_up", PROMPT) == [len(PROMPT)] * RANKS
    with workers(tmp_root) as (second, extras):
        with seated(readers, "mha", *extras, batch_pages=BATCH_PAGES):
            eventually(finds(readers, len(PROMPT)), "an answer of both workers")
            second.kill()
            assert readers.both("read", PROMPT) == [(0, 0)] * RANKS
            assert readers.both("prefetch", PROMPT) == [(0, 0)] * RANKS
            assert readers.one(1, "back_up", OTHER) == 0
        with seated(readers, "mha", *extras):
            assert readers.both("prefetch", PROMPT) == [(0, 0)] * RANKS, "attached while it is down"
            with worker_process(tmp_root, second.address):
                eventually(reads_whole(readers), "a prefetch through the next worker")


def test_neither_rank_waits_for_a_worker_of_one_that_stands_still(writers: Pair, readers: Pair, tmp_root: Path) -> None:
    with seated(writers, "mha", {"root": str(tmp_root)}):
        assert writers.both("back_up", PROMPT) == [len(PROMPT)] * RANKS
    with (
        workers(tmp_root) as (second, extras),
        seated(readers, "mha", *extras, batch_pages=BATCH_PAGES),
    ):
        eventually(finds(readers, len(PROMPT)), "an answer of both workers")
        second.send(signal.SIGSTOP)
        assert readers.both("read", PROMPT) == [(0, 0)] * RANKS
        assert readers.both("prefetch", PROMPT) == [(0, 0)] * RANKS
        assert readers.one(1, "back_up", OTHER) == 0
        second.send(signal.SIGCONT)
        eventually(reads_whole(readers), "a prefetch when the worker goes on")


def test_neither_rank_waits_for_the_root_of_one_that_hangs(writers: Pair, readers: Pair, tmp_root: Path) -> None:
    extra: dict[str, Any] = {"root": str(tmp_root)}
    with seated(writers, "mha", extra):
        for prompt in (PROMPT, OTHER):
            assert writers.both("back_up", prompt) == [len(prompt)] * RANKS
    with seated(readers, "mha", extra | quick(), faulty=[1], batch_pages=BATCH_PAGES):
        eventually(finds(readers, len(PROMPT)), "an answer of both roots")
        readers.one(1, "hang", "read")
        assert readers.both("read", PROMPT) == [(0, 0)] * RANKS
        readers.one(1, "heal")
        eventually(reads_whole(readers), "a prefetch when the root goes on")
        readers.one(1, "hang", "look", "stat", "open", "list")
        assert readers.both("ask", OTHER) == [0] * RANKS
        readers.one(1, "heal")
        eventually(reads_whole(readers), "a prefetch when the root goes on")


def back_up_all_of_the_first(ranks: Pair, root: Path) -> list[Path]:
    """Backs up PROMPT of a latent model, and returns the chunk files with page VICTIM."""
    end = VICTIM * PAGE
    assert ranks.both("back_up", PROMPT[:end]) == [end, 0]
    before = set(chunk_files(root))
    assert ranks.both("back_up", PROMPT[: end + PAGE], VICTIM) == [PAGE, 0]
    victims = sorted(set(chunk_files(root)) - before)
    assert ranks.both("back_up", PROMPT, VICTIM + 1) == [PAGE, 0]
    return victims


def test_latent_pages_are_stored_by_the_first_rank_and_read_by_both(
    writers: Pair, readers: Pair, tmp_root: Path
) -> None:
    extra = {"root": str(tmp_root)}
    with seated(writers, "mla", extra):
        assert writers.one(1, "back_up", PROMPT) == 0, "SGLang leaves it to the first rank"
        assert not chunk_files(tmp_root)
        assert writers.both("prefetch", PROMPT) == [(0, 0)] * RANKS
        (victim,) = back_up_all_of_the_first(writers, tmp_root)
    with seated(readers, "mla", extra, batch_pages=BATCH_PAGES):
        assert readers.both("prefetch", PROMPT) == [(len(PROMPT), 0)] * RANKS
    damage(victim)
    with seated(readers, "mla", extra, batch_pages=BATCH_PAGES):
        assert readers.both("ask", PROMPT) == [len(PROMPT)] * RANKS
        assert readers.both("read", PROMPT) == [(VICTIM * PAGE, 0)] * RANKS, "the ranks read the same file"
        assert readers.both("prefetch", PROMPT) == [(VICTIM * PAGE, 0)] * RANKS


@pytest.mark.parametrize("kind", ["mha+mamba", "mla+mamba"])
def test_a_prefix_ends_where_both_ranks_have_a_state(writers: Pair, readers: Pair, tmp_root: Path, kind: str) -> None:
    """The minimum of what each rank has, 3 pages, would be wrong: the first rank has no state there."""
    extra, states = {"root": str(tmp_root)}, ((2, 4, 5), (2, 3))
    with seated(writers, kind, extra):
        for number, ends in enumerate(states):
            for first, end in pairwise((0, *ends)):
                assert writers.one(number, "back_up", PROMPT[: end * PAGE], first) == (end - first) * PAGE
    with seated(readers, kind, extra):
        assert readers.both("prefetch", PROMPT) == [(2 * PAGE, 1)] * RANKS
        assert readers.one(1, "back_up", PROMPT, 3) == 2 * PAGE
        assert readers.both("prefetch", PROMPT) == [(len(PROMPT), 1)] * RANKS


def test_a_damaged_state_of_one_rank_is_a_miss_for_both(writers: Pair, readers: Pair, tmp_root: Path) -> None:
    extra = {"root": str(tmp_root)}
    with seated(writers, "mla+mamba", extra):
        assert writers.one(0, "back_up", PROMPT) == len(PROMPT)
        before = set(chunk_files(tmp_root))
        assert writers.one(1, "back_up", PROMPT) == len(PROMPT)
        for victim in set(chunk_files(tmp_root)) - before:
            damage(victim)
    with seated(readers, "mla+mamba", extra):
        assert readers.both("ask", PROMPT) == [len(PROMPT)] * RANKS
        assert readers.both("read", PROMPT) == [(len(PROMPT), 0)] * RANKS
        assert readers.both("prefetch", PROMPT) == [(0, 0)] * RANKS
        assert readers.one(1, "back_up", PROMPT) == len(PROMPT)
        assert readers.both("prefetch", PROMPT) == [(len(PROMPT), 1)] * RANKS


@pytest.mark.parametrize("kind", ["mha+mamba", "mla"])
def test_pipeline_stages_prefetch_their_own_layers_of_one_prefix(
    writers: Pair, readers: Pair, tmp_root: Path, kind: str
) -> None:
    """Each stage stores latent pages, since it has layers that the other has not."""
    extra, states = {"root": str(tmp_root)}, int(kind.endswith("mamba"))
    with seated(writers, kind, extra, hybrid=True, stages="cache"):
        assert writers.both("back_up", PROMPT[: 2 * PAGE]) == [2 * PAGE] * RANKS
        assert writers.one(0, "back_up", PROMPT, 2) == 3 * PAGE
    with seated(readers, kind, extra, hybrid=True, stages="cache"):
        assert readers.both("prefetch", PROMPT) == [(2 * PAGE, states)] * RANKS
        assert readers.one(1, "back_up", PROMPT, 2) == 3 * PAGE
        assert readers.both("prefetch", PROMPT) == [(len(PROMPT), states)] * RANKS


def test_pipeline_stages_without_a_cache_in_host_memory_prefetch_by_ticket(
    writers: Pair, readers: Pair, tmp_root: Path
) -> None:
    extra, shorter = {"root": str(tmp_root)}, VICTIM * PAGE
    with seated(writers, "mha", extra, hybrid=True, stages="buffer_only"):
        assert writers.both("prefetch_by_ticket", PROMPT) == [(0, 0)] * RANKS
        victims = back_up_all_but(writers, 1, tmp_root)
    with seated(readers, "mha", extra, hybrid=True, stages="buffer_only", batch_pages=BATCH_PAGES):
        assert readers.both("prefetch_by_ticket", PROMPT) == [(len(PROMPT), 0)] * RANKS
        for victim in victims:
            damage(victim)
    with seated(readers, "mha", extra, hybrid=True, stages="buffer_only", batch_pages=BATCH_PAGES):
        assert readers.both("prefetch_by_ticket", PROMPT) == [(shorter, 0)] * RANKS, "found when it is read"
        assert readers.both("prefetch_by_ticket", PROMPT) == [(shorter, 0)] * RANKS, "found before it is read"
