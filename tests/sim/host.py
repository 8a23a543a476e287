"""A node under test: a real member, joined as production joins it, and workers that use it as engines do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from kvstore.core.executor import Deadline
from kvstore.engine.coordination import ClusterMember
from kvstore.engine.gc_state import ChunkHold, ClusterGcState
from kvstore.engine.open import join
from kvstore.engine.settings import NodeOptions
from kvstore.errors import KVStoreError
from kvstore.format import places
from kvstore.format.keyset import ChunkKeys
from kvstore.format.places import Name
from kvstore.meta.session import Session
from tests.sim.kernel import Process
from tests.sim.metadata import SimStore
from tests.sim.shared_root import RootPort

if TYPE_CHECKING:
    from tests.sim.world import World

PIN_TTLS_S = (5, 20, 60)
HOLD_TTLS_S = (1.0, 5.0, None)
SESSION_TTL_S = 15
"""Longer than nodes' own: the seeds that find bugs were searched with it."""
IDLE_S = 3.0
"""The longest that a worker waits after a call that did nothing, so that steps go to those that do something."""


class Host:
    """One node's process."""

    def __init__(self, world: World, name: str, workers: int, store: SimStore) -> None:
        self.world = world
        self._store = store
        self.kernel = world.kernel
        self.process = Process(world.kernel, name, ahead_s=2 * world.kernel.random() - 1)
        self.member: ClusterMember | None = None
        self.is_proven = False
        self._workers = workers
        self._pins: list[tuple[str, Callable[[], None]]] = []
        self.kernel.spawn(self.process, "main", self._main, world.weight())

    def _main(self) -> None:
        world = self.world
        root, meta = RootPort(world.root, world.faults), self._store.port(world.faults)
        while self.member is None:
            try:
                self.member = join(
                    root,
                    world.identity,
                    meta,
                    NodeOptions(session_ttl_s=SESSION_TTL_S),
                    limits=world.limits,
                    clock=self.process,
                    ids=world.ids,
                    in_cluster=True,
                )
            except KVStoreError as error:
                self.kernel.note(f"could not join: {error}")
                self.kernel.sleep(0.5)
        for number in range(self._workers):
            self.kernel.spawn(self.process, f"w{number}", self._work, world.weight())

    def leave(self) -> None:
        """Leaves in good order, in a separate actor; then the program ends."""

        def close() -> None:
            if self.member is not None:
                self.member.close()
            self.world.faults.doomed.append(self.process)

        self.kernel.spawn(self.process, "leave", close)

    def prove_well(self) -> None:
        """In the end a node that lives protects again, stores and reads."""

        def prove() -> None:
            chain = self.world.whole_chain()
            while True:
                self.kernel.sleep(1.0)
                if self.member is None or not self.member.node.gc_view.protects:
                    continue
                try:
                    stored = self.member.node.put(chain, 0, lambda index: self.world.payload(chain, index))
                    hold = self.member.node.hold(chain)
                    self._read(hold)
                except KVStoreError as error:
                    self.kernel.note(f"not well yet: {error}")
                    continue
                size = chain.namespace.layout.chunk_tokens
                if stored.tokens_present == len(chain) * size and hold.count == len(chain):
                    break
                self.kernel.note(f"not well yet: {stored} {hold.count}")
            self.is_proven = True

        self.kernel.spawn(self.process, "prove", prove)

    @property
    def session(self) -> Session | None:
        """The session that it has at the moment, as far as it knows."""
        return None if self.member is None else self.member.presence._session

    def _work(self) -> None:
        world, kernel = self.world, self.kernel
        while not world.winding_up:
            kernel.sleep(world.pace_s * kernel.random())
            work = world.work()
            kernel.note(f"begins {work}")
            try:
                getattr(self, f"_{work}")()
            except KVStoreError as error:
                world.raised(work, error)
                kernel.sleep(IDLE_S * kernel.random())
            else:
                world.count(work)

    # What engines do.

    def _put(self) -> None:
        chain = self.world.chain()
        stored = self._member.node.put(chain, 0, lambda index: self.world.payload(chain, index))
        if not stored.chunks_written:
            self.kernel.sleep(IDLE_S * self.kernel.random())

    def _match(self) -> None:
        self._member.node.match(self.world.chain())

    def _hold(self) -> None:
        world, node, kernel = self.world, self._member.node, self.kernel
        keeps = world.faults.strikes(world.profile.dwell_long)
        hold = node.hold(world.chain(), None if keeps else kernel.source.choice(HOLD_TTLS_S))
        if not hold.count:
            kernel.sleep(0.5)
        try:
            if hold.count:
                world.count("holds of something")
                self._claim(hold)
                for _ in range(1 + kernel.source.randrange(2)):
                    kernel.sleep(kernel.random() * (world.profile.dwell_s if keeps else 0.4))
                    self._read(hold)
                if hold.ends_s - self.process.monotonic_s() < 1.0:
                    kernel.sleep(1.0)
                    self._read(hold)  # which is over, and must be refused
        finally:
            node.holds.release(hold)

    def _read(self, hold: ChunkHold) -> None:
        world, node = self.world, self._member.node
        buffers = [world.buffer() for _ in range(hold.count)]
        was_live, excuses, was_over = self._is_live(hold), self._excuses(), self._is_over(hold)
        count = node.read(hold, lambda index: buffers[index])
        if count and was_over:
            self.kernel.fail(f"H4: {self.process.name} read {count} chunks under a hold that had ended")
        for index in range(count):
            world.check_read(hold.chain, index, buffers[index])
        world.count("chunks read", count)
        is_whole = not any(self.name(hold.chain, index) in world.oracle.weak for index in range(hold.count))
        undisturbed = is_whole and excuses == self._excuses() and was_live and self._is_live(hold)
        if count < hold.count and undisturbed:
            self.kernel.fail(f"I1: {self.process.name} read {count} chunks of {hold.count} that it holds")

    def _is_over(self, hold: ChunkHold) -> bool:
        """True if a hold has ended by the node's own clock: by its time, or with its session, told or not."""
        session, now_s = self.session, self.process.monotonic_s()
        is_lapsed = session is not None and now_s - session._acknowledged_s >= session.ttl_s
        return hold.ends_s <= now_s or (hold.born is not None and is_lapsed)

    def _excuses(self) -> int:
        """Grows with each thing by which a read may be cut short although all is there."""
        counts = self._member.node.counters.snapshot()
        return self.process.faults_count + counts["miss_shed"] + counts["miss_deadline"] + counts["miss_unreadable"]

    def _pin(self) -> None:
        world = self.world
        chain, ttl_s, began_s = world.chain(), self.kernel.source.choice(PIN_TTLS_S), self.kernel.now_s
        record = self._member.pin(chain, ttl_s, self.process.name)
        count = record.tokens // chain.namespace.layout.chunk_tokens
        if count:
            world.count("pins of something")
            end = world.oracle.pins(record.id, [self.name(chain, index) for index in range(count)], began_s + ttl_s)
            self._pins.append((record.id, end))

    def _unpin(self) -> None:
        if not self._pins:
            return
        pin, end = self._pins.pop(self.kernel.source.randrange(len(self._pins)))
        end()
        self._member.unpin(pin)

    def _put_blocks(self) -> None:
        world = self.world
        keys = world.block_keys()
        payloads = [memoryview(b"".join(world.block_payload(key))) for key in keys]
        self._member.node.put_blocks(world.namespace, keys, payloads)

    def _get_blocks(self) -> None:
        world = self.world
        keys = world.block_keys()
        buffers = [memoryview(bytearray(world.block_bytes)) for _ in keys]
        done = self._member.node.blocks.get(world.namespace, keys, buffers, self._deadline())
        for key, buffer, is_hit in zip(keys, buffers, done, strict=True):
            if is_hit:
                world.check_block(key, bytes(buffer))

    def _deadline(self) -> Deadline:
        return Deadline(self.process, 10.0)

    # What it says by that.

    def name(self, chain: ChunkKeys, index: int) -> Name:
        """P(address)."""
        return places.chunk(chain.addresses[index], chain.namespace.id, self.world.identity.shard_bits)

    def _claim(self, hold: ChunkHold) -> None:
        names = [self.name(hold.chain, index) for index in range(hold.count)]
        self.world.oracle.holds(self.process, hold, names, lambda: self._is_live(hold))

    def _is_live(self, hold: ChunkHold) -> bool:
        """True if the node believes that the hold protects. Asked without the side effects of asking."""
        node, session, now_s = self._member.node, self.session, self.process.monotonic_s()
        return (
            session is not None
            and cast(ClusterGcState, node.gc_view)._session is not None
            and not node._closed
            and session.id not in self.world.oracle.void_sessions
            and hold.born is not None
            and node.holds._live.get(hold.id) is hold
            and hold.ends_s > now_s
            and session._lost is None
            and now_s - session._acknowledged_s < session.ttl_s
        )

    @property
    def _member(self) -> ClusterMember:
        assert self.member is not None
        return self.member
