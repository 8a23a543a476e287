"""The local disk tier: bounded at each moment, in a folder of its own; whole files or misses, and each error a miss."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstore import recency
from kvstore.address import NO_PARENT, Chain, block_address
from kvstore.errors import InvalidRequest, RootMismatch
from kvstore.format import places
from kvstore.format.checksum import checksum
from kvstore.format.header import Damaged, Expected, Incarnation, decode, encode, expected_block, expected_chunk
from kvstore.hints import Hints
from kvstore.memory.inventory import Place, place_of
from kvstore.memory.policy import DEFAULT_POLICY, POLICIES
from kvstore.namespace import Namespace
from kvstore.node import disk_gate, disk_refill, disk_tier
from kvstore.node.counters import Counters
from kvstore.node.deadline import Deadline
from kvstore.node.disk_shelf import QUANTUM_S, DiskShelf, Found
from kvstore.node.disk_tier import DiskTier
from kvstore.root.identity import create_or_open
from kvstore.root.interface import Root
from kvstore.root.posix import PosixRoot
from kvstore.sources import RandomIds, SystemClock
from tests.node.stores import TINY
from tests.patience import PATIENCE_S, returns
from tests.root.faulty import EIO, ENOSPC, FaultyRoot, Hang, Rule

NAMESPACE = Namespace.of("m", TINY)
OTHER = Namespace.of("other", TINY)
CHUNKS = 12
MIB = 1 << 20


class FakeClock:
    """Both clocks as the test sets them."""

    def __init__(self) -> None:
        self.wall_s = 1_700_000_000.0
        self.mono_s = 0.0

    def now_s(self) -> float:
        return self.wall_s

    def monotonic_s(self) -> float:
        return self.mono_s

    def pass_s(self, seconds: float) -> None:
        self.wall_s += seconds
        self.mono_s += seconds


def chain_of(seed: int = 0, chunks: int = CHUNKS, namespace: Namespace = NAMESPACE) -> Chain:
    return Chain.of(namespace, np.arange(chunks * TINY.chunk_tokens, dtype=np.uint32) + np.uint32(seed * 1_000_000))


def image_as(expected: Expected) -> memoryview:
    """The image of a chunk, whose bytes its address determines."""
    generator = np.random.default_rng(int.from_bytes(expected.address[:8], "little"))
    payload = generator.bytes(expected.payload_bytes)
    size = expected.section_bytes
    sums = [checksum(payload[at * size : (at + 1) * size]) for at in range(expected.section_count)]
    return memoryview(bytes(encode(expected, Incarnation(bytes(16)), sums)) + payload)


def image_of(chain: Chain, index: int) -> memoryview:
    return image_as(expected_chunk(chain, index))


def is_right(image: bytearray, chain: Chain, index: int) -> bool:
    return bytes(image) == bytes(image_of(chain, index))


IMAGE_BYTES = len(image_of(chain_of(), 0))
FILE_BYTES = (-(-IMAGE_BYTES // 4096) + 1) * 4096
"""What one is charged."""


class Disk:
    """A tier on a folder, with what it is made of."""

    def __init__(
        self, path: Path, files: int = 100, *, size_bytes: int | None = None, rules: Sequence[Rule] = ()
    ) -> None:
        self.path = path
        self._rules = rules
        self.clock = FakeClock()
        self.counters = Counters()
        self.root: FaultyRoot | None = None
        self.tier = DiskTier(
            str(path),
            files * FILE_BYTES if size_bytes is None else size_bytes,
            self.counters,
            self.clock,
            RandomIds(),
            make_root=self._faulty,
        )

    def _faulty(self, path: str) -> Root:
        self.root = FaultyRoot(PosixRoot(path), self._rules)
        return self.root

    def add(self, chain: Chain, *indexes: int, hints: Hints | None = None) -> list[bool]:
        given = {} if hints is None else {"hints": hints}
        return [self.tier.add(place_of(chain, index), image_of(chain, index), **given) for index in indexes]

    def fetch(self, chain: Chain, *indexes: int, deadline_s: float = 10.0) -> list[bytearray | None]:
        images = [bytearray(IMAGE_BYTES) for _ in indexes]
        deadline = Deadline(self.clock, deadline_s)
        came = self.tier.fetch(chain, indexes, [memoryview(image) for image in images], deadline)
        return [image if whole else None for image, whole in zip(images, came, strict=True)]

    def has(self, chain: Chain, *indexes: int) -> bool:
        """Whether these are there, and their bytes right."""
        found = self.fetch(chain, *indexes)
        pairs = zip(found, indexes, strict=True)
        return all(image is not None and is_right(image, chain, index) for image, index in pairs)

    def count(self, name: str) -> int:
        return self.counters.snapshot()[name]

    def rules(self, *rules: Rule) -> None:
        assert self.root is not None
        self.root.set_rules(rules)

    def wait_refilled(self) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while self.tier.stats()["disk_refilling"]:
            assert time.monotonic() < until_s
            time.sleep(0.002)


@contextmanager
def disk_on(path: Path, files: int = 100, *, refilled: bool = True, size_bytes: int | None = None) -> Iterator[Disk]:
    disk = Disk(path, files, size_bytes=size_bytes)
    disk.tier.open()
    try:
        if refilled:
            disk.wait_refilled()
        yield disk
    finally:
        disk.tier.close()


def files_under(path: Path) -> list[Path]:
    """Chunk files, staged ones too."""
    return [file for part in ("chunks", "staging") for file in (path / part).rglob("*") if file.is_file()]


def bytes_under(path: Path) -> int:
    total = 0
    for file in files_under(path):
        try:
            total += file.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


@pytest.fixture
def folder(tmp_root: Path) -> Path:
    return tmp_root / "disk"


@pytest.fixture
def disk(folder: Path) -> Iterator[Disk]:
    with disk_on(folder) as opened:
        yield opened


# ---------------------------------------------------------------------------------------------------------------------
# What goes in comes out


def test_what_was_added_is_said_and_read(disk: Disk) -> None:
    chain = chain_of()
    assert disk.tier.leading(chain, 0) == 0
    assert disk.add(chain, *range(5)) == [True] * 5
    assert [disk.tier.leading(chain, first) for first in (0, 2, 5)] == [5, 3, 0]
    assert disk.has(chain, 0, 1, 2, 3, 4)
    assert disk.fetch(chain, 5) == [None]
    assert disk.add(chain, 2) == [False], "first writer wins"
    stats = disk.tier.stats()
    assert (stats["disk_entries"], stats["disk_held_bytes"]) == (5, 5 * FILE_BYTES)
    assert disk.count("disk_hits") == 5 and disk.count("disk_bytes") == 5 * IMAGE_BYTES
    assert disk.count("disk_writes") == 5 and disk.count("disk_write_bytes") == 5 * IMAGE_BYTES


def test_asking_does_no_io(disk: Disk) -> None:
    chain = chain_of()
    disk.add(chain, *range(5))
    assert disk.root is not None
    before = sum(disk.root.calls.values())
    disk.tier.leading(chain, 0)
    assert sum(disk.root.calls.values()) == before


def test_blocks_that_an_engine_hashed_are_kept_too(folder: Path) -> None:
    key = b"k" * 32
    image = image_as(expected_block(NAMESPACE, key, 100))
    address = block_address(NAMESPACE, key)
    place = Place(NAMESPACE.digest, address, NO_PARENT, b"")
    with disk_on(folder) as disk:
        assert disk.tier.add(place, image)
    with disk_on(folder) as disk:
        assert disk.tier.stats()["disk_entries"] == 1
        assert disk.tier.drop(address) and not disk.tier.drop(address)
        assert not files_under(folder)


def test_an_image_of_another_size_is_not_filled_and_the_file_stays(disk: Disk) -> None:
    chain = chain_of()
    disk.add(chain, 0)
    for size in (IMAGE_BYTES - 1, IMAGE_BYTES + 1):
        image = memoryview(bytearray(size))
        assert disk.tier.fetch(chain, [0], [image], Deadline(disk.clock, 1.0)) == [False]
        assert not any(image)
    assert disk.has(chain, 0)


def test_past_the_deadline_nothing_is_read(disk: Disk) -> None:
    chain = chain_of()
    disk.add(chain, 0, 1)
    assert disk.fetch(chain, 0, 1, deadline_s=0.0) == [None, None]
    assert disk.has(chain, 0, 1)


def test_an_image_whose_header_is_wrong_is_not_written(disk: Disk) -> None:
    chain = chain_of()
    broken = bytearray(image_of(chain, 0))
    broken[200] ^= 1
    assert not disk.tier.add(place_of(chain, 0), memoryview(broken))
    assert not disk.tier.add(place_of(chain, 0), image_of(chain, 1)), "of another chunk"
    assert not disk.tier.add(place_of(chain, 0), image_of(chain, 0)[:-1])
    assert not files_under(disk.path)


# ---------------------------------------------------------------------------------------------------------------------
# The bound


def test_the_bound_holds_at_each_moment_under_random_adds(folder: Path) -> None:
    """E1, E2: watched from outside while it works; leaves go before their parents."""
    rng = random.Random(7)
    chains = [chain_of(seed) for seed in range(12)]
    limit = 30 * FILE_BYTES
    over: list[int] = []
    with disk_on(folder, 30) as disk:
        assert disk.root is not None

        def step(operation: Callable[[], object]) -> None:
            operation()
            held = bytes_under(folder)
            if held > limit or held > disk.tier.stats()["disk_held_bytes"]:
                over.append(held)

        for _ in range(400):
            disk.clock.pass_s(rng.random() * 40)
            chain = rng.choice(chains)
            index = disk.tier.leading(chain, 0)
            if index < CHUNKS and rng.random() < 0.7:
                step(lambda: disk.add(chain, index))  # noqa: B023 - called at once
            else:
                step(lambda: disk.fetch(chain, rng.randrange(CHUNKS)))  # noqa: B023
        assert disk.count("disk_evicted") > 50
        stats = disk.tier.stats()
        assert stats["disk_held_bytes"] == len(files_under(folder)) * FILE_BYTES <= limit
        assert stats["disk_entries"] == len(files_under(folder)) > 20
        for chain in chains:
            count = disk.tier.leading(chain, 0)
            assert disk.tier.leading(chain, count + 1) == 0, "a child outlived its parent"
            assert disk.has(chain, *range(count))
    assert not over


def test_the_bound_holds_between_two_system_calls(folder: Path) -> None:
    """The file that goes is removed before the first byte of the one that comes is written."""
    chain = chain_of(chunks=6)
    highest = 0

    def look(point: str) -> None:
        nonlocal highest
        highest = max(highest, bytes_under(folder))

    tier = DiskTier(
        str(folder),
        3 * FILE_BYTES,
        Counters(),
        FakeClock(),
        RandomIds(),
        make_root=lambda path: PosixRoot(path, step=look),
    )
    tier.open()
    try:
        until_s = time.monotonic() + PATIENCE_S
        while tier.stats()["disk_refilling"] and time.monotonic() < until_s:
            time.sleep(0.002)
        for seed in range(6):
            single = chain_of(seed, 1)
            assert tier.add(place_of(single, 0), image_of(single, 0))
        assert len(files_under(folder)) == 3
        assert tier.leading(chain, 0) == 0, "the least recently used went"
    finally:
        tier.close()
    assert 0 < highest <= 3 * FILE_BYTES


def test_a_chunk_is_not_made_room_for_by_its_parent(folder: Path) -> None:
    chain = chain_of()
    with disk_on(folder, 2) as disk:
        disk.add(chain, 0)
        disk.clock.pass_s(1000)
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
        place = Place(NAMESPACE.digest, block_address(NAMESPACE, key), NO_PARENT, b"")
        assert not disk.tier.add(place, large)
        assert disk.has(chain, 0)


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
        disk.add(filler, *range(5))  # two fit, three displace the leaves of what was used least
        assert disk.tier.leading(chain, 0) == 1
        assert disk.has(chain, 0) and disk.has(precious, 0) and disk.has(other, 0) and disk.has(filler, 0, 1, 2, 3, 4)


def test_what_a_file_says_of_its_use_is_what_the_shelf_goes_by() -> None:
    chain, clock = chain_of(), FakeClock()
    shelf = DiskShelf(MIB, POLICIES[DEFAULT_POLICY](), Counters(), clock)
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
    """Runs in a process of its own, until it is killed: adds, evicts, and stops in the middle of a file."""
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
    script = f"from tests.node.test_disk_tier import add_for_ever; add_for_ever({str(folder)!r})"
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
    """The refill takes no part of what is written meanwhile, and the bound counts what it has not taken in yet."""
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
    before = len(os.listdir("/proc/self/fd"))
    (folder / "FORMAT").write_bytes(b"{}")
    with pytest.raises(InvalidRequest):
        Disk(folder).tier.open()
    assert len(os.listdir("/proc/self/fd")) == before


# ---------------------------------------------------------------------------------------------------------------------
# Damage, and a disk that fails


def test_flipped_bytes_are_given_as_they_are_and_dropped_when_told(disk: Disk) -> None:
    """I1: the caller verifies."""
    chain = chain_of()
    disk.add(chain, 0, 1)
    file = next(file for file in files_under(disk.path) if file.name.startswith(chain.addresses[0].hex()))
    flipped = bytearray(file.read_bytes())
    flipped[-1] ^= 0xFF
    file.write_bytes(flipped)
    assert disk.fetch(chain, 0) == [flipped]
    disk.tier.damaged(chain, 0)
    assert disk.tier.leading(chain, 0) == 0 and disk.fetch(chain, 0) == [None] and not file.exists()
    disk.tier.damaged(chain, 0)
    assert disk.count("disk_damaged") == 1
    assert disk.add(chain, 0) == [True] and disk.has(chain, 0, 1), "the next demotion repairs it"


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
    disk.fetch(chain, *range(disk_gate.FAILURES_MAX))
    for index in range(4, 9):
        disk.add(chain_of(1), index)
    assert disk.root is not None
    before = sum(disk.root.calls.values())
    assert disk.tier.leading(chain, 6) == 0
    assert disk.fetch(chain, 6, 7) == [None, None] and disk.add(chain_of(1), 0) == [False]
    assert sum(disk.root.calls.values()) == before, "nothing is asked of it"
    disk.rules()
    disk.clock.pass_s(disk_gate.PAUSE_S + 1)
    assert disk.tier.leading(chain, 6) == CHUNKS - 6 and disk.has(chain, 6, 7)
    assert disk.add(chain_of(1), 0) == [True]
    assert disk.tier.stats()["disk_held_bytes"] >= len(files_under(disk.path)) * FILE_BYTES


def test_failures_between_which_it_works_are_no_reason_to_leave_it_alone(disk: Disk) -> None:
    chain = chain_of(chunks=30)
    disk.add(chain, *range(30))
    for index in range(29, 15, -2):
        disk.rules(Rule("read", EIO))
        assert disk.fetch(chain, index) == [None]
        disk.rules()
        assert disk.has(chain, index - 1)
    assert disk.count("disk_failed") == 7


def test_what_cannot_be_removed_keeps_its_room_until_it_is(folder: Path) -> None:
    chain = chain_of(chunks=3)
    with disk_on(folder, 3) as disk:
        disk.add(chain, 0, 1, 2)
        disk.rules(Rule("remove", EIO))
        for _ in range(2):
            assert disk.add(chain_of(1), 0) == [False]
            assert bytes_under(folder) <= 3 * FILE_BYTES and disk.tier.stats()["disk_held_bytes"] == 3 * FILE_BYTES
        assert disk.count("disk_evicted") == 1, "a dead disk is not emptied by trying"
        disk.rules()
        disk.clock.pass_s(disk_gate.PAUSE_S + 1)
        assert disk.add(chain_of(1), 0) == [True]
        assert disk.tier.leading(chain, 0) == 2 and len(files_under(folder)) == 3


@pytest.mark.parametrize("operation", ["stage", "publish", "stat"])
def test_a_write_that_fails_leaves_nothing(disk: Disk, operation: str) -> None:
    chain = chain_of()
    disk.rules(Rule(operation, EIO, nth=1, times=1))
    assert disk.add(chain, 0) == [False]
    assert not files_under(disk.path) and disk.tier.stats()["disk_held_bytes"] == 0
    assert disk.count("disk_failed") == 1 and disk.add(chain, 0) == [True] and disk.has(chain, 0)


def test_a_full_disk_is_counted_and_turns_over_in_the_room_there_is(disk: Disk) -> None:
    chain, new = chain_of(), chain_of(1)
    disk.add(chain, 0, 1)
    disk.clock.pass_s(100)
    disk.rules(Rule("stage", ENOSPC, times=1))
    assert disk.add(new, 0) == [True], "at the cost of one of its own"
    assert disk.tier.leading(chain, 0) == 1 and disk.count("disk_evicted") == 1
    disk.rules(Rule("stage", ENOSPC))
    for index in range(1, 4):
        assert disk.add(new, index) == [False]
    assert disk.count("disk_failed") == 3
    assert disk.tier.stats()["disk_held_bytes"] == len(files_under(disk.path)) * FILE_BYTES


def test_too_few_descriptors_cost_no_file(disk: Disk) -> None:
    chain = chain_of()
    disk.add(chain, 0)
    emfile = type(ENOSPC)(ENOSPC.error, errno.EMFILE)
    disk.rules(Rule("open", emfile, times=1))
    assert disk.fetch(chain, 0) == [None]
    assert disk.has(chain, 0)


def test_a_disk_that_hangs_takes_half_of_the_lanes_at_most_and_nobody_asks_it_again(disk: Disk) -> None:
    chain = chain_of()
    disk.add(chain, *range(CHUNKS))
    hang = Hang()
    disk.rules(Rule("read", hang))
    threads = [threading.Thread(target=disk.fetch, args=(chain, at)) for at in range(disk_gate.READERS_MAX)]
    for thread in threads:
        thread.start()
    try:
        assert disk.root is not None
        until_s = time.monotonic() + PATIENCE_S
        while disk.root.calls["read"] < disk_gate.READERS_MAX and time.monotonic() < until_s:
            time.sleep(0.002)
        assert returns(lambda: disk.fetch(chain, 9)) == [None], "one more is not let in"
        assert disk.tier.leading(chain, 0) == CHUNKS
        disk.clock.pass_s(disk_gate.STALL_S + 0.1)
        assert disk.tier.leading(chain, 0) == 0, "it hangs: nobody hopes for it"
        started_s = time.monotonic()
        assert disk.fetch(chain, 9) == [None]
        assert time.monotonic() - started_s < disk_gate.WAIT_S
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
                disk.clock.pass_s(1)
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
                disk.clock.pass_s(100)
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


# ---------------------------------------------------------------------------------------------------------------------
# Clear


def test_a_cleared_namespace_is_gone_files_too(disk: Disk) -> None:
    chain, other = chain_of(), chain_of(namespace=OTHER)
    disk.add(chain, *range(5))
    disk.add(other, 0)
    disk.tier.drop_namespace(NAMESPACE.digest)
    assert disk.tier.leading(chain, 0) == 0 and disk.fetch(chain, 0) == [None]
    assert disk.has(other, 0) and len(files_under(disk.path)) == 1
    assert disk.tier.stats()["disk_held_bytes"] == FILE_BYTES
    assert disk.add(chain, 0) == [True]


def test_a_cleared_namespace_is_not_found_even_where_its_files_cannot_be_removed(disk: Disk) -> None:
    chain = chain_of()
    disk.add(chain, *range(5))
    disk.rules(Rule("remove", EIO))
    disk.tier.drop_namespace(NAMESPACE.digest)
    assert disk.tier.leading(chain, 0) == 0 and disk.fetch(chain, 0) == [None]
    assert disk.tier.stats()["disk_held_bytes"] == 5 * FILE_BYTES, "they still take room"
    disk.rules()
    disk.tier.drop_namespace(NAMESPACE.digest)
    assert not files_under(disk.path) and disk.tier.stats()["disk_held_bytes"] == 0


def test_a_clear_waits_for_a_disk_that_hangs_within_its_time_alone(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "CLEAR_S", 0.05)
    chain, other = chain_of(), chain_of(namespace=OTHER)
    disk.add(chain, *range(5))
    disk.add(other, 0)
    hang = Hang()
    disk.rules(Rule("remove", hang))
    returns(lambda: disk.tier.drop_namespace(NAMESPACE.digest))
    assert hang.reached.is_set()
    assert disk.tier.leading(chain, 0) == 0 and disk.has(other, 0)
    hang.release.set()
    until_s = time.monotonic() + PATIENCE_S
    while len(files_under(disk.path)) > 1:
        assert time.monotonic() < until_s
        time.sleep(0.002)


def test_what_is_taken_in_or_written_while_its_namespace_is_cleared_goes_too(folder: Path) -> None:
    chain, other = chain_of(), chain_of(namespace=OTHER)
    with disk_on(folder) as disk:
        disk.add(chain, *range(3))
        disk.add(other, 0)
    hang = Hang()
    disk = Disk(folder, rules=[Rule("read", hang, lambda name: "chunks/" in name)])
    disk.tier.open()
    try:
        assert hang.reached.wait(PATIENCE_S)
        disk.tier.drop_namespace(NAMESPACE.digest)
        assert disk.add(chain, 7) == [True], "what is put after it is new"
        hang.release.set()
        disk.wait_refilled()
        assert disk.tier.stats()["disk_entries"] == 2 == len(files_under(folder))
        assert disk.has(other, 0) and disk.has(chain, 7)
    finally:
        hang.release.set()
        disk.tier.close()
    with disk_on(folder) as disk:
        staging = Hang()
        disk.rules(Rule("publish", staging))
        adding = threading.Thread(target=disk.add, args=(chain, 1))
        adding.start()
        assert staging.reached.wait(PATIENCE_S)
        disk.tier.drop_namespace(NAMESPACE.digest)
        staging.release.set()
        adding.join(PATIENCE_S)
        assert disk.tier.leading(chain, 1) == 0 and len(files_under(folder)) == 1


# ---------------------------------------------------------------------------------------------------------------------
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
                        disk.tier.drop_namespace(NAMESPACE.digest)
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
        time.sleep(1.5)
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not wrong
        assert disk.count("disk_failed") == 0 and disk.count("disk_hits") > 50 and disk.count("disk_writes") > 50
        stats = disk.tier.stats()
        files = files_under(folder)
        assert stats["disk_entries"] == len(files) and stats["disk_held_bytes"] == len(files) * FILE_BYTES
        assert not list(folder.glob("staging/*/*.part"))


def test_no_descriptor_and_no_thread_is_left(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with disk_on(folder) as disk:
            disk.add(chain_of(), 0, 1)
            disk.fetch(chain_of(), 0, 1, 2)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [thread for thread in threading.enumerate() if thread.name == "kvstore-disk-refill"]


def test_a_listing_that_fails_is_tried_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_refill, "RETRY_S", 0.01)
    chain = chain_of()
    with disk_on(folder) as disk:
        disk.add(chain, 0, 1)
    disk = Disk(folder, rules=[Rule("list", EIO, lambda name: "chunks" in name, times=2), Rule("remove", EIO, times=1)])
    disk.tier.open()
    try:
        disk.wait_refilled()
        assert disk.has(chain, 0, 1) and disk.tier.stats()["disk_held_bytes"] == 2 * FILE_BYTES
    finally:
        disk.tier.close()


def test_images_are_whole_chunk_files(disk: Disk) -> None:
    chain = chain_of()
    disk.add(chain, 0)
    header = decode(files_under(disk.path)[0].read_bytes())
    assert header.address == chain.addresses[0] and header.file_bytes == IMAGE_BYTES
    with pytest.raises(Damaged):
        decode(bytes(IMAGE_BYTES))
