"""Garbage collection beside nodes with memory: a collector takes chunks from the root while memory has them.

MEMORY.md R1, R5, W2 and W5; H1, H2 and P1 of gc/PROTOCOL.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvstore.client.cache import Cache
from kvstore.client.local import LocalTransport
from kvstore.client.store import Store
from kvstore.core.address import block_address
from kvstore.core.clock import RandomIds, SystemClock
from kvstore.core.write_mode import WriteMode
from kvstore.engine.coordination import ClusterMember
from kvstore.engine.open import join
from kvstore.engine.settings import Limits, NodeOptions, TierSettings
from kvstore.format.keyset import ChunkKeys
from kvstore.meta.memory import MemoryMetadata
from kvstore.root.interface import Root
from tests.kit.clusters import NODE_LIMITS, SPACE, Cluster, cluster, eventually, looking, prompt, put
from tests.kit.faulty_root import EIO, FaultyRoot, Rule
from tests.kit.patience import PATIENCE_S
from tests.kit.stores import TINY, kv_of, same
from tests.kit.tiers import MEMORY_BYTES, held


@pytest.fixture
def c() -> Iterator[Cluster]:
    with cluster() as made:
        yield made


LIMITS = replace(NODE_LIMITS, behind_give_up_s=2.0)


def with_memory(
    c: Cluster, root: Root | None = None, write: WriteMode = WriteMode.BEHIND, limits: Limits = LIMITS
) -> ClusterMember:
    """A node of the cluster that has memory."""
    member = join(
        root or c.root,
        c.identity,
        MemoryMetadata(c.store),
        limits=limits,
        clock=SystemClock(),
        ids=RandomIds(),
        in_cluster=True,
        options=NodeOptions(tiers=TierSettings(MEMORY_BYTES, write=write)),
    )
    member.claim_namespace(SPACE)
    c.undo.callback(member.close)
    eventually(lambda: member.node.gc_view.protects)
    return member


def cache_of(member: ClusterMember) -> Cache:
    return Store(LocalTransport(member)).namespace(SPACE.name, TINY)


def get(member: ClusterMember, chain: ChunkKeys) -> int:
    """Returns the number of leading chunks that are read, all compared."""
    tokens, kv = cache_of(member).get(chain.tokens)
    assert same(kv, kv_of(TINY, chain.tokens)[:, :, :tokens]), "wrong bytes"
    return tokens // TINY.chunk_tokens


def put_rest(member: ClusterMember, chain: ChunkKeys, first: int) -> int:
    """Puts the chunks from ``first`` on; how many leading ones are there then."""
    kv, size = kv_of(TINY, chain.tokens), TINY.chunk_tokens
    return cache_of(member).put(chain.tokens, kv[:, :, first * size :], first * size).tokens_present // size


def test_h1_what_is_condemned_is_a_miss_though_memory_has_it(c: Cluster) -> None:
    node, other, chain = with_memory(c), c.node(), prompt(1, 8)
    put(node, chain)
    node.node.drain()
    hold = looking(other, chain)
    sweep = threading.Thread(target=lambda: c.collector().sweep(c.plans(chain)))
    sweep.start()
    eventually(lambda: node.node.gc_view.leading(chain) == 0)
    assert node.node.match(chain) == 0 and get(node, chain) == 0
    assert put(node, chain) == 0, "not before the sweep has ended"
    other.node.holds.release(hold)
    sweep.join(PATIENCE_S)
    eventually(lambda: get(node, chain) == 8)


def test_h2_a_hold_reads_what_was_condemned_after_it(c: Cluster) -> None:
    node, chain = with_memory(c, limits=replace(LIMITS, hold_linger_s=1e-9)), prompt(1, 8)
    put(node, chain)
    node.node.drain()
    with cache_of(node).hold(chain.tokens) as hold:
        read: list[bool] = []

        def pause(seconds: float) -> None:
            eventually(lambda: node.node.gc_view.leading(chain) == 0)
            out = np.empty(TINY.shape(hold.tokens), TINY.numpy_dtype)
            assert hold.read_into(out) == len(chain.tokens) and same(out, kv_of(TINY, chain.tokens))
            read.append(len(hold.view()) == 8)
            time.sleep(seconds)

        look = looking(c.node(), chain)
        sweep = threading.Thread(target=lambda: c.collector(pause=pause).sweep(c.plans(chain)))
        sweep.start()
        eventually(lambda: bool(read))
        c.members[-1].node.holds.release(look)
        sweep.join(PATIENCE_S)
        assert all(read) and c.present(chain) == 8
    assert c.collector().sweep(c.plans(chain)).reaped.count == 8


@pytest.mark.parametrize("write", list(WriteMode))
def test_w5_children_of_what_was_reaped_take_it_back_to_the_root(c: Cluster, write: WriteMode) -> None:
    node, longer = with_memory(c, write=write), prompt(1, 12)
    chain = longer.leading(8)
    put(node, chain)
    node.node.drain()
    assert get(node, chain) == 8 and get(node, chain) == 8, "asked for twice, so in memory by now"
    c.collector().sweep(c.plans(chain))
    eventually(lambda: node.node.match(chain) == 8)
    assert put_rest(node, longer, 8) == 12
    node.node.drain()
    assert c.present(longer) == 12
    assert get(c.node(), longer) == 12


def test_w2_children_that_wait_while_their_parents_are_swept(c: Cluster) -> None:
    """Neither is lost: memory has the parents, and writes them with their children when the sweep has ended."""
    root, patient = FaultyRoot(c.root), replace(LIMITS, behind_give_up_s=PATIENCE_S, flush_s=PATIENCE_S)
    node, other, longer = with_memory(c, root, limits=patient), c.node(), prompt(1, 12)
    chain = longer.leading(8)
    put(node, chain)
    node.node.drain()
    hold = looking(other, chain)
    with held(root):
        assert put_rest(node, longer, 8) == 12
        sweep = threading.Thread(target=lambda: c.collector().sweep(c.plans(chain)))
        sweep.start()
        eventually(lambda: node.node.gc_view.leading(chain) == 0)
    other.node.holds.release(hold)
    sweep.join(PATIENCE_S)
    node.node.drain()
    assert get(node, longer) == 12
    assert (c.present(longer), node.stats()["behind_lost"]) == (12, 0)


def test_w2_parents_that_a_whole_sweep_takes_while_their_children_are_written(c: Cluster) -> None:
    """The write looked at the parents before the sweep, and ends after it: they are written then."""
    root, patient = FaultyRoot(c.root), replace(LIMITS, behind_give_up_s=PATIENCE_S, flush_s=PATIENCE_S)
    node, longer = with_memory(c, root, limits=patient), prompt(1, 12)
    chain = longer.leading(8)
    put(node, chain)
    node.node.drain()
    with held(root) as writing:
        assert put_rest(node, longer, 8) == 12
        assert writing.reached.wait(PATIENCE_S)
        assert c.collector().sweep(c.plans(chain)).reaped.count == 8
        eventually(lambda: node.node.gc_view.is_calm)
    node.node.drain()
    assert (c.present(longer), node.stats()["behind_lost"]) == (12, 0)
    assert get(c.node(), longer) == 12


def test_w2_a_chunk_of_the_write_that_was_found_and_a_whole_sweep_takes(c: Cluster) -> None:
    root, patient = FaultyRoot(c.root), replace(LIMITS, behind_give_up_s=PATIENCE_S, flush_s=PATIENCE_S)
    node, other, longer = with_memory(c, root, limits=patient), c.node(), prompt(1, 12)
    put(node, longer.leading(8))
    node.node.drain()
    root.set_rules([Rule("stage", EIO)])
    assert put_rest(node, longer, 8) == 12
    eventually(lambda: root.struck)
    assert put(other, longer.leading(9)) == 9
    with held(root) as writing:
        assert writing.reached.wait(PATIENCE_S)
        alone = ChunkKeys(SPACE, np.empty(0, np.uint32), longer.addresses[8])
        assert c.collector().sweep(c.plans(alone)).reaped.count == 1
        eventually(lambda: node.node.gc_view.is_calm)
    node.node.drain()
    assert (c.present(longer), node.stats()["behind_lost"]) == (12, 0)


def test_p1_what_was_put_behind_and_pinned_is_spared(c: Cluster) -> None:
    node, chain = with_memory(c), prompt(1, 8)
    put(node, chain)
    pin = node.pin(chain, 60.0, "me")
    assert pin.tokens == len(chain.tokens)
    assert c.collector().sweep(c.plans(chain)).reaped.count == 0 and c.present(chain) == 8
    assert get(node, chain) == 8


def test_h1_of_blocks_asked_for_together_only_the_condemned_ones_are_misses(c: Cluster) -> None:
    root = FaultyRoot(c.root)
    node, other = with_memory(c, root), c.node()
    keys = [bytes([number]) * 32 for number in range(4)]
    blocks = [bytes([number]) * 5_000 for number in range(4)]
    cache = cache_of(node)
    assert all(cache.blocks.put(keys[:2], blocks[:2]))
    node.node.drain()
    condemned = ChunkKeys(SPACE, np.empty(0, np.uint32), b"".join(block_address(SPACE, key) for key in keys[:2]))
    hold = looking(other, condemned)
    sweep = threading.Thread(target=lambda: c.collector().sweep(c.plans(condemned)))
    with held(root):
        assert all(cache.blocks.put(keys[2:], blocks[2:])), "in memory alone"
        sweep.start()
        eventually(lambda: node.node.gc_view.leading(condemned) == 0)
        buffers = [bytearray(5_000) for _ in keys]
        assert cache.blocks.get(keys, buffers) == [False, False, True, True]
        assert buffers[2:] == blocks[2:]
    other.node.holds.release(hold)
    sweep.join(PATIENCE_S)


def test_h1_a_match_of_blocks_ends_before_the_first_condemned_one(c: Cluster) -> None:
    node, other = with_memory(c), c.node()
    keys = [bytes([number]) * 32 for number in range(4)]
    cache = cache_of(node)
    assert all(cache.blocks.put(keys, [bytes([number]) * 5_000 for number in range(4)]))
    node.node.drain()
    condemned = ChunkKeys(SPACE, np.empty(0, np.uint32), block_address(SPACE, keys[2]))
    hold = looking(other, condemned)
    sweep = threading.Thread(target=lambda: c.collector().sweep(c.plans(condemned)))
    sweep.start()
    try:
        eventually(lambda: node.node.gc_view.leading(condemned) == 0)
        assert cache.blocks.match(keys) == 2
    finally:
        other.node.holds.release(hold)
        sweep.join(PATIENCE_S)


def test_puts_gets_and_sweeps_at_once(c: Cluster) -> None:
    """Two nodes with memory beside a collector that takes all it finds: never wrong bytes, and all ends.

    Holes there may be: a child put while its parent is swept is unreachable until the next rounds (PROTOCOL, Prefixes).
    """
    nodes = [with_memory(c), with_memory(c)]
    chains = [prompt(number, 12) for number in range(4)]
    ended = threading.Event()
    errors: list[BaseException] = []

    def act(seed: int) -> None:
        generator = np.random.default_rng(seed)
        try:
            for _ in range(60):
                node = nodes[int(generator.integers(2))]
                chain = chains[int(generator.integers(4))].leading(int(generator.integers(1, 13)))
                if generator.integers(2):
                    put(node, chain)
                else:
                    get(node, chain)
        except BaseException as error:  # noqa: BLE001 - carried to the test
            errors.append(error)

    def collect() -> None:
        collector = c.collector()
        while not ended.is_set():
            collector.sweep(c.plans(*chains))

    threads = [threading.Thread(target=act, args=(seed,)) for seed in range(3)]
    sweeping = threading.Thread(target=collect)
    for thread in (sweeping, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    ended.set()
    sweeping.join()
    assert not errors, errors
    for node in nodes:
        node.node.drain()
    for chain in chains:
        for node in nodes:
            get(node, chain)
    for node in nodes:
        # A chunk whose parent was swept is tried again for as long as a peer may still be writing that.
        eventually(lambda node=node: node.stats()["memory_dirty_bytes"] == 0)  # type: ignore[misc]
