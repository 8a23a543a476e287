"""What the processes of a host lend themselves while their metadata are lost (rule S8)."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.errors import Unavailable
from kvstore.format.places import LOANS
from kvstore.meta.bounds import CLAIMED_SHARE
from kvstore.meta.sqlite import loans
from kvstore.meta.sqlite.loans import BEFORE_SHARE, COUNT_S, Loans, end_loans
from kvstore.meta.sqlite.making import locked
from tests.kit.fake_meta import FakeClock

BOUND = 100_000
MOST = int((CLAIMED_SHARE - BEFORE_SHARE) * BOUND)


class Folder:
    """A folder whose files are a number."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = FakeClock()
        self.boot = "boot-1"
        self.used_bytes = 0
        self.counted = 0

    def loans(self) -> Loans:
        return Loans(str(self.path), BOUND, self._count, self.clock, self.boot)

    def _count(self) -> int:
        self.counted += 1
        return self.used_bytes

    @property
    def file(self) -> Path:
        return self.path / LOANS


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_s8_files_and_loans_of_all_stay_below_a_share_of_the_bound(folder: Folder) -> None:
    folder.used_bytes = 20_000
    one, other = folder.loans(), folder.loans()
    lent = 0
    while one.lend(1_000, 0) is not None and other.lend(500, 0) is not None:
        lent += 1_500
    assert MOST - 1_500 < folder.used_bytes + lent <= MOST
    assert folder.counted == 1


def test_s8_lends_more_where_there_is_room_and_the_put_alone_where_there_is_not(folder: Folder) -> None:
    assert folder.loans().lend(MOST - 1_000, 500) == 500
    assert folder.loans().lend(400, 500) == 0
    assert folder.loans().lend(101, 0) is None
    assert folder.loans().lend(100, 0) == 0


def test_s8_the_root_is_counted_again_and_what_was_lent_since_counts_once_more(folder: Folder) -> None:
    one = folder.loans()
    assert one.lend(60_000, 0) == 0
    folder.used_bytes = 10_000  # of the loan
    folder.clock.advance(COUNT_S + 1)
    assert one.lend(MOST - 70_000 + 1, 0) is None, "all of it may still be written"
    folder.clock.advance(COUNT_S + 1)
    assert one.lend(MOST - 10_000, 0) == 0, "what was lent two countings ago is written, or was given up"
    assert folder.counted == 3


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\0" * 128,
        b"boot-1 nan 1 1",
        b"boot-1 inf 1 0",
        b"boot-1 1000",
        b"boot-1 1000 -5 1",
        b"boot-1 1000 5 -5",
        b"x" * 5000,
        b"boot-1 1e999 0 0",
        b"\xff\xfe 1000 0 0",
        b"1000 0 0",
    ],
)
def test_s8_what_is_no_level_is_counted_anew(folder: Folder, record: bytes) -> None:
    folder.used_bytes = MOST - 10
    folder.file.write_bytes(record)
    assert folder.loans().lend(11, 0) is None and folder.loans().lend(10, 0) == 0
    assert folder.counted == 1


def test_s8_a_level_of_another_boot_is_counted_anew(folder: Folder) -> None:
    assert folder.loans().lend(1_000, 0) == 0
    folder.boot = "boot-2"
    folder.used_bytes = MOST - 1_000
    assert folder.loans().lend(1, 0) is None and folder.counted == 2


def test_s8_threads_lend_no_more_together_than_one_would(folder: Folder) -> None:
    def lend_all(_: int) -> int:
        mine, lent = folder.loans(), 0
        while mine.lend(500, 0) is not None:
            lent += 500
        return lent

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(lend_all, range(8))) == MOST // 500 * 500


def test_s8_the_root_is_counted_under_the_lock(folder: Folder) -> None:
    """Else others may borrow after the counting, and a level replace theirs that knows nothing of it."""

    def count() -> int:
        with pytest.raises(Unavailable), locked(str(folder.file), 0.0):
            pass
        return 0

    assert Loans(str(folder.path), BOUND, count, folder.clock, folder.boot).lend(1, 0) == 0


def test_s8_the_file_belongs_to_whom_the_folder_belongs(folder: Folder) -> None:
    folder.path.chmod(0o770)
    folder.loans().lend(1, 0)
    assert stat.S_IMODE(folder.file.stat().st_mode) == 0o660


def test_s8_an_adoption_removes_the_level(folder: Folder) -> None:
    end_loans(str(folder.path))
    assert os.listdir(folder.path) == []
    folder.loans().lend(1, 0)
    end_loans(str(folder.path))
    assert os.listdir(folder.path) == []


@pytest.mark.parametrize("place", ["a folder", "a link", "a pipe"])
def test_s8_what_is_no_file_lends_nothing(folder: Folder, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setattr(loans, "LOCK_S", 0.05)
    made: dict[str, Callable[[], object]] = {
        "a folder": folder.file.mkdir,
        "a link": lambda: folder.file.symlink_to(folder.path / "elsewhere"),
        "a pipe": lambda: os.mkfifo(folder.file),
    }
    made[place]()
    with pytest.raises(Unavailable, match=LOANS):
        folder.loans().lend(1, 0)
    assert not (folder.path / "elsewhere").exists()


def test_s8_a_process_that_stands_still_in_a_loan_stops_no_other_for_ever(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loans, "LOCK_S", 0.05)
    with locked(str(folder.file), 1.0), pytest.raises(Unavailable, match="is one stopped"):
        folder.loans().lend(1, 0)
