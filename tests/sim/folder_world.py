"""A run on one host without etcd: programs and collectors share a folder, are killed at any step, and begin again.

The judge knows the files, and what programs have told their callers:

* I1: a chunk that a live program holds has its file, and is read whole.
* I2: so has a chunk that a pin names.
* I4: bytes read are those that were written.
* O1: no chunk is without its parent, unless its writer was killed.
* S1: the files never take more than the limit, and puts never count more.
* At the end: the count is that of the files, a match is what can be read, and a clear leaves nothing.
"""

from __future__ import annotations

import gc
import os
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvstore.core.address import block_address
from kvstore.core.executor import Deadline
from kvstore.core.layout import Layout
from kvstore.core.namespace import Namespace
from kvstore.engine.coordination import ClusterMember
from kvstore.engine.host import HostMember
from kvstore.engine.open import join
from kvstore.engine.settings import Limits
from kvstore.errors import KVStoreError
from kvstore.format import places
from kvstore.format.keyset import ChunkKeys
from kvstore.format.places import Name
from kvstore.host.tables import Number, Own, live_tables
from kvstore.meta.memory import MemoryMetadata
from kvstore.root.identity import create_or_open
from kvstore_gc.config import Config
from kvstore_gc.host import opened
from tests.sim.folder import Files, SimRoot
from tests.sim.kernel import Kernel, Process
from tests.sim.profiles import Profile

LAYOUT = Layout(layers=1, kv_heads=1, head_dim=2, dtype="float16", chunk_tokens=2)
NAMESPACES = (Namespace("one", LAYOUT), Namespace("two", LAYOUT))
PROMPTS = ((0, 1, 2, 3), (0, 1, 4, 5))
BLOCK_KEYS = [bytes([number]) * 16 for number in range(3)]
BLOCK_BYTES = 16
FILE_BYTES = 4112
PIN_TTLS_S = (2, 20)
STOPPED_STEPS = 6000
END_STEPS = 150_000


@dataclass(slots=True, eq=False)
class Claim:
    """Somebody was told that these chunks stay, as long as ``is_live()``."""

    rule: str
    names: frozenset[str]
    is_live: Callable[[], bool]


