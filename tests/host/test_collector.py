"""The collector of a host, without its process: what it evicts, and how it counts."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace

import pytest

from kvstore.core.address import Address
from kvstore.core.recency import NS_PER_S, QUANTUM_S
from kvstore.engine.host import Collecting
from kvstore.errors import KVStoreError
from kvstore.format import places
from kvstore.host.tables import Number, Own, Shared
from kvstore.root.posix import PosixRoot
from kvstore_gc.config import Config, QuotaRule
from kvstore_gc.host import HostCollector, opened
from tests.kit.faulty_root import EIO, FaultyRoot, Rule
from tests.kit.host_parts import CHUNKS, SHARD_BITS, Parts, child_of
from tests.kit.hosts import TICK_S, chunks_count, used_bytes
from tests.kit.patience import eventually
from tests.kit.programs import ended

FILE_BYTES = 6144


def ago(parts: Parts, seconds: float) -> None:
    """Makes all chunks unused for a time."""
    for path in (parts.folder / "chunks").glob("*/*"):
        os.utime(path, ns=(0, path.stat().st_mtime_ns - int(seconds) // QUANTUM_S * QUANTUM_S * NS_PER_S))
    time.sleep(TICK_S)


def counted(parts: Parts) -> int:
    return parts.shared[Number.USED]


def test_the_smallest_limit_and_time_to_live_count(parts: Parts) -> None:
    parts.chain(1)
    parts.table.numbers[Own.MAX_BYTES], parts.table.numbers[Own.TTL_MS] = 1000 * FILE_BYTES, 3_600_000
    parts.collector(Config(max_bytes=5000 * FILE_BYTES, ttl_s=7200)).once()
    assert parts.shared[Number.LIMIT] == 1000 * FILE_BYTES and chunks_count(parts.folder) == CHUNKS
    ago(parts, 5000)
    assert parts.collector().once().count == CHUNKS


def test_a_time_to_live_of_zero_takes_all_that_is_not_used(parts: Parts) -> None:
    chain, view = parts.chain(1), parts.view()
    parts.chain(2)
    ago(parts, 10)
    view.protect(chain.packed_addresses)
    assert parts.collector(Config(ttl_s=0.0)).once().count == CHUNKS and len(parts.files(chain)) == CHUNKS


def test_a_quota_takes_the_oldest_of_its_namespace(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    old = parts.chain(1)
    ago(parts, 5000)
    new = parts.chain(2)
    share = QuotaRule(None, "model", int(5.3 * FILE_BYTES))  # 95 % of it is 5 files
    assert parts.collector(Config(shares=(share,))).once().count == 3
    assert (len(parts.files(old)), len(parts.files(new))) == (1, CHUNKS)
    assert parts.collector(Config(shares=(replace(share, namespace="other"),))).once().count == 0
    rules = [Rule("open", EIO, lambda name: name.startswith("namespaces/"))]
    monkeypatch.setattr(parts.root, "open", FaultyRoot(PosixRoot(parts.folder), rules).open)
    assert parts.collector(Config(max_bytes=1, shares=(share,))).once().count == CHUNKS + 1, "without the quota"


def test_room_is_made_ahead_of_need(parts: Parts) -> None:
    old = parts.chain(1)
    ago(parts, 5000)
    new = parts.chain(2)
    parts.table.numbers[Own.MAX_BYTES] = 8 * FILE_BYTES
    parts.table.numbers[Own.PUT_MAX] = FILE_BYTES
    collector = parts.collector()
    collector.step()  # counts
    collector.step()
    assert counted(parts) == used_bytes(parts.folder) == 6 * FILE_BYTES, "two of the largest put are free"
    assert parts.files(old) == [0, 1] and len(parts.files(new)) == CHUNKS
    collector.step()
    assert counted(parts) == 6 * FILE_BYTES and not parts.shared[Number.FULL]


def test_a_put_that_waits_gets_more_than_the_headroom(parts: Parts) -> None:
    parts.chain(1)
    parts.table.numbers[Own.MAX_BYTES], parts.table.numbers[Own.WAITING] = 4 * FILE_BYTES, 3 * FILE_BYTES
    collector = parts.collector()
    collector.step()
    assert counted(parts) <= FILE_BYTES


def test_held_chunks_make_the_store_full_until_released(parts: Parts) -> None:
    chain, view = parts.chain(1), parts.view()
    run = view.protect(chain.packed_addresses)
    parts.table.numbers[Own.MAX_BYTES] = FILE_BYTES
    collector = parts.collector()

    def is_full() -> bool:
        collector.step()
        return view.is_full

    eventually(is_full, "it finds nothing to evict")
    assert len(parts.files(chain)) == CHUNKS
    view.unprotect(run)
    eventually(lambda: not is_full(), "it finds something")
    assert not parts.files(chain)


@pytest.mark.parametrize("wrong_by, lacks", [(-5000, 0), (5000, 0), (5000, 1)])
def test_a_listing_corrects_the_count(parts: Parts, monkeypatch: pytest.MonkeyPatch, wrong_by: int, lacks: int) -> None:
    parts.chain(1)
    rules = [Rule("list", EIO, lambda name: name.startswith("chunks/"), times=lacks)]
    monkeypatch.setattr(parts.root, "list", FaultyRoot(PosixRoot(parts.folder), rules).list)
    parts.shared[Number.USED] = CHUNKS * FILE_BYTES + wrong_by
    parts.collector().list()
    assert counted(parts) == CHUNKS * FILE_BYTES + lacks * wrong_by, "a shard that cannot be listed is not empty"


def test_a_put_that_comes_and_goes_while_a_listing_begins_is_not_subtracted(parts: Parts) -> None:
    parts.chain(1)
    room = parts.room()

    class Busy(Shared):
        """A put begins before the used bytes are read, and ends after that."""

        def __getitem__(self, place: int) -> int:
            if place != Number.USED:
                return super().__getitem__(place)
            with room.reserve(FILE_BYTES):
                return super().__getitem__(place)

    HostCollector(parts.root, SHARD_BITS, Busy(str(parts.folder)), Config()).list()
    assert counted(parts) == CHUNKS * FILE_BYTES


def test_a_put_that_is_settled_while_a_listing_begins_is_not_subtracted(parts: Parts) -> None:
    parts.chain(1)
    room = parts.room()
    parts.shared.add(Number.USED, -2 * FILE_BYTES)
    long, short = room.reserve(3 * FILE_BYTES), room.reserve(FILE_BYTES)
    room.wrote(2 * FILE_BYTES)  # two of the files are those of the long put

    class Busy(Shared):
        def __getitem__(self, place: int) -> int:
            if place == Number.USED:
                short.release()
            return super().__getitem__(place)

    HostCollector(parts.root, SHARD_BITS, Busy(str(parts.folder)), Config()).list()
    long.release()
    assert counted(parts) == CHUNKS * FILE_BYTES


def test_deletions_during_a_listing_are_subtracted_once(parts: Parts) -> None:
    chains = [parts.chain(prompt) for prompt in range(4)]
    collector, left = parts.collector(), chains.copy()
    collector.list()
    collector.list(listed=lambda: left and parts.evict(left.pop()))
    assert not left and counted(parts) == used_bytes(parts.folder) == 0


def test_writes_during_a_listing_are_counted_at_least_once(parts: Parts) -> None:
    parts.chain(0)
    collector, prompts = parts.collector(), [1, 2, 3]
    collector.list()

    def write() -> None:
        if prompts:
            parts.chain(prompts.pop())

    collector.list(listed=write)
    assert counted(parts) >= used_bytes(parts.folder)
    collector.list()
    assert counted(parts) == used_bytes(parts.folder)


def test_leftovers_of_a_killed_writer_are_removed_after_a_while(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    child = child_of(parts.folder, "table = HoldTable(folder); table.stages_in(b's' * 16)")
    mine = parts.folder / "staging" / (b"s" * 16).hex()
    mine.mkdir(parents=True)
    (mine / "0.part").write_bytes(b"half")
    damaged = parts.folder / places.quarantined(Address(bytes(16)), b"s" * 16, 0)
    obstacle = damaged.with_name("kept")
    obstacle.mkdir(parents=True)  # of a person: it stays, and keeps nothing else
    damaged.write_bytes(bytes(100))
    monkeypatch.setattr(HostCollector, "_age_s", lambda self, name: 100.0)
    collector = parts.collector()
    collector.list()
    assert (mine / "0.part").exists() and damaged.exists() and counted(parts) == 100
    child.kill()
    child.communicate()
    monkeypatch.setattr(HostCollector, "_age_s", lambda self, name: 1.0)
    collector.list()
    assert (mine / "0.part").exists(), "its last put may be about to end"
    monkeypatch.setattr(HostCollector, "_age_s", lambda self, name: 1e9)
    collector.list()
    assert not mine.exists() and not damaged.exists() and obstacle.exists()
    collector.list()
    assert counted(parts) == 0


def test_files_that_cannot_be_opened_are_named(parts: Parts, caplog: pytest.LogCaptureFixture) -> None:
    holds, lock = (parts.folder / "host" / name for name in ("holds/of-root", "collector.lock"))
    holds.symlink_to(parts.folder)
    with pytest.raises(KVStoreError, match=str(holds)):
        parts.collector().step()
    holds.replace(lock)
    assert not Collecting(str(parts.folder))._is_free() and f"could not lock {lock}" in caplog.text


def test_one_round_beside_a_collector_names_its_process(parts: Parts) -> None:
    command = [sys.executable, "-m", "kvstore_gc", "--root", str(parts.folder), "--once"]
    with opened(str(parts.folder), Config(), {}):
        done = ended(*command)
        assert done.returncode == 2 and f"process {os.getpid()} collects it" in done.stderr, done.stderr
    assert ended(*command).returncode == 0
