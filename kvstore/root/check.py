"""Tries on the actual root what the store relies on, and says plainly what follows if it does not hold.

The probes here test what any root must do; ``check_posix.py`` tests what only a mounted file system can answer. All of
them work in a scratch folder under the root, which is removed afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from kvstore.buffers import Borrowed
from kvstore.errors import KVStoreError
from kvstore.format.places import Name
from kvstore.root.check_posix import CheckTimings, posix_probes
from kvstore.root.interface import Root
from kvstore.root.posix import PosixRoot
from kvstore.root.probe import Probe
from kvstore.root.tree import remove_tree
from kvstore.sources import Ids, RandomIds

WRITERS_COUNT = 4
RACES_COUNT = 20
SMALL_FILES_COUNT = 100
REMOVE_TRIES_MAX = 40
STAMP_NS = 1_700_000_000_123_456_789


def check_root(
    root: Root,
    *,
    second: str | None = None,
    ids: Ids | None = None,
    progress: Callable[[Probe], object] = lambda probe: None,
    timings: CheckTimings | None = None,
) -> list[Probe]:
    """Probes ``root``; ``second`` is the root's folder as another mount of the same file system shows it.

    Writes a few MiB. Calls ``progress`` with each probe as it is done. Raises the root's errors if nothing can be tried
    at all: not even a scratch folder can be made, or removed.
    """
    scratch = Name(f".check-{(ids or RandomIds()).fresh().hex()}")
    timings, done = timings or CheckTimings(), list[Probe]()
    try:
        for probe in _probes(root, scratch, second, timings):
            done.append(probe)
            progress(probe)
    finally:
        removed = _removed(root, scratch, timings.remove_pause_s)
    if not removed:
        done.append(Probe("the scratch folder is removed", False, scratch, "delete it by hand"))
        progress(done[-1])
    return done


def is_sound(probes: list[Probe]) -> bool:
    """True if every probe that was tried held."""
    return all(probe.ok is not False for probe in probes)


def _probes(root: Root, scratch: Name, second: str | None, timings: CheckTimings) -> Iterator[Probe]:
    try_it = _Tries(root, scratch)
    # The first write is not guarded: if no file can be written at all, that is the error to show.
    try_it.write("first", b"first")
    for attempt in (
        try_it.first_writer_wins,
        try_it.racing_writers,
        try_it.many_pieces,
        try_it.ranges,
        try_it.durable,
        try_it.listing,
        try_it.deletion,
        # If a folder fences a sweep, no conditional deletion is needed.
        *([] if root.traits.fenced else [try_it.conditional_deletion]),
        try_it.open_while_deleted,
        try_it.mtime,
        try_it.mapping,
        try_it.space,
        try_it.speed,
    ):
        yield _guarded(attempt)
    if isinstance(root, PosixRoot):
        yield from posix_probes(root.path, str(scratch), second, timings)


def _removed(root: Root, scratch: Name, pause_s: float) -> bool:
    """Removes the scratch folder, in which a distributed file system may go on showing deleted files for a while."""
    for _ in range(REMOVE_TRIES_MAX):
        if remove_tree(root, scratch):
            return True
        time.sleep(pause_s)
    return False


def _guarded(attempt: Callable[[], Probe]) -> Probe:
    try:
        return attempt()
    except KVStoreError as error:
        name = attempt.__name__.replace("_", " ")
        return Probe(name, False, str(error), "the root fails in use: look at the mount or the server first")


class _Tries:
    """The probes of any root."""

    def __init__(self, root: Root, scratch: Name) -> None:
        self._root = root
        self._scratch = scratch
        self._count = 0

    def name(self, last: str) -> Name:
        return Name(f"{self._scratch}/{last}")

    def stage(self, content: bytes, *, durable: bool = False) -> Name:
        self._count += 1
        staged = self.name(f"staging/{self._count}.part")
        self._root.stage(staged, [memoryview(content)], stamp_ns=STAMP_NS, durable=durable)
        return staged

    def write(self, last: str, content: bytes) -> bool:
        return self._root.publish(self.stage(content), self.name(last), durable=False)

    def read(self, last: str, offset: int, size: int) -> bytes | None:
        reader = self._root.open(self.name(last))
        if reader is None:
            return None
        with reader:
            memory = bytearray(size)
            return bytes(memory[: reader.read([memoryview(memory)], offset, Borrowed())])

    def first_writer_wins(self) -> Probe:
        again = self.write("first", b"other")
        kept = self.read("first", 0, 100)
        ok = not again and kept == b"first"
        return Probe(
            "publishing refuses a name that is taken",
            ok,
            "refused" if ok else f"the second writer got {again}, the file holds {kept!r}",
            "" if ok else "a chunk may change under its reader: reads that notice are misses. Do not use this root",
        )

    def racing_writers(self) -> Probe:
        name = "of racing writers one wins"
        winners = []
        with ThreadPoolExecutor(WRITERS_COUNT) as pool:
            for number in range(RACES_COUNT):
                staged = [self.stage(b"%d" % writer * 1000) for writer in range(WRITERS_COUNT)]
                target = self.name(f"race/{number}")
                won = pool.map(lambda each, target=target: self._root.publish(each, target, durable=False), staged)
                winners.append(sum(won))
        wrong = sum(count != 1 for count in winners)
        if not self._root.traits.exclusive_publish:
            return Probe(
                name,
                None,
                f"the store cannot create conditionally; {wrong} of {RACES_COUNT} races had several winners",
                "the last of several writers of one chunk wins; a read then may be a miss (bytes are verified)",
            )
        return Probe(
            name,
            not wrong,
            f"{RACES_COUNT - wrong} of {RACES_COUNT} races had one winner",
            "" if not wrong else "a held chunk may be replaced: reads that notice are misses. Do not use this root",
        )

    def many_pieces(self) -> Probe:
        pieces = [memoryview(b"%04d" % number) for number in range(2500)]
        staged = self.name("staging/pieces.part")
        self._root.stage(staged, pieces, stamp_ns=STAMP_NS, durable=False)
        self._root.publish(staged, self.name("pieces"), durable=False)
        ok = self.read("pieces", 0, 20_000) == b"".join(pieces)
        return Probe(
            "a file is readable at once, whole",
            ok,
            "2500 pieces, 10000 bytes" if ok else "the bytes read are not those written",
            "" if ok else "chunks read back wrong: every read is a miss. Do not use this root",
        )

    def ranges(self) -> Probe:
        content = bytes(index * 7 % 256 for index in range(9000))
        self.write("ranges", content)
        wanted = [(0, 100), (4090, 20), (8990, 100), (9000, 10)]
        ok = all(self.read("ranges", offset, size) == content[offset : offset + size] for offset, size in wanted)
        return Probe("parts of a file can be read", ok, f"{len(wanted)} ranges", "" if ok else "every read is a miss")

    def durable(self) -> Probe:
        start_s = time.perf_counter()
        count = 5
        for number in range(count):
            staged = self.stage(b"durable" * 1000, durable=True)
            self._root.publish(staged, self.name(f"durable/{number}"), durable=True)
        each_ms = (time.perf_counter() - start_s) / count * 1000
        return Probe('writes with durability="fsync"', True, f"{each_ms:.1f} ms each")

    def listing(self) -> Probe:
        for number in range(5):
            self.write(f"list/{number}", b"x" * number)
        found = {entry.name: entry.stat and entry.stat.size_bytes for entry in self._root.list(self.name("list"))}
        ok = found == {str(number): number for number in range(5)}
        return Probe(
            "a listing shows what was just written",
            ok,
            f"{len(found)} of 5 files",
            "" if ok else "fsck and garbage collection see new files late; reads do not list",
        )

    def deletion(self) -> Probe:
        self.write("gone", b"gone")
        self._root.remove(self.name("gone"))
        ok = self._root.stat(self.name("gone")) is None and self._root.open(self.name("gone")) is None
        free = self.write("gone", b"again") and self.read("gone", 0, 10) == b"again"
        return Probe(
            "a deleted file is gone, and its name is free",
            ok and free,
            "gone at once" if ok else "still seen after its deletion",
            "" if ok and free else "evicted chunks look present for a while: reads of them are misses",
        )

    def conditional_deletion(self) -> Probe:
        name = "a file is deleted only if it is still the one looked at"
        if not self._root.traits.conditional_remove:
            return Probe(
                name,
                None,
                "conditional delete: not honoured",
                "kvstore-gc will not run here, because it could delete a newer chunk than the one that it chose. "
                "Amazon S3 honours If-Match on DELETE, through botocore 1.35.67 or later; elsewhere a lifecycle rule "
                "of the bucket can expire objects by age, pinned ones too",
            )
        self.write("condition", b"old")
        old = self._root.look(self.name("condition"), 3)
        self._root.remove(self.name("condition"))
        self.write("condition", b"new")
        new = self._root.look(self.name("condition"), 3)
        assert old is not None and new is not None
        kept = not self._root.remove_if(self.name("condition"), old) and self.read("condition", 0, 3) == b"new"
        gone = self._root.remove_if(self.name("condition"), new) and self.read("condition", 0, 3) is None
        if kept and gone:
            return Probe(name, True, "conditional delete: honoured; kvstore-gc will run here")
        wrong = "a newer file was deleted" if not kept else "the file itself was not deleted"
        return Probe(name, False, wrong, "garbage collection may lose newer chunks: do not run kvstore-gc here")

    def open_while_deleted(self) -> Probe:
        self.write("held", b"held" * 1000)
        reader = self._root.open(self.name("held"))
        assert reader is not None
        with reader:
            self._root.remove(self.name("held"))
            memory = bytearray(4000)
            count = reader.read([memoryview(memory)], 0, Borrowed())
        wrong = memory[:count] != (b"held" * 1000)[:count]
        return Probe(
            "reading an open file that was deleted",
            False if wrong else None,
            "reads on" if count == 4000 else f"gives {count} of 4000 bytes",
            "other bytes were read. Do not use this root" if wrong else "",
        )

    def mtime(self) -> Probe:
        name = "the mtime can be set"
        self.write("stamp", b"stamp")
        wanted_ns = STAMP_NS + 60_000_000_000
        if not self._root.touch(self.name("stamp"), wanted_ns):
            return Probe(
                name,
                None,
                "it cannot",
                "recency is the time of writing: eviction goes by age of publication (first in, first out), not by use",
            )
        stat = self._root.stat(self.name("stamp"))
        off_ns = None if stat is None else abs(stat.mtime_ns - wanted_ns)
        if off_ns is None or off_ns >= 1_000_000_000:
            return Probe(
                name, False, "it is not what was set", "eviction order is wrong: recently used chunks may go first"
            )
        grain = next(
            text for limit, text in ((1, "1 ns"), (1_000, "1 µs"), (1_000_000_000, "coarser")) if off_ns < limit
        )
        weaker = "of chunks used at one time, parents may be evicted before children" if grain == "coarser" else ""
        return Probe(name, True, f"to {grain}", weaker)

    def mapping(self) -> Probe:
        self.write("mapped", b"mapped" * 1000)
        reader = self._root.open(self.name("mapped"))
        assert reader is not None
        with reader:
            mapped = reader.map() if self._root.traits.mapped else None
        ok = mapped is not None and bytes(mapped) == b"mapped" * 1000
        if not self._root.traits.mapped:
            return Probe("files can be mapped into memory", None, "they cannot", "view() reads a copy instead")
        return Probe("files can be mapped into memory", ok, "mapped", "" if ok else "view() fails: use read_into()")

    def space(self) -> Probe:
        space = self._root.space()
        if space.total_bytes is None or space.free_bytes is None:
            return Probe(
                "free space is reported",
                None,
                "it is not",
                "garbage collection needs --max-bytes or --ttl on this root",
            )
        detail = f"{space.free_bytes / 2**30:.1f} of {space.total_bytes / 2**30:.1f} GiB free"
        return Probe("free space is reported", True, detail)

    def speed(self) -> Probe:
        start_s = time.perf_counter()
        for number in range(SMALL_FILES_COUNT):
            self.write(f"small/{number}", b"x" * 100)
        middle_s = time.perf_counter()
        listed = len(list(self._root.list(self.name("small"))))
        end_s = time.perf_counter()
        published_per_s = SMALL_FILES_COUNT / max(middle_s - start_s, 1e-9)
        listed_per_s = listed / max(end_s - middle_s, 1e-9)
        return Probe("small files", None, f"{published_per_s:.0f} published/s, {listed_per_s:.0f} listed/s")
