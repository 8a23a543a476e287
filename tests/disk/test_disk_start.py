"""The local disk tier at its start and end: files that it takes in again, and folders that it refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.census.selection import ClearOrder
from kvstore.core.clock import RandomIds, SystemClock
from kvstore.core.metrics import Counters
from kvstore.core.recency import Hints
from kvstore.errors import InvalidRequest, RootMismatch
from kvstore.format import places
from kvstore.root.identity import create_or_open
from kvstore.root.interface import Root
from kvstore.root.posix import PosixRoot
from kvstore.tiers.disk import DiskTier
from tests.kit.descriptors import open_before, open_now
from tests.kit.disks import (
    FILE_BYTES,
    IMAGE_BYTES,
    NAMESPACE,
    OTHER,
    Disk,
    bytes_under,
    chain_of,
    disk_on,
    files_under,
    image_of,
)
from tests.kit.faulty_root import EIO, Hang, Rule
from tests.kit.patience import PATIENCE_S, eventually
from tests.kit.programs import forked
from tests.kit.stores import flip

# The next start


def test_a_restart_finds_everything_with_its_order_uses_and_hints(folder: Path) -> None:
    chain, precious, other = chain_of(0), chain_of(1, 1), chain_of(2, 1)
    with disk_on(folder, 8) as disk:
        disk.add(chain, *range(4))
        disk.add(precious, 0, hints=Hints(priority=100))
        disk.add(other, 0)
        for _ in range(3):
            disk.clock.advance(120)
            assert disk.has(other, 0)
        then_s = disk.clock.now_s()
    with disk_on(folder, 8) as disk:
        disk.clock.advance(then_s + 60 - disk.clock.now_s())
        assert disk.tier.leading(chain, 0) == 4
        assert disk.tier.stats()["disk_held_bytes"] == 6 * FILE_BYTES
        filler = chain_of(3)
        disk.add(filler, *range(5))  # two fit, three evict the leaves of the least used chain
        assert disk.tier.leading(chain, 0) == 1
        assert disk.has(chain, 0) and disk.has(precious, 0) and disk.has(other, 0) and disk.has(filler, 0, 1, 2, 3, 4)


def test_smaller_bound_keeps_what_fits_and_removes_the_rest(folder: Path) -> None:
    with disk_on(folder, 20) as disk:
        for seed in range(10):
            disk.add(chain_of(seed, 1), 0)
    with disk_on(folder, 4) as disk:
        assert sum(disk.has(chain_of(seed, 1), 0) for seed in range(10)) == 4
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
    flip(of[3], 60)
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


def test_files_of_another_root_are_not_taken_in(folder: Path) -> None:
    for root_id, is_kept in ((b"1" * 16, False), (b"1" * 16, True), (b"2" * 16, False)):
        with disk_on(folder, root_id=root_id) as disk:
            assert disk.has(chain_of(0), 0) is is_kept is bool(files_under(folder))
            disk.add(chain_of(0), 0)


def test_what_a_clear_could_not_remove_is_not_taken_in(folder: Path) -> None:
    with disk_on(folder) as disk:
        disk.add(chain_of(0), 0)
        disk.rules(Rule("remove", EIO))
        disk.clear()
        eventually(lambda: disk.count("disk_failed") == 1)
        assert not disk.tier.leading(chain_of(0), 0) and files_under(folder)
    with disk_on(folder) as disk:
        assert not disk.tier.leading(chain_of(0), 0) and not files_under(folder)


def test_a_file_that_cannot_be_read_at_a_start_costs_no_other_its_place(folder: Path) -> None:
    bad, other = chain_of(0, 1), chain_of(1, 3)
    with disk_on(folder) as disk:
        disk.add(bad, 0)
        disk.add(other, 0, 1, 2)
    rule = Rule("open", EIO, lambda name: bad.addresses[0].hex() in name)
    for _ in range(2):
        with disk_on(folder, rules=[rule]) as disk:
            assert not disk.tier.leading(bad, 0) and disk.tier.leading(other, 0) == 3
    with disk_on(folder, rules=[rule]) as disk:
        disk.clear()
        eventually(lambda: len(files_under(folder)) == 1)
    with disk_on(folder) as disk:
        assert not disk.tier.leading(bad, 0) and not files_under(folder), "it was cleared"


@pytest.mark.parametrize("operation", ["stat", "publish"])
def test_what_is_written_during_a_clear_does_not_stay(folder: Path, operation: str) -> None:
    hang = Hang()
    with disk_on(folder) as disk:
        disk.rules(Rule(operation, hang))
        with ThreadPoolExecutor() as pool:
            adding = pool.submit(disk.add, chain_of(0), 0)
            assert hang.reached.wait(PATIENCE_S)
            disk.tier.forbid(ClearOrder(frozenset({NAMESPACE.id})))
            disk.clear()
            hang.release.set()
        assert adding.result() == [False] and not disk.tier.leading(chain_of(0), 0) and not files_under(folder)


def add_for_ever(path: str) -> None:
    """Runs in a separate process until it is killed: adds, evicts, and stops in the middle of a file."""
    clock = SystemClock()
    tier = DiskTier(path, 20 * FILE_BYTES, Counters(), clock, RandomIds(), make_root=_dying)
    tier.open()
    tier.refill()
    while tier.stats()["disk_refilling"]:
        time.sleep(0.001)
    for seed in range(10_000):
        chain = chain_of(seed, 3)
        for index in range(3):
            tier.add(chain.place(index), image_of(chain, index))


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


def test_nothing_is_written_before_all_files_are_taken_in(folder: Path) -> None:
    chain, new = chain_of(), chain_of(1)
    with disk_on(folder, 10) as disk:
        disk.add(chain, *range(8))
    reading = Hang()
    disk = Disk(folder, 10, rules=[Rule("read", reading, lambda name: "chunks/" in name)])
    disk.tier.open()
    disk.tier.refill()
    try:
        assert reading.reached.wait(PATIENCE_S)
        assert disk.add(new, 0) == [False], "nobody knows yet how much is there"
        reading.release.set()
        disk.wait_refilled()
        assert disk.has(chain, *range(8)) and disk.add(new, 0, 1) == [True, True]
        assert disk.tier.stats()["disk_held_bytes"] == 10 * FILE_BYTES
    finally:
        reading.release.set()
        disk.tier.close()


# Whose folder it is


def test_two_nodes_on_one_folder(folder: Path) -> None:
    with disk_on(folder):
        with pytest.raises(InvalidRequest, match="in use by another node"):
            Disk(folder).tier.open()
    with disk_on(folder):
        pass


def test_a_forked_child_does_not_keep_the_folder(folder: Path) -> None:
    with disk_on(folder):
        end_child = forked()
    with disk_on(folder):
        pass
    end_child()


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
