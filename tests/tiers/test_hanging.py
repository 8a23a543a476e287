"""A root that hangs or is slow below a node with memory: nobody waits beyond the deadline.

Puts are written when it answers again (MEMORY.md, W1, W3; the design's "nothing waits for ever").
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from functools import partial

import numpy as np
import pytest

from kvstore.core.buffers import planes_of
from kvstore.core.clock import SystemClock
from kvstore.core.executor import Deadline
from kvstore.core.recency import Hints
from kvstore.core.write_mode import WriteMode
from kvstore.errors import KVStoreError
from kvstore.tiers.stack import PART_BYTES_MIN, MemoryPut
from tests.kit.faulty_root import ENOSPC, FaultyRoot, Hang, Rule
from tests.kit.memory_tiers import empty
from tests.kit.patience import PATIENCE_S, returns, slowness
from tests.kit.stores import same
from tests.kit.tiers import ASKING, LARGE, QUEUE_CHUNKS, Acting, eventually, faulty, held, quick


@pytest.mark.slow
def test_puts_go_on_until_the_queue_is_full_and_all_is_written_after_the_hang(node: Acting, root: FaultyRoot) -> None:
    node.put(1, 4)
    node.drain()
    with held(root, *ASKING) as hang:
        for number in range(2, 9):
            returns(partial(node.put, number, 4))
        assert hang.reached.is_set() and not any(node.on_root(2, 4))
        assert node.stat("behind_bytes") == 28 * node.unit_bytes
        assert node.put(9, 4).tokens_present == (QUEUE_CHUNKS - 28) * node.size
        assert node.put(10, 4).tokens_present == 0
    node.drain()
    for number in range(2, 9):
        assert node.on_root(number, 4) == [True] * 4
    assert node.stat("behind_lost") == 0
    node.assert_settled()


def test_memory_is_served_while_every_thread_hangs(node: Acting, root: FaultyRoot) -> None:
    node.put(1, 6)
    node.put(2, 2, write=WriteMode.UNCACHED)
    node.drain()
    buffers = [bytearray(300_000) for _ in range(3)]
    keys = [number.to_bytes(16, "big") for number in range(3)]
    node.cache.blocks.put(keys, [bytes([number + 1]) * 300_000 for number in range(3)])
    node.drain()
    with held(root, *ASKING):
        stall(node)
        for _ in range(3):
            assert returns(lambda: node.get(1, 6)) == 6
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


def test_what_memory_has_of_a_prompt_is_read_while_the_rest_hangs(node: Acting, root: FaultyRoot) -> None:
    node.put(1, 8)
    node.drain()
    node.forget(1, 8, first=5)
    node.node.forget()
    with held(root, *ASKING):
        assert returns(lambda: node.get(1, 8)) == 5
    assert node.get(1, 8) == 8


@pytest.mark.parametrize("operation", ["open", "read", "stat"])
def test_a_get_with_a_slow_root_returns_in_time_and_leaves_the_memory_alone(
    node: Acting, root: FaultyRoot, operation: str
) -> None:
    """Partly in memory, partly on a root that delivers too late: nothing is written behind the caller's back."""
    node.put(1, 8)
    node.drain()
    node.forget(1, 8, first=4)
    tokens = node.prompts.tokens(1, 8)
    out = np.zeros(LARGE.shape(len(tokens)), LARGE.numpy_dtype)
    hang = Hang(after_bytes=10_000)
    root.set_rules([Rule(operation, hang)])
    count = returns(lambda: node.cache.get(tokens, out))
    assert hang.reached.is_set() or operation == "stat"
    assert same(out[:, :, :count], node.prompts.kv(1, 8)[:, :, :count])
    out[:, :, count:] = 7
    marked = out.copy()
    hang.release.set()
    eventually(lambda: not any(node.node.executor._busy_since_s))
    assert same(out, marked), "written into after the return"
    root.set_rules([])
    eventually(lambda: node.get(1, 8) == 8)
    node.assert_settled()


def test_i2_bytes_that_hang_on_their_way_to_the_root_get_no_name_once_their_room_is_anothers() -> None:
    root = faulty()
    with Acting(root, limits=quick(behind_give_up_s=0.1)) as node:
        node.put(9, 1)
        node.drain()  # what hangs below is not the record of the session, which is staged before its first chunk
        with held(root) as hang:
            node.put(1, 6)
            eventually(hang.reached.is_set)
            empty(node.memory, node.cache.namespace)
            eventually(lambda: not node.stat("memory_referenced_bytes"))  # the write has passed its deadline
            for number in range(2, 6):  # in all of the room
                sections = planes_of(node.prompts.kv(number, 20), node.cache.layout)
                deadline = Deadline(SystemClock(), PATIENCE_S)
                node.tiers.keep(MemoryPut(node.chain(number, 20), 0, 20, sections, Hints(), deadline))
                assert node.memory.leading(node.chain(number, 20)) == 20
        eventually(lambda: not any(node.node.executor._busy_since_s))
        node.drain()
        assert node.on_root(1, 6) == [False] * 6 and node.stat("behind_lost") == 6
        with Acting(root.inner) as other:
            assert other.get(1, 6) == 0
        node.assert_settled()


