"""A root that hangs or is slow below a node with memory: nobody waits beyond the deadline, and what was put is written
when it answers again (MEMORY.md, W1, W3; the design's "nothing waits for ever").
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.buffers import Borrowed
from kvstore.errors import KVStoreError
from kvstore.root.faulty import Delay, FaultyRoot, Rule
from kvstore.writes import WriteMode
from tests.node.stores import same
from tests.tiers.acting import ASKING, IN_TIME_S, LARGE, QUEUE_CHUNKS, Acting, eventually, faulty, held, on_posix, timed
from tests.tiers.test_writing import replaced


@pytest.fixture(params=["memory", "posix"])
def node(request: pytest.FixtureRequest, tmp_root: object) -> Iterator[Acting]:
    root = faulty(on_posix(tmp_root / "root") if request.param == "posix" else None)  # type: ignore[operator]
    with Acting(root) as acting:
        yield acting


def root_of(node: Acting) -> FaultyRoot:
    assert isinstance(node.root, FaultyRoot)
    return node.root


def test_puts_go_on_until_the_queue_is_full_and_all_is_written_after_the_hang(node: Acting) -> None:
    node.put(1, 4)
    node.drain()
    with held(root_of(node), *ASKING) as hang:
        for number in range(2, 9):
            assert timed(lambda number=number: node.put(number, 4)) < IN_TIME_S  # type: ignore[misc]
        assert hang.reached.is_set() and not any(node.on_root(2, 4))
        assert node.stat("behind_bytes") == 28 * node.unit_bytes
        assert node.put(9, 4).tokens_present == (QUEUE_CHUNKS - 28) * node.size
        assert node.put(10, 4).tokens_present == 0
    node.drain()
    for number in range(2, 9):
        assert node.on_root(number, 4) == [True] * 4
    assert node.stat("behind_lost") == 0
    node.assert_settled()


def test_memory_is_served_while_every_lane_hangs(node: Acting) -> None:
    node.put(1, 6)
    node.put(2, 2, write=WriteMode.AROUND)
    node.drain()
    buffers = [bytearray(300_000) for _ in range(3)]
    keys = [number.to_bytes(16, "big") for number in range(3)]
    node.cache.blocks.put(keys, [bytes([number + 1]) * 300_000 for number in range(3)])
    node.drain()
    with held(root_of(node), *ASKING):
        stall(node)
        for _ in range(3):
            assert timed(lambda: node.get(1, 6)) < IN_TIME_S and node.get(1, 6) == 6
            assert node.match(1, 6) == 6
            assert node.get(2, 2) == 0, "a miss: it is on the root alone"
            with node.cache.hold(node.prompts.tokens(1, 6)) as hold:
                assert len(hold.view()) == 6
                for layer, k, _ in hold.layers():
                    assert same(k, node.prompts.kv(1, 6)[layer, 0])
            assert node.cache.blocks.present(keys) == [True] * 3
            assert node.cache.blocks.get(keys, buffers) == [True] * 3
            assert [buffer[7] for buffer in buffers] == [1, 2, 3]
    eventually(lambda: not node.stat("root_hangs"))
    assert node.get(2, 2) == 2


def test_what_memory_has_of_a_prompt_is_read_while_the_rest_hangs(node: Acting) -> None:
    node.put(1, 8)
    node.drain()
    node.forget(1, 8, first=5)
    node.node.forget()
    with held(root_of(node), *ASKING):
        assert timed(lambda: node.get(1, 8)) < IN_TIME_S
        assert node.get(1, 8) == 5
    assert node.get(1, 8) == 8


def test_a_get_with_a_slow_root_returns_in_time_and_leaves_the_memory_alone(node: Acting) -> None:
    """Partly in memory, partly on a root that delivers too late: nothing is written behind the caller's back."""
    node.put(1, 8)
    node.drain()
    node.forget(1, 8, first=4)
    tokens = node.prompts.tokens(1, 8)
    for operation in ("open", "read", "look"):
        root_of(node).set_rules([Rule(operation, Delay(1.5))])
        out = np.zeros(LARGE.shape(len(tokens)), LARGE.numpy_dtype)
        count = 0

        def read(out: np.ndarray = out) -> None:  # type: ignore[type-arg]
            nonlocal count
            count = node.cache.get(tokens, out)

        assert timed(read) < IN_TIME_S
        assert same(out[:, :, :count], node.prompts.kv(1, 8)[:, :, :count])
        out[:, :, count:] = 7
        marked = out.copy()
        threading.Event().wait(1.0)  # until what was late is over
        assert same(out, marked), "written into after the return"
        root_of(node).set_rules([])
    eventually(lambda: node.get(1, 8) == 8)
    node.assert_settled()


def test_a_put_that_is_late_gives_its_room_back(node: Acting) -> None:
    """Past its deadline a put behind leaves nothing claimed, reserved or referred to."""
    sections = node.chain(1, 4)
    began, release = threading.Event(), threading.Event()

    def source(index: int) -> list[memoryview]:
        began.set()
        release.wait(0.5)
        return [memoryview(bytes(LARGE.section_bytes))] * LARGE.section_count

    with pytest.raises(KVStoreError):
        node.node.put(sections, 0, source, deadline_s=0.05) if node.node.tiers is None else late(node, source)
    assert began.is_set()
    node.assert_settled()
    assert node.stat("memory_chunks") == 0


def late(node: Acting, source: object) -> None:
    # Enough chunks that lanes copy them.
    chain = node.chain(1, 24)
    node.node.put(chain, 0, source, deadline_s=0.3)  # type: ignore[arg-type]


def test_w3_draining_flushes(node: Acting) -> None:
    with held(root_of(node)):
        node.put(1, 6)
    node.close()
    assert node.on_root(1, 6) == [True] * 6 and node.node.counters.snapshot().get("behind_lost", 0) == 0


def test_w3_what_cannot_be_flushed_in_time_is_lost_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    root = faulty()
    node = Acting(root, limits=replaced(flush_s=0.3))
    with held(root):
        node.put(1, 6)
        node.put(2, 6)
        with caplog.at_level(logging.INFO, "kvstore"):
            assert timed(node.close) < 2 * IN_TIME_S
        assert any("behind.lost" in record.message for record in caplog.records)
    eventually(lambda: node.node.counters.snapshot().get("behind_lost", 0) == 12)


def test_w3_after_the_end_nothing_is_taken_any_more(node: Acting) -> None:
    node.put(1, 2)
    node.close()
    assert node.node.tiers is not None
    assert node.node.tiers.behind.reserve([1]) == []
    assert node.memory.leading(node.chain(1, 2)) == 0
    with node.memory.refer(node.chain(1, 2), 0, 2) as slots:
        done = node.memory.read(slots, 0, 2, lambda index: [], Borrowed())
        assert not done.any()


def stall(node: Acting) -> None:
    """Has every lane wait for the root."""
    lanes = node.node.limits.lanes

    def ask(number: int) -> None:
        try:
            node.node.on_root(lambda: node.root.stat(node.name(50 + number, 0)))
        except KVStoreError:
            pass

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(lanes)]
    for thread in threads:
        thread.start()
    eventually(lambda: node.stat("root_hangs"))
    for thread in threads:
        thread.join()
