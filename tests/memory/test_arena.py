"""The arena (A1, A2): a holder of its descriptor can only read it, and keeps it alive after its writer's end."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvstore.errors import Unavailable
from kvstore.tiers import arena as host
from kvstore.tiers.arena import SealedArena, follow, map_arena, memory_most_bytes, memory_there_bytes
from tests.kit.patience import PATIENCE_S

SIZE = 64 * 4096

INTRUDER = """
import ctypes, fcntl, json, mmap, os, socket, sys
with socket.socket(fileno=int(sys.argv[1])) as link:
    fd = socket.recv_fds(link, 1, 1)[1][0]
    size = os.fstat(fd).st_size
    libc = ctypes.CDLL(None, use_errno=True)
    mapped = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mprotect.argtypes = libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)

    def checked(result):
        if result:
            raise OSError(ctypes.get_errno(), "")

    def through_another_descriptor(attempt):
        def again():
            os.fchmod(fd, 0o777)
            fresh = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
            try:
                attempt(fresh)
            finally:
                os.close(fresh)
        return again

    ATTEMPTS = {
        "map": lambda fd: mmap.mmap(fd, size),
        "write": lambda fd: os.pwrite(fd, b"x", 0),
        "shrink": lambda fd: os.ftruncate(fd, 4096),
        "grow": lambda fd: os.ftruncate(fd, 2 * size),
        "allocate": lambda fd: os.posix_fallocate(fd, size, 4096),
        "punch": lambda fd: checked(libc.fallocate(fd, 3, ctypes.c_long(0), ctypes.c_long(4096))),
        "unseal": lambda fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    }
    done = {}
    def attempt(name, act):
        try:
            act()
            done[name] = "worked"
        except (OSError, ValueError) as error:
            done[name] = type(error).__name__
    for name, act in ATTEMPTS.items():
        attempt(name, lambda: act(fd))
        attempt(f"{name} through /proc", through_another_descriptor(act))
    attempt("mprotect", lambda: checked(libc.mprotect(start, size, 3)))
    attempt("remove", lambda: checked(libc.madvise(start, 4096, 9)))
    link.sendall(b"1")
    link.recv(1)  # until the writer has gone on
    print(json.dumps({"done": done, "read": mapped[:5].decode("latin-1")}))
"""


def test_a1_another_process_reads_what_is_written_and_changes_nothing() -> None:
    arena = SealedArena(SIZE).open()
    arena.memory[:5] = b"first"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", INTRUDER, str(theirs.fileno())]
        child = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE)
        socket.send_fds(ours, [b"x"], [arena.fd])
        assert ours.recv(1) == b"1"
        assert bytes(arena.memory[:5]) == b"first"
        arena.memory[:5] = b"later"
        ours.sendall(b"x")
        said = json.loads(child.communicate(timeout=PATIENCE_S)[0])
    assert said["read"] == "later"
    assert [name for name, outcome in said["done"].items() if outcome == "worked"] == []
    assert os.fstat(arena.fd).st_size == SIZE and bytes(arena.memory[:5]) == b"later"
    arena.close()


WRITER = """
import socket, sys, time
from kvstore.tiers.arena import SealedArena
with socket.socket(fileno=int(sys.argv[1])) as link:
    arena = SealedArena(int(sys.argv[2])).open()
    arena.memory[-4:] = b"left"
    socket.send_fds(link, [b"x"], [arena.fd])
    link.recv(1)
