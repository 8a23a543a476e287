"""Hold tables: they grow, reuse what is free, and count as long as their process lives. And the file that all map."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kvstore.core.address import ADDRESS_BYTES
from kvstore.host import tables as shared_file
from kvstore.host.tables import BATCH_MAX, RING, SHARED, SIZE_BYTES_MIN, Number, Own, Shared, live_tables
from tests.kit.host_parts import Parts, address, child_of
from tests.kit.patience import eventually

HOLDING = "table = HoldTable(folder); table.add(b'held' * 4); table.numbers[Own.RESERVED] = 100"


def held(parts: Parts) -> set[bytes]:
    found = set()
    for table in live_tables(str(parts.folder), parts.shared, whole=True):
        found |= {table.held[at : at + ADDRESS_BYTES] for at in range(0, len(table.held), ADDRESS_BYTES)}
    return found - {bytes(ADDRESS_BYTES)}


def test_a_table_that_grows_keeps_its_entries_and_numbers(parts: Parts) -> None:
    parts.table.numbers[Own.MAX_BYTES] = 77
    runs = [parts.table.add(address(number) * 1000) for number in range(1, 10)]
    assert sum(stop - start for start, stop in runs) > 2 * SIZE_BYTES_MIN
    assert held(parts) == {address(number) for number in range(1, 10)}
    (found,) = live_tables(str(parts.folder), parts.shared)
    assert found.numbers[Own.MAX_BYTES] == 77
    for run in runs[:-1]:
        parts.table.remove(run)
    assert held(parts) == {address(9)}


def test_the_table_of_a_killed_process_is_removed(parts: Parts) -> None:
    parts.shared[Number.USED] = 150
    child = child_of(parts.folder, HOLDING)
    assert b"held" * 4 in held(parts) and parts.shared[Number.USED] == 150
    child.kill()
    child.communicate()
    assert held(parts) == set() and len(list((parts.folder / "host/holds").iterdir())) == 1
    assert parts.shared[Number.USED] == 50, "what it had reserved is free again"


def test_a_forked_child_does_not_keep_the_table(parts: Parts) -> None:
    forking = f"""{HOLDING}
import os, time
reading, writing = os.pipe()
pid = os.fork()
if not pid:
    os.write(writing, b"x")  # it runs, so it has closed what it inherited
    time.sleep(3600)
os.read(reading, 1)
open(folder + "/grandchild", "w").write(str(pid))"""
    child = child_of(parts.folder, forking)
    grandchild = int((parts.folder / "grandchild").read_text())
    try:
        assert b"held" * 4 in held(parts)
        child.kill()
        child.wait()
        assert held(parts) == set()
    finally:
        os.kill(grandchild, signal.SIGKILL)
        child.communicate()


def test_a_forked_child_holds_nothing_and_removes_nothing(parts: Parts) -> None:
    run = parts.table.add(address(1))
    pid = os.fork()
    if not pid:
        parts.table.remove(run)
        parts.table.close()
        os._exit(int(parts.table.is_open))
    assert os.waitpid(pid, 0)[1] == 0
    assert held(parts) == {address(1)}


def test_a_table_is_locked_before_it_has_its_name(parts: Parts) -> None:
    """Tables are made all the time while others are read: none is taken for one that was left."""
    making = "import threading\nmade = []\ndef make():\n    for _ in range(200): made.append(HoldTable(folder))"
    child = child_of(parts.folder, f"{making}\nthreading.Thread(target=make).start()")
    eventually(lambda: len(live_tables(str(parts.folder), parts.shared, whole=True)) == 201, "all tables are there")
    child.communicate()


# The file that all processes of a host map: its numbers, and the log of evicted chunks


ADDING = "shared = Shared(folder)\nfor _ in range(20_000): shared.add(Number.USED, 3)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shared_file.make(str(tmp_path), 0)
    return tmp_path


def packed(first: int, count: int) -> bytes:
    return b"".join(address(number) for number in range(first, first + count))


def test_entries_across_the_end_of_the_ring_are_read_back(folder: Path) -> None:
    one, other = Shared(str(folder)), Shared(str(folder))
    at, count = 0, BATCH_MAX - 1
    while at < 2 * RING:
        one.append(packed(at, count))
        assert other[Number.TAIL] == at + count and other.entries(at, at + count) == packed(at, count)
        at += count


@pytest.mark.parametrize("native", ["1", "0"])
def test_additions_of_two_processes_are_all_counted(folder: Path, native: str) -> None:
    children = [child_of(folder, ADDING, KVSTORE_NATIVE=native) for _ in range(2)]
    for child in children:
        child.communicate()
    assert Shared(str(folder))[Number.USED] == 2 * 20_000 * 3


@pytest.mark.parametrize("content", [b"", b"short", bytes(shared_file._BYTES)], ids=["empty", "short", "zeros"])
def test_a_damaged_file_is_not_taken_for_one(folder: Path, content: bytes) -> None:
    assert shared_file.is_made(str(folder))
    (folder / SHARED).write_bytes(content)
    assert not shared_file.is_made(str(folder))
    with pytest.raises(ValueError, match=r"shared (has another size|is another file)"):
        Shared(str(folder))
