"""Tries on the actual root what the store relies on, and reports what follows if it does not hold.

Some probes test what any root must do. Others test what only a mounted file system can answer: links, renames, folders
as fences, and a second client. All of them work in a scratch folder under the root, which is removed afterwards.

The rival process works on a second mount of the same file system, if there is one, where caches show. Without one it
works on the same mount, and what another client would see stays unknown.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvstore.buffers import Borrowed
from kvstore.errors import KVStoreError
from kvstore.format.places import Name
from kvstore.root.fences import remove_tree
from kvstore.root.interface import Root
from kvstore.root.posix import FILE_SYSTEMS as NFS
from kvstore.root.posix import PosixRoot, file_system_type, mount_of
from kvstore.sources import Ids, RandomIds
from kvstore.text import parse_json

# A second process on a mounted file system, for the probes of ``check-root`` that need a rival.
#
# Run as ``python -m kvstore.root.check FOLDER``. Reads one JSON object per line, answers each with one, and ends when
# its input does, so that it never outlives the process that started it.


ANSWER_S = 30.0
TURN_S = 0.002
AT_FULL_SPEED = 1_000
"""Renames into one folder after which each further one waits ``STEP_S`` longer."""
STEP_S = 1e-5
STEP_MAX_S = 0.02


class Contender:
    """The rival, seen from the process that checks. ``folder`` is the scratch folder's path for the rival."""

    def __init__(self, folder: str) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "kvstore.root.check", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the process that checks, which ends this one
            # Pass the search path on: the package may be importable here only because of it.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)},
        )

    def send(self, what: str, **parameters: Any) -> None:
        """Starts an action; ``receive`` returns its outcome."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"what": what, **parameters}) + "\n")
        self._child.stdin.flush()

    def receive(self) -> Any:
        """Returns the outcome of the action that was sent. Raises OSError if it failed, or if the rival is gone."""
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise OSError("the second process ended")
        answer = parse_json(line)
        if "error" in answer:
            raise OSError(answer["code"], answer["error"])
        return answer["outcome"]

    def ask(self, what: str, **parameters: Any) -> Any:
        """Sends an action and returns its outcome."""
        self.send(what, **parameters)
        return self.receive()

    def close(self) -> None:
        """Ends the process, by force if it hangs on the mount."""
        if self._child.stdin is not None:
            self._child.stdin.close()
        try:
            self._child.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
        if self._child.stdout is not None:
            self._child.stdout.close()


def create_names(folder: str, prefix: str, names_count: int, at_s: float, me: str) -> list[int]:
    """Creates many names with O_EXCL, starting at wall time ``at_s``; returns those that this process created."""
    return _compete(at_s, names_count, lambda number: _create(f"{folder}/{prefix}{number}"))


def prepare_links(folder: str, prefix: str, names_count: int, me: str) -> None:
    """Makes the files that ``link_names`` links, one for each name.

    GlusterFS allows about a hundred links to one file, and the store never makes more than two.
    """
    for number in range(names_count):
        _create(f"{folder}/{prefix}{me}-{number}")


def link_names(folder: str, prefix: str, names_count: int, at_s: float, me: str) -> list[int]:
    """Links files of its own to many names; returns the names that this process won."""
    return _compete(
        at_s, names_count, lambda number: os.link(f"{folder}/{prefix}{me}-{number}", f"{folder}/{prefix}{number}")
    )


def rename_into(folder: str, fence: str, stop: str, me: str) -> int:
    """Renames files into folder ``fence`` as fast as it can until ``stop`` exists; returns how many got in.

    It slows down while one folder stays: on a busy machine the other process could never empty it otherwise.
    """
    count = in_a_row = 0
    source = f"{folder}/{fence}-source-{me}"
    while not os.path.exists(f"{folder}/{stop}"):
        try:
            if not os.path.exists(source):
                _create(source)
            os.rename(source, f"{folder}/{fence}/{me}{count}")
        except OSError:
            in_a_row = 0
            continue  # the folder is gone at the moment: the fence holds
        count += 1
        in_a_row += 1
        if in_a_row > AT_FULL_SPEED:
            time.sleep(min((in_a_row - AT_FULL_SPEED) * STEP_S, STEP_MAX_S))
    return count


def wait_for(folder: str, name: str, present: bool, limit_s: float) -> float:
    """Returns the seconds until a root finds a name (or does not); -1 if that took longer than ``limit_s``."""
    root, start_s = PosixRoot(folder), time.monotonic()
    while (root.stat(Name(name)) is not None) != present:
        if time.monotonic() - start_s > limit_s:
            return -1.0
        time.sleep(0.0005)
    return time.monotonic() - start_s


def read_hex(folder: str, name: str) -> str:
    """Returns a small file's content in hexadecimal digits."""
    with open(f"{folder}/{name}", "rb") as file:
        return file.read().hex()