PARTS_CHUNKS = 2 * PART_BYTES_MIN // LARGE.chunk_bytes + 2
"""Chunks that two threads copy."""


def test_a_put_that_is_late_gives_its_room_back() -> None:
    """Past its deadline a put behind leaves nothing claimed, reserved or referred to."""
    payload = [memoryview(bytes(LARGE.section_bytes))] * LARGE.section_count
    began, late, longer, caller = threading.Event(), threading.Event(), slowness(), threading.current_thread()

    def source(_: int) -> list[memoryview]:
        if threading.current_thread() is caller:
            began.wait(PATIENCE_S)  # or it would copy both parts
        else:
            began.set()
            late.wait(longer)
            late.set()
        return payload

    with Acting(faulty(), memory_bytes=8 * PART_BYTES_MIN) as node:
        with pytest.raises(KVStoreError):
            node.node.put(node.chain(1, PARTS_CHUNKS), 0, source, deadline_s=0.3 * longer)
        assert began.is_set()
        node.assert_settled()
        assert node.stat("memory_chunks") == 0


def test_a_put_through_that_memory_takes_too_long_for_is_stored_all_the_same(node: Acting) -> None:
    chain, asked = node.chain(1, 24), Counter[int]()
    payload = [memoryview(bytes(LARGE.section_bytes))] * LARGE.section_count
    release, longer = threading.Event(), slowness()

    def source(index: int) -> list[memoryview]:
        asked[index] += 1
        if node.on_root(1, 24)[23]:
            release.wait(1.2 * longer)
        return payload

    result = node.node.put(chain, 0, source, deadline_s=2.0 * longer, write=WriteMode.THROUGH)
    assert result.tokens_present == len(chain.tokens) and max(asked.values()) == 2
    node.assert_settled()


def test_w3_a_put_that_ends_when_the_node_is_closed_is_counted(node: Acting) -> None:
    behind, chain = node.tiers.behind, node.chain(1, 1)
    assert behind.reserve([node.unit_bytes])
    behind.close()
    behind.add(chain, 0, 1, Hints(), node.unit_bytes)
    assert behind.size_bytes == 0 and behind.flush(1.0) and node.stat("behind_lost") == 1


@pytest.mark.slow
def test_w3_what_cannot_be_flushed_in_time_is_lost_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    root = faulty()
    node = Acting(root, limits=quick(flush_s=0.3))
    with held(root):
        node.put(1, 6)
        node.put(2, 6)
        with caplog.at_level(logging.INFO, "kvstore"):
            returns(node.close)
            # While it hangs: what is being staged goes on to its own deadline, and would be written once the hang ends.
            eventually(lambda: node.node.counters.snapshot().get("behind_lost", 0) == 12)
            eventually(lambda: any("behind.lost" in record.message for record in caplog.records))


def test_w3_a_root_that_refuses_at_the_end_loses_chunks(caplog: pytest.LogCaptureFixture) -> None:
    """A full root does this: chunks in memory alone are lost, counted, logged."""
    root = faulty()
    node = Acting(root, limits=quick(flush_s=0.3, behind_give_up_s=3600.0))
    root.set_rules([Rule("stage", ENOSPC)])
    node.put(1, 6)
    node.put(2, 6)
    with caplog.at_level(logging.INFO, "kvstore"):
        node.close()
    said = [record.message for record in caplog.records if record.message.startswith("behind.")]
    assert len(said) == 1 and said[0].startswith("behind.lost_at_close chunks=12 were in memory alone")
    assert node.node.counters.snapshot()["behind_lost"] == 12
    assert not any(node.on_root(1, 6))


def stall(node: Acting) -> None:
    """Has every thread wait for the root."""
    executor = node.node.limits.io_threads

    def ask(number: int) -> None:
        try:
            node.node.on_root(lambda: node.root.stat(node.name(50 + number, 0)))
        except KVStoreError:
            pass

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(executor)]
    for thread in threads:
        thread.start()
    eventually(lambda: node.stat("root_hangs"))
    for thread in threads:
        thread.join()
