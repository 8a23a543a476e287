"""One run: a root, an etcd, nodes and collectors, a saboteur, and the end at which everything must be tidy."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from kvstore.core.address import block_address
from kvstore.core.layout import Layout
from kvstore.core.namespace import Namespace
from kvstore.engine.settings import Limits
from kvstore.errors import KVStoreError
from kvstore.format import places
from kvstore.format.header import FIXED_BYTES, Generation, incarnation_at
from kvstore.format.keyset import ChunkKeys
from kvstore.format.places import Name
from kvstore.meta.cluster import Agreed, join_generation
from kvstore.meta.keys import PARTS, Keys
from kvstore.meta.memory import MemoryMetadata
from kvstore.meta.store import Put
from kvstore.meta.sweeps import Condemned
from kvstore.meta.usage import Capacity
from kvstore.root.fences import list_twins
from kvstore.root.identity import RootId, RootIdentity, publish, read_newest
from kvstore.root.memory import MemoryFile, MemoryRoot
from kvstore_gc.deletion import read_victims
from kvstore_gc.site import Timings
from tests.kit.object_root import MemoryObjectRoot
from tests.sim.collector import Collector
from tests.sim.faults import Faults, Rates
from tests.sim.host import Host
from tests.sim.kernel import Effect, Kernel, Process
from tests.sim.metadata import SimStore
from tests.sim.oracle import Oracle
from tests.sim.profiles import Profile
from tests.sim.shared_root import SimFiles
from tests.sim.threads import NowClock

LAYOUT = Layout(layers=1, kv_heads=1, head_dim=2, dtype="float16", chunk_tokens=2)
NAMESPACE = Namespace("model", LAYOUT)
ROOT = RootId(bytes(range(16)))
BLOCK_KEYS = [bytes([number]) * 16 for number in range(3)]
COARSE_S = 4.5
WIND_UP_STEPS = 30_000
ROUNDS_MAX = 25

TIMINGS = Timings(
    staging_age_s=40.0,
    plan_age_s=40.0,
    quarantine_age_s=40.0,
    twin_margin_s=10.0,
)


class SimIds:
    """Ids from the seed."""

    def __init__(self, kernel: Kernel) -> None:
        self._source = kernel.source

    def fresh(self) -> bytes:
        return self._source.randbytes(16)


class World:
    """Everything of one run."""

    wind_up_steps = WIND_UP_STEPS

    def __init__(self, kernel: Kernel, profile: Profile) -> None:
        self.kernel = kernel
        source = kernel.source
        self.profile = profile
        self.keys = Keys(ROOT)
        self.ids = SimIds(kernel)
        self.oracle = Oracle(kernel, self.keys)
        self.faults = Faults(kernel, replace(profile.rates))
        self.identity = RootIdentity(ROOT, 1, profile.shard_bits)
        self.namespace = NAMESPACE
        self.block_bytes = 16
        self.root = (MemoryObjectRoot if profile.objects else MemoryRoot)(SimFiles(self.oracle))
        self.store = self._make_store()
        self.oracle.read_plan = self._plan_of
        self.pace_s = source.choice((0.1, 0.3, 1.0))
        self.limits = Limits(
            io_threads=2,
            width=2,
            known_max=64,
            quantum_s=source.choice((5, 30)),
            hold_max_s=profile.hold_max_s,
            announce_s=0.05,
            announce_lag_max_s=profile.hold_max_s + 10.0,
            follow_s=source.choice((0.1, 0.3)),
            gap_check_s=source.choice((1.0, 4.0)),
            stall_s=profile.stall_s,
            read_deadline_s=10.0,
            match_deadline_s=source.choice((5.0, 60.0)),
        )
        # One ttl and some delay of the watch after a node has given up by itself (rule H4).
        lag_max_s = self.limits.announce_lag_max_s + 40.0
        self.timings = replace(
            TIMINGS, poll_s_min=source.choice((0.1, 0.5)), announce_lag_max_s=lag_max_s, grace_max_s=lag_max_s + 20.0
        )
        self.winding_up = False
        self.is_done = False
        self._chains = chains(profile.shard_bits, profile.prompts, profile.chunks)
        self._written: dict[bytes, set[bytes]] = {}
        self._publications = 0
        self._made = 0
        self._saved: Any = None
        self._restore_at: int | None = None
        self._restore_upon: list[str] = []
        self._relapses_left = profile.relapse.times
        self._spoiled: dict[Name, MemoryFile] = {}
        kernel.heard = self._heard
        self._work: Mapping[str, float] = profile.work
        self._mishaps: Mapping[str, float] = profile.mishaps
        if profile.swarms:
            self._work = self._some(profile.work, keeps=("put", "hold"))
            self._mishaps = self._some(profile.mishaps)
        self._first_generation()
        self._hosts_ever: list[Host] = []
        self.hosts = [self._host() for _ in range(profile.nodes)]
        self._strangers = [self._host(self._other_cluster()) for _ in range(profile.strangers)]
        self.collectors = [self._collector() for _ in range(profile.collectors)]

    def close(self) -> None:
        """Leaves nothing on this machine."""

    def run(self) -> None:
        """From the first step to the verdict, which the kernel has."""
        self.kernel.run(steps=self.profile.steps, each=self._turn)
        if not self.kernel.over:
            self._wind_up()

    # What those who run in it ask.

    @property
    def _members(self) -> list[Host | Collector]:
        return [*self.hosts, *self.collectors]

    def choose(self, weights: Mapping[str, float]) -> str:
        """One of the names."""
        at = self.kernel.random() * sum(weights.values())
        for name, weight in weights.items():
            at -= weight
            if at < 0:
                return name
        return next(iter(weights))

    def work(self) -> str:
        """Chooses the next action of a worker."""
        return self.choose(self._work)

    def _some(self, weights: Mapping[str, float], keeps: Sequence[str] = ()) -> Mapping[str, float]:
        """Returns a random part of a profile's choices."""
        left = {name: weight for name, weight in weights.items() if name in keeps or self.kernel.random() < 0.6}
        return left or weights

    def weight(self) -> float:
        """Returns how often an actor gets its turn: some are very slow."""
        return self.kernel.source.choice((1.0, 1.0, 1.0, 1.0, 0.3, 0.05))

    def count(self, what: str, times: int = 1) -> None:
        """For the summary."""
        self.faults.count(what, times)

    def raised(self, work: str, error: KVStoreError) -> None:
        """A node's action failed."""
        self.count(f"{work} raised {type(error).__name__}")

    def chain(self) -> ChunkKeys:
        """A prompt, or the beginning of one."""
        chain = self.kernel.source.choice(self._chains)
        return chain.leading(1 + self.kernel.source.randrange(len(chain)))

    def whole_chain(self) -> ChunkKeys:
        """The first prompt."""
        return self._chains[0]

    def payload(self, chain: ChunkKeys, index: int) -> list[memoryview]:
        """The sections of a chunk as one writer computes them: never twice the same bytes."""
        return self._payload(chain.addresses[index], LAYOUT.section_bytes, LAYOUT.section_count)

    def buffer(self) -> list[memoryview]:
        """Returns the memory to read a chunk into."""
        return [memoryview(bytearray(LAYOUT.section_bytes)) for _ in range(LAYOUT.section_count)]

    def check_read(self, chain: ChunkKeys, index: int, sections: list[memoryview]) -> None:
        """I4 of a chunk."""
        self._check_bytes(chain.addresses[index], b"".join(sections))

    def block_keys(self) -> list[bytes]:
        """Some engine's block hashes."""
        return self.kernel.source.sample(BLOCK_KEYS, 2)

    def block_payload(self, key: bytes) -> list[memoryview]:
        """A block's bytes."""
        return self._payload(block_address(NAMESPACE, key), self.block_bytes, 1)

    def check_block(self, key: bytes, content: bytes) -> None:
        """I4 of a block."""
        self._check_bytes(block_address(NAMESPACE, key), content)

    def _payload(self, address: bytes, size_bytes: int, count: int) -> list[memoryview]:
        self._publications += 1
        sections = [struct.pack("<IHH", self._publications, at, 7).ljust(size_bytes, b".") for at in range(count)]
        self._written.setdefault(address, set()).add(b"".join(sections))
        return [memoryview(section) for section in sections]

    def _check_bytes(self, address: bytes, content: bytes) -> None:
        if content not in self._written.get(address, ()):
            self.kernel.fail(f"I4: {content.hex()} was read for {address.hex()}, which nobody wrote")

    # Setting up.

    def _make_store(self) -> SimStore:
        return SimStore(NowClock(), self._was_put, lambda: self.kernel.happened("closed"))

    def _first_generation(self) -> None:
        clock = Process(self.kernel, "first")
        standing = join_generation(
            MemoryMetadata(self.store),
            self.keys,
            self.ids,
            read_root=lambda: read_newest(self.root),
            publish_root=lambda mine: publish(self.root, mine, ids=self.ids, clock=clock),
        )
        assert isinstance(standing, Agreed)

    def _other_cluster(self) -> SimStore:
        """An etcd that is not this root's: a new one, or one whose root this once was."""
        store = SimStore(NowClock(), lambda put: None, lambda: None)
        if self.kernel.random() < 0.5:
            store.txn((), (Put(self.keys.generation, Generation(1, self.ids.fresh()).to_json()),))
        return store

    def _host(self, store: SimStore | None = None) -> Host:
        self._made += 1
        host = Host(self, f"n{self._made}", self.profile.workers, store or self.store)
        self._hosts_ever.append(host)
        return host

    def _collector(self) -> Collector:
        self._made += 1
        return Collector(self, f"g{self._made}", threads=self.kernel.random() < 0.3).start()

    def _was_put(self, put: Put) -> None:
        if self.keys.parse_condemned(put.key) is not None:
            self.oracle.condemned(Condemned.from_bytes(put.value))

    def _plan_of(self, record: Condemned) -> list[bytes]:
        victims = read_victims(self.root, record.sweep, record.plan_checksum)
        return [one.incarnation for one in victims or ()]

    # The saboteur.

    def _turn(self) -> None:
        kernel = self.kernel
        if kernel.random() < 0.02:
            kernel.advance(3.0 * kernel.random() ** 3)
        while self.faults.doomed:
            self._end(self.faults.doomed.pop())
        if self._restore_at is not None and kernel.steps >= self._restore_at:
            self._restore_at = None
            kernel.note("MISHAP restore")
            self.count("mishap: restore")
            self._restore()
        if kernel.random() < self.profile.mishap and self._mishaps:
            mishap = self.choose(self._mishaps)
            if getattr(self, f"_{mishap}")() is not False:
                kernel.note(f"MISHAP {mishap}")
                self.count(f"mishap: {mishap}")

    def _end(self, process: Process) -> None:
        """Ends a process that died at a call, or has stopped in order."""
        self.kernel.note(f"MISHAP {process.name} ends")
        for one in self._members:
            if one.process is process:
                self.count("processes that died at a call")
                self._replace(one)
                return
        self._killed(process)

    def _killed(self, process: Process) -> list[Effect]:
        """Kills a process; returns its calls on their way."""
        return self.kernel.kill(process)

    def _kill(self) -> None:
        victims: list[Host | Collector] = [*self.hosts, *self.collectors]
        self._replace(self.kernel.source.choice(victims))

    def _replace(self, victim: Host | Collector) -> None:
        self._bury(victim)
        if isinstance(victim, Host):
            self.hosts.append(self._host())
        else:
            self.collectors.append(self._collector())

    @property
    def counts(self) -> Counter[str]:
        """Returns the counts of events, for the summary."""
        counts = Counter(self.faults.counts) + self.oracle.counts
        for host in self._hosts_ever:
            if host.member is not None:
                for name, times in host.member.node.counters.snapshot().items():
                    counts[f"node: {name}"] += times
        return +counts

    def _bury(self, victim: Host | Collector) -> None:
        effects = self._killed(victim.process)
        self.faults.late += [effect for effect in effects if self.kernel.random() < 0.5]
        if isinstance(victim, Host):
            self.hosts.remove(victim)
        else:
            self.collectors.remove(victim)

    def _stop(self) -> None:
        processes = [one.process for one in self._members]
        self.kernel.stop(self.kernel.source.choice(processes), int(600 ** self.kernel.random()))

    def _leave(self) -> None:
        host = self.kernel.source.choice(self.hosts)
        host.leave()
        self.hosts.remove(host)
        self.hosts.append(self._host())

    def _land(self) -> bool:
        late = self.faults.late
        if late:
            self.faults.land(self.kernel.source.randrange(len(late)))
        return bool(late)

    def _cut_watches(self) -> bool:
        watches = self.store.watches
        if watches:
            self.kernel.source.choice(watches).cut()
        return bool(watches)

    def _compact(self) -> None:
        self.store.compact(self.store._revision)
        self.store.stir()

    def _expire(self) -> None:
        self.kernel.advance(self.kernel.source.choice((6.0, 16.0, 40.0)))

    def _etcd_down(self) -> None:
        self.faults.meta_down_until_s = self.kernel.now_s + 20 * self.kernel.random()

    def _full(self) -> None:
        """Makes the root look full, or so nearly full that each node must report its writes."""
        lease = self.store.grant(1 + self.kernel.source.randrange(4))
        is_full, credit_bytes = self.kernel.source.random() < 0.5, 1 << self.kernel.source.randrange(16)
        capacity = Capacity(self.store._revision, credit_bytes=credit_bytes, is_full=is_full)
        self.store.txn((), (Put(self.keys.gc_capacity, capacity.to_json(), lease),))

    @property
    def _may_relapse(self) -> bool:
        """True if a restore may be planned: none is yet, and there were not enough of them."""
        return self._relapses_left > 0 and self._restore_at is None and not self._restore_upon

    def _heard(self, what: str) -> None:
        """Something happened that rules are about: the moment for a mishap that is aimed at it."""
        if self.winding_up:
            return
        if what == "condemned":
            self.faults.takes = 0
        relapse, kernel = self.profile.relapse, self.kernel
        if self._restore_upon and what == self._restore_upon[0]:
            self._restore_upon.pop(0)
            if not self._restore_upon:
                self._restore_at = kernel.steps + int(relapse.steps * kernel.random())
        elif what in relapse.to and self._may_relapse and self.faults.strikes(relapse.likely):
            self._relapses_left -= 1
            self._snapshot()
            self._restore_upon = kernel.source.choice(relapse.at).split(">")
        if what in ("condemned", "closed") and self.faults.strikes(self.profile.cuts):
            self.count("mishap: cut_watches")
            for watch in list(self.store.watches):
                watch.cut()

    def _snapshot(self) -> None:
        self._saved = self.store.snapshot()

    def _restore(self) -> bool:
        if self._saved is None:
            return False
        relapse = self.profile.relapse
        lost = self.store.restore(self._saved, bump=self.faults.strikes(relapse.bump))
        if self.faults.strikes(relapse.cut):
            for watch in list(self.store.watches):
                watch.cut()
        if self.faults.strikes(relapse.spoils):
            self._spoil(lost)
        self.kernel.happened("restored")
        self.kernel.advance(self.kernel.source.choice((0.0, 0.0, 2.0, 6.0)))  # nodes look after their sessions
        sessions = {self.keys.parse_session(key) for key in lost}
        self.oracle.void_sessions |= {session for session in sessions if session is not None}
        self.oracle.restored = True
        self.count("sessions lost by a restore", len(sessions - {None}))
        self._mishaps = {name: weight for name, weight in self._mishaps.items() if name not in ("snapshot", "restore")}
        return True

    def _spoil(self, keys: Iterable[str]) -> None:
        """The twins of some pins become unreadable; an operator writes them again in the end (deploy/RUNBOOK.md)."""
        lost = {key.rpartition("/")[2] for key in keys if key.startswith(self.keys.refs)}
        for name in list(list_twins(self.root)):
            file = self.root.files.find(name)
            if file is not None and name.rpartition("/")[2] in lost:
                self._spoiled[name] = file
                self.root.files.write(name, MemoryFile(file.content[:20], file.mtime_ns))
                self.count("twins spoiled")

    def _garble(self) -> bool:
        """A session's record that collectors cannot understand, such as of a later version."""
        sessions = self.store.keys_under(self.keys.sessions)
        if not sessions:
            return False
        found = self.store.get(self.kernel.source.choice(sessions))
        assert found is not None
        self.store.txn((), (Put(found.key, b"KVSESS2 " + found.value, found.lease),))
        return True

    def _damage(self) -> bool:
        if not self.oracle.names:
            return False
        name = Name(self.kernel.source.choice(self.oracle.names))
        file = self.root.files.find(name)
        assert file is not None
        self.oracle.damages(name, incarnation_at(file.content))
        if self.kernel.random() < 0.3 or len(file.content) <= FIXED_BYTES:
            content = file.content[: int(self.kernel.random() * len(file.content))]
        else:
            # The payload is small next to the header, and it must be damaged as often.
            start = FIXED_BYTES if self.kernel.random() < 0.5 else len(file.content) - LAYOUT.chunk_bytes
            at = self.kernel.source.randrange(start, len(file.content))
            content = file.content[:at] + bytes([file.content[at] ^ 0xFF]) + file.content[at + 1 :]
        self.root.files.write(name, MemoryFile(content, file.mtime_ns))
        return True

    # The end.

    def _wind_up(self) -> None:
        """Stops the faults; survivors go on; a fresh collector has to leave nothing behind (I5)."""
        kernel = self.kernel
        kernel.note("WINDING UP")
        self.winding_up = True
        self._restore_at = None
        for name, file in self._spoiled.items():
            if self.root.files.find(name) is not None:
                self.root.files.write(name, file)
        self.faults.rates = Rates()
        self.faults.meta_down_until_s = 0.0
        while self.faults.late:
            if kernel.random() < 0.5:
                self.faults.land(0)
            else:
                self.faults.late.pop(0)
        for host in self._strangers:
            self._killed(host.process)
        if kernel.random() < 0.4:
            for host in list(self.hosts):
                self._bury(host)
        if kernel.random() < 0.5:
            for collector in list(self.collectors):
                self._bury(collector)
        self.faults.late.clear()
        kernel.resume_all()
        kernel.even()
        kernel.coarse_s = COARSE_S
        janitor = Collector(self, "janitor", threads=False)
        kernel.spawn(janitor.process, "main", lambda: self._tidy(janitor))
        kernel.run(steps=self.wind_up_steps, each=lambda: None, until=lambda: self.is_done)
        if not self.is_done:
            kernel.fail(f"I5: not tidy after {self.wind_up_steps} steps: {self._untidy()}")

    def _tidy(self, janitor: Collector) -> None:
        kernel = self.kernel
        kernel.sleep(70.0)  # the last pins end
        for number in range(ROUNDS_MAX):
            self._try(janitor.sweeper.adopt)
            self._try(janitor.sweeper.lift_unnamed)
            self._try(janitor.remove_orphans)
            if number > 1:
                self._try(lambda: janitor.sweeper.sweep([janitor.plan(part, 1.0) for part in range(PARTS)]))
            if not self._untidy() and not self.oracle.names:
                break
            kernel.sleep(20.0)
        else:
            kernel.fail(f"I5: {self._untidy()} {self.oracle.names} after {ROUNDS_MAX} rounds")
        for host in self.hosts:
            host.prove_well()
        kernel.sleep(1.0)
        while any(not host.is_proven for host in self.hosts):
            kernel.sleep(2.0)
        self.is_done = True

    def _try(self, work: Callable[[], object]) -> bool:
        try:
            work()
        except KVStoreError as error:
            self.kernel.note(f"janitor: {error}")
            return False
        return True

    def _untidy(self) -> list[str]:
        """Returns what should not exist once everything has calmed down."""
        live = {key.rpartition("/")[2] for key in self.store.keys_under(self.keys.sessions)}
        left = [f"key {key}" for key in self.store.keys_under(self.keys.condemned)]
        for folder in (places.TRASH, places.PLANS, places.QUARANTINE, places.PINS):
            left += [
                f"{folder}/{entry.name}"
                for entry in self.root.list(folder)
                if folder != places.PINS or self._has(entry.name)
            ]
        left += [f"staging/{entry.name}" for entry in self.root.list(places.STAGING) if entry.name not in live]
        return left

    def _has(self, owner: str) -> bool:
        return any(True for _ in self.root.list(Name(f"{places.PINS}/{owner}")))


@lru_cache
def chains(shard_bits: int, prompts: int, chunks: int) -> tuple[ChunkKeys, ...]:
    """Prompts whose first chunks are spread over the shards."""
    found: list[ChunkKeys] = []
    number = 0
    while len(found) < prompts:
        tokens = np.arange(number, number + chunks * LAYOUT.chunk_tokens, dtype="<u4")
        chain = ChunkKeys.of(NAMESPACE, tokens)
        if places.shard(chain.addresses[0], shard_bits) == len(found) % (1 << shard_bits):
            found.append(chain)
        number += 1
    return tuple(found)
