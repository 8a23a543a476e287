"""The local disk tier: bounded at each moment, whole files or misses, cleared with its namespaces."""

from __future__ import annotations

import random
import threading
from pathlib import Path

from kvstore.core.address import NO_PARENT, block_address
from kvstore.core.executor import Deadline
from kvstore.format.header import expected_block
from kvstore.tiers.inventory import ChunkIdentity
from tests.kit.descriptors import open_before, open_now
from tests.kit.disks import (
    CHUNKS,
    FILE_BYTES,
    IMAGE_BYTES,
    NAMESPACE,
    OTHER,
    Disk,
    bytes_under,
    chain_of,
    disk_on,
    files_under,
    image_as,
    image_of,
    is_right,
)
from tests.kit.faulty_root import EIO, Hang, Rule
from tests.kit.patience import PATIENCE_S, eventually

# What goes in comes out


def test_an_image_of_another_size_is_not_filled_and_the_file_stays(disk: Disk) -> None:
    chain = chain_of()
    disk.add(chain, 0)
    for size in (IMAGE_BYTES - 1, IMAGE_BYTES + 1):
        image = memoryview(bytearray(size))
        assert disk.tier.fetch(chain, [0], [image], Deadline(disk.clock, 1.0)) == [False]
        assert not any(image)
    assert disk.has(chain, 0)


def test_an_image_whose_header_is_wrong_is_not_written(disk: Disk) -> None:
    chain = chain_of()
    broken = bytearray(image_of(chain, 0))
    broken[200] ^= 1
    assert not disk.tier.add(chain.place(0), memoryview(broken))
    assert not disk.tier.add(chain.place(0), image_of(chain, 1)), "of another chunk"
    assert not disk.tier.add(chain.place(0), image_of(chain, 0)[:-1])
    assert not files_under(disk.path)


# The bound


def test_the_bound_holds_between_two_system_calls(folder: Path) -> None:
    """The file that goes is removed before the first byte of the one that comes is written."""
    chain = chain_of(chunks=6)
    highest = 0

    def look(point: str) -> None:
        nonlocal highest
        highest = max(highest, bytes_under(folder))

    with disk_on(folder, 3, step=look) as disk:
        for seed in range(6):
            assert disk.add(chain_of(seed, 1), 0) == [True]
        assert len(files_under(folder)) == 3
        assert disk.tier.leading(chain, 0) == 0, "the least recently used went"
    assert 0 < highest <= 3 * FILE_BYTES


def test_a_chunk_is_not_made_room_for_by_its_parent(folder: Path) -> None:
    chain = chain_of()
    with disk_on(folder, 2) as disk:
        disk.add(chain, 0)
        disk.clock.advance(1000)
        other = chain_of(1)
        disk.add(other, 0)
        assert disk.add(chain, 1) == [True]
        assert disk.tier.leading(chain, 0) == 2 and disk.tier.leading(other, 0) == 0


def test_what_is_larger_than_the_tier_is_refused_and_evicts_nothing(folder: Path) -> None:
    chain = chain_of()
    with disk_on(folder, size_bytes=2 * FILE_BYTES) as disk:
        disk.add(chain, 0)
        key = b"k" * 32
        large = image_as(expected_block(NAMESPACE, key, 3 * FILE_BYTES))
        place = ChunkIdentity(NAMESPACE.digest, block_address(NAMESPACE, key), NO_PARENT)
        assert not disk.tier.add(place, large)
        assert disk.has(chain, 0)


# Clear


def test_a_cleared_namespace_is_gone_files_too(disk: Disk) -> None:
    chain, other = chain_of(), chain_of(namespace=OTHER)
    disk.add(chain, *range(5))
    disk.add(other, 0)
    disk.clear()
    assert disk.tier.leading(chain, 0) == 0 and disk.fetch(chain, 0) == [None]
    eventually(lambda: disk.tier.stats()["disk_held_bytes"] == FILE_BYTES)  # a thread removes the files
    assert disk.has(other, 0) and len(files_under(disk.path)) == 1
    assert disk.add(chain, 0) == [True]