class FolderWorld:
    """Everything of one run."""

    def __init__(self, kernel: Kernel, profile: Profile) -> None:
        self.kernel = kernel
        self.profile = profile
        self.counts: Counter[str] = Counter()
        source = kernel.source
        gc.collect()  # finalizers would make steps, also those of the run before
        gc.disable()
        self.path = tempfile.mkdtemp(prefix="kvsim-", dir="/dev/shm")
        pause, aim = source.choice((0.0, 0.002, 0.02)), source.choice((0.0, 0.05, 0.3))
        self.files = Files(kernel, self.path, self._linked, self._left, pause, aim)
        self.limit_bytes = source.choice((8, 10, 14)) * FILE_BYTES
        self.limits = Limits(io_threads=2, width=2, known_max=64, stall_s=1000.0)
        self.chains = [
            ChunkKeys.of(namespace, np.array([2 * chunk + at for chunk in prompt for at in (0, 1)], "<u4"))
            for namespace in NAMESPACES
            for prompt in PROMPTS
        ]
        self.files.lowered = self._lowered
        self.pins: list[tuple[str, Claim]] = []
        self.winding_up = self.is_ending = self.is_done = False
        self._claims: list[Claim] = []
        self._written: dict[bytes, set[bytes]] = {}
        self._publications = 0
        self._used_bytes = 0
        self._sizes: dict[str, int] = {}
        self._excused: set[str] = set()
        self._parents: dict[str, str] = {}
        self.identity = create_or_open(SimRoot(self.path), self, shard_bits=1)
        for chain, prompt in zip(self.chains, PROMPTS * len(NAMESPACES), strict=True):
            for index, chunk in enumerate(prompt):
                self.files.labels[self.name(chain, index)] = f"{chain.namespace.name}/{chunk}"
                if index:
                    self._parents[self.name(chain, index)] = self.name(chain, index - 1)
        self.works: Mapping[str, float] = profile.work
        if profile.swarms:
            self.works = {
                work: weight
                for work, weight in profile.work.items()
                if work in ("put", "hold") or kernel.random() < 0.6
            }
        # A put of blocks does not keep what it finds: it may write that too.
        self._slack_bytes = 2 * FILE_BYTES if "put_blocks" in self.works else 0
        self._made = 0
        self.programs = [self._program() for _ in range(profile.nodes)]
        self.gatherers = [self._gatherer() for _ in range(profile.collectors)]

    def run(self) -> None:
        """From the first step to the verdict, which the kernel has."""
        kernel = self.kernel
        kernel.run(steps=self.profile.steps, each=self._turn)
        if kernel.over:
            return
        kernel.note("WINDING UP")
        self.winding_up = True
        self.files._pause = self.files._aim = 0.0
        kernel.resume_all()
        kernel.even()
        judge = Process(kernel, "judge")
        kernel.spawn(judge, "main", lambda: self._judge(judge))
        kernel.run(steps=END_STEPS, each=lambda: None, until=lambda: self.is_done)
        if not self.is_done and not kernel.over:
            busy = [f"{program.process.name} {work}" for program in self.programs for work in program.busy]
            kernel.fail(f"L1: not done after {END_STEPS} steps: {busy}")

    def close(self) -> None:
        """Leaves nothing on this machine."""
        self.files.end()
        shutil.rmtree(self.path, ignore_errors=True)
        gc.enable()

    def fresh(self) -> bytes:
        """An id."""
        return self.kernel.source.randbytes(16)

    def choose(self, weights: Mapping[str, float]) -> str:
        """One of the names."""
        return self.kernel.source.choices([*weights], [*weights.values()])[0]

    def weight(self) -> float:
        """Returns how often an actor gets its turn: some are slow."""
        return self.kernel.source.choice((1.0, 1.0, 1.0, 0.3, 0.05))

    # What is written, and where.

    def name(self, chain: ChunkKeys, index: int) -> Name:
        """P(address)."""
        return places.chunk(chain.addresses[index], chain.namespace.id, self.identity.shard_bits)

    def block_name(self, namespace: Namespace, key: bytes) -> Name:
        """The same of a block."""
        return places.chunk(block_address(namespace, key), namespace.id, self.identity.shard_bits)

    def payload(self, address: bytes, size_bytes: int, count: int) -> list[memoryview]:
        """The sections of a chunk as one writer computes them: never twice the same bytes."""
        self._publications += 1
        sections = [struct.pack("<IHH", self._publications, at, 7).ljust(size_bytes, b".") for at in range(count)]
        self._written.setdefault(address, set()).add(b"".join(sections))
        return [memoryview(section) for section in sections]

    def check_bytes(self, address: bytes, content: bytes) -> None:
        """I4."""
        if content not in self._written.get(address, ()):
            self.kernel.fail(f"I4: {content.hex()} was read for {address.hex()}, which nobody wrote")

    def label(self, name: str) -> str:
        """A short name."""
        return self.files.labels.get(name, name)

    def exists(self, name: str) -> bool:
        """True if there is a file of that name."""
        return name in self._sizes

    # The judge.

    def claim(self, rule: str, names: Sequence[str], is_live: Callable[[], bool]) -> Claim:
        """A program was told that these chunks are there and stay."""
        claim = Claim(rule, frozenset(names), is_live)
        self.counts[f"claims of {rule}"] += 1
        for name in names:
            if is_live() and not self.exists(name):
                self.kernel.fail(f"{rule}: {self.label(name)} is promised, and is not there")
        self._claims = [one for one in self._claims if one.is_live()] + [claim]
        self.kernel.happened("held" if rule == "I1" else "pinned")
        return claim

    def _linked(self, name: str) -> None:
        if not name.startswith("chunks/"):
            return
        self._sizes[name] = os.stat(f"{self.path}/{name}").st_size
        self.counts["chunks linked"] += 1
        self.kernel.happened("linked")
        parent = self._parents.get(name)
        if parent is not None and not self.exists(parent) and not self._excused & {name, parent}:
            self.kernel.fail(f"O1: {self.label(name)} was linked without its parent")
        used_bytes = sum(self._sizes.values())
        if used_bytes > self.limit_bytes + self._slack_bytes:
            self.kernel.fail(f"S1: the files take {used_bytes} bytes of {self.limit_bytes}")

    def _left(self, name: str) -> None:
        if self._sizes.pop(name, None) is None:
            return
        self.counts["chunks evicted"] += 1
        self.kernel.happened("deleted")
        for claim in self._claims:
            if name in claim.names and claim.is_live():
                self.kernel.fail(f"{claim.rule}: {self.label(name)} is promised, and was deleted")
        for child, parent in self._parents.items():
            if parent == name and self.exists(child) and child not in self._excused:
                self.kernel.fail(f"O1: {self.label(name)} was deleted before its child {self.label(child)}")

    def _lowered(self, name: str) -> None:
        """A process that was stopped between its look and its renewal took back the renewal of another."""
        self._excused |= {child for child, parent in self._parents.items() if parent == name}

    def _judge(self, process: Process) -> None:
        kernel = self.kernel
        while any(any(program.busy) for program in self.programs) or any(p.member is None for p in self.programs):
            kernel.sleep(0.1)
        self.is_ending = True
        while any(gatherer.is_running for gatherer in self.gatherers):
            kernel.sleep(0.1)
        kernel.sleep(max(PIN_TTLS_S) + 5.0)  # the last pins end
        with opened(f"file://{self.path}", Config(max_bytes=self.limit_bytes), {}) as collector:
            gc.collect()  # what threads that were late have reserved
            reserved = sum(table.numbers[Own.RESERVED] for table in live_tables(self.path, collector._shared))
            if reserved:
                kernel.fail(f"S2: {reserved} bytes are reserved, and nothing is put")
            collector.step()  # it lists the root, and settles what was killed
            used_bytes, shared = sum(self._sizes.values()), collector._shared
            if shared[Number.USED] != used_bytes:
                kernel.fail(f"S2: {shared[Number.USED]} bytes are counted, the files take {used_bytes}")
        for program in self.programs:
            program.check()
        for namespace in NAMESPACES:
            program = kernel.source.choice(self.programs)
            program._member.clear(namespace)
            left = [name for name in self._sizes if namespace.id.hex() in name]
            if left:
                kernel.fail(f"P1: {left} are left of what was cleared")
        for program in self.programs:
            program.check()
            program._member.close()
        self.is_done = True

    # Processes, and what happens to them.

    def _program(self) -> Program:
        self._made += 1
        return Program(self, f"p{self._made}")

    def _gatherer(self) -> Gatherer:
        self._made += 1
        return Gatherer(self, f"g{self._made}")

    def _turn(self) -> None:
        kernel = self.kernel
        if kernel.random() < 0.002:
            kernel.advance(2.0 * kernel.random() ** 3)
        if kernel.random() < self.profile.mishap:
            mishap = self.choose(self.profile.mishaps)
            kernel.note(f"MISHAP {mishap}")
            self.counts[f"mishap: {mishap}"] += 1
            getattr(self, f"_{mishap}")()

    def _kill(self) -> None:
        victim = self.kernel.source.choice(self.programs)
        self._excused |= victim.putting
        # Each of its threads may have linked a file that it did not count yet.
        self._slack_bytes += self.limits.io_threads * FILE_BYTES if victim.putting else 0
        self._killed(victim.process)
        self.programs.remove(victim)
        self.programs.append(self._program())

    def _kill_collector(self) -> None:
        victim = self.kernel.source.choice(self.gatherers)
        self._killed(victim.process)
        self.gatherers.remove(victim)
        self.gatherers.append(self._gatherer())

    def _killed(self, process: Process) -> None:
        self.kernel.kill(process)
        self.files.died(process)

    def _stop(self) -> None:
        """SIGSTOP, often for longer than others wait."""
        processes = [*(one.process for one in self.programs), *(one.process for one in self.gatherers)]
        self.kernel.stop(self.kernel.source.choice(processes), int(STOPPED_STEPS ** self.kernel.random()))

    def _leave(self) -> None:
        victim = self.kernel.source.choice(self.programs)
        victim.is_leaving = victim.member is not None


