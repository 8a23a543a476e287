"""Tries on the actual root what the store relies on, and reports what follows if it does not hold.

Some probes test what any root must do. Others test what only a mounted file system can answer: links, folders as
fences, and a second client. All of them work in a scratch folder under the root, which is removed afterwards.

The rival of a probe is a thread that works through a second mount of the same file system, if there is one, where
caches show. Without one it works on the same mount, and what another client would see stays unknown.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvstore.core.buffers import BufferLoan
from kvstore.core.clock import RandomIds
from kvstore.errors import KVStoreError
from kvstore.format.places import Name
from kvstore.root.fences import remove_tree
from kvstore.root.interface import Root
from kvstore.root.posix import FILE_SYSTEMS as NFS
from kvstore.root.posix import PosixRoot, file_system_type, mount_of


@dataclass(frozen=True, slots=True)
class Probe:
    """One thing tried. ``ok`` is None if it is only information, or could not be tried (the detail says why).

    ``consequence`` says what it means for the store; empty if all is well.
    """

    name: str
    ok: bool | None
    detail: str
    consequence: str = ""


@dataclass(frozen=True)
class CheckTimings:
    """How long the probes of a root take and wait."""

    fence_s: float = 2.0
    """Time for which folders are removed while a rival renames into them."""
    visible_s_max: float = 10.0
    """Longest wait for what the rival did."""
    remove_pause_s: float = 0.3
    """Pause between two attempts to remove the scratch folder."""


WRITERS_COUNT = 4
RACES_COUNT = 20
LINKS_COUNT = 100
REMOVE_TRIES_MAX = 40
STAMP_NS = 1_700_000_000_123_456_789
WEAK_FENCES = frozenset({"fuse.glusterfs"})
"""File systems on which a rename can succeed after the folder was removed; two seconds of trying may not show it."""

_NFS_OPTIONS = frozenset({"vers", "proto", "hard", "soft", "softerr", "nconnect", "lookupcache", "acdirmin", "actimeo"})
_DO_NOT_USE = "reads that notice are misses. Do not use this root"
_WEAK_FENCE = (
    "the guarantee of this root is the weak one: a garbage collector that was paused past its sweep can make a held or "
    "pinned chunk a miss until the next sweep restores it. No newer publication is lost"
)


def check_root(
    root: Root,
    *,
    second: str | None = None,
    progress: Callable[[Probe], object] = lambda probe: None,
    timings: CheckTimings | None = None,
) -> list[Probe]:
    """Probes ``root``; ``second`` is the root's folder as another mount of the same file system shows it.

    Writes a few MiB. Calls ``progress`` with each probe as it is done. Raises the root's errors if nothing can be tried
    at all: not even a scratch folder can be made, or removed.
    """
    scratch = Name(f".check-{RandomIds().fresh().hex()}")
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
    tries = _Tries(root, scratch)
    # The first write is not guarded: if no file can be written at all, that is the error to show.
    tries.write("first", b"first")
    attempts: list[Callable[[], Probe | None]] = [
        tries.first_writer_wins,
        tries.racing_writers,
        tries.ranges,
        tries.listing,
        tries.deletion,
        tries.mtime,
        tries.space,
    ]
    if not root.traits.fenced:  # where a folder fences a sweep, no conditional deletion is needed
        attempts.append(tries.conditional_deletion)
    if isinstance(root, PosixRoot):
        mounted = _MountTries(root.path, str(scratch), second, timings)
        same = mounted.second_mount()
        if same is not None:
            yield same
        if same is None or same.ok:
            attempts += [mounted.link, mounted.fence, mounted.visibility, mounted.deletions, mounted.options]
    for attempt in attempts:
        try:
            probe = attempt()
        except (KVStoreError, OSError) as error:
            name = attempt.__name__.replace("_", " ")
            probe = Probe(name, False, str(error), "the root fails in use: look at the mount or the server first")
        if probe is not None:
            yield probe


def _removed(root: Root, scratch: Name, pause_s: float) -> bool:
    """Removes the scratch folder, in which a distributed file system may go on showing deleted files for a while."""
    for _ in range(REMOVE_TRIES_MAX):
        if remove_tree(root, scratch):
            return True
        time.sleep(pause_s)
    return False


def _verdict(name: str, ok: bool, good: str, bad: str, consequence: str) -> Probe:
    return Probe(name, True, good) if ok else Probe(name, False, bad, consequence)


class _Tries:
    """The probes of any root."""

    def __init__(self, root: Root, scratch: Name) -> None:
        self._root = root
        self._scratch = scratch
        self._count = 0

    def name(self, last: str) -> Name:
        return Name(f"{self._scratch}/{last}")

    def stage(self, content: bytes) -> Name:
        self._count += 1
        staged = self.name(f"staging/{self._count}.part")
        self._root.stage(staged, [memoryview(content)], stamp_ns=STAMP_NS, durable=False)
        return staged

    def write(self, last: str, content: bytes) -> bool:
        return self._root.publish(self.stage(content), self.name(last), durable=False)

    def read(self, last: str, offset: int, size: int) -> bytes | None:
        reader = self._root.open(self.name(last))
        if reader is None:
            return None
        with reader:
            memory = bytearray(size)
            return bytes(memory[: reader.read([memoryview(memory)], offset, BufferLoan())])

    def first_writer_wins(self) -> Probe:
        again = self.write("first", b"other")
        kept = self.read("first", 0, 100)
        return _verdict(
            "publishing refuses a name that is taken",
            not again and kept == b"first",
            "refused",
            f"the second writer got {again}, the file holds {kept!r}",
            f"a chunk may change under its reader: {_DO_NOT_USE}",
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
        detail = f"{RACES_COUNT - wrong} of {RACES_COUNT} races had one winner"
        return _verdict(name, not wrong, detail, detail, f"a held chunk may be replaced: {_DO_NOT_USE}")

    def ranges(self) -> Probe:
        pieces = [memoryview(b"%04d" % number) for number in range(2500)]
        content = b"".join(pieces)
        staged = self.name("staging/ranges.part")
        self._root.stage(staged, pieces, stamp_ns=STAMP_NS, durable=False)
        self._root.publish(staged, self.name("ranges"), durable=False)
        wanted = [(0, 100), (4090, 20), (9990, 100), (10_000, 10), (0, 20_000)]
        ok = all(self.read("ranges", offset, size) == content[offset : offset + size] for offset, size in wanted)
        return _verdict(
            "parts of a file can be read",
            ok,
            f"{len(wanted)} ranges of {len(pieces)} pieces",
            "the bytes read are not those written",
            "every read is a miss. Do not use this root",
        )

    def listing(self) -> Probe:
        for number in range(5):
            self.write(f"list/{number}", b"x" * number)
        found = {entry.name: entry.stat and entry.stat.size_bytes for entry in self._root.list(self.name("list"))}
        detail = f"{len(found)} of 5 files"
        return _verdict(
            "a listing shows what was just written",
            found == {str(number): number for number in range(5)},
            detail,
            detail,
            "fsck and garbage collection see new files late; reads do not list",
        )

    def deletion(self) -> Probe:
        self.write("gone", b"gone")
        self._root.remove(self.name("gone"))
        gone = self._root.stat(self.name("gone")) is None and self._root.open(self.name("gone")) is None
        free = self.write("gone", b"again") and self.read("gone", 0, 10) == b"again"
        return _verdict(
            "a deleted file is gone, and its name is free",
            gone and free,
            "gone immediately",
            "still seen after its deletion",
            "evicted chunks look present for a while: reads of them are misses",
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
        return _verdict(
            name,
            kept and gone,
            "conditional delete: honoured; kvstore-gc will run here",
            "a newer file was deleted" if not kept else "the file itself was not deleted",
            "garbage collection may lose newer chunks: do not run kvstore-gc here",
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
        if off_ns < 1_000:
            return Probe(name, True, "to 1 µs")
        weaker = "of chunks used at one time, parents may be evicted before children"
        return Probe(name, True, "to coarser than 1 µs", weaker)

    def space(self) -> Probe:
        name, space = "free space is reported", self._root.space()
        if space.total_bytes is None or space.free_bytes is None:
            return Probe(name, None, "it is not", "garbage collection needs --max-bytes or --ttl on this root")
        return Probe(name, True, f"{space.free_bytes / 2**30:.1f} of {space.total_bytes / 2**30:.1f} GiB free")


class _MountTries:
    """The probes of a mounted root; the rival sees its scratch folder through the ``second`` mount, if there is one."""

    def __init__(self, path: str, scratch: str, second: str | None, timings: CheckTimings) -> None:
        self._folder = f"{path}/{scratch}"
        self._rivals = f"{second or path}/{scratch}"
        self._has_two = second is not None
        self._timings = timings
        self._between = "two mounts" if second is not None else "two threads on one mount"

    def second_mount(self) -> Probe | None:
        if not self._has_two:
            return None
        shown = _soon(lambda: os.path.isdir(self._rivals), self._timings.visible_s_max)
        return _verdict(
            "the second mount",
            shown,
            "shows the same folder",
            f"{self._rivals} does not exist",
            "it is not another mount of the same file system, or shows new folders too late",
        )

    def link(self) -> Probe:
        """Links files of two writers to the same names. A file gets one link: GlusterFS allows about a hundred."""
        name = "link(2) has one winner"
        writers = [(self._folder, "own"), (self._rivals, "rival")]
        for folder, writer in writers:
            for number in range(LINKS_COUNT):
                _write(f"{folder}/link-{writer}-{number}", b"")
        together = threading.Barrier(len(writers), timeout=self._timings.visible_s_max)

        def compete(folder: str, writer: str) -> set[int]:
            won = set()
            for number in range(LINKS_COUNT):
                together.wait()
                try:
                    os.link(f"{folder}/link-{writer}-{number}", f"{folder}/link-{number}")
                except FileExistsError:
                    continue
                except OSError:
                    together.abort()
                    raise
                won.add(number)
            return won

        with ThreadPoolExecutor(len(writers)) as pool:
            running = [pool.submit(compete, *writer) for writer in writers]
        failed = [error for each in running if isinstance(error := each.exception(), OSError)]
        if failed and failed[0].errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            unusable = "publishing is impossible: use another file system, or an object store"
            return Probe(name, False, f"no hard links here: {failed[0]}", unusable)
        mine, theirs = (each.result() for each in running)
        both, neither = len(mine & theirs), LINKS_COUNT - len(mine | theirs)
        counts = f"{len(mine)} + {len(theirs)} of {LINKS_COUNT} won, both {both}, neither {neither}"
        detail = f"{self._between}: {counts}"
        consequence = "two writers may both believe that they published a chunk"
        return _verdict(name, not both and not neither, detail, detail, consequence)

    def fence(self) -> Probe:
        """Checks that no rename into the folder succeeds once rmdir has returned, by path or through an open folder."""
        stop = threading.Event()
        fences = late = 0
        end_s = time.monotonic() + self._timings.fence_s
        with ThreadPoolExecutor(1) as pool:
            rival = pool.submit(_rename_into, self._rivals, stop)
            try:
                while time.monotonic() < end_s:
                    fences += 1
                    late += self.late_renames(f"{self._folder}/fence")
            finally:
                stop.set()
        kind = file_system_type(self._folder)
        detail = f"{self._between}: {fences} fences, {rival.result()} renames before them, {late} after"
        if kind in WEAK_FENCES:
            detail += f"; {kind} is known for late ones"
        ok = not late and kind not in WEAK_FENCES
        return _verdict("a removed folder takes no renames", ok, detail, detail, _WEAK_FENCE)

    def late_renames(self, fence: str) -> int:
        """Makes and removes one fence; returns how many renames succeeded after the removal."""
        late = 0
        try:
            os.mkdir(fence)
        except FileExistsError:  # rmdir had returned, and a rename brought the folder back
            late += 1
        held = os.open(fence, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            time.sleep(0.0005)
            _drain(fence, self._timings.visible_s_max)
            _write(f"{self._folder}/fence-late", b"")
            try:
                os.rename(f"{self._folder}/fence-late", "late", dst_dir_fd=held)
                late += 1
            except OSError:
                os.unlink(f"{self._folder}/fence-late")  # refused, as it must be (ENOENT, or ESTALE on NFS)
        finally:
            os.close(held)
        return late

    def visibility(self) -> Probe:
        if not self._has_two:
            return Probe(
                "another mount sees changes",
                None,
                "not tried: give a second mount of the same file system",
                "other hosts may see a new chunk late (a miss) or a deleted one for a while (a miss when it is read)",
            )
        limit_s = self._timings.visible_s_max
        rival = PosixRoot(self._rivals)
        rival.stat(Name("seen"))  # the rival misses it first, so that a cached absence would show
        start_s = time.monotonic()
        _write(f"{self._folder}/seen", b"seen")
        shown = _soon(lambda: rival.stat(Name("seen")) is not None, limit_s) and _read(f"{self._rivals}/seen")
        return _verdict(
            "another mount sees new files",
            shown == b"seen",
            f"after {(time.monotonic() - start_s) * 1000:.1f} ms",
            f"not within {limit_s:.0f} s, or not whole",
            "other hosts miss what this one stored, or read it torn (a miss)",
        )

    def deletions(self) -> Probe | None:
        if not self._has_two:
            return None
        limit_s = self._timings.visible_s_max
        rival = PosixRoot(self._rivals)
        start_s = time.monotonic()
        os.unlink(f"{self._folder}/seen")
        return _verdict(
            "another mount sees deletions",
            _soon(lambda: rival.stat(Name("seen")) is None, limit_s),
            f"after {(time.monotonic() - start_s) * 1000:.1f} ms",
            f"not within {limit_s:.0f} s",
            "evicted chunks look present on other hosts for long: reads of them are misses",
        )

    def options(self) -> Probe | None:
        mount = mount_of(self._folder)
        if mount.type not in NFS:
            return None
        chosen = [each for each in mount.options if each.partition("=")[0] in _NFS_OPTIONS]
        is_soft = not {"soft", "softerr"}.isdisjoint(chosen)
        return Probe(
            "the options of the NFS mount",
            None,
            ", ".join(chosen),
            "a server that is slow makes reads and puts fail: use `hard`, the store has deadlines of its own"
            if is_soft
            else "none is required; `lookupcache=positive` is not needed, and costs a LOOKUP for each miss",
        )


def _rename_into(folder: str, stop: threading.Event) -> int:
    """Renames files into the folder ``fence`` until ``stop``; returns how many got in.

    It slows down while one folder stays: on a busy machine the other thread could never empty it otherwise.
    """
    count = in_a_row = 0
    source = f"{folder}/fence-source"
    while not stop.is_set():
        try:
            if not os.path.exists(source):
                _write(source, b"")
            os.rename(source, f"{folder}/fence/{count}")
        except OSError:
            in_a_row = 0
            time.sleep(0)  # the folder does not exist at the moment: the fence holds
            continue
        count += 1
        in_a_row += 1
        time.sleep(min(in_a_row * 1e-5, 0.02))
    return count


def _drain(fence: str, limit_s: float) -> None:
    """Empties and removes the folder while the rival fills it."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        try:
            for entry in os.listdir(fence):
                os.unlink(f"{fence}/{entry}")
            os.rmdir(fence)
            return
        except FileNotFoundError:
            if not os.path.exists(fence):
                return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ESTALE):
                raise
    raise OSError(errno.ENOTEMPTY, f"could not empty and remove the folder within {limit_s:.0f} s", fence)


def _soon(condition: Callable[[], bool], limit_s: float) -> bool:
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.0005)
    return True


def _write(path: str, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
