"""What one process knows of evictions: what is being evicted is a miss, and what is gone is forgotten."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvstore.core.address import ADDRESS_BYTES
from kvstore.engine.gc_state import HostGcState
from kvstore.format.keyset import ChunkKeys
from kvstore.host.tables import BATCH_MAX, RING, Number
from tests.kit.host_parts import CHUNKS, SPACE, Parts, address
from tests.kit.host_process import tokens
from tests.kit.patience import PATIENCE_S

CHAIN = ChunkKeys.of(SPACE, np.array(tokens(1), np.uint32))


def remember(parts: Parts, epoch: int | None = None) -> None:
    known = parts.known
    known.add_all(CHAIN.addresses, known.quantum(), renewed=True, epoch=known.epoch if epoch is None else epoch)


def remembered(parts: Parts, view: HostGcState) -> int:
    """Returns how many chunks it remembers, after it has read the log."""
    view.leading(CHAIN)
    return parts.known.leading_count(CHAIN.packed_addresses, parts.known.quantum())


def begin(parts: Parts, count: int = BATCH_MAX) -> None:
    """A batch that is not settled, with the chunks from the second on."""
    others = b"".join(address(number) for number in range(count - CHUNKS + 1))
    parts.shared.append(CHAIN.packed_addresses[ADDRESS_BYTES:] + others)


def settle(parts: Parts) -> None:
    parts.shared[Number.SETTLED] = parts.shared[Number.TAIL]


def test_a_process_that_begins_during_a_batch_sees_it(parts: Parts) -> None:
    begin(parts)
    assert parts.view().leading(CHAIN) == 1


def test_a_look_under_way_brings_nothing_back(parts: Parts) -> None:
    view = parts.view()
    epoch = parts.known.epoch
    begin(parts)
    view.leading(CHAIN)
    remember(parts, epoch)
    assert parts.known.leading_count(CHAIN.packed_addresses, parts.known.quantum()) == 1


def test_a_look_during_a_batch_brings_nothing_back(parts: Parts) -> None:
    view = parts.view()
    begin(parts)
    view.leading(CHAIN)
    remember(parts)  # it has found files that are deleted later
    settle(parts)
    assert remembered(parts, view) == 1


def test_a_process_that_is_a_whole_log_behind_forgets_everything(parts: Parts) -> None:
    view = parts.view()
    remember(parts)
    assert remembered(parts, view) == CHUNKS
    begin(parts)
    settle(parts)
    others = b"".join(address(number) for number in range(BATCH_MAX))
    for _ in range(RING // BATCH_MAX):  # what the log had of the prompt is overwritten
        parts.shared.append(others)
        settle(parts)
    parts.shared[Number.SETTLED] += 1  # of a batch that began after it had read TAIL
    assert not view.condemned and remembered(parts, view) == 0


def test_a_put_waits_for_the_batch_that_has_its_chunks(parts: Parts) -> None:
    view = parts.view()
    begin(parts)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(view.settle, CHAIN)
        settle(parts)
        assert waiting.result(PATIENCE_S)
    assert view.leading(CHAIN) == CHUNKS
