"""Metadata in a file: several processes, and whatever can happen to the file, to a process and to the host."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest, KVStoreError, PermissionDenied, SessionLost, Unavailable
from kvstore.format.places import METADATA, METADATA_LIVENESS
from kvstore.meta.deadline import Deadline
from kvstore.meta.interface import Absent, Compare, Delete, LeaseGone, Meta, Put, WatchLost
from kvstore.meta.keys import Keys
from kvstore.meta.memory import MemoryMeta
from kvstore.meta.session import Session
from kvstore.meta.sqlite import file as file_module
from kvstore.meta.sqlite import host, mending, process
from kvstore.meta.sqlite import store as store_module
from kvstore.meta.sqlite.client import SqliteMeta
from kvstore.meta.sqlite.store import Store
from kvstore.sources import RandomIds, SystemClock
from tests.kit.cases import for_each
from tests.kit.etcd import frozen
from tests.kit.fake_meta import FakeClock
from tests.kit.patience import PATIENCE_S, eventually, returns
from tests.meta.conftest import take
from tests.meta.sqlite_process import COUNT, KEY
from tests.meta.test_meta_conformance import COMPARES, OPERATIONS

DEADLINE_S = 0.3
LOCKED_S = 4.0
"""Leaves a busy machine enough time, after the wait for the lock, to say who has it."""

Maker = Callable[..., SqliteMeta]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Maker]:
    """Opens clients of the file in ``tmp_path``."""
    opened: list[SqliteMeta] = []

    def make(folder: Path = tmp_path, **more: object) -> SqliteMeta:
        opened.append(SqliteMeta(str(folder), **{"timeout_s": PATIENCE_S, **more}))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for meta in opened:
        meta.close()


@contextmanager
def running(folder: Path, part: str) -> Iterator[subprocess.Popen[str]]:
    """A process of ``sqlite_process`` that has begun."""
    command = [sys.executable, "-m", "tests.meta.sqlite_process", str(folder), part]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert returns(lambda: said(child), "the child") == "begun"
        yield child
    finally:
        child.kill()
        child.communicate()


def said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def calls(meta: Meta) -> list[Callable[[], object]]:
    """One call of each kind."""
    return [
        lambda: meta.get("a"),
        lambda: meta.list("a"),
        lambda: meta.count("a"),
        lambda: meta.txn((Absent("a"),), (Put("a", b""),)),
        lambda: meta.put("a", b""),
        lambda: meta.delete("a"),
        lambda: meta.grant(5),
    ]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.lists(COMPARES, max_size=2), OPERATIONS), max_size=12))
def test_it_agrees_with_memory_on_any_history(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[list[Compare], list[Put | Delete]]]
) -> None:
    memory, sqlite = MemoryMeta(), SqliteMeta(str(tmp_path_factory.mktemp("agree")), timeout_s=PATIENCE_S)
    try:
        for compares, operations in steps:
            assert memory.txn(compares, operations) == sqlite.txn(compares, operations)
            assert memory.list("") == sqlite.list("")
        assert memory.watch("", 2).next(0) == sqlite.watch("", 2).next(0)
    finally:
        sqlite.close()


# ------------------------------------------------------------------------------------------ several processes


def test_two_processes_that_compare_and_set_lose_no_update(client: Maker, tmp_path: Path) -> None:
    meta = client()
    meta.put(KEY, b"0")
    with running(tmp_path, "counts") as one, running(tmp_path, "counts") as other:
        assert returns(lambda: said(one)) == returns(lambda: said(other)) == "done"
    found = meta.get(KEY)
    assert found is not None and int(found.value) == 2 * COUNT


def test_processes_that_begin_at_once_make_one_file(tmp_path: Path) -> None:
    program = (
        "import sys; from kvstore.meta.sqlite.client import SqliteMeta\n"
        "meta = SqliteMeta(sys.argv[1], timeout_s=float(sys.argv[3])); sys.stdin.read(); meta.put(sys.argv[2], b'')\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    children = [subprocess.Popen([*command, f"/{n}", str(PATIENCE_S)], stdin=subprocess.PIPE) for n in range(3)]
    for child in children:
        assert child.stdin is not None
        child.stdin.close()
    assert [child.wait(PATIENCE_S) for child in children] == [0, 0, 0]
    meta = SqliteMeta(str(tmp_path), timeout_s=PATIENCE_S)
    assert meta.count("/") == 3
    meta.close()


def test_a_watch_in_another_process_sees_each_change_in_order(client: Maker, tmp_path: Path) -> None:
    meta = client()
    with running(tmp_path, "watches") as child:
        for number in range(5):
            meta.put("/watched", b"%d" % number)
        assert [returns(lambda: said(child)) for _ in range(5)] == ["0", "1", "2", "3", "4"]


def test_a_process_killed_in_a_transaction_leaves_nothing_of_it(client: Maker, tmp_path: Path) -> None:
    meta = client()
    with running(tmp_path, "stops_within") as child:
        assert meta.get("/whole") is not None, "readers do not wait for a writer"
        with pytest.raises(Unavailable, match="another process has been writing"):
            meta.put("/late", b"1", timeout_s=LOCKED_S)
        child.kill()
        child.wait(PATIENCE_S)
        meta.put("/after", b"1")
    assert [kv.key for kv in meta.list("/").items] == ["/after", "/whole"]


def test_a_lease_ends_while_its_process_is_stopped(client: Maker, tmp_path: Path) -> None:
    meta = client()
    with running(tmp_path, "holds") as child:
        watch = meta.watch("/held", 1)
        with frozen(child.pid):
            assert [event.kv is None for event in take(watch, 2)] == [False, True]
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
        assert returns(lambda: said(child)) == "gone"


def test_a_session_that_was_stopped_past_its_lease_is_lost(client: Maker) -> None:
    clock = FakeClock()
    meta, other = client(clock=clock), client(clock=clock)
    session = Session.open(meta, Keys(bytes(16)), clock=SystemClock(), ids=RandomIds(), ttl_s=60)
    clock.advance(60)
    assert other.get(session.key) is None
    with pytest.raises(SessionLost):
        session.txn((), (Put("/x", b"1"),))


# ------------------------------------------------------------------------------------------ time


class SteppedClock(FakeClock):
    """A clock whose wall time nobody may ask for."""

    def now_s(self) -> float:
        raise AssertionError("leases do not end by the wall clock, which may be set")


def test_leases_end_by_the_time_since_the_boot_alone(client: Maker) -> None:
    clock = SteppedClock()
    meta = client(clock=clock)
    lease = meta.grant(10)
    meta.put("/a", b"1", lease)
    clock.advance(9)
    assert meta.keep_alive(lease)
    clock.advance(9)
    assert meta.get("/a") is not None
    clock.advance(1)
    assert meta.get("/a") is None and meta.count("/") == 0 and not meta.keep_alive(lease)


def test_all_leases_end_with_the_boot(client: Maker) -> None:
    meta = client(boot="one")
    lease = meta.grant(3600)
    revision = meta.put("/leased", b"1", lease)
    meta.put("/kept", b"1")
    meta.close()
    again = client(boot="two")
    assert [kv.key for kv in again.list("/").items] == ["/kept"]
    assert not again.keep_alive(lease)
    with pytest.raises(LeaseGone):
        again.put("/leased", b"2", lease)
    assert take(again.watch("/leased", revision + 1), 1)[0].kv is None
    client(boot="two").grant(60)


def test_leases_outlive_the_last_process_that_had_the_file_open(client: Maker) -> None:
    meta = client()
    lease = meta.grant(3600)
    meta.put("/a", b"1", lease)
    meta.close()
    assert client().keep_alive(lease)


def test_a_time_namespace_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = tmp_path / "offsets"
    offsets.write_text("monotonic           0         0\nboottime        86400         0\n")
    monkeypatch.setattr(host, "_OFFSETS", offsets)
    with pytest.raises(InvalidRequest, match=r"time namespace.*use etcd"):
        SqliteMeta(str(tmp_path))


# ------------------------------------------------------------------------------------------ the file


@for_each(
    "number, name",
    [
        (0x6969, "NFS"),
        (0x65735546, "FUSE, such as GlusterFS"),
        (0x01021997, "9p"),
        (0xFF534D42, "CIFS"),
        (0x0BD00BD0, "Lustre"),
        (0x12345678, "type 0x12345678"),
    ],
)
def test_a_file_system_of_several_hosts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, name: str
) -> None:
    monkeypatch.setattr(host, "_file_system", lambda folder: number)
    with pytest.raises(InvalidRequest, match=f"{name}.*use etcd"):
        SqliteMeta(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_unavailable(client: Maker, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="No such file"):
        SqliteMeta(str(tmp_path / "none"))
    (tmp_path / "root").mkdir()
    meta = client(tmp_path / "root")
    (tmp_path / "root").rmdir()
    for call in calls(meta):
        with pytest.raises(Unavailable, match="No such file"):
            call()
    (tmp_path / "root").mkdir()
    meta.put("/a", b"1")


def test_a_file_that_is_no_database_is_unavailable_until_it_goes(client: Maker, tmp_path: Path) -> None:
    (tmp_path / METADATA).write_bytes(b"not a database, but longer than a header is: " + bytes(range(256)) * 20)
    meta = client()
    for call in calls(meta):
        with pytest.raises(Unavailable, match=r"is damaged.*kvstore fsck ROOT --adopt"):
            call()
    watch = meta.watch("/", 1)
    assert watch.next(0) is None
    (tmp_path / METADATA).unlink()
    meta.put("/a", b"1")


def test_damage_in_the_middle_is_an_error_and_never_another_answer(client: Maker, tmp_path: Path) -> None:
    meta = client()
    for number in range(200):
        meta.put(f"/{number:03}", bytes([number]) * 1000)
    meta.close()
    path = tmp_path / METADATA
    content = bytearray(path.read_bytes())
    for at in range(4096, len(content), 4096):
        content[at : at + 64] = os.urandom(64)
    path.write_bytes(content)
    again = client()
    with pytest.raises(Unavailable, match="is damaged"):
        again.list("/")
    with pytest.raises(Unavailable, match="is damaged"):
        again.put("/200", b"1")


def test_a_row_that_nobody_wrote_is_damage(client: Maker, tmp_path: Path) -> None:
    meta = client()
    meta.put("/a", b"1")
    meta.close()
    database = sqlite3.connect(tmp_path / METADATA)
    database.execute("INSERT INTO keys VALUES (?, ?, 1, 1, 0)", (b"/\xff", b""))
    database.commit()
    database.close()
    with pytest.raises(Unavailable, match=r"a key cannot be read.*is damaged"):
        client().list("/")


def test_another_version_is_as_good_as_damage(client: Maker, tmp_path: Path) -> None:
    client().put("/a", b"1")
    database = sqlite3.connect(tmp_path / METADATA)
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(Unavailable, match=r"version 99.*kvstore fsck ROOT --adopt"):
        client().get("/a")
    assert "version 99" in (mending.remove_damaged(str(tmp_path)) or "")
    assert client().get("/a") is None


def test_a_file_that_was_removed_is_an_empty_store_whose_sessions_have_ended(client: Maker, tmp_path: Path) -> None:
    meta, other = client(), client()
    session = Session.open(meta, Keys(bytes(16)), clock=SystemClock(), ids=RandomIds(), ttl_s=60)
    watch = meta.watch("/", meta.list("/").revision + 1)
    other.put("/seen", b"1")
    assert take(watch, 1)
    for each in tmp_path.iterdir():
        each.unlink()
    other.put("/new", b"1")
    assert [kv.key for kv in meta.list("/").items] == ["/new"], "all processes are in the same file again"
    with pytest.raises(WatchLost, match="removed or replaced"):
        watch.next(PATIENCE_S)
    with pytest.raises(SessionLost):
        session.txn((), (Put("/x", b"1"),))
    fresh = meta.watch("/", meta.list("/").revision + 1)
    other.put("/new", b"2")
    assert take(fresh, 1)[0].key == "/new"


@pytest.mark.parametrize("lost", ["-wal", "-shm"])
def test_processes_see_each_other_after_a_file_beside_it_was_removed(client: Maker, tmp_path: Path, lost: str) -> None:
    meta = client()
    meta.put("/before", b"1")
    watch = meta.watch("/", meta.list("/").revision + 1)
    assert watch.next(0) is None
    (tmp_path / f"{METADATA}{lost}").unlink()
    # Another process makes that file anew, and writes.
    program = "import sys; from kvstore.meta.sqlite.client import SqliteMeta; SqliteMeta(sys.argv[1]).put('/new', b'1')"
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=PATIENCE_S)
    with pytest.raises(WatchLost, match="removed or replaced"):
        watch.next(PATIENCE_S)
    with running(tmp_path, "holds"):
        assert meta.get("/held"), "what others write"
    meta.put("/mine", b"1")
    mine = subprocess.run(
        [sys.executable, "-c", program.replace(".put('/new', b'1')", ".get('/mine').value"), str(tmp_path)], check=False
    )
    assert mine.returncode == 0, "others see what this one writes"


@pytest.mark.parametrize("at", ["first page", "last page", "a row"])
def test_a_damaged_file_is_taken_away_and_a_sound_one_stays(client: Maker, tmp_path: Path, at: str) -> None:
    meta = client()
    for number in range(100):
        meta.put(f"/{number:03}", bytes(1000))
    assert mending.remove_damaged(str(tmp_path)) is None and meta.count("/") == 100
    meta.close()
    path = tmp_path / METADATA
    if at == "a row":
        database = sqlite3.connect(path)
        database.execute("INSERT INTO keys VALUES (?, ?, 1, 1, 0)", (b"/\xff", b""))
        database.commit()
        database.close()
    else:
        with path.open("r+b") as file:
            file.seek(0 if at == "first page" else path.stat().st_size - 4096)
            file.write(os.urandom(4096))
    assert mending.remove_damaged(str(tmp_path))
    assert [each.name for each in tmp_path.iterdir()] == [METADATA_LIVENESS]
    again = client()
    assert again.count("/") == 0
    again.put("/a", b"1")


def test_a_file_without_its_log_is_taken_away_though_a_process_that_knows_the_log_stands_still(
    client: Maker, tmp_path: Path
) -> None:
    with running(tmp_path, "holds") as process:
        process.send_signal(signal.SIGSTOP)
        (tmp_path / f"{METADATA}-wal").unlink()
        with pytest.raises(Unavailable, match="--adopt"):
            client().put("/a", b"1")
        assert mending.remove_damaged(str(tmp_path))
        client().put("/a", b"1")
        process.send_signal(signal.SIGCONT)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert said(process) == "gone", "it sees the new file"


def test_nobody_makes_a_new_file_while_the_old_log_is_there(
    client: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was killed while it removed a damaged file: the next removal goes on."""
    client().put("/a", b"1")

    def killed(path: str) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "unlink", killed)
    with pytest.raises(KeyboardInterrupt):
        mending._remove(str(tmp_path / METADATA))
    assert (tmp_path / f"{METADATA}-wal").exists()
    with pytest.raises(Unavailable, match="not a file"):
        client().put("/b", b"1")
    assert mending.remove_damaged(str(tmp_path)) == "an earlier removal was not finished"
    meta = client()
    meta.put("/b", b"1")
    assert meta.count("/") == 1


