"""What is told against what the root holds: puts, sweeps, clears, damage, and anything that nobody announced."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from kvstore.client.local import LocalTransport
from kvstore.client.store import Store
from kvstore.core.address import Address
from kvstore.core.namespace import Namespace
from kvstore.engine.coordination import ClusterMember
from kvstore.events.index import ListingScheduler
from kvstore.events.limits import EventLimits
from kvstore.format import places
from kvstore.format.keyset import ChunkKeys
from kvstore.meta.keys import Keys, SweepId, part_of
from kvstore.meta.memory import MemoryMetadata
from kvstore.meta.sweeps import Condemned
from kvstore.root.posix import PosixRoot
from tests.kit.clusters import SPACE, Cluster, cluster, looking, prompt, put
from tests.kit.events import Following, addresses
from tests.kit.patience import eventually
from tests.kit.stores import TINY


def condemn(made: Cluster, victims: list[Address]) -> list[str]:
    """Puts the keys of sweeps of these addresses, as a collector does; returns the keys."""
    meta, keys, put_keys = MemoryMetadata(made.store), Keys(made.identity.root), []
    for part in sorted({part_of(each) for each in victims}):
        of_part = [each for each in victims if part_of(each) == part]
        key = keys.condemned_in(part)
        meta.put(key, Condemned.of_victims(SweepId(bytes(16)), bytes(16), of_part).to_bytes())
        put_keys.append(key)
    return put_keys


def test_a_removal_is_told_before_the_file_goes(clustered: Cluster) -> None:
    node, following = clustered.node(), Following(clustered)
    chain, kept = prompt(1, 6), prompt(2, 6)
    put(node, chain), put(node, kept)
    following.catch_up()
    # It makes the sweep wait: a node that holds nothing may have announced that before the sweep looks.
    hold = looking(node, kept)
    seen_in_grace = []

    def told() -> bool:
        following.step()
        return not following.heard & addresses(chain.addresses)

    def pause(seconds: float) -> None:
        eventually(told, "the removal is told while the sweep waits")
        seen_in_grace.append(clustered.present(chain))
        node.node.holds.release(hold)

    clustered.collector(pause=pause).sweep(clustered.plans(chain))
    assert seen_in_grace[0] == 6, "all files were there when the removal was told"
    following.catch_up()
    assert following.heard == following.on_root() == addresses(kept.addresses)


def test_what_a_sweep_spares_is_told_again(clustered: Cluster) -> None:
    node, following = clustered.node(), Following(clustered)
    chain = prompt(1, 4)
    put(node, chain)
    node.close()
    following.catch_up()
    keys = condemn(clustered, list(chain.addresses))
    following.step()
    assert not following.heard
    following.catch_up()
    assert not following.heard, "a listing during the sweep finds condemned chunks"
    clustered.root.remove(clustered.name(chain.addresses[3]))
    for key in keys:
        MemoryMetadata(clustered.store).delete(key)
    following.catch_up()
    assert following.heard == addresses(chain.addresses[:3]) == following.on_root()


def test_what_comes_while_it_is_condemned_is_not_told(clustered: Cluster) -> None:
    node, following = clustered.node(), Following(clustered)
    chain = prompt(1, 4)
    following.catch_up()
    put(node, chain)
    node.close()
    keys = condemn(clustered, [chain.addresses[2]])
    following.catch_up()
    assert following.heard == addresses(chain.addresses[:2]), "and nothing behind it"
    MemoryMetadata(clustered.store).delete(keys[0])
    following.catch_up()
    assert following.heard == addresses(chain.addresses)


def test_a_clear_is_told_before_it_deletes_and_what_it_spares_again(clustered: Cluster) -> None:
    node, following = clustered.node(), Following(clustered)
    gone, pinned = prompt(1, 4), prompt(2, 4)
    put(node, gone), put(node, pinned)
    cache = Store(LocalTransport(node)).namespace(SPACE.name, TINY)
    cache.pin(pinned.tokens, ttl=3600)
    following.catch_up()
    told: list[str] = []
    removed, one_by_one = node.node.root.remove, threading.Lock()

    def is_told() -> bool:
        following.step()
        return not following.heard

    def remove(name: places.Name) -> bool:
        if name.startswith(places.CHUNKS):
            with one_by_one:
                eventually(is_told, "it was told before the file goes, though the watch may take its time")
                told.append(name)
        return removed(name)

    node.node.root.remove = remove  # type: ignore[method-assign]
    node.clear(SPACE)
    node.node.root.remove = removed  # type: ignore[method-assign]
    assert len(told) == len(gone), "each file went after it was told"
    following.catch_up()
    assert following.heard == following.on_root() == addresses(pinned.addresses)


def test_a_damaged_chunk_is_taken_back_once_its_folder_was_listed(clustered: Cluster) -> None:
    node, following = clustered.node(), Following(clustered)
    chain = prompt(1, 4)
    put(node, chain)
    following.catch_up()
    _damage(clustered, chain.addresses[1])
    cache = Store(LocalTransport(node)).namespace(SPACE.name, TINY)
    assert cache.get(chain.tokens)[0] == TINY.chunk_tokens
    following.catch_up()
    assert following.heard == addresses(chain.addresses[:1])
    put(node, chain)
    following.catch_up()
    assert following.heard == addresses(chain.addresses)
    _damage(clustered, chain.addresses[1], 0)
    late = Following(clustered)
    late.catch_up()
    assert late.heard == addresses(chain.addresses[:1])
    clustered.root.remove(clustered.name(chain.addresses[1])), put(node, chain)
    late.catch_up()
    assert late.heard == addresses(chain.addresses), "no listing found its folder without it"


def test_only_wanted_namespaces_are_told(clustered: Cluster) -> None:
    node = clustered.node()
    put(node, prompt(1, 2))
    following = Following(clustered, wanted=lambda namespace: namespace.tenant == "other")
    following.catch_up()
    assert not following.heard
    other = Namespace.of("m2", TINY, tenant="other")
    cache = Store(LocalTransport(node)).namespace("m2", TINY, tenant="other")
    tokens = np.arange(8, dtype=np.uint32)
    cache.put(tokens, np.zeros(TINY.shape(8), np.int8))
    following.catch_up()
    assert following.heard == addresses(ChunkKeys.of(other, tokens).addresses)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_a_subscriber_ends_with_what_can_be_read(clustered: Cluster, seed: int) -> None:
    random = np.random.default_rng(seed)
    node, following = clustered.node(), Following(clustered)
    chains = [prompt(number, 1 + number % 5) for number in range(12)]
    for _ in range(25):
        chain = chains[random.integers(len(chains))]
        act = random.integers(5)
        if act <= 1:
            put(node, chain)
        elif act == 2:
            clustered.collector().sweep(clustered.plans(chain))
        elif act == 3:
            clustered.root.remove(clustered.name(chain.addresses[random.integers(len(chain))]))
        elif random.random() < 0.3:
            node.clear(SPACE)
        if random.random() < 0.5:
            following.clock.passed_s += random.random()
            following.step()
    following.catch_up()
    for chain in chains:
        told = [address in following.heard for address in chain.addresses]
        assert [*told, False].index(False) == _readable(clustered.node(), chain)
        assert sum(told) == [*told, False].index(False), "nothing is told behind what is not there"


def test_a_lost_watch_loses_nothing(clustered: Cluster) -> None:
    node = clustered.node()
    chain = prompt(1, 4)
    put(node, chain)
    node.close()
    following = Following(clustered)
    following.catch_up()
    keys = condemn(clustered, list(chain.addresses))
    following.step()
    for watch in following.truth._doomed._watches.values():
        watch.close()
    for key in keys:
        MemoryMetadata(clustered.store).delete(key)
    following.step()  # hears that the watches are lost
    following.catch_up()
    assert following.heard == addresses(chain.addresses)


def test_a_folder_whose_time_changed_is_listed_twice_and_then_left_alone() -> None:
    limits = EventLimits(settle_s=2.0, relist_s=1.0, list_share=1.0)
    folders, now_s = ListingScheduler(4, limits), 100.0
    for shard in range(4):
        folders.listed(shard, 7, now_s - 50, now_s - 50)
    now_s += 1
    for shard in range(4):
        folders.listed(shard, 7, now_s, now_s)
    assert folders.due(now_s + 99) is None
    now_s += 99
    folders.looked(2, 8, now_s + 1)
    assert folders.due(now_s + 1) == 2
    folders.listed(2, 8, now_s + 1, now_s + 1)
    assert folders.due(now_s + 2) is None, "within the same tick of the folder's clock something may have come"
    assert folders.due(now_s + 3) == 2
    folders.listed(2, 8, now_s + 3, now_s + 3)
    assert folders.due(now_s + 99) is None


def test_etcd_pays_nothing_per_chunk(tmp_root: Path) -> None:
    with cluster(PosixRoot(str(tmp_root))) as made:
        meta = MemoryMetadata(made.store)
        node, following = made.node(), Following(made, meta=meta)
        following.catch_up()
        before = meta.operations_count
        for seed in range(20):
            put(node, prompt(seed, 5))
        following.catch_up()
        assert len(following.heard) == 100
        assert meta.operations_count == before


def _readable(node: ClusterMember, chain: ChunkKeys) -> int:
    eventually(lambda: node.node.gc_view.protects)
    # A match finds the end of a prefix by bisection, and so believes in what lies behind a hole.
    return Store(LocalTransport(node)).namespace(SPACE.name, TINY).get(chain.tokens)[0] // TINY.chunk_tokens


def _damage(made: Cluster, address: Address, at: int = -1) -> None:
    root, name = made.root, made.name(address)
    seen = root.look(name, 1 << 20)
    assert seen is not None
    root.remove(name)
    staged = places.staged(bytes(16), 1)
    content = bytearray(seen.prefix)
    content[at] ^= 1
    root.stage(staged, [memoryview(content)], stamp_ns=seen.stat.mtime_ns, durable=False)
    root.publish(staged, name, durable=False)


def test_a_file_that_is_not_what_its_name_says_is_never_told(clustered: Cluster) -> None:
    node, following = clustered.node(), Following(clustered)
    chain = prompt(1, 2)
    put(node, chain)
    wrong = Address(bytes([chain.addresses[0][0]]) + bytes(15))
    clustered.root.move(clustered.name(chain.addresses[0]), clustered.name(wrong))
    following.catch_up()
    assert not following.heard