"""


def test_a2_what_is_mapped_stays_readable_when_the_writer_is_killed() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", WRITER, str(theirs.fileno()), str(SIZE)]
        child = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        ours.settimeout(60)
        fd = socket.recv_fds(ours, 1, 1)[1][0]
        mapped = map_arena(fd, SIZE)
        os.close(fd)
        child.send_signal(signal.SIGKILL)
        assert child.wait(PATIENCE_S) == -signal.SIGKILL
    assert mapped.readonly and bytes(mapped[-4:]) == b"left" and bytes(mapped[:4]) == bytes(4)


def test_pages_are_taken_in_the_background_and_keep_what_is_written_meanwhile() -> None:
    arena = SealedArena(SIZE).open()
    arena.memory[4096:4100] = b"page"
    assert arena._filling is not None
    arena._filling.join(PATIENCE_S)
    assert os.fstat(arena.fd).st_blocks * 512 == SIZE and bytes(arena.memory[4096:4101]) == b"page\0"
    arena.close()


def test_a_view_outlives_the_arena() -> None:
    arena = SealedArena(SIZE).open()
    arena.memory[4096:4101] = b"alive"
    image = arena.memory.toreadonly()[4096:8192]
    arena.close()
    arena.close()
    assert bytes(image[:5]) == b"alive" and len(arena.memory) == 0 and arena.fd == -1


def sealed_file(size_bytes: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_what_a_worker_does_not_hand_over_is_not_mapped() -> None:
    """A client that reads a file that may shrink dies of it."""
    all_but_shrink = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | 0x10
    good = SealedArena(SIZE).open()
    files = [sealed_file(SIZE, all_but_shrink), sealed_file(SIZE, 0), os.open("/dev/null", os.O_RDONLY)]
    try:
        for fd in files:
            with pytest.raises(Unavailable):
                map_arena(fd, SIZE)
        with pytest.raises(Unavailable):
            map_arena(good.fd, SIZE + 4096)
        assert len(map_arena(good.fd, SIZE)) == SIZE
    finally:
        for fd in files:
            os.close(fd)
        good.close()


def test_pages_are_not_taken_ahead_where_the_system_has_not_as_many_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 99999999 kB\nMemAvailable:       100 kB\n")
    monkeypatch.setattr(host, "MEMINFO", tmp_path / "meminfo")
    arena = SealedArena(SIZE).open()
    try:
        assert arena._filling is None and "memory.scarce" in caplog.text
        arena.memory[:5] = b"first"
        assert bytes(arena.memory[:5]) == b"first"
    finally:
        arena.close()


def _open_count(name: str) -> int:
    links = (Path("/proc/self/fd") / each for each in os.listdir("/proc/self/fd"))
    return sum(name in os.readlink(link) for link in links if link.is_symlink())


def test_pages_of_another_are_never_taken_and_its_file_is_let_go_of() -> None:
    """A taken page is charged to the taker's cgroup: a client only follows what the worker took."""
    fd = os.memfd_create("kvstore-other", os.MFD_CLOEXEC)
    closing = threading.Event()
    try:
        os.ftruncate(fd, SIZE)
        mapped = memoryview(mmap.mmap(fd, SIZE, mmap.MAP_SHARED, mmap.PROT_READ))
        os.pwrite(fd, b"x", 0)
        taken, open_count = os.fstat(fd).st_blocks, _open_count("kvstore-other")
        follow(mapped, fd, closing)
        following = [each for each in threading.enumerate() if each.name == "kvstore-pages"]
        assert following and os.fstat(fd).st_blocks == taken
        closing.set()
        for each in following:
            each.join(PATIENCE_S)
        assert os.fstat(fd).st_blocks == taken
        assert _open_count("kvstore-other") == open_count
    finally:
        closing.set()
        os.close(fd)


# The memory of this host, or the lowest limit of a cgroup of this process.

GIB = 1 << 30


@pytest.fixture
def cgroups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(host, "CGROUPS", tmp_path)
    monkeypatch.setattr(host, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr("os.sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else 64 * GIB // 4096)
    return tmp_path


def limit(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_limits_it_is_the_hosts_less_what_is_left_to_others(cgroups: Path) -> None:
    assert (memory_there_bytes(), memory_most_bytes()) == (64 * GIB, 63 * GIB)
    limit(cgroups / "memory.max", "max\n")
    limit(cgroups / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert memory_there_bytes() == 64 * GIB


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_a_container_sees_its_own_limit_at_the_top(cgroups: Path, name: str) -> None:
    limit(cgroups / name, f"{4 * GIB}\n")
    assert (memory_there_bytes(), memory_most_bytes()) == (4 * GIB, 7 * GIB // 2)


@pytest.mark.parametrize(
    ("line", "above"), [("0::/a.slice/b.service", "a.slice"), ("4:memory:/a/b", "memory/a"), ("4:cpu:/x\n0::/a/b", "a")]
)
def test_a_service_is_limited_by_its_cgroup_and_by_those_around_it(cgroups: Path, line: str, above: str) -> None:
    limit(cgroups / "membership", f"{line}\n")
    name = "memory.limit_in_bytes" if ":memory:" in line else "memory.max"
    limit(cgroups / above / name, f"{8 * GIB}\n")
    assert memory_there_bytes() == 8 * GIB
    limit(cgroups / above / os.path.basename(line) / name, f"{2 * GIB}\n")
    assert memory_there_bytes() == 2 * GIB
