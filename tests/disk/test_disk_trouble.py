"""The local disk tier with damaged files and a disk that fails, hangs or is full: each error is a miss."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.tiers import disk as disk_tier
from tests.kit.disks import CHUNKS, FILE_BYTES, IMAGE_BYTES, MIB, Disk, chain_of, disk_on, files_under
from tests.kit.faulty_root import EIO, ENOSPC, Hang, Rule
from tests.kit.patience import PATIENCE_S, eventually, returns


@pytest.mark.parametrize("size", [None, 0, 100, IMAGE_BYTES - 1, IMAGE_BYTES + 1])
def test_a_missing_or_short_file_is_a_miss_and_forgotten(disk: Disk, size: int | None) -> None:
    chain = chain_of()
    disk.add(chain, 0, 1)
    file = next(file for file in files_under(disk.path) if file.name.startswith(chain.addresses[0].hex()))
    if size is None:
        file.unlink()
    else:
        os.truncate(file, size)
    assert disk.fetch(chain, 0) == [None]
    assert disk.tier.leading(chain, 0) == 0 and disk.tier.stats()["disk_held_bytes"] == FILE_BYTES
    assert disk.add(chain, 0) == [True] and disk.has(chain, 0, 1)


def test_a_file_that_cannot_be_read_is_a_miss_and_dropped(disk: Disk) -> None:
    chain = chain_of()
    disk.add(chain, 0, 1)
    disk.rules(Rule("read", EIO, lambda name: chain.addresses[0].hex() in name))
    assert disk.fetch(chain, 0) == [None] and disk.has(chain, 1)
    assert disk.count("disk_failed") == 1
    assert disk.tier.leading(chain, 0) == 0 and len(files_under(disk.path)) == 1


def test_a_dead_disk_is_left_alone_for_a_while(disk: Disk) -> None:
    chain = chain_of()
    disk.add(chain, *range(CHUNKS))
    disk.rules(*(Rule(operation, EIO) for operation in ("open", "stat", "stage", "remove")))
    disk.fetch(chain, *range(disk_tier.FAILURES_MAX))
    for index in range(4, 9):
        disk.add(chain_of(1), index)
    assert disk.root is not None
    before = sum(disk.root.calls.values())
    assert disk.tier.leading(chain, 6) == 0
    assert disk.fetch(chain, 6, 7) == [None, None] and disk.add(chain_of(1), 0) == [False]
    assert sum(disk.root.calls.values()) == before, "nothing is asked of it"
    disk.rules()
    disk.clock.advance(disk_tier.PAUSE_S + 1)
    assert disk.tier.leading(chain, 6) == CHUNKS - 6 and disk.has(chain, 6, 7)
    assert disk.add(chain_of(1), 0) == [True]
    assert disk.tier.stats()["disk_held_bytes"] >= len(files_under(disk.path)) * FILE_BYTES


def test_what_cannot_be_removed_keeps_its_room(folder: Path) -> None:
    chain = chain_of(chunks=3)
    with disk_on(folder, 3) as disk:
        disk.add(chain, 0, 1, 2)
        disk.rules(Rule("remove", EIO))
        assert disk.add(chain_of(1), 0) == [False]
        assert disk.tier.stats()["disk_held_bytes"] == 3 * FILE_BYTES and len(files_under(folder)) == 3
        disk.rules()
        assert disk.add(chain_of(1), 0) == [True]
        assert disk.tier.leading(chain, 0) == 1 and len(files_under(folder)) == 3


def test_a_full_disk_is_counted_and_turns_over_in_the_room_there_is(disk: Disk) -> None:
    chain, new = chain_of(), chain_of(1)
    disk.add(chain, 0, 1)
    disk.clock.advance(100)
    disk.rules(Rule("stage", ENOSPC, times=1))
    assert disk.add(new, 0) == [True], "at the cost of one of its own"
    assert disk.tier.leading(chain, 0) == 1 and disk.count("disk_evicted") == 1
    disk.rules(Rule("stage", ENOSPC))
    for index in range(1, 4):
        assert disk.add(new, index) == [False]
    assert disk.count("disk_failed") == 3
    assert disk.tier.stats()["disk_held_bytes"] == len(files_under(disk.path)) * FILE_BYTES


def test_a_disk_that_hangs_takes_half_of_the_lanes_at_most_and_nobody_asks_it_again(disk: Disk) -> None:
    chain = chain_of()
    disk.add(chain, *range(CHUNKS))
    hang = Hang()
    disk.rules(Rule("read", hang))
    threads = [threading.Thread(target=disk.fetch, args=(chain, at)) for at in range(disk_tier.READERS_MAX)]
    for thread in threads:
        thread.start()
    try:
        root = disk.root
        assert root is not None
        eventually(lambda: root.calls["read"] >= disk_tier.READERS_MAX)
        assert returns(lambda: disk.fetch(chain, 9)) == [None], "one more is not let in"
        assert disk.tier.leading(chain, 0) == CHUNKS
        disk.clock.advance(disk_tier.STALL_S + 0.1)
        assert disk.tier.leading(chain, 0) == 0, "it hangs: nobody hopes for it"
        assert returns(lambda: disk.fetch(chain, 9)) == [None]
    finally:
        hang.release.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    disk.rules()
    assert disk.tier.leading(chain, 0) == CHUNKS and disk.has(chain, *range(CHUNKS))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_on_a_small_file_system_it_turns_over_and_never_raises(tmp_path: Path) -> None:
    folder = tmp_path / "mounted"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        with disk_on(folder, size_bytes=64 * MIB) as disk:
            for seed in range(150):
                disk.clock.advance(1)
                disk.add(chain_of(seed, 2), 0, 1)
            assert disk.count("disk_writes") > 290
            last = chain_of(149, 2)
            assert disk.tier.leading(last, 0) == 2 and disk.has(last, 0, 1)
            assert not list(folder.glob("staging/*/*"))
            (folder / "chunks" / "ballast").touch()
            with suppressed_full(), open(folder / "chunks" / "ballast", "wb") as ballast:
                while True:
                    ballast.write(bytes(4096))
                    ballast.flush()
            for seed in range(200, 210):
                disk.clock.advance(100)
                disk.add(chain_of(seed, 1), 0)
            assert disk.has(chain_of(209, 1), 0)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def suppressed_full() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        assert error.errno == errno.ENOSPC
