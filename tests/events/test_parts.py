"""Blocks whose parts lie in several namespaces, one for each rank: told once, while all parts are there."""

from __future__ import annotations

import random

import pytest

from kvstore.core.address import block_address
from kvstore.core.namespace import Namespace
from kvstore.format import places
from kvstore.root.memory import MemoryFiles, MemoryRoot
from tests.events.engines import Prompt, prompt_of, put_blocks
from tests.events.test_speaker import TOPIC, Publishing
from tests.kit.cases import for_each
from tests.kit.clusters import Cluster, cluster
from tests.kit.events import Ticking
from tests.kit.stores import TINY

RANKS = [Namespace.of("m", TINY, attributes={"tp rank": str(rank)}) for rank in range(3)]
FOURTH = Namespace.of("m", TINY, attributes={"tp rank": "another"})
WHOLE = b"the three of them"[:16]


@pytest.fixture
def clock(clustered: Cluster) -> Ticking:
    return Ticking()


def parted(seed: int, blocks: int, parts: int = 3, whole: bytes = WHOLE) -> Prompt:
    """The blocks of a prompt that an engine of several ranks stores."""
    found = prompt_of(seed, blocks)
    for index in range(blocks):
        found = found.saying(index, parts=parts, whole=whole)
    return found


def remove(made: Cluster, space: Namespace, key: bytes) -> None:
    made.root.remove(places.chunk(block_address(space, key), space.id, made.identity.shard_bits))
    for member in made.members:
        member.node.forget()


def claim(made: Cluster, *spaces: Namespace) -> None:
    for space in spaces:
        made.members[0].claim_namespace(space)


def test_a_block_is_told_once_all_parts_are_there_and_removed_with_the_first_that_goes(
    clustered: Cluster, clock: Ticking
) -> None:
    node, publishing, blocks = clustered.node(), Publishing(clustered, clock), parted(1, 3)
    claim(clustered, *RANKS)
    for space in RANKS:
        assert not publishing.index.blocks, "a part is missing"
        put_blocks(node, blocks, space=space)
        publishing.catch_up()
    assert publishing.index.blocks.keys() == {*blocks.hashes}
    remove(clustered, RANKS[2], blocks.keys[1])
    publishing.catch_up()
    assert publishing.index.blocks.keys() == {blocks.hashes[0]}
    put_blocks(node, blocks, range(1, 2), RANKS[2])
    publishing.catch_up()
    assert publishing.index.blocks.keys() == {*blocks.hashes}
    assert {topic for topic, _ in publishing.sent} == {TOPIC}


@pytest.mark.parametrize("parts", [2, 4])
def test_more_or_fewer_namespaces_than_parts_tell_nothing(clustered: Cluster, clock: Ticking, parts: int) -> None:
    node, publishing, blocks = clustered.node(), Publishing(clustered, clock), parted(1, 2, parts)
    claim(clustered, *RANKS)
    for space in RANKS:
        put_blocks(node, blocks, space=space)
    publishing.catch_up()
    assert not publishing.index.blocks


def test_a_namespace_too_many_takes_back_what_was_told(clustered: Cluster, clock: Ticking) -> None:
    node, publishing, blocks = clustered.node(), Publishing(clustered, clock), parted(1, 2)
    claim(clustered, *RANKS, FOURTH)
    for space in RANKS:
        put_blocks(node, blocks, space=space)
    publishing.catch_up()
    assert publishing.index.blocks.keys() == {*blocks.hashes}
    put_blocks(node, parted(2, 1), space=FOURTH)
    publishing.catch_up()
    assert not publishing.index.blocks


def test_block_that_was_a_part_is_published_when_whole(clustered: Cluster, clock: Ticking) -> None:
    node, publishing, whole = clustered.node(), Publishing(clustered, clock), prompt_of(1, 1)
    claim(clustered, RANKS[0])
    put_blocks(node, parted(1, 1), space=RANKS[0])
    publishing.catch_up()
    assert not publishing.index.blocks
    remove(clustered, RANKS[0], whole.keys[0])
    publishing.catch_up()
    put_blocks(node, whole, space=RANKS[0])
    publishing.catch_up()
    assert publishing.index.blocks.keys() == {*whole.hashes}


@for_each("seed", range(6))
def test_what_is_told_is_what_all_ranks_have_whatever_happens(seed: int) -> None:
    chance, clock = random.Random(seed), Ticking()
    with cluster(MemoryRoot(MemoryFiles())) as made:
        node, publishing = made.node(), Publishing(made, clock)
        claim(made, *RANKS)
        prompts = [parted(number, 3) for number in range(4)]
        there: set[tuple[int, int, bytes]] = set()
        for _ in range(60):
            rank, number, index = chance.randrange(3), chance.randrange(4), chance.randrange(3)
            blocks = prompts[number]
            at = (rank, number, blocks.keys[index])
            if at in there:
                remove(made, RANKS[rank], blocks.keys[index])
                there.discard(at)
            else:
                put_blocks(node, blocks, range(index, index + 1), RANKS[rank])
                there.add(at)
            if chance.random() < 0.2:
                publishing.catch_up()
                assert publishing.index.blocks.keys() == _readable(prompts, there)
        publishing.catch_up()
        assert publishing.index.blocks.keys() == _readable(prompts, there)


def _readable(prompts: list[Prompt], there: set[tuple[int, int, bytes]]) -> set[int]:
    """The hashes of leading blocks that every rank has."""
    found = set()
    for number, blocks in enumerate(prompts):
        for key, hashed in zip(blocks.keys, blocks.hashes, strict=True):
            if not all((rank, number, key) in there for rank in range(3)):
                break
            found.add(hashed)
    return found
