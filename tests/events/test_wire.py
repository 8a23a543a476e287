"""The bytes of batches, as vLLM 0.32 encodes the same events (tests/engines/vllm/test_kv_events.py asks it)."""

from __future__ import annotations

import numpy as np

from kvstore.core.address import Address
from kvstore.events import stream
from kvstore.events.inventory import EventBlock
from kvstore.events.stream import MEDIUM

EXPECTED = (
    "93cb3ff80000000000009381a474797065b0416c6c426c6f636b73436c656172656483a474797065ac426c6f636b52656d6f766564ac626c6f"
    "636b5f6861736865739101a66d656469756da753544f5241474588a474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573"
    "920203b1706172656e745f626c6f636b5f6861736801a9746f6b656e5f696473920102aa626c6f636b5f73697a6501a76c6f72615f6964c0a6"
    "6d656469756da753544f52414745a96c6f72615f6e616d65c000"
)
"""``KVEventBatch(1.5, [AllBlocksCleared(), BlockRemoved([1], "STORAGE"), BlockStored([2, 3], 1, [1, 2], 1, None,
"STORAGE", None)], 0)`` by vLLM 0.32.0 and its ``msgspec.msgpack.Encoder``."""


def test_a_batch_has_the_bytes_that_vllm_sends() -> None:
    addresses = [Address(bytes([number]) * 16) for number in range(4)]
    blocks = [
        EventBlock(addresses[number], addresses[number - 1], number, np.uint32(tokens).tobytes(), number, number - 1)
        for number, tokens in ((1, 9), (2, 1), (3, 2))
    ]
    events = [
        stream.cleared(),
        *next(stream.removed(blocks[:1], MEDIUM, 9)),
        *next(stream.stored(blocks[1:], MEDIUM, 9)),
    ]
    assert stream.encoded(events, 1.5).hex() == EXPECTED


def test_a_removed_block_is_told_with_its_group() -> None:
    zero, groups = Address(bytes(16)), (None, 0, 1, 0)
    blocks = [EventBlock(zero, zero, at, bytes(4), at, None, group) for at, group in enumerate(groups)]
    told = next(stream.removed(blocks, MEDIUM, 9))
    assert [(event.get("group_idx"), event["block_hashes"]) for event in told] == [(None, [0]), (0, [1, 3]), (1, [2])]
