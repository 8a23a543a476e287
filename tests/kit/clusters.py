"""A cluster for tests of garbage collection: nodes and collectors on one root and one store, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from kvstore.client.local import LocalTransport
from kvstore.client.store import Store
from kvstore.core.address import Address
from kvstore.core.clock import Clock, RandomIds, SystemClock
from kvstore.core.namespace import Namespace
from kvstore.engine.coordination import ClusterMember
from kvstore.engine.gc_state import ChunkHold
from kvstore.engine.open import join
from kvstore.engine.settings import Limits, NodeOptions
from kvstore.format import places
from kvstore.format.keyset import ChunkKeys
from kvstore.format.places import Name
from kvstore.meta.keys import part_of
from kvstore.meta.memory import MemoryMetadata, MemoryStore
from kvstore.meta.store import MetadataStore
from kvstore.root.identity import RootId, RootIdentity, create_or_open
from kvstore.root.interface import Root
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore_gc.deletion import SweepPlan
from kvstore_gc.site import Site, Timings
from tests.kit.patience import eventually as eventually
from tests.kit.stores import LASTING, ONE_QUANTUM_S, TINY, kv_of
from tests.kit.sweeping import WholeSweeper, plans_of

NODE_LIMITS = Limits(announce_s=0.01, follow_s=0.01, io_threads=2, width=2, quantum_s=ONE_QUANTUM_S)
NOT_LINGERING = replace(NODE_LIMITS, hold_linger_s=1e-9)
"""A hold is not named after its end, as where its node has died."""
TIMINGS = Timings(poll_s_min=0.01, poll_s_max=0.02, announce_lag_max_s=60.0, grace_max_s=100.0)
SPACE = Namespace.of("m", TINY)


def site_of(meta: MetadataStore, root_id: bytes = bytes(16), clock: Clock | None = None) -> Site:
    """A site for what needs no root, over some metadata."""
    return Site(MemoryRoot(), RootIdentity(RootId(root_id), 0, 2), meta, clock or SystemClock())


def prompt(seed: int, chunks: int) -> ChunkKeys:
    """Returns a chain that no other number has."""
    tokens = np.arange(chunks * TINY.chunk_tokens, dtype=np.uint32) + 1_000_000 * seed
    return ChunkKeys.of(SPACE, tokens)


def prompt_of_one_sweep() -> ChunkKeys:
    """Returns a chain of 8 chunks that are all in one part, so that one sweep has them all."""
    chain = ChunkKeys.of(SPACE, np.arange(8 * TINY.chunk_tokens, dtype=np.uint32) + 3568)
    assert len({part_of(each) for each in chain.addresses}) == 1
    return chain


@dataclass
class Cluster:
    """One root with its metadata; ``node`` and ``collector`` add members."""

    root: Root
    store: MemoryStore
    identity: RootIdentity
    undo: ExitStack
    members: list[ClusterMember] = field(default_factory=list)

    def node(
        self,
        root: Root | None = None,
        meta: MetadataStore | None = None,
        limits: Limits = NODE_LIMITS,
        options: NodeOptions = LASTING,
    ) -> ClusterMember:
        """A node of the cluster, with a session and a view."""
        member = join(
            root or self.root,
            self.identity,
            meta or MemoryMetadata(self.store),
            limits=limits,
            clock=SystemClock(),
            ids=RandomIds(),
            options=options,
            in_cluster=True,
        )
        member.claim_namespace(SPACE)
        self.undo.callback(member.close)
        self.members.append(member)
        eventually(lambda: member.node.gc_view.protects)
        return member

    def collector(
        self,
        root: Root | None = None,
        meta: MetadataStore | None = None,
        timings: Timings = TIMINGS,
        pause: Callable[[float], object] = time.sleep,
    ) -> WholeSweeper:
        """A collector."""
        return WholeSweeper(self.site(root, meta, timings=timings, pause=pause))

    def site(
        self,
        root: Root | None = None,
        meta: MetadataStore | None = None,
        clock: Clock | None = None,
        timings: Timings = TIMINGS,
        pause: Callable[[float], object] = time.sleep,
    ) -> Site:
        """A collector's site: this cluster, through other ports if given."""
        return Site(
            root or self.root,
            self.identity,
            meta or MemoryMetadata(self.store),
            clock or SystemClock(),
            timings=timings,
            pause=pause,
        )

    def plans(self, *chains: ChunkKeys) -> list[SweepPlan]:
        """A plan to take all of some chains."""
        names = [self.name(address) for chain in chains for address in chain.addresses]
        return plans_of(self.root, names)

    def name(self, address: Address) -> Name:
        """Returns the name of a chunk's file."""
        return places.chunk(address, SPACE.id, self.identity.shard_bits)

    def present(self, chain: ChunkKeys) -> int:
        """Counts its chunks on the root."""
        return sum(self.root.stat(self.name(address)) is not None for address in chain.addresses)

    def leftovers(self) -> list[str]:
        """Returns the leftovers of sweeps in ``trash/``, ``plans/`` and etcd."""
        keys = [kv.key for kv in self.store.list(f"/kv/{self.identity.root.hex()}/gc/condemned/").items]
        folders = (places.TRASH, places.PLANS)
        return keys + [f"{folder}/{entry.name}" for folder in folders for entry in self.root.list(folder)]


@contextmanager
def cluster(root: Root | None = None, shard_bits: int = 2) -> Iterator[Cluster]:
    """A cluster over a memory root, or the given one, closed at the end."""
    root = root or MemoryRoot(MemoryFiles())
    with ExitStack() as undo:
        store = MemoryStore(SystemClock())
        yield Cluster(root, store, create_or_open(root, RandomIds(), shard_bits=shard_bits), undo)


def looking(member: ClusterMember, chain: ChunkKeys) -> ChunkHold:
    """A hold whose look goes on: nobody knows yet which chunks it is on, so sweeps wait for it (rule A2)."""
    return member.node.holds.take(chain, whatever=True)


def put(member: ClusterMember, chain: ChunkKeys) -> int:
    """Stores a chain; the leading chunks that are there then."""
    cache = Store(LocalTransport(member)).namespace(SPACE.name, TINY)
    return cache.put(chain.tokens, kv_of(TINY, chain.tokens)).tokens_present // TINY.chunk_tokens