class Gatherer:
    """A process that collects if no other does."""

    def __init__(self, world: FolderWorld, name: str) -> None:
        self._world = world
        self._kernel = world.kernel
        self.process = Process(world.kernel, name, is_collector=True)
        self.is_running = True
        world.kernel.spawn(self.process, "main", self._main, world.weight())

    def _main(self) -> None:
        world, kernel = self._world, self._kernel
        while not world.is_ending:
            try:
                with opened(
                    f"file://{world.path}", Config(max_bytes=world.limit_bytes), {}, wait_s=3 * kernel.random()
                ) as collector:
                    world.counts["collectors begun"] += 1
                    if kernel.random() < 0.2:
                        collector.once()
                    else:
                        collector.serve(self._is_signalled)
            except KVStoreError as error:
                kernel.note(f"collector: {type(error).__name__}")
            kernel.sleep(0.1)
        self.is_running = False

    def _is_signalled(self, timeout_s: float) -> bool:
        self._kernel.sleep(timeout_s)
        return self._world.is_ending or self._kernel.random() < 0.005


class Program:
    """A process with an embedded store, whose threads use it as engines do."""

    def __init__(self, world: FolderWorld, name: str) -> None:
        self.world = world
        self.kernel = world.kernel
        self.process = Process(world.kernel, name)
        self.member: ClusterMember | None = None
        self.putting: set[str] = set()
        """The chunks of puts under way."""
        self.busy: list[str] = []
        self.is_leaving = False
        self._pace_s = world.kernel.source.choice((0.005, 0.05, 0.5))
        world.kernel.spawn(self.process, "main", self._main, world.weight())

    def _main(self) -> None:
        world = self.world
        while not self.is_leaving:
            self.member = self._opened()
            if self.member is None:
                self.kernel.sleep(0.5)
                continue
            for number in range(world.profile.workers):
                self.busy.append("begins")
                self.kernel.spawn(self.process, f"w{number}", partial(self._work, number), world.weight())
            while self.member is not None and not (self.is_leaving and not any(self.busy)):
                self.kernel.sleep(0.2)
                if world.winding_up:
                    return
            # It closes its store, and opens it again.
            self.member.close()
            self.member, self.busy, self.is_leaving = None, [], False

    def _opened(self) -> ClusterMember | None:
        """Opens the store, as ``open_member`` does; None if the process was stopped for too long."""
        world, root = self.world, SimRoot(self.world.path)
        host, meta = HostMember(root, world.limit_bytes), MemoryMetadata(clock=self.process)
        try:
            return join(root, world.identity, meta, limits=world.limits, clock=self.process, ids=world, host=host)
        except KVStoreError as error:
            self.kernel.note(f"could not open: {type(error).__name__}")
            host.leave()
            return None

    def _work(self, number: int) -> None:
        world, kernel = self.world, self.kernel
        while not (world.winding_up or self.is_leaving):
            kernel.sleep(self._pace_s * kernel.random())
            work = self.busy[number] = world.choose(world.works)
            kernel.note(f"begins {work}")
            try:
                getattr(self, f"_{work}")()
                world.counts[work] += 1
            except KVStoreError as error:
                world.counts[f"{work} raised {type(error).__name__}"] += 1
                kernel.note(f"{work}: {type(error).__name__}")
        self.busy[number] = ""

    # What engines do.

    def _chain(self) -> ChunkKeys:
        chain = self.kernel.source.choice(self.world.chains)
        return chain.leading(1 + self.kernel.source.randrange(len(chain)))

    def _put(self) -> None:
        chain, world = self._chain(), self.world
        names = {world.name(chain, index) for index in range(len(chain))}
        self.putting |= names
        try:
            self._member.node.put(
                chain,
                0,
                lambda index: world.payload(chain.addresses[index], LAYOUT.section_bytes, LAYOUT.section_count),
            )
        finally:
            self.putting -= names

    def _match(self) -> None:
        self._member.node.match(self._chain())

    def _hold(self) -> None:
        world, node, kernel = self.world, self._member.node, self.kernel
        hold, is_held = node.hold(self._chain()), [True]
        names = [world.name(hold.chain, index) for index in range(hold.count)]
        world.claim("I1", names, lambda: is_held[0] and self.process.alive)
        kernel.sleep(kernel.random() * kernel.source.choice((0.01, 0.5, 3.0)))
        excuses = self._excuses()
        if self._read(hold) < hold.count and excuses == self._excuses():
            kernel.fail(f"I1: {self.process.name} reads less than the {hold.count} chunks that it holds")
        is_held[0] = False
        node.holds.release(hold)
        kernel.happened("released")

    def _read(self, hold: Any) -> int:
        buffers = [
            [memoryview(bytearray(LAYOUT.section_bytes)) for _ in range(LAYOUT.section_count)]
            for _ in range(hold.count)
        ]
        count = self._member.node.read(hold, lambda index: buffers[index])
        for index in range(count):
            self.world.check_bytes(hold.chain.addresses[index], b"".join(buffers[index]))
        self.world.counts["chunks read"] += count
        return count

    def _excuses(self) -> int:
        """Grows with each thing by which a read may be cut short although all is there."""
        counts = self._member.node.counters.snapshot()
        return counts["miss_shed"] + counts["miss_deadline"] + counts["miss_unreadable"]

    def _put_blocks(self) -> None:
        namespace, keys = self._blocks()
        payloads = [self.world.payload(block_address(namespace, key), BLOCK_BYTES, 1)[0] for key in keys]
        self._member.node.put_blocks(namespace, keys, payloads)

    def _hold_blocks(self) -> None:
        world, node, kernel = self.world, self._member.node, self.kernel
        namespace, keys = self._blocks()
        hold, there = node.blocks.hold(namespace, keys, None, Deadline(self.process, 5.0))
        keys, is_held = [key for key, found in zip(keys, there, strict=True) if found], [True]
        names = [world.block_name(namespace, key) for key in keys]
        world.claim("I1", names, lambda: is_held[0] and self.process.alive)
        kernel.sleep(kernel.random() * kernel.source.choice((0.01, 0.5)))
        buffers, excuses = [memoryview(bytearray(BLOCK_BYTES)) for _ in keys], self._excuses()
        done = node.blocks.get(namespace, keys, buffers, Deadline(self.process, 10.0), held=True)
        for key, buffer, is_hit in zip(keys, buffers, done, strict=True):
            if is_hit:
                world.check_bytes(block_address(namespace, key), bytes(buffer))
            elif excuses == self._excuses():
                kernel.fail(f"I1: {self.process.name} misses a block that it holds")
        is_held[0] = False
        node.holds.release(hold)
        kernel.happened("released")

    def _blocks(self) -> tuple[Namespace, list[bytes]]:
        return self.kernel.source.choice(NAMESPACES), self.kernel.source.sample(BLOCK_KEYS, 2)

    def _pin(self) -> None:
        world, kernel = self.world, self.kernel
        chain, ttl_s, began_s = self._chain(), kernel.source.choice(PIN_TTLS_S), kernel.now_s
        record = self._member.pin(chain, ttl_s, "owner")
        is_pinned = [True]
        names = [world.name(chain, index) for index in range(record.tokens // LAYOUT.chunk_tokens)]
        kernel.happened("released")
        if names:
            claim = world.claim("I2", names, lambda: is_pinned[0] and kernel.now_s < began_s + ttl_s)
            world.pins.append((record.id, claim))
            claim.is_live.ended = is_pinned  # type: ignore[attr-defined]

    def _unpin(self) -> None:
        if self.world.pins:
            pin, claim = self.world.pins.pop(self.kernel.source.randrange(len(self.world.pins)))
            claim.is_live.ended[0] = False  # type: ignore[attr-defined]
            self._member.unpin(pin)

    def _clear(self) -> None:
        self._member.clear(self.kernel.source.choice(NAMESPACES))

    # At the end.

    def check(self) -> None:
        """A match is what there is, and what can be read."""
        world, node = self.world, self._member.node
        for chain in world.chains:
            there = [world.exists(world.name(chain, index)) for index in range(len(chain))]
            count = (*there, False).index(False)
            if any(there[count:]):
                continue  # an orphan whose writer was killed
            matched = node.match(chain)
            hold = node.hold(chain)
            if not count == matched == hold.count == self._read(hold):
                self.kernel.fail(f"M1: {self.process.name} matches {matched} chunks and holds {hold.count}, of {count}")
            node.holds.release(hold)

    @property
    def _member(self) -> ClusterMember:
        assert self.member is not None
        return self.member