def test_a_cleared_namespace_is_not_found_even_where_its_files_cannot_be_removed(disk: Disk) -> None:
    chain = chain_of()
    disk.add(chain, *range(5))
    disk.rules(Rule("remove", EIO))
    disk.clear()
    assert disk.tier.leading(chain, 0) == 0 and disk.fetch(chain, 0) == [None]
    assert disk.tier.stats()["disk_held_bytes"] == 5 * FILE_BYTES, "they still take room"


def test_what_is_taken_in_while_its_namespace_is_cleared_goes_too(folder: Path) -> None:
    chain, other = chain_of(), chain_of(namespace=OTHER)
    with disk_on(folder) as disk:
        disk.add(chain, *range(3))
        disk.add(other, 0)
    hang = Hang()
    disk = Disk(folder, rules=[Rule("read", hang, lambda name: "chunks/" in name)])
    disk.tier.open()
    disk.tier.refill()
    try:
        assert hang.reached.wait(PATIENCE_S)
        disk.clear()
        hang.release.set()
        disk.wait_refilled()
        assert disk.tier.stats()["disk_entries"] == 1 == len(files_under(folder)) and disk.has(other, 0)
        assert disk.add(chain, 7) == [True], "what is put after it is new"
    finally:
        hang.release.set()
        disk.tier.close()


# At once


def test_added_fetched_evicted_and_dropped_at_once(folder: Path) -> None:
    """No wrong byte, the bound kept, nothing leaked: every file has its entry at the end."""
    chains = [chain_of(seed) for seed in range(10)]
    limit = 40 * FILE_BYTES
    wrong: list[str] = []
    stop = threading.Event()
    with disk_on(folder, 40) as disk:

        def work(seed: int) -> None:
            rng = random.Random(seed)
            while not stop.is_set():
                chain = rng.choice(chains)
                index = rng.randrange(CHUNKS)
                match rng.randrange(20):
                    case 0:
                        disk.tier.damaged(chain, index)
                    case 1 if rng.random() < 0.1:
                        disk.clear()
                    case drawn if drawn < 11:
                        disk.add(chain, min(index, disk.tier.leading(chain, 0)))
                    case _:
                        (image,) = disk.fetch(chain, index)
                        if image is not None and not is_right(image, chain, index):
                            wrong.append(f"{index}")

        def watch() -> None:
            while not stop.is_set():
                held = disk.tier.stats()["disk_held_bytes"]
                if held > limit:
                    wrong.append(f"held {held}")

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
        threads.append(threading.Thread(target=watch))
        for thread in threads:
            thread.start()
        try:
            eventually(lambda: disk.count("disk_hits") > 300 and disk.count("disk_writes") > 300, "hits and writes")
        finally:
            stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not wrong
        assert disk.count("disk_failed") == 0
        eventually(lambda: disk.tier.stats()["disk_entries"] == len(files_under(folder)))
        assert disk.tier.stats()["disk_held_bytes"] == len(files_under(folder)) * FILE_BYTES
        assert not list(folder.glob("staging/*/*.part"))


def test_no_descriptor_and_no_thread_is_left(folder: Path) -> None:
    before = open_before()
    for _ in range(3):
        with disk_on(folder) as disk:
            disk.add(chain_of(), 0, 1)
            disk.fetch(chain_of(), 0, 1, 2)
    assert open_now() <= before
    # A thread that is done with the folder ends a moment after it has said so.
    eventually(lambda: "kvstore-disk-refill" not in {each.name for each in threading.enumerate()}, "no thread is left")


def test_a_listing_that_fails_leaves_the_disk_as_it_is(folder: Path) -> None:
    chain = chain_of()
    with disk_on(folder) as disk:
        disk.add(chain, 0, 1)
    disk = Disk(folder, rules=[Rule("list", EIO, lambda name: "chunks" in name)])
    disk.tier.open()
    disk.tier.refill()
    eventually(lambda: not disk.tier._users_count)
    assert not disk.has(chain, 0) and disk.add(chain, 2) == [False]
    disk.tier.close()
    with disk_on(folder) as again:
        assert again.has(chain, 0, 1)