def _create(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))


def _compete(at_s: float, names_count: int, take: Callable[[int], object]) -> list[int]:
    won = []
    for number in range(names_count):
        # Each name has a start time of its own: otherwise the process that begins first takes all names before the
        # other looks.
        while time.time() < at_s + number * TURN_S:
            pass
        try:
            take(number)
        except FileExistsError:
            continue
        won.append(number)
    return won


_DOES: dict[str, Callable[..., Any]] = {
    "create": create_names,
    "prepare_links": prepare_links,
    "link": link_names,
    "rename_into": rename_into,
    "wait_for": wait_for,
    "read": read_hex,
}


def _serve(folder: str) -> None:
    for line in sys.stdin:
        parameters = parse_json(line)
        try:
            answer: dict[str, Any] = {"outcome": _DOES[parameters.pop("what")](folder, **parameters)}
        except OSError as error:
            answer = {"error": str(error), "code": error.errno or 0}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve(sys.argv[1])


@dataclass(frozen=True, slots=True)
class Probe:
    """One thing tried. ``ok`` is None if it is only information, or could not be tried (the detail says why).

    ``consequence`` says what it means for the store; empty if all is well.
    """

    name: str
    ok: bool | None
    detail: str
    consequence: str = ""


NAMES_COUNT = 100
SOON_S = 0.2
NAME_BYTES_MIN = 100
WEAK_FENCES = frozenset({"fuse.glusterfs"})

_NFS_OPTIONS = frozenset({"vers", "proto", "hard", "soft", "softerr", "nconnect", "lookupcache", "acdirmin", "actimeo"})
_NO_LINKS = "publishing is impossible: use another file system, or an object store"
_WEAK_FENCE = (
    "the guarantee of this root is the weak one: a garbage collector that was paused past its sweep can make a held or "
    "pinned chunk a miss until the next sweep restores it. No newer publication is lost"
)


@dataclass(frozen=True)
class CheckTimings:
    """How long the probes of a root take and wait."""

    fence_s: float = 2.0
    """Time for which folders are removed while another process renames into them."""
    visible_s_max: float = 10.0
    """Longest wait for what another process or mount did."""
    remove_pause_s: float = 0.3
    """Pause between two attempts to remove the scratch folder."""


def posix_probes(path: str, scratch: str, second: str | None, timings: CheckTimings) -> Iterator[Probe]:
    """Yields the probes of a mounted root at ``path``, in its folder ``scratch``, which exists."""
    folder, other = f"{path}/{scratch}", f"{second or path}/{scratch}"
    if second is not None:
        if not _soon(lambda: os.path.isdir(other), timings.visible_s_max):
            yield Probe(
                "the second mount",
                False,
                f"{other} is not there",
                "it is not another mount of the same file system, or new folders stay unseen for more than 10 s",
            )
            return
        yield Probe("the second mount", True, f"shows the same folder as {path}")
    rival = Contender(other)
    try:
        tries = _PosixTries(folder, rival, second is not None, timings)
        for attempt in (
            tries.exclusive_creation,
            tries.exclusive_link,
            tries.rename,
            tries.fence,
            tries.visibility,
            tries.names,
            tries.nowait,
            tries.options,
        ):
            try:
                yield from attempt()
            except OSError as error:
                name = attempt.__name__.replace("_", " ")
                yield Probe(name, False, str(error), "the mount fails in use: look at it first")
    finally:
        rival.close()