def test_a_maker_that_is_killed_leaves_no_file_under_the_name(client: Maker, tmp_path: Path) -> None:
    program = (
        "import os, sys, kvstore.meta.sqlite.file as file\n"
        "file.create = lambda *_: os.kill(os.getpid(), 9)\n"
        "from kvstore.meta.sqlite.client import SqliteMeta; SqliteMeta(sys.argv[1]).put('/a', b'1')"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=PATIENCE_S)
    assert done.returncode == -signal.SIGKILL and not (tmp_path / METADATA).exists()
    client().put("/b", b"1")


def test_a_file_replaced_while_it_is_opened_is_left_alone(
    client: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite opens the log after the file, by its name: it may be that of the next file."""
    replaced = "import sys; from kvstore.meta.sqlite.client import SqliteMeta; m = SqliteMeta(sys.argv[1]); "
    put = replaced + "m.put('/kept', b'1'); m.close()"
    real, children = sqlite3.connect, ExitStack()

    def connect(name: str, **named: object) -> sqlite3.Connection:
        opened = real(name, **named)  # type: ignore[call-overload]
        if f"/{METADATA}?" not in name:
            return opened  # type: ignore[no-any-return]  # it is being made
        monkeypatch.undo()
        (tmp_path / METADATA).unlink()
        subprocess.run([sys.executable, "-c", put, str(tmp_path)], check=True, timeout=PATIENCE_S)
        children.enter_context(running(tmp_path, "holds"))
        return opened  # type: ignore[no-any-return]

    monkeypatch.setattr(sqlite3, "connect", connect)
    meta = client()
    with children:
        with pytest.raises(Unavailable):
            meta.get("/kept")
        assert meta.get("/kept") is not None
        got = subprocess.run(
            [sys.executable, "-c", replaced + "m.get('/kept').value; m.close()", str(tmp_path)], check=False
        )
        assert got.returncode == 0, "what others wrote is there for all"


def test_something_else_under_the_name_is_unavailable(client: Maker, tmp_path: Path) -> None:
    (tmp_path / METADATA).mkdir()
    with pytest.raises(Unavailable, match="not a file"):
        client().get("/a")
    (tmp_path / METADATA).rmdir()
    (tmp_path / METADATA).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Unavailable, match="not a file"):
        client().get("/a")
    assert not (tmp_path / "elsewhere").exists()


def test_the_file_may_be_written_by_those_who_may_write_to_the_folder(client: Maker, tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    meta = client()
    meta.put("/a", b"1")
    modes = {each.name: each.stat().st_mode & 0o777 for each in tmp_path.iterdir()}
    names = (METADATA, f"{METADATA}-wal", f"{METADATA}-shm", METADATA_LIVENESS)
    assert modes == dict.fromkeys(names, 0o660)
    meta.close()


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "tmpfs"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    if subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield mount
    subprocess.run(["umount", "--lazy", mount], check=True)


def test_a_full_disk_is_unavailable_and_nothing_wedges(client: Maker, small_tmpfs: Path) -> None:
    clock = FakeClock()
    meta = client(small_tmpfs, clock=clock)
    lease = meta.grant(10)
    meta.put("/leased", b"1", lease)
    with pytest.raises(Unavailable, match=r"free some|is the disk full"):
        for number in range(1000):
            meta.put(f"/{number}", os.urandom(10_000))
    before = meta.count("/")
    with pytest.raises(Unavailable, match=r"free some|is the disk full"):
        meta.put("/more", os.urandom(500_000))
    assert meta.count("/") == before
    subprocess.run(["mount", "-o", "remount,size=16m", small_tmpfs], check=True)
    meta.put("/more", os.urandom(500_000))
    clock.advance(10)
    assert meta.get("/leased") is None


def test_a_full_disk_with_no_room_to_begin(client: Maker, small_tmpfs: Path) -> None:
    (small_tmpfs / "other").write_bytes(bytes((1 << 20) - 8192))
    meta = client(small_tmpfs)
    with pytest.raises(Unavailable):
        meta.put("/a", b"1")
    (small_tmpfs / "other").unlink()
    meta.put("/a", b"1")


def test_a_read_only_folder_is_refused(client: Maker, small_tmpfs: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_tmpfs], check=True)
    meta = client(small_tmpfs)
    for call in calls(meta):
        with pytest.raises(PermissionDenied, match="check the mount"):
            call()
    subprocess.run(["mount", "-o", "remount,rw", small_tmpfs], check=True)
    meta.put("/a", b"1")
    meta.close()
    subprocess.run(["mount", "-o", "remount,ro", small_tmpfs], check=True)
    with pytest.raises(PermissionDenied, match="check the mount"):
        client(small_tmpfs).put("/a", b"2")


# ------------------------------------------------------------------------------------------ limits and deadlines


def test_a_watch_that_is_too_far_behind_is_lost(client: Maker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(store_module, "HISTORY_BYTES_MAX", 100_000)
    meta = client()
    start = meta.put("/a", b"1")
    behind, near = meta.watch("/", start), meta.watch("/", start)
    for _ in range(50):
        meta.put("/b", bytes(10_000))
        take(near, 1)
    with pytest.raises(WatchLost, match="compacted"):
        behind.next(0)
    size_bytes = sqlite3.connect(tmp_path / METADATA).execute("SELECT sum(length(value)) FROM history").fetchone()[0]
    assert 10_000 <= size_bytes <= 100_000
    meta.put("/c", bytes(200_000))
    assert take(near, 1)[0].key == "/c", "one revision always stays, however large"


def test_a_call_into_a_disk_that_hangs_ends_at_its_deadline(client: Maker) -> None:
    meta, gate = client(), threading.Event()
    meta.put("/a", b"1")

    def hang(store: Store) -> None:
        gate.wait(PATIENCE_S)

    with pytest.raises(Unavailable, match="outcome is unknown"):
        meta._connection.call("hang", hang, Deadline(DEADLINE_S))
    try:
        with pytest.raises(Unavailable, match="Nothing was done"):
            meta.put("/a", b"2", timeout_s=DEADLINE_S)
        watch = meta.watch("/", 1)
        assert returns(lambda: watch.next(0)) is None
    finally:
        gate.set()
    found = meta.get("/a")
    assert found is not None and found.value == b"1", "what was given up is not done later"


def test_closing_ends_calls_that_wait(client: Maker) -> None:
    meta, began, gate = client(), threading.Event(), threading.Event()
    failed: list[str] = []

    def hang(store: Store) -> None:
        began.set()
        gate.wait(PATIENCE_S)

    def call() -> None:
        try:
            meta._connection.call("call", hang, Deadline(PATIENCE_S))
        except KVStoreError as error:
            failed.append(str(error))

    threads = [threading.Thread(target=call) for _ in range(2)]
    threads[0].start()
    assert began.wait(PATIENCE_S)
    threads[1].start()
    eventually(lambda: meta._connection._tasks)
    meta.close()
    gate.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert failed == ["the metadata client is closed: open a new one"], "the one that had begun ended as it does"


def test_a_log_that_cannot_be_used_again_does_not_fill_the_disk(
    client: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = client()
    meta.put("/a", b"1")
    reader = sqlite3.connect(tmp_path / METADATA, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM keys").fetchall()
    monkeypatch.setattr(file_module, "LOG_BYTES_MAX", 1 << 20)
    with pytest.raises(Unavailable, match="stopped while it read"):
        for number in range(100):
            meta.put(f"/{number}", bytes(100_000))
    reader.close()
    monkeypatch.undo()
    meta.put("/b", b"1")


# ------------------------------------------------------------------------------------------ forks


def in_child(work: Callable[[], bool]) -> bool:
    """What ``work`` returns in a forked child."""
    pid = os.fork()
    if not pid:
        is_right = False
        try:
            signal.alarm(int(PATIENCE_S))
            is_right = work()
        finally:
            os._exit(0 if is_right else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_forked_child_opens_the_file_anew(client: Maker, tmp_path: Path) -> None:
    meta = client()
    meta.put("/a", b"1")
    inode = (tmp_path / METADATA).stat().st_ino

    def child() -> bool:
        try:
            meta.get("/a")
            return False
        except InvalidRequest:
            pass
        meta.close()
        own = SqliteMeta(str(tmp_path), timeout_s=PATIENCE_S)
        own.put("/b", b"1")
        mine = [line.split() for line in Path("/proc/locks").read_text().splitlines() if f":{inode} " in line]
        return str(os.getpid()) in {fields[4] for fields in mine}

    assert in_child(child), "the child has locks of its own"
    assert meta.get("/b") is not None
    meta.put("/c", b"1")


def test_forks_beside_calls_break_nothing(client: Maker, tmp_path: Path) -> None:
    meta, over = client(), threading.Event()
    counts = [0, 0]

    def call(which: int) -> None:
        while not over.is_set():
            meta.put(f"/{which}", b"%d" % counts[which])
            counts[which] += 1

    threads = [threading.Thread(target=call, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()

    def child() -> bool:
        own = SqliteMeta(str(tmp_path), timeout_s=PATIENCE_S)
        own.put("/child", b"1")
        own.close()
        return True

    try:
        assert all(in_child(child) for _ in range(10))
    finally:
        over.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert all(counts)
    for which in range(2):
        found = meta.get(f"/{which}")
        assert found is not None and int(found.value) == counts[which] - 1


def test_a_child_of_a_process_that_could_not_close_the_file_opens_nothing(
    client: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.meta.sqlite.connection.REST_S", 0.05)
    meta, began, gate = client(), threading.Event(), threading.Event()

    def hang(store: Store) -> None:
        began.set()
        gate.wait(PATIENCE_S)

    thread = threading.Thread(target=lambda: meta._connection.call("hang", hang, Deadline(PATIENCE_S)))
    thread.start()
    began.wait(PATIENCE_S)

    def child() -> bool:
        try:
            SqliteMeta(str(tmp_path), timeout_s=PATIENCE_S).get("/a")
        except InvalidRequest as error:
            return "by spawn" in str(error)
        return False

    assert in_child(child)
    gate.set()
    thread.join(PATIENCE_S)
    meta.put("/a", b"1")
    assert not process.is_inherited(str(tmp_path / METADATA))


def test_the_file_is_not_opened_before_the_first_call(client: Maker, tmp_path: Path) -> None:
    before = threading.active_count()
    meta = client()
    assert list(tmp_path.iterdir()) == [] and threading.active_count() == before
    meta.close()
