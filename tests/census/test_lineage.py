"""A writer is recorded before its chunks, whatever happens to its session; chunks without a record are stored too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstore.census.walk import by_writer, sampled, walk
from kvstore.cli.app import app
from kvstore.core.clock import RandomIds
from kvstore.core.recency import NS_PER_S
from kvstore.engine.chunk_store import RETRY_S, Incarnations
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.format import places
from kvstore.format.header import lineage_id, written
from kvstore.format.places import Name
from kvstore.fsck import FindingKind, Options, fsck
from kvstore.fsck.check import WRITER_AGE_S
from kvstore.meta.memory import MemoryStore
from kvstore.root.identity import read_writers
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.root.posix import PosixRoot
from kvstore.version import VERSION
from tests.kit.census import RolledOut, closing
from tests.kit.fake_meta import FakeClock
from tests.kit.faulty_root import EIO, FaultyRoot, Rule


@pytest.fixture
def node(tmp_root: Path) -> Iterator[RolledOut]:
    (tmp_root / "root").mkdir()
    made = RolledOut(PosixRoot(str(tmp_root / "root")), MemoryStore(), "canary")
    with closing(made):
        yield made


def incarnations(root: FaultyRoot, clock: FakeClock, sessions: list[bytes]) -> Incarnations:
    return Incarnations(root, lambda: sessions[0], b"n" * 16, clock, RandomIds(), "canary")


def test_a_chunk_says_which_session_wrote_it_and_when(node: RolledOut) -> None:
    node.put(1)
    node.drain()
    writers = read_writers(node.root)
    for found in node.on_root():
        assert found.header is not None
        said = written(found.header.incarnation)
        assert said is not None and abs(said.written_s - node.node.clock.now_s()) < 60
        writer = writers[said.lineage]
        assert writer.session == node.session.hex() and writer.node == node.node.id.hex()
        assert (writer.label, writer.version) == ("canary", VERSION)
    assert len({found.header.incarnation for found in node.on_root() if found.header}) == 4


def test_who_only_reads_leaves_no_record(tmp_root: Path) -> None:
    files, store = MemoryFiles(), MemoryStore()
    writes, reads = RolledOut(MemoryRoot(files), store, "stable"), RolledOut(MemoryRoot(files), store, "canary")
    with closing(writes, reads):
        writes.put(1)
        writes.drain()
        assert reads.serves(1, writes) == 4
        assert [each.label for each in read_writers(writes.root).values()] == ["stable"]


def test_each_session_has_its_record_once() -> None:
    root, clock, sessions = FaultyRoot(MemoryRoot(MemoryFiles())), FakeClock(), [b"a" * 16]
    mine = incarnations(root, clock, sessions)
    mine.record()
    assert read_writers(root) == {}, "nothing was written"
    for session in (b"a" * 16, b"b" * 16, b"b" * 16):
        sessions[0] = session
        said = written(mine.fresh())
        assert said is not None and said.lineage == lineage_id(session)
        mine.record()
        assert not mine.owes_record
    assert {each.session for each in read_writers(root).values()} == {(b"a" * 16).hex(), (b"b" * 16).hex()}


def test_a_root_that_refuses_the_record_is_asked_again_later() -> None:
    root, clock = FaultyRoot(MemoryRoot(MemoryFiles())), FakeClock()
    mine = incarnations(root, clock, [b"a" * 16])
    root.set_rules([Rule("publish", EIO)])
    mine.fresh()
    mine.record()
    root.set_rules([])
    mine.record()
    assert read_writers(root) == {} and mine.owes_record, "not with every chunk"
    clock.advance(RETRY_S + 1)
    mine.record()
    assert len(read_writers(root)) == 1 and not mine.owes_record


def test_writers_are_told_apart_and_unknown_ones_are_taken_together(node: RolledOut) -> None:
    node.put(1)
    node.drain()
    known, unknown = by_writer(node.on_root(), read_writers(node.root)), by_writer(node.on_root(), {})
    assert [(each.writer.label if each.writer else None, each.chunks_count) for each in known] == [("canary", 4)]
    assert [(each.writer, each.chunks_count, each.first_s) for each in unknown] == [(None, 4, 0)]
    assert known[0].size_bytes == sum(each.size_bytes for each in node.on_root())


def test_ls_shows_who_wrote_what(node: RolledOut, tmp_root: Path) -> None:
    node.put(1)
    node.drain()
    arguments = ["ls", "--lineage", "--root", str(tmp_root / "root")]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    (writer,) = json.loads(done.stdout)["writers"]
    assert (writer["session"], writer["label"], writer["chunks"]) == (node.session.hex(), "canary", 4)
    assert writer["namespaces"] == ["m"] and writer["first_written_s"] <= writer["last_written_s"]
    assert node.session.hex() in CliRunner().invoke(app, arguments).stdout


def test_clear_by_writer_asks_first_and_counts_when_told_to(node: RolledOut, tmp_root: Path) -> None:
    node.put(1)
    node.drain()
    arguments = ["clear", "--written-by", "label=canary", "--root", str(tmp_root / "root"), "--ignore-pins", "--json"]
    assert CliRunner().invoke(app, arguments).exit_code == 2
    counted = json.loads(CliRunner().invoke(app, [*arguments, "--dry-run"]).stdout)
    assert counted["chunks"] == 4 and counted["dry_run"] and len(node.on_root()) == 4
    assert json.loads(CliRunner().invoke(app, [*arguments, "--yes"]).stdout)["chunks"] == 4 and node.on_root() == []
    nobody = CliRunner().invoke(app, ["clear", "--written-by", "label=x", *arguments[3:], "--yes"])
    assert nobody.exit_code == 2 and "canary" in nobody.output


def test_a_walk_counts_what_it_cannot_read_and_goes_on() -> None:
    made = RolledOut(FaultyRoot(MemoryRoot(MemoryFiles())), MemoryStore(), "stable")
    with closing(made):
        for number in range(8):
            made.put(number)
        made.drain()
        root, troubles = made.root, list[KVStoreError]()
        assert isinstance(root, FaultyRoot)
        shard_bits = made.node.identity.shard_bits
        root.set_rules([Rule("look", EIO, times=3)])
        found = list(walk(root, shard_bits, headers=True, trouble=troubles.append))
        assert len(found) == 29 and len(troubles) == 3
        root.inner.stage(places.staged(b"x" * 16, 0), [memoryview(b"no chunk")], stamp_ns=1, durable=False)
        root.inner.publish(places.staged(b"x" * 16, 0), Name("chunks/0000/foreign"), durable=False)
        steps: list[tuple[int, int]] = []
        assert len(list(walk(root, shard_bits, shard_done=lambda *step: steps.append(step)))) == 32
        assert steps[-1] == (256, 256)
        shards = sampled(shard_bits, 0.25)
        assert len(shards) == 64
        assert {*walk(root, shard_bits, share=0.25)} == {*walk(root, shard_bits, shards=shards)}
        with pytest.raises(InvalidRequest, match="share"):
            next(walk(root, shard_bits, share=0))


def test_fsck_knows_the_records_and_removes_old_ones_that_no_chunk_names(node: RolledOut) -> None:
    node.put(1)
    node.drain()
    root, identity = node.root, node.node.identity
    assert fsck(root, identity).counts == {}
    name = places.writer(node.session)
    root.touch(name, int(node.node.clock.now_s() - 2 * WRITER_AGE_S) * NS_PER_S)
    assert fsck(root, identity).counts == {}, "its chunks are there"
    for found in node.on_root():
        root.remove(found.name)
    assert fsck(root, identity, Options(live_sessions={node.session})).counts == {}, "it may write more"
    report = fsck(root, identity, Options(live_sessions=set()))
    assert dict(report.counts) == {FindingKind.OLD_WRITER: 1} and report.is_clean
    repaired = fsck(root, identity, Options(live_sessions=set(), repair=True))
    assert repaired.is_clean and repaired.unrepaired_count == 0 and root.stat(name) is None