class _PosixTries:
    """The probes of a mounted root in ``folder``; ``rival`` is another process, by a second mount if there is one."""

    def __init__(self, folder: str, rival: Contender, has_two: bool, timings: CheckTimings) -> None:
        self._folder = folder
        self._timings = timings
        self._rival = rival
        self._has_two = has_two
        self._between = "two mounts" if has_two else "two processes on one mount"

    def exclusive_creation(self) -> Iterator[Probe]:
        yield self._race(
            "create", create_names, "O_EXCL", "two sessions may write one staging file: bytes are verified"
        )

    def exclusive_link(self) -> Iterator[Probe]:
        try:
            self._rival.ask("prepare_links", prefix="link-", names_count=NAMES_COUNT, me="rival")
            prepare_links(self._folder, "link-", NAMES_COUNT, "own")
            yield self._race("link", link_names, "link(2)", "two writers may both believe that they published a chunk")
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
            yield Probe("link(2) has one winner", False, f"no hard links here: {error}", _NO_LINKS)

    def _race(self, what: str, compete: Callable[..., list[int]], call: str, consequence: str) -> Probe:
        parameters = {"prefix": f"{what}-", "names_count": NAMES_COUNT, "at_s": time.time() + SOON_S}
        self._rival.send(what, me="rival", **parameters)
        try:
            mine = compete(self._folder, me="own", **parameters)
        finally:
            theirs = self._rival.receive()
        both = len(set(mine) & set(theirs))
        nobody = NAMES_COUNT - len(set(mine) | set(theirs))
        ok = not both and not nobody
        return Probe(
            f"{call} has one winner",
            ok,
            f"{self._between}: {len(mine)} + {len(theirs)} of {NAMES_COUNT} won, both {both}, nobody {nobody}",
            "" if ok else consequence,
        )

    def rename(self) -> Iterator[Probe]:
        source, target = f"{self._folder}/rename-a", f"{self._folder}/rename-b"
        _write(source, b"renamed")
        os.rename(source, target)
        ok = not os.path.exists(source) and _read(target) == b"renamed"
        yield Probe(
            "rename moves a file as a whole",
            ok,
            "moved" if ok else "the old name is still there, or the new one is not",
            "" if ok else "damaged files cannot be set aside: they stay misses until garbage collection takes them",
        )

    def fence(self) -> Iterator[Probe]:
        """Checks that no rename into the folder succeeds once rmdir has returned, by path or through an open folder."""
        fence = f"{self._folder}/fence"
        self._rival.send("rename_into", fence="fence", stop="fence-stop", me="rival")
        fences = late = risen = 0
        end_s = time.monotonic() + self._timings.fence_s
        try:
            while time.monotonic() < end_s:
                late_now, risen_now = self._one_fence(fence)
                fences += 1
                late += late_now
                risen += risen_now
        finally:
            _write(f"{self._folder}/fence-stop", b"")
            got_in = self._rival.receive()
        # If it depends on chance, two seconds may not show it: known failures of this file system count too.
        kind = file_system_type(self._folder)
        ok = not late and not risen and kind not in WEAK_FENCES
        seen = f"{fences} fences, {got_in} renames before them, {late} after, {risen} folders came back"
        known = f"; {kind} is known for late ones" if kind in WEAK_FENCES else ""
        yield Probe(
            "a removed folder takes no renames", ok, f"{self._between}: {seen}{known}", "" if ok else _WEAK_FENCE
        )

    def _one_fence(self, fence: str) -> tuple[int, int]:
        """Raises and closes one fence; returns how many renames came late, and whether the folder had come back."""
        late = risen = 0
        try:
            os.mkdir(fence)
        except FileExistsError:  # rmdir had returned, and yet the folder is there again
            risen = 1
            late += len(os.listdir(fence))
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
        return late, risen

    def visibility(self) -> Iterator[Probe]:
        if not self._has_two:
            yield Probe(
                "another mount sees changes",
                None,
                "not tried: give a second mount of the same file system",
                "other hosts may see a new chunk late (a miss) or a deleted one for a while (a miss when it is read)",
            )
            return
        limit_s = self._timings.visible_s_max
        # The rival looks first, and misses, so that a cached absence would show.
        self._rival.ask("wait_for", name="seen", present=False, limit_s=1.0)
        _write(f"{self._folder}/seen", b"seen")
        shown_s = self._rival.ask("wait_for", name="seen", present=True, limit_s=limit_s)
        content = self._rival.ask("read", name="seen") if shown_s >= 0 else ""
        whole = content == b"seen".hex()
        os.unlink(f"{self._folder}/seen")
        hidden_s = self._rival.ask("wait_for", name="seen", present=False, limit_s=limit_s)
        yield Probe(
            "another mount sees new files",
            shown_s >= 0 and whole,
            f"after {shown_s * 1000:.1f} ms" if shown_s >= 0 else f"not within {limit_s:.0f} s",
            "" if shown_s >= 0 and whole else "other hosts miss what this one stored, or read it torn (a miss)",
        )
        yield Probe(
            "another mount sees deletions",
            None if hidden_s >= 0 else False,
            f"after {hidden_s * 1000:.1f} ms" if hidden_s >= 0 else f"not within {limit_s:.0f} s",
            "" if hidden_s >= 0 else "evicted chunks look present on other hosts for long: reads of them are misses",
        )

    def names(self) -> Iterator[Probe]:
        _write(f"{self._folder}/case", b"lower")
        sensitive = not os.path.exists(f"{self._folder}/CASE")
        yield Probe("upper and lower case differ", None, "they do" if sensitive else "they do not; our names are lower")
        longest = os.pathconf(self._folder, "PC_NAME_MAX")
        _write(f"{self._folder}/{'n' * NAME_BYTES_MIN}", b"")
        yield Probe(
            "names are long enough",
            longest >= NAME_BYTES_MIN,
            f"{longest} bytes, {NAME_BYTES_MIN} needed",
            "" if longest >= NAME_BYTES_MIN else "chunks cannot be named here: use another file system",
        )

    def nowait(self) -> Iterator[Probe]:
        name = "cached bytes are read without a copy (RWF_NOWAIT)"
        _write(f"{self._folder}/nowait", b"x" * 8192)
        fd = os.open(f"{self._folder}/nowait", os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.preadv(fd, [bytearray(8192)], 0, getattr(os, "RWF_NOWAIT", 0))
        except OSError as error:
            detail = "not cached" if error.errno == errno.EAGAIN else "not supported"
            yield Probe(name, None, detail, "" if detail == "not cached" else "reads cost one copy more (not on tmpfs)")
        else:
            yield Probe(name, None, "yes")
        finally:
            os.close(fd)

    def options(self) -> Iterator[Probe]:
        mount = mount_of(self._folder)
        if mount.type not in NFS:
            return
        chosen = [each for each in mount.options if each.partition("=")[0] in _NFS_OPTIONS]
        is_soft = bool({"soft", "softerr"} & set(chosen))
        yield Probe(
            "the options of the NFS mount",
            None,
            ", ".join(chosen),
            "a server that is slow makes reads and puts fail: use `hard`, the store has deadlines of its own"
            if is_soft
            else "none is required; `lookupcache=positive` is not needed, and costs a LOOKUP for each miss",
        )


def _drain(fence: str, limit_s: float) -> None:
    """Empties and removes the folder while the rival fills it."""
    end_s = time.monotonic() + limit_s
    while True:
        if time.monotonic() > end_s:
            raise OSError(errno.ENOTEMPTY, f"could not empty and remove the folder within {limit_s:.0f} s", fence)
        try:
            for entry in os.listdir(fence):
                os.unlink(f"{fence}/{entry}")
            os.rmdir(fence)
        except FileNotFoundError:
            if not os.path.exists(fence):
                return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ESTALE):
                raise
        else:
            return


def _soon(condition: Callable[[], bool], limit_s: float) -> bool:
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True


def _write(path: str, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


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
