"""Blocks that engines hash themselves: told by what their files say, and nothing that a file says does harm."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from kvstore.core.address import Address
from kvstore.format import places
from kvstore.format.header import expected_block
from kvstore.root.interface import Root
from kvstore.root.memory import MemoryFiles, MemoryRoot
from tests.events.engines import GROUP, SIZE, Prompt, prompt_of, put_blocks
from tests.events.test_speaker import TOPIC, Publishing
from tests.kit.cases import for_each
from tests.kit.clusters import SPACE, Cluster, cluster
from tests.kit.events import Following, Ticking
from tests.kit.strategies import chunk_file


def told(prompts: list[Prompt]) -> dict[int, tuple[int | None, list[int]]]:
    """What an index has of some prompts: parent and tokens by hash."""
    found: dict[int, tuple[int | None, list[int]]] = {}
    for each in prompts:
        parent: int | None = None
        for hashed, descent in zip(each.hashes, each.descents, strict=True):
            found[hashed] = (parent, list(descent.tokens))
            parent = hashed
    return found


def events_of(publishing: Publishing, kind: str) -> list[dict[str, object]]:
    """All events of a kind that were sent."""
    batches = [msgspec.msgpack.decode(batch.payload)[1] for _, batch in publishing.sent]
    return [event for batch in batches for event in batch if event["type"] == kind]


def test_blocks_are_told_by_the_engines_hashes_with_parent_and_tokens(clustered: Cluster, clock: Ticking) -> None:
    node, publishing = clustered.node(), Publishing(clustered, clock)
    prompts = [prompt_of(seed, 5) for seed in range(3)]
    for each in prompts:
        put_blocks(node, each)
    publishing.catch_up()
    assert publishing.index.blocks == told(prompts)
    assert {topic for topic, _ in publishing.sent} == {TOPIC}
    for event in events_of(publishing, "BlockStored"):
        assert event["group_idx"] == GROUP and event["block_size"] == SIZE and event["lora_name"] is None


WRONG = {
    "no descent": None,
    "other tokens in number": {"tokens": [1]},
    "a longer hash than the key": {"hash_bytes": 64},
    "no JSON": {"extra": b"{"},
    "nested JSON": {"extra": b"[" * 1000},
    "no object": {"extra": b"[]"},
    "an adapter that is a number": {"extra": b'{"lora_name": 5}'},
    "half of a surrogate pair": {"extra": b'{"lora_name": "\\ud800"}'},
    "a number without end": {"extra": b'{"extra_keys": [' + b"9" * 100 + b"]}"},
    "extra keys that are objects": {"extra": b'{"extra_keys": [{}]}'},
    "extra keys in extra keys": {"extra": b'{"extra_keys": [[["a"]]]}'},
}


@for_each("wrong", WRONG)
def test_a_file_that_says_nothing_of_use_is_not_told_and_hides_what_is_behind_it(wrong: str) -> None:
    blocks, others, change = prompt_of(1, 4), prompt_of(2, 2), WRONG[wrong]
    with cluster(MemoryRoot(MemoryFiles())) as made:
        node, publishing = made.node(), Publishing(made, Ticking())
        if change is None:
            keys, buffers = blocks.keys[1:2], [memoryview(bytes(100))]
            assert node.node.put_blocks(SPACE, keys, buffers).there.all()
            put_blocks(node, blocks, range(1))
            put_blocks(node, blocks, range(2, 4))
        else:
            put_blocks(node, blocks.saying(1, **change))
        put_blocks(node, others)
        publishing.catch_up()
        assert publishing.index.blocks == told([Prompt(blocks.keys[:1], blocks.descents[:1]), others])


def test_a_key_that_does_not_give_the_name_of_its_file_is_not_told(clustered: Cluster, clock: Ticking) -> None:
    node, publishing = clustered.node(), Publishing(clustered, clock)
    blocks, other = prompt_of(1, 1), prompt_of(2, 1)
    put_blocks(node, prompt_of(3, 1))
    expected = expected_block(SPACE, blocks.keys[0], 100, blocks.descents[0].pack())
    forged = chunk_file(replace(expected, address=other.addresses[0]), bytes(16), bytes(100))
    staged = places.staged(bytes(16), 1)
    clustered.root.stage(staged, [memoryview(forged.content)], stamp_ns=0, durable=False)
    assert clustered.root.publish(staged, clustered.name(other.addresses[0]), durable=False)
    publishing.catch_up()
    assert publishing.index.blocks == told([prompt_of(3, 1)])


def test_claims_of_circles_and_of_other_depths_are_not_told(clustered: Cluster, clock: Ticking) -> None:
    node, publishing = clustered.node(), Publishing(clustered, clock)
    circle = prompt_of(1, 2).saying(0, depth=2, parent=prompt_of(1, 2).keys[1])
    itself, deep = prompt_of(2, 1), prompt_of(3, 3).saying(2, depth=7)
    put_blocks(node, circle)
    put_blocks(node, itself.saying(0, depth=1, parent=itself.keys[0]))
    put_blocks(node, deep)
    publishing.catch_up()
    assert publishing.index.blocks == told([Prompt(deep.keys[:2], deep.descents[:2])])


def test_what_is_told_of_blocks_is_what_the_root_has_whatever_happens(any_root: Root) -> None:
    with cluster(any_root) as made:
        node, following = made.node(), Following(made)
        prompts = [prompt_of(seed, 1 + seed % 7) for seed in range(20)]
        for turn, each in enumerate(prompts):
            put_blocks(node, each)
            if turn % 3 == 2:
                gone = prompts[turn - 1].addresses
                for address in gone[len(gone) // 2 :]:
                    made.root.remove(made.name(Address(address)))
            if turn % 5 == 4:
                following.catch_up()
        following.catch_up()
        assert following.heard == following.on_root()
