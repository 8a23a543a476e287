"""The local disk tier at its start and end: files that it takes in again, and folders that it refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvstore import recency
from kvstore.errors import InvalidRequest, RootMismatch
from kvstore.format import places
from kvstore.format.header import decode, expected_chunk
from kvstore.hints import Hints
from kvstore.memory.inventory import place_of
from kvstore.node.counters import Counters
from kvstore.node.disk_tier import DiskShelf, DiskTier, Found
from kvstore.recency import QUANTUM_S
from kvstore.root.identity import create_or_open
from kvstore.root.interface import Root
from kvstore.root.posix import PosixRoot
from kvstore.sources import RandomIds, SystemClock
from tests.kit.descriptors import open_before, open_now
from tests.kit.disks import (
    FILE_BYTES,
    IMAGE_BYTES,
    MIB,
    NAMESPACE,
    OTHER,
    Disk,
    FakeClock,
    bytes_under,
    chain_of,
    disk_on,
    files_under,
    image_of,
)
from tests.kit.faulty_root import Hang, Rule
from tests.kit.patience import PATIENCE_S, returns

# ---------------------------------------------------------------------------------------------------------------------
# The next start


def test_a_restart_finds_everything_with_its_order_uses_and_hints(folder: Path) -> None:
    chain, precious, other = chain_of(0), chain_of(1, 1), chain_of(2, 1)
    with disk_on(folder, 8) as disk:
        disk.add(chain, *range(4))
        disk.add(precious, 0, hints=Hints(priority=100))
        disk.add(other, 0)
        for _ in range(3):
            disk.clock.pass_s(120)
            assert disk.has(other, 0)
        wall_s = disk.clock.wall_s
    with disk_on(folder, 8) as disk:
        disk.clock.wall_s = wall_s + 60
        assert disk.tier.leading(chain, 0) == 4
        assert disk.tier.stats()["disk_held_bytes"] == 6 * FILE_BYTES
        filler = chain_of(3)
        disk.add(filler, *range(5))  # two fit, three evict the leaves of the least used chain
        assert disk.tier.leading(chain, 0) == 1
        assert disk.has(chain, 0) and disk.has(precious, 0) and disk.has(other, 0) and disk.has(filler, 0, 1, 2, 3, 4)


def test_what_a_file_says_of_its_use_is_what_the_shelf_goes_by() -> None:
    chain, clock = chain_of(), FakeClock()
    shelf = DiskShelf(MIB, Counters(), clock)
    expected = expected_chunk(chain, 3)
    header = decode(image_of(chain, 3))
    quantum_s = recency.quantum_of(clock.wall_s - 5000, QUANTUM_S)
    hints = Hints(priority=80, ttl_s=43_200)
    stamp_ns = recency.stamp_ns(quantum_s, 3, hints, uses=2)
    shelf.counted(FILE_BYTES)
    assert shelf.admit(Found(stamp_ns, IMAGE_BYTES, expected.address, NAMESPACE.id), header)
    entry = shelf.refer(expected.address)
    assert entry is not None and entry.place == place_of(chain, 3)
    assert (entry.used_s, entry.uses, entry.hints) == (quantum_s, 2, hints)
    assert shelf.stats()["disk_held_bytes"] == FILE_BYTES


def test_a_smaller_bound_takes_the_most_recent_and_removes_the_rest(folder: Path) -> None:
    with disk_on(folder, 20) as disk:
        for seed in range(10):
            disk.clock.pass_s(120)
            disk.add(chain_of(seed, 1), 0)
    with disk_on(folder, 4) as disk:
        assert [seed for seed in range(10) if disk.has(chain_of(seed, 1), 0)] == [6, 7, 8, 9]
        assert bytes_under(folder) <= 4 * FILE_BYTES and len(files_under(folder)) == 4


def test_files_that_are_not_right_are_removed_at_the_start(folder: Path) -> None:
    chain = chain_of()
    with disk_on(folder) as disk:
        disk.add(chain, *range(6))
    files = {places.parse_chunk(file.name): file for file in files_under(folder)}
    of = {index: files[(chain.addresses[index], NAMESPACE.id)] for index in range(6)}
    os.truncate(of[0], 100)
    os.truncate(of[1], IMAGE_BYTES - 1)
    of[2].write_bytes(bytes(IMAGE_BYTES))  # allocated late, never written
    damaged = bytearray(of[3].read_bytes())
    damaged[60] ^= 1
    of[3].write_bytes(damaged)
    other_shard = folder / "chunks" / f"{(int(of[4].parent.name, 16) + 1) % 256:04x}"
    other_shard.mkdir(exist_ok=True)
    of[4].rename(other_shard / of[4].name)
    (folder / "chunks" / "0000").mkdir(exist_ok=True)
    (folder / "chunks" / "0000" / "foreign").write_bytes(b"x" * 5000)
    whole = of[5].read_bytes()
    (folder / "chunks" / "0000" / f"{bytes(16).hex()}.{NAMESPACE.id.hex()}").write_bytes(whole)  # the name of another
    of[5].with_name(f"{chain.addresses[5].hex()}.{OTHER.id.hex()}").write_bytes(whole)
    (folder / "mine").write_bytes(b"not of the tier")
    with disk_on(folder) as disk:
        assert [index for index in range(6) if disk.has(chain, index)] == [5]
        assert len(files_under(folder)) == 1 and disk.tier.stats()["disk_held_bytes"] == FILE_BYTES
        assert (folder / "mine").exists(), "what is not in its own folders is not touched"
        assert disk.add(chain, 0, 1, 2, 3, 4) == [True] * 5


def add_for_ever(path: str) -> None:
    """Runs in a separate process until it is killed: adds, evicts, and stops in the middle of a file."""
    clock = SystemClock()
    tier = DiskTier(path, 20 * FILE_BYTES, Counters(), clock, RandomIds(), make_root=_dying)
    tier.open()
    while tier.stats()["disk_refilling"]:
        time.sleep(0.001)
    for seed in range(10_000):
        chain = chain_of(seed, 3)
        for index in range(3):
            tier.add(place_of(chain, index), image_of(chain, index))


def _dying(path: str) -> Root:
    left = [100]

    def step(point: str) -> None:
        left[0] -= point == "stage.created"
        if not left[0]:
            torn = next(Path(path).glob("staging/*/*.part"))
            torn.write_bytes(b"torn" * 1000)
            print("now", flush=True)
            signal.pause()

    return PosixRoot(path, step=step)


@pytest.mark.slow
def test_after_sigkill_all_whole_files_are_taken_in_and_torn_ones_removed(folder: Path) -> None:
    script = f"from tests.disk.test_disk_start import add_for_ever; add_for_ever({str(folder)!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    worker = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE)
    try:
        assert worker.stdout is not None and worker.stdout.readline() == b"now\n"
        with pytest.raises(InvalidRequest, match="in use by another node"):
            Disk(folder).tier.open()
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait(PATIENCE_S)
        assert worker.stdout is not None
        worker.stdout.close()
    assert bytes_under(folder) <= 20 * FILE_BYTES, "with what was being written"
    assert list(folder.glob("staging/*/*.part"))
    whole = [file for file in files_under(folder) if file.suffix != ".part"]
    assert len(whole) >= 18
    with disk_on(folder, 20) as disk:
        assert not list(folder.glob("staging/*"))
        assert disk.tier.stats()["disk_entries"] == len(whole)
        assert sum(disk.has(chain_of(seed, 3), index) for seed in range(40) for index in range(3)) == len(whole)
    with disk_on(folder, 10) as disk:
        assert disk.tier.stats()["disk_entries"] == 10 == len(files_under(folder))


def test_nothing_is_written_before_all_is_counted_and_nothing_counted_twice(folder: Path) -> None:
    """The refill takes no part of files written meanwhile, and the bound counts files that it has yet to take in."""
    chain, new = chain_of(), chain_of(1)
    with disk_on(folder, 10) as disk:
        disk.add(chain, *range(8))
    listing, reading = Hang(), Hang()
    disk = Disk(
        folder,
        10,
        rules=[
            Rule("list", listing, lambda name: name == "chunks"),
            Rule("read", reading, lambda name: "chunks/" in name),
        ],
    )
    disk.tier.open()
    try:
        assert listing.reached.wait(PATIENCE_S)
        assert disk.add(new, 0) == [False], "nobody knows yet how much is there"
        listing.release.set()
        assert reading.reached.wait(PATIENCE_S)
        assert disk.add(new, 0, 1) == [True, True], "what is free may be used"
        assert disk.add(new, 2) == [False], "what is not taken in yet has its room"
        assert disk.add(chain, 0) == [False], "its file is there"
        assert bytes_under(folder) <= 10 * FILE_BYTES
        reading.release.set()
        disk.wait_refilled()
        assert disk.has(chain, *range(8)) and disk.has(new, 0, 1)
        assert disk.tier.stats()["disk_held_bytes"] == 10 * FILE_BYTES
    finally:
        listing.release.set()
        reading.release.set()
        disk.tier.close()


def test_closed_while_it_is_refilled(folder: Path) -> None:
    chain = chain_of()
    with disk_on(folder) as disk:
        disk.add(chain, *range(8))
    for point in ("list", "read"):
        hang = Hang()
        tier = Disk(folder, rules=[Rule(point, hang, lambda name: "chunks" in name)]).tier
        tier.open()
        assert hang.reached.wait(PATIENCE_S)
        returns(lambda tier=tier: tier.close(0.05))  # type: ignore[misc]
        with pytest.raises(InvalidRequest, match="in use"):
            Disk(folder).tier.open()  # somebody hangs in it, who could still remove a file
        hang.release.set()
        until_s = time.monotonic() + PATIENCE_S
        while any(thread.name == "kvstore-disk-refill" for thread in threading.enumerate()):
            assert time.monotonic() < until_s
            time.sleep(0.002)
        assert len(files_under(folder)) == 8, "a refill that was stopped removes nothing"
    with disk_on(folder) as disk:
        assert disk.has(chain, *range(8))


def test_after_close_nothing_is_done(folder: Path) -> None:
    chain = chain_of()
    with disk_on(folder) as disk:
        disk.add(chain, 0)
        disk.tier.close()
        assert disk.tier.leading(chain, 0) == 0
        assert disk.fetch(chain, 0) == [None]
        assert disk.add(chain, 1) == [False]
        assert not disk.tier.drop(chain.addresses[0])
        disk.tier.close()
    assert len(files_under(folder)) == 1


def test_a_tier_that_was_never_opened_has_nothing(folder: Path) -> None:
    disk = Disk(folder)
    assert disk.tier.leading(chain_of(), 0) == 0 and disk.add(chain_of(), 0) == [False]
    disk.tier.close()
    assert not folder.exists(), "a constructor does no I/O"


# ---------------------------------------------------------------------------------------------------------------------
# Whose folder it is


def test_two_nodes_on_one_folder(folder: Path) -> None:
    with disk_on(folder):
        with pytest.raises(InvalidRequest, match="in use by another node"):
            Disk(folder).tier.open()
    with disk_on(folder):
        pass


def test_a_root_is_no_disk_tier_and_a_disk_tier_no_root(tmp_root: Path, folder: Path) -> None:
    root = tmp_root / "root"
    root.mkdir()
    create_or_open(PosixRoot(root), RandomIds())
    before = set(root.iterdir())
    with pytest.raises(InvalidRequest, match="no root is in"):
        Disk(root).tier.open()
    assert set(root.iterdir()) == before, "nothing is left there"
    with disk_on(folder):
        with pytest.raises(RootMismatch):
            create_or_open(PosixRoot(folder), RandomIds())


@pytest.mark.parametrize("content", [b"", b"{}", b'{"format": "kvstore-disk", "version": 2}', b"\xff"])
def test_another_format_is_refused(folder: Path, content: bytes) -> None:
    folder.mkdir()
    (folder / "FORMAT").write_bytes(content)
    with pytest.raises(InvalidRequest):
        Disk(folder).tier.open()
    assert [entry.name for entry in folder.iterdir()] == ["FORMAT"]


def test_d2_a_folder_within_a_root_or_another_tier_is_refused_and_not_made(tmp_root: Path, folder: Path) -> None:
    (tmp_root / "root").mkdir()
    create_or_open(PosixRoot(tmp_root / "root"), RandomIds())
    with disk_on(folder):
        for above in (tmp_root / "root", folder):
            with pytest.raises(InvalidRequest, match=f"lies within {above}"):
                Disk(above / "a" / "b").tier.open()
            assert not (above / "a").exists()


def test_a_folder_that_holds_something_else_is_refused(folder: Path) -> None:
    folder.mkdir()
    (folder / "photographs").mkdir()
    with pytest.raises(InvalidRequest, match="photographs"):
        Disk(folder).tier.open()
    assert len(list(folder.iterdir())) == 1
    file = folder / "file"
    file.write_bytes(b"")
    with pytest.raises(InvalidRequest):
        Disk(file).tier.open()


def test_a_refused_folder_is_not_kept_locked(folder: Path) -> None:
    folder.mkdir()
    disk = Disk(folder)
    (folder / "lock").touch()
    (folder / "staging").mkdir()  # of a node that was killed while making it
    disk.tier.open()
    disk.tier.close()
    before = open_before()
    (folder / "FORMAT").write_bytes(b"{}")
    with pytest.raises(InvalidRequest):
        Disk(folder).tier.open()
    assert open_now() <= before
