"""Leases that end with their client: at once when it is closed or killed, and never before."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.errors import Unavailable
from kvstore.format.places import METADATA, METADATA_LIVENESS
from kvstore.meta.sqlite.client import SqliteMeta
from kvstore.meta.sqlite.liveness import NOBODY, Liveness
from kvstore.meta.sqlite.making import locked
from tests.kit.etcd import frozen
from tests.kit.fake_meta import FakeClock
from tests.kit.patience import PATIENCE_S, eventually
from tests.meta.conftest import take
from tests.meta.test_meta_sqlite import LOCKED_S, running, said


@pytest.fixture
def meta(tmp_path: Path) -> Iterator[SqliteMeta]:
    with closing(SqliteMeta(str(tmp_path), timeout_s=PATIENCE_S)) as opened:
        yield opened


def elsewhere(folder: Path, call: str) -> str:
    """Returns what a call prints in another process."""
    program = f"import sys; from kvstore.meta.sqlite.client import SqliteMeta; print(SqliteMeta(sys.argv[1]).{call})"
    command = [sys.executable, "-c", program, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_killed_process_has_no_lease_but_those_that_outlive_it(meta: SqliteMeta, tmp_path: Path) -> None:
    with running(tmp_path, "lives") as child:
        assert [kv.key for kv in meta.list("/").items] == ["/held", "/kept"]
        watch = meta.watch("/", meta.list("/").revision + 1)
        child.kill()
        child.wait()
        assert meta.get("/held") is None, "an hour before its time"
        (event,) = take(watch, 1)
    assert (event.key, event.kv) == ("/held", None), "those who watch hear it"
    assert meta.get("/kept")


def test_those_who_watch_hear_of_a_killed_process_without_a_call(meta: SqliteMeta, tmp_path: Path) -> None:
    with running(tmp_path, "lives") as child:
        watch = meta.watch("/", meta.list("/").revision + 1)
        child.kill()
        (event,) = take(watch, 1)
    assert (event.key, event.kv) == ("/held", None)


def test_a_stopped_process_keeps_its_lease(meta: SqliteMeta, tmp_path: Path) -> None:
    with running(tmp_path, "lives") as child, frozen(child.pid):
        assert meta.get("/held")
        with pytest.raises(AssertionError):
            eventually(lambda: meta.get("/held") is None, patience_s=0.5)


def test_a_closed_client_has_no_lease_though_its_process_goes_on(meta: SqliteMeta, tmp_path: Path) -> None:
    other = SqliteMeta(str(tmp_path), timeout_s=PATIENCE_S)
    other.put("/held", b"1", other.grant(3600, while_open=True))
    assert meta.get("/held")
    other.close()
    eventually(lambda: meta.get("/held") is None)


def test_a_lease_ends_by_its_time_too(tmp_path: Path) -> None:
    clock = FakeClock()
    with closing(SqliteMeta(str(tmp_path), clock=clock, timeout_s=PATIENCE_S)) as meta:
        lease = meta.grant(10, while_open=True)
        clock.advance(9)
        assert meta.keep_alive(lease)
        clock.advance(10)
        assert not meta.keep_alive(lease)


def test_a_child_does_not_keep_the_lease_of_its_parent(meta: SqliteMeta, tmp_path: Path) -> None:
    with running(tmp_path, "forks") as parent:
        child = int(said(parent))
        try:
            assert meta.get("/held")
            parent.kill()
            parent.wait()
            eventually(lambda: meta.get("/held") is None)  # the child may not have run yet
            os.kill(child, 0)  # it is there
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_parent_keeps_its_lease_when_its_child_ends(meta: SqliteMeta, tmp_path: Path) -> None:
    with running(tmp_path, "forks") as parent:
        child = int(said(parent))
        os.kill(child, signal.SIGKILL)
        eventually(lambda: "State:\tZ" in Path(f"/proc/{child}/status").read_text(), "it has ended")
        assert meta.get("/held")


def test_nobody_is_judged_by_another_file_of_that_name(meta: SqliteMeta, tmp_path: Path) -> None:
    place = tmp_path / METADATA_LIVENESS
    with running(tmp_path, "lives") as child:
        for _ in range(20):  # an inode that is free is given again
            place.unlink()
            assert meta.get("/held"), "its process lives"
            meta.grant(60, while_open=True)
            assert place.exists()
        child.kill()
        child.wait()
        assert meta.get("/held"), "nobody can tell"
    meta.put("/mine", b"1", meta.grant(3600, while_open=True))
    program = (
        "import sys; from kvstore.meta.sqlite.client import SqliteMeta; print(SqliteMeta(sys.argv[1]).get('/mine'))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "KeyValue" in done.stdout


def test_no_new_file_gets_the_inode_by_which_a_client_is_judged(tmp_path: Path) -> None:
    own = Liveness(str(tmp_path))
    before = own.owner()
    (tmp_path / METADATA_LIVENESS).unlink()
    after = own.owner()
    assert after.byte == before.byte and after.inode != before.inode
    files = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    assert before.inode in {os.stat(file).st_ino for file in files if os.path.exists(file)}
    own.close()


def refuse(*_: object) -> None:
    raise OSError(22, "no such locks here")


@pytest.mark.parametrize("hinder", ["no such locks", "a link", "a pipe", "a folder"])
def test_without_such_a_lock_a_lease_ends_by_its_time(
    meta: SqliteMeta, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hinder: str
) -> None:
    place = tmp_path / METADATA_LIVENESS
    meta.get("/")
    place.unlink()
    obstacles: dict[str, Callable[[], object]] = {
        "no such locks": lambda: monkeypatch.setattr("kvstore.meta.sqlite.liveness.fcntl.fcntl", refuse),
        "a link": lambda: place.symlink_to(tmp_path / METADATA),
        "a pipe": lambda: os.mkfifo(place),
        "a folder": place.mkdir,
    }
    obstacles[hinder]()
    other = SqliteMeta(str(tmp_path), timeout_s=PATIENCE_S)
    other.put("/held", b"1", other.grant(3600, while_open=True))
    other.close()
    assert meta.get("/held")
    assert (tmp_path / METADATA).stat().st_size, "what the link names was not touched"


def test_a_lock_of_others_on_its_byte_makes_it_nobody(tmp_path: Path) -> None:
    own = Liveness(str(tmp_path))
    with (tmp_path / METADATA_LIVENESS).open("wb") as others:
        fcntl.lockf(others, fcntl.LOCK_EX)
        assert own.owner() == NOBODY
    assert own.owner() != NOBODY
    own.close()


def test_a_client_leaves_no_descriptor(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(5):
        other = SqliteMeta(str(tmp_path), timeout_s=PATIENCE_S)
        other.grant(60, while_open=True)
        other.close()
    eventually(lambda: descriptors() <= before)


def test_a_new_file_has_nothing_of_the_log_of_one_that_was_removed(tmp_path: Path) -> None:
    with closing(SqliteMeta(str(tmp_path), timeout_s=PATIENCE_S)) as kept_open:
        kept_open.put("/old", b"1")
        assert (tmp_path / f"{METADATA}-wal").stat().st_size
        (tmp_path / METADATA).unlink()
        assert elsewhere(tmp_path, "list('/')") == "Snapshot(items=(), revision=1)"
        assert not kept_open.list("/").items, "who had the old one open finds the new one"


def test_who_makes_the_file_waits_for_another_maker_until_the_deadline(tmp_path: Path) -> None:
    lock = str(tmp_path / METADATA_LIVENESS)
    with locked(lock, 1.0), closing(SqliteMeta(str(tmp_path), timeout_s=LOCKED_S)) as meta:
        with pytest.raises(Unavailable, match=r"another process has had .* locked"):
            meta.get("/")
    assert os.listdir(tmp_path) == [METADATA_LIVENESS]


def test_a_lock_on_a_file_that_was_removed_is_taken_anew(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with locked(str(lock), 1.0):
        lock.unlink()
        with locked(str(lock), 1.0), pytest.raises(Unavailable), locked(str(lock), 0.1):
            pass
