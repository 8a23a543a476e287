"""The file that all processes of a host map: its numbers, and the log of evicted chunks."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.host import tables as shared_file
from kvstore.host.tables import BATCH_MAX, RING, SHARED, Number, Shared
from tests.kit.host_parts import address, child_of

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
