"""Batches, numbers, replays and the fence: publishers in this process over metadata in memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.client.local import LocalTransport
from kvstore.client.store import Store
from kvstore.core.clock import RandomIds
from kvstore.core.namespace import Namespace
from kvstore.engine.coordination import ClusterMember
from kvstore.errors import Unavailable
from kvstore.events import stream as messages
from kvstore.events.index import PendingDeletions, RootIndex
from kvstore.events.limits import EventLimits
from kvstore.events.publisher import EventPublisher, Fence, PublishScope, Speaker
from kvstore.events.stream import MEDIUM, TERM_BITS, EventBatch, ReplayQuery, TopicLog
from kvstore.format import places
from kvstore.format.keyset import ChunkKeys
from kvstore.format.places import Name
from kvstore.meta.keys import Keys
from kvstore.meta.memory import MemoryMetadata, MemoryStore
from kvstore.meta.store import Compare, Delete, Put, TxnResult
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.root.posix import PosixRoot
from tests.events.subscriber import Index
from tests.kit.clusters import SPACE, Cluster, cluster, prompt, put
from tests.kit.events import TICK_S, Ticking, await_tick
from tests.kit.faulty_root import EACCES, EIO, FaultyRoot, Rule
from tests.kit.stores import TINY

TOPIC = "kv@kvstore@m"


class Publishing:
    """One publisher whose batches go into a list, and to an index."""

    def __init__(self, cluster: Cluster, clock: Ticking, limits: EventLimits | None = None) -> None:
        self.clock = clock
        self.sent: list[tuple[str, EventBatch]] = []
        self.index = Index()
        limits, told = limits or EventLimits(), PublishScope()
        meta, keys = MemoryMetadata(cluster.store), Keys(cluster.identity.root)
        self.truth = RootIndex(
            cluster.root, cluster.identity.shard_bits, PendingDeletions(meta, keys, limits), told.wants, limits, clock
        )
        self.fence = Fence(meta, keys.speaker("kvstore"), limits, clock, RandomIds())
        self.speaker = Speaker(self.truth, self.fence, self._send, told, limits, clock)
        cluster.undo.callback(self.truth.close)

    def catch_up(self) -> None:
        for _ in range(2):
            self.clock.passed_s += 1.0
            self.fence.step()
            self.clock.passed_s += 2.0
            self.speaker.step()
            while self.truth.is_busy:
                self.speaker.step()
        await_tick()

    def _send(self, topic: str, batch: EventBatch) -> None:
        self.sent.append((topic, batch))
        self.index.apply(batch.seq, batch.payload)


def expected(*chains: ChunkKeys) -> dict[int, tuple[int | None, list[int]]]:
    """What an index has of some chains."""
    found: dict[int, tuple[int | None, list[int]]] = {}
    for chain in chains:
        parent: int | None = None
        for at, address in enumerate(chain.addresses):
            each = int.from_bytes(address, "big") & ((1 << 64) - 1)
            found[each] = (parent, chain.tokens[at * TINY.chunk_tokens : (at + 1) * TINY.chunk_tokens].tolist())
            parent = each
    return found


def _stored(node: ClusterMember, *chains: ChunkKeys) -> None:
    for chain in chains:
        put(node, chain)


def test_events_say_hash_parent_and_tokens_of_every_block(clustered: Cluster, clock: Ticking) -> None:
    node, publishing = clustered.node(), Publishing(clustered, clock)
    chains = [prompt(seed, 4) for seed in range(3)]
    _stored(node, *chains)
    publishing.catch_up()
    assert publishing.index.blocks == expected(*chains)
    assert {topic for topic, _ in publishing.sent} == {TOPIC}
    clustered.collector().sweep(clustered.plans(chains[0]))
    publishing.catch_up()
    assert publishing.index.blocks == expected(*chains[1:])


def test_numbers_have_no_gaps_and_begin_above_those_of_earlier_speakers(clustered: Cluster, clock: Ticking) -> None:
    node, first = clustered.node(), Publishing(clustered, clock)
    _stored(node, prompt(1, 4))
    first.catch_up()
    first.fence.close()
    second = Publishing(clustered, clock)
    second.catch_up()
    numbers = [batch.seq for _, batch in first.sent]
    later = [batch.seq for _, batch in second.sent]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert later == list(range(later[0], later[0] + len(later)))
    assert later[0] >> TERM_BITS > numbers[-1] >> TERM_BITS


def test_of_two_publishers_one_speaks_and_the_other_goes_on(clustered: Cluster, clock: Ticking) -> None:
    node, first = clustered.node(), Publishing(clustered, clock)
    first.catch_up()
    second = Publishing(clustered, clock)
    _stored(node, prompt(1, 4))
    first.catch_up()
    while second.truth.is_busy:
        second.speaker.step()
    assert first.speaker.speaks and not second.speaker.speaks
    assert not second.sent
    first.fence.close()
    second.catch_up()
    assert second.index.blocks == expected(prompt(1, 4))
    assert second.index.cleared == 1, "the marker comes first"


def test_a_speaker_that_was_stopped_past_its_lease_says_nothing_more(clustered: Cluster, clock: Ticking) -> None:
    node, publishing = clustered.node(), Publishing(clustered, clock)
    publishing.catch_up()
    _stored(node, prompt(1, 4))
    publishing.catch_up()
    count = len(publishing.sent)
    assert publishing.speaker.speaks
    clock.passed_s += TICK_S  # stopped here; the step below is the first one after it
    publishing.fence._due_s = float("inf")  # and etcd does not answer
    publishing.speaker.step()
    assert len(publishing.sent) == count and not publishing.speaker.speaks


def test_silence_is_broken_by_empty_batches(clustered: Cluster, clock: Ticking) -> None:
    node, publishing = clustered.node(), Publishing(clustered, clock)
    _stored(node, prompt(1, 4))
    publishing.catch_up()
    last = publishing.index.last
    assert last is not None
    clock.passed_s += EventLimits().heartbeat_s
    publishing.speaker.step()
    assert publishing.index.last == last + 1


@pytest.mark.parametrize("kept", [10_000, 2])
def test_a_subscriber_that_missed_batches_gets_them_or_a_snapshot(
    clustered: Cluster, clock: Ticking, kept: int
) -> None:
    limits = EventLimits(replay_batches=kept, batch_blocks=3)
    node, publishing = clustered.node(), Publishing(clustered, clock, limits)
    _stored(node, *(prompt(seed, 5) for seed in range(8)))
    publishing.catch_up()
    missed = Index()
    for _, batch in publishing.sent[:3]:
        missed.apply(batch.seq, batch.payload)
    assert missed.last is not None
    clustered.collector().sweep(clustered.plans(prompt(0, 5)))
    publishing.catch_up()
    for batch in publishing.speaker.replay(TOPIC, missed.last + 1):
        missed.apply(batch.seq, batch.payload)
    assert missed.blocks == publishing.index.blocks == expected(*(prompt(seed, 5) for seed in range(1, 8)))
    assert missed.last == publishing.index.last
    assert missed.cleared == (1 if kept > 2 else 2), "a snapshot begins with the marker"


def test_a_replay_of_another_speakers_numbers_is_a_snapshot() -> None:
    stream = TopicLog(5, EventLimits())
    stream.add(b"")
    first = 5 << TERM_BITS
    assert stream.since(first - 1) is None and stream.since(0) is None
    assert stream.since(first + 2) is None, "numbers that nobody has said yet"
    assert stream.since(first) == [EventBatch(first, b"")]
    assert stream.since(first + 1) == []


def test_topics_keep_tenants_apart() -> None:
    told = PublishScope(pod="p")
    names = [
        told.topic(Namespace.of("m", TINY)),
        told.topic(Namespace.of("m", TINY, tenant="t")),
        told.topic(Namespace.of("m@x", TINY, tenant="t@u")),
    ]
    assert names == ["kv@p@m", "kv@p.t@m", "kv@p.t%40u@m%40x"]


def test_a_lost_reply_of_the_election_is_read_back(clock: Ticking) -> None:
    store = MemoryStore(clock)

    class Losing(MemoryMetadata):
        def txn(
            self, compares: Sequence[Compare], operations: Sequence[Put | Delete], timeout_s: float | None = None
        ) -> TxnResult:
            super().txn(compares, operations, timeout_s)
            raise Unavailable("the reply was lost")

    fence = Fence(Losing(store, clock), "/kv/speaker", EventLimits(), clock, RandomIds())
    fence.step()
    assert fence.term
    other = Fence(MemoryMetadata(store, clock), "/kv/speaker", EventLimits(), clock, RandomIds())
    other.step()
    assert not other.term


def test_long_chains_are_cut_into_batches_that_continue_each_other(clustered: Cluster, clock: Ticking) -> None:
    node, publishing = clustered.node(), Publishing(clustered, clock, EventLimits(batch_blocks=4))
    _stored(node, prompt(1, 11))
    publishing.catch_up()
    assert publishing.index.blocks == expected(prompt(1, 11))
    model = next(iter(publishing.truth.models.values()))
    sizes = [
        sum(len(event["block_hashes"]) for event in events)  # type: ignore[arg-type,misc]
        for events in messages.stored(model.inventory.snapshot(), MEDIUM, 4)
    ]
    assert sizes == [4, 4, 3]


def test_a_root_that_does_not_answer_silences_nobody() -> None:
    faulty = FaultyRoot(MemoryRoot(MemoryFiles()))
    with cluster(faulty) as made:
        node, publishing = made.node(), Publishing(made, Ticking())
        _stored(node, prompt(1, 4))
        publishing.catch_up()
        told, last = dict(publishing.index.blocks), publishing.index.last or 0
        faulty.set_rules([Rule("list", EIO)])
        publishing.clock.passed_s += EventLimits().heartbeat_s
        publishing.speaker.step()
        assert publishing.speaker.fails
        assert publishing.index.blocks == told and publishing.index.last == last + 1
        faulty.set_rules([])
        publishing.speaker.step()
        assert not publishing.speaker.fails


CHAINS = [prompt(seed, 1) for seed in range(24)]
"""Prompts of one chunk, in all shards."""


def _filled(made: Cluster, limits: EventLimits | None = None) -> Publishing:
    """A publisher of a root with ``CHAINS``, whose node has left."""
    node = made.node()
    _stored(node, *CHAINS)
    node.close()
    return Publishing(made, Ticking(), limits)


def _apart_from_shard_0(made: Cluster) -> list[ChunkKeys]:
    return [chain for chain in CHAINS if places.shard(chain.addresses[0], made.identity.shard_bits)]


def _steps(publishing: Publishing, passed_s: float = 0.0) -> None:
    """Lets time pass, and steps until there is no more to do, however much that fails."""
    for _ in range(int(passed_s)):
        publishing.clock.passed_s += 1.0
        publishing.fence.step()
    for _ in range(100):
        publishing.speaker.step()
    assert not publishing.truth.is_busy, "what cannot be read rests"


def test_folders_and_files_that_cannot_be_read_rest_and_hold_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    faulty = FaultyRoot(MemoryRoot(MemoryFiles()))
    with cluster(faulty) as made:
        publishing, names = _filled(made), tuple(made.name(chain.addresses[0]) for chain in CHAINS)
        readable = _apart_from_shard_0(made)
        last = names[CHAINS.index(readable[-1])]
        bad = (places.shard_folder(0), last)
        faulty.set_rules([Rule(each, EACCES, lambda name: name.startswith(bad)) for each in ("list", "look")])
        looked = faulty.calls["look"]
        caplog.set_level(logging.WARNING)
        _steps(publishing)
        assert publishing.index.blocks == expected(*readable[:-1])
        assert faulty.calls["look"] - looked == len(readable), "each was tried once"
        for passed_s, logged in ((EventLimits().retry_s, 1), (60.0, 2)):
            _steps(publishing, passed_s)
            assert sum("events.failed" in each.message for each in caplog.records) == logged
        faulty.set_rules([])
        _steps(publishing, EventLimits().retry_s)
        assert publishing.index.blocks == expected(*CHAINS)


def test_a_folder_that_is_no_folder_of_the_root_holds_up_no_other(tmp_root: Path) -> None:
    with cluster(PosixRoot(str(tmp_root))) as made:
        publishing, folder = _filled(made), tmp_root / places.shard_folder(0)
        folder.rename(folder.with_name("elsewhere"))
        folder.symlink_to("elsewhere")
        _steps(publishing)
        assert publishing.index.blocks == expected(*_apart_from_shard_0(made))


@pytest.mark.parametrize("is_shown", [True, False])
def test_a_record_that_shows_late_holds_up_no_other_and_brings_its_whole_namespace(is_shown: bool) -> None:
    faulty, record = FaultyRoot(MemoryRoot(MemoryFiles())), places.namespace_record(SPACE.digest)
    hidden, tokens = Name(f"{places.NAMESPACES}/hidden"), np.arange(4, dtype=np.uint32)
    with cluster(faulty) as made:
        other = Store(LocalTransport(made.node())).namespace("other", TINY)
        other.put(tokens, np.zeros(TINY.shape(4), np.int8))
        publishing = _filled(made)
        if is_shown:
            faulty.set_rules([Rule("open", EACCES, record.__eq__)])
        else:
            assert faulty.move(record, hidden)
        _steps(publishing)
        assert {topic for topic, _ in publishing.sent} == {"kv@kvstore@other"}
        faulty.set_rules([])
        assert is_shown or faulty.move(hidden, record)
        _steps(publishing, EventLimits().retry_s)
        assert expected(*CHAINS).items() <= publishing.index.blocks.items()


def test_replays_take_turns_with_a_step_after_each(clustered: Cluster) -> None:
    limits, said = EventLimits(batch_blocks=1), list[str]()
    publishing = _filled(clustered, limits)
    publishing.catch_up()
    asking = [ReplayQuery(bytes([number]), 0, None) for number in range(3)]
    step = publishing.speaker.step

    def reply(client: bytes, batches: Sequence[EventBatch]) -> int:
        said.append(f"replay {client[0]}")
        return len(batches)

    def noted() -> None:
        said.append("step")
        step()

    clients: Any = SimpleNamespace(publish="", replay="", reply=reply)
    clients.requests = lambda wait_s: [asking.pop(0) for _ in range(len(asking))]
    publisher = EventPublisher(publishing.truth, publishing.speaker, clients, "", limits, publishing.clock)
    publishing.speaker.step = noted  # type: ignore[method-assign]
    for _ in range(6):
        publisher.step()
    assert said == ["replay 0", "step", "replay 1", "step", "replay 2", "step"] * 2


def test_a_long_snapshot_keeps_the_lease(clustered: Cluster) -> None:
    publishing = _filled(clustered, EventLimits(batch_blocks=1))
    publishing.catch_up()
    for _ in publishing.speaker.replay(TOPIC, 0):
        publishing.clock.passed_s += 1.0
    assert publishing.speaker.speaks
