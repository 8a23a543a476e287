"""A root on NFS, whose client remembers that a file was absent: a miss is asked for again, at a bounded cost."""

from __future__ import annotations

import errno
import itertools
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.format.places import Name
from kvstore.root import posix
from kvstore.root.posix import FRESH_S, Absence, Mount, PosixRoot, mount_of, remembers_absence

NFS = Mount("nfs4", ("rw", "vers=4.2", "hard"))
A, B = Name("chunks/0001/a"), Name("chunks/0001/b")


class Client:
    """The kernel's client of NFS in front of a folder: an absent name stays so until its folder was opened.

    ``asked`` counts what went to the server.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._absent: set[str] = set()
        self._lstat, self._open = os.lstat, os.open
        self.asked = Counter[str]()

    def lstat(self, path: Any, **more: Any) -> os.stat_result:
        self._look(path)
        return self._lstat(path, **more)

    def open(self, path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECTORY and str(path).startswith(self._folder):
            self._look(path)
            self.asked["GETATTR"] += 1
            self._absent -= {each for each in self._absent if os.path.dirname(each) == path}
        elif not flags & os.O_CREAT:
            self._look(path)
        return self._open(path, flags, *more, **named)

    def _look(self, path: Any) -> None:
        if not str(path).startswith(self._folder) or self._is_there(str(path)):
            return
        raise FileNotFoundError(errno.ENOENT, "absent, as far as this client knows", path)

    def _is_there(self, path: str) -> bool:
        if any(path == each or path.startswith(f"{each}/") for each in self._absent):
            return False
        parts = path[len(self._folder) + 1 :].split("/")
        for count in range(1, len(parts) + 1):
            part = "/".join([self._folder, *parts[:count]])
            try:
                self._lstat(part)
            except FileNotFoundError:
                self.asked["LOOKUP"] += 1
                self._absent.add(part)
                return False
        return True


@pytest.fixture
def now_s() -> list[float]:
    return [0.0]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now_s: list[float]) -> Iterator[tuple[PosixRoot, Client]]:
    monkeypatch.setattr(posix, "mount_of", lambda path: NFS)
    monkeypatch.setattr(posix, "Absence", lambda path: Absence(path, lambda: now_s[0]))
    root, client = PosixRoot(tmp_path / "root"), Client(tmp_path / "root")
    with monkeypatch.context() as patched:
        patched.setattr(os, "lstat", client.lstat)
        patched.setattr(os, "open", client.open)
        yield root, client


def other_host(tmp_path: Path, name: Name) -> None:
    """Another host publishes a file: this one's client is not told."""
    (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "root" / name).write_bytes(b"theirs")


def test_file_missed_before_is_found_soon(root: tuple[PosixRoot, Client], tmp_path: Path, now_s: list[float]) -> None:
    mine, _ = root
    other_host(tmp_path, B)
    assert mine.stat(A) is None and mine.open(A) is None
    other_host(tmp_path, A)
    now_s[0] += FRESH_S
    assert mine.stat(A) is not None
    reader = mine.open(A)
    assert reader is not None
    reader.close()


def test_file_in_folders_missed_before_is_found(
    root: tuple[PosixRoot, Client], tmp_path: Path, now_s: list[float]
) -> None:
    mine, _ = root
    (tmp_path / "root").mkdir()
    assert mine.stat(A) is None
    other_host(tmp_path, A)
    now_s[0] += FRESH_S
    assert mine.stat(A) is not None


def test_misses_in_one_folder_cost_one_request(
    root: tuple[PosixRoot, Client], tmp_path: Path, now_s: list[float]
) -> None:
    mine, client = root
    other_host(tmp_path, B)
    assert mine.stat(B) is not None and not client.asked, "a hit costs nothing"
    assert mine.stat(A) is None
    assert client.asked["GETATTR"] == 1
    for number in range(100):
        assert mine.stat(Name(f"chunks/0001/{number}")) is None
    assert client.asked["GETATTR"] == 1
    now_s[0] += FRESH_S
    assert mine.stat(A) is None and client.asked["GETATTR"] == 2


def test_folder_that_cannot_be_opened_leaves_the_miss(
    root: tuple[PosixRoot, Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, client = root
    other_host(tmp_path, B)

    def refused(path: Any, flags: int, *more: Any) -> int:
        if flags & os.O_DIRECTORY:
            raise OSError(errno.EIO, "no answer", path)
        return client.open(path, flags, *more)

    monkeypatch.setattr(os, "open", refused)
    assert mine.stat(A) is None and mine.open(A) is None


def test_only_nfs_that_remembers_absence_is_asked(tmp_path: Path) -> None:
    assert remembers_absence(NFS) and remembers_absence(Mount("nfs", ("rw", "vers=3")))
    assert not remembers_absence(Mount("nfs4", ("rw", "lookupcache=pos")))
    assert mount_of(str(tmp_path)).type and not remembers_absence(mount_of(str(tmp_path)))
    assert mount_of(str(tmp_path / "missing")) == Mount()


def test_server_slower_than_its_answers_stand_is_asked_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer about the folder is old as it comes."""
    looks, now_s = Counter[str](), itertools.count(step=FRESH_S)
    monkeypatch.setattr(posix, "mount_of", lambda path: NFS)
    monkeypatch.setattr(posix, "Absence", lambda path: Absence(path, lambda: next(now_s)))
    root, lstat, opened = PosixRoot(tmp_path / "root"), os.lstat, os.open
    other_host(tmp_path, B)
    monkeypatch.setattr(os, "lstat", lambda path: looks.update([path]) or lstat(path))
    monkeypatch.setattr(os, "open", lambda path, *given: looks.update([path]) or opened(path, *given))
    missing = str(tmp_path / "root" / A)
    assert root.stat(A) is None and looks[missing] == 2
    assert root.open(A) is None and looks[missing] == 4
