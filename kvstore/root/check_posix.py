"""Probes that only a mounted file system can answer: links, renames, folders as fences, and a second client.

The rival process works on a second mount of the same file system, if there is one, where caches show. Without one it
works on the same mount, and what another client would see stays unknown.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvstore.root.absence import FILE_SYSTEMS as NFS
from kvstore.root.contender import Contender, create_names, link_names, prepare_links
from kvstore.root.mounts import file_system_type, mount_of
from kvstore.root.probe import Probe

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
