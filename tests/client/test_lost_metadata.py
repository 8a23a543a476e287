"""Stores whose ``metadata.sqlite`` is lost: reads and puts go on, within the bound, until it was adopted (rule S8)."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from click.testing import CliRunner

import kvstore
from kvstore.cli.fsck import fsck
from kvstore.errors import Overloaded
from kvstore.format.places import LOANS, METADATA
from kvstore.meta.bounds import CLAIMED_SHARE
from kvstore.meta.sqlite.loans import BEFORE_SHARE
from kvstore.node.view import View
from tests.client.test_host import damage
from tests.kit.bound_process import CHUNKS, LAYOUT, PROMPT_BYTES, kv, tokens
from tests.kit.patience import PATIENCE_S, eventually

MIB = 1 << 20
BOUND_BYTES = 16 * MIB
LENT_BYTES = (CLAIMED_SHARE - BEFORE_SHARE) * BOUND_BYTES
TOKENS_COUNT = CHUNKS * LAYOUT.chunk_tokens
WRITER = """
import sys, kvstore
from kvstore.errors import Overloaded
from tests.kit.bound_process import LAYOUT, kv, tokens
writer, stored = int(sys.argv[2]), 0
with kvstore.open(sys.argv[1], max_bytes=int(sys.argv[3])) as store:
    cache = store.namespace("model", LAYOUT)
    try:
        while True:
            cache.put(tokens(writer, stored), kv(), required=True)
            stored += 1
    except Overloaded as full:
        assert "fsck ROOT --adopt" in str(full), full
print(stored)
"""
"""Puts until it is refused; says how many prompts it stored."""


def remove(root: Path) -> None:
    for path in root.glob(f"{METADATA}*"):
        path.unlink()


def truncate(root: Path) -> None:
    os.truncate(root / METADATA, 4096 + 17)


def of_another_version(root: Path) -> None:
    with closing(sqlite3.connect(root / METADATA)) as database:
        database.execute("PRAGMA user_version = 1")


def destroy_record(root: Path) -> None:
    for path in (root / "generations.host").iterdir():
        path.write_bytes(b"nothing")


def make_folder(root: Path) -> None:
    remove(root)
    (root / METADATA).mkdir()


LOSSES: dict[str, Callable[[Path], None]] = {
    "removed": remove,
    "damaged": damage,
    "cut": truncate,
    "of another version": of_another_version,
    "the root's record damaged": destroy_record,
    "a folder": make_folder,
}


SEEN = ("removed", "damaged")
"""A process that has the file open sees these."""


@pytest.fixture(params=list(LOSSES))
def lose(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    return LOSSES[request.param]


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A folder with one prompt; nobody has it open."""
    with kvstore.open(tmp_path / "root", max_bytes=BOUND_BYTES, shard_bits=2) as store:
        assert put(store, 0)
    yield tmp_path / "root"


def put(store: kvstore.Store, number: int) -> bool:
    return not store.namespace("model", LAYOUT).put(tokens(1 << 10, number), kv()).reason


def has(store: kvstore.Store, number: int) -> bool:
    count, got = store.namespace("model", LAYOUT).get(tokens(1 << 10, number))
    return count == TOKENS_COUNT and bool((got == 1).all())


def taken(root: Path) -> int:
    return sum(path.stat().st_size for path in (root / "chunks").rglob("*") if path.is_file())


def fill(store: kvstore.Store, first: int) -> int:
    """Puts until it is refused; returns the number that was."""
    while put(store, first):
        first += 1
    return first


def adopt(root: Path) -> None:
    if (root / METADATA).is_dir():
        (root / METADATA).rmdir()  # as its refusal says
    adopted = CliRunner().invoke(fsck, [str(root), "--adopt"])
    assert adopted.exit_code == 0, adopted.output
    assert not (root / LOANS).exists()


def test_a_store_that_opens_later_reads_and_puts_up_to_its_bound(root: Path, lose: Callable[[Path], None]) -> None:
    lose(root)
    with kvstore.open(root, max_bytes=BOUND_BYTES) as store:
        assert has(store, 0)
        refused = fill(store, 1)
        assert LENT_BYTES - 2 * PROMPT_BYTES < taken(root) <= LENT_BYTES
        assert all(has(store, number) for number in range(refused)) and not store.stats()["protected"]
    with kvstore.open(root, max_bytes=BOUND_BYTES) as store:
        assert not put(store, refused), "program after program"
    adopt(root)
    with kvstore.open(root, max_bytes=BOUND_BYTES) as store:
        eventually(lambda: put(store, refused), "a collector counted")
        assert taken(root) <= BOUND_BYTES and store.stats()["protected"]


@pytest.mark.parametrize("lose", SEEN, indirect=True)
def test_a_store_that_had_it_open_goes_on(root: Path, lose: Callable[[Path], None]) -> None:
    with kvstore.open(root, max_bytes=BOUND_BYTES) as store:
        assert put(store, 1)
        lose(root)
        refused = fill(store, 2)
        eventually(lambda: not store.stats()["protected"], "it has noticed")
        refused = fill(store, refused)
        assert 0.7 * BOUND_BYTES < taken(root) <= BOUND_BYTES
        assert all(has(store, number) for number in (0, refused - 1))
        adopt(root)
        eventually(lambda: put(store, refused), "a collector counted")
        assert taken(root) <= BOUND_BYTES


@pytest.mark.parametrize("lose", SEEN, indirect=True)
def test_a_store_that_obeyed_a_collector_goes_on(
    root: Path, lose: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.node.collecting.START_S", 0.0)
    with kvstore.open(root, max_bytes=BOUND_BYTES) as store:
        eventually(lambda: put(store, 1) and store.stats()["collecting"] == 1, "it collects")
        lose(root)
        eventually(lambda: not store.stats()["protected"], "it has noticed")
        refused = fill(store, 2)
        assert 0.7 * BOUND_BYTES < taken(root) <= BOUND_BYTES and has(store, refused - 1)


def test_many_processes_at_once_stay_below_the_bound(root: Path, lose: Callable[[Path], None]) -> None:
    lose(root)
    command = [sys.executable, "-c", WRITER, str(root)]
    writers = [
        subprocess.Popen([*command, str(number), str(BOUND_BYTES)], stdout=subprocess.PIPE, text=True)
        for number in range(4)
    ]
    stored = [int(writer.communicate(timeout=PATIENCE_S)[0]) for writer in writers]
    assert 0.7 * BOUND_BYTES < taken(root) <= LENT_BYTES
    assert sum(stored) * PROMPT_BYTES <= LENT_BYTES


def test_stores_that_had_claims_stay_below_the_bound_together(root: Path) -> None:
    with ExitStack() as opened:
        stores = [opened.enter_context(kvstore.open(root, max_bytes=BOUND_BYTES)) for _ in range(8)]
        assert all(put(store, 1 + number) for number, store in enumerate(stores))
        remove(root)
        for store in stores:
            eventually(lambda store=store: not store.stats()["protected"], "it has noticed")  # type: ignore[misc]
        for number, store in enumerate(stores):
            fill(store, 1000 * (1 + number))
        assert taken(root) <= BOUND_BYTES


def test_a_file_that_comes_back_under_stores_with_claims_gives_none_of_them_a_moment_more(
    root: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    with ExitStack() as opened:
        stores = [opened.enter_context(kvstore.open(root, max_bytes=BOUND_BYTES)) for _ in range(8)]
        assert all(put(store, 1 + number) for number, store in enumerate(stores))
        for path in root.glob(f"{METADATA}*"):
            shutil.move(path, kept / path.name)
        for store in stores:
            eventually(lambda store=store: not store.stats()["protected"], "it has noticed")  # type: ignore[misc]
        with kvstore.open(root, max_bytes=BOUND_BYTES) as other:
            fill(other, 1000)
        remove(root)
        for path in kept.iterdir():
            shutil.move(path, root / path.name)
        for number, store in enumerate(stores):
            put(store, 2000 + number)
        assert taken(root) <= BOUND_BYTES


def test_threads_of_one_store_wait_for_the_loans_of_each_other(root: Path) -> None:
    remove(root)
    with kvstore.open(root, max_bytes=BOUND_BYTES) as store, ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda number: put(store, number), range(1, 9)))


def test_a_check_says_that_a_folder_has_the_name_of_the_metadata(root: Path) -> None:
    make_folder(root)
    checked = CliRunner().invoke(fsck, [str(root)])
    assert checked.exit_code == 1 and "is not a file: remove it, and run `kvstore fsck ROOT --adopt`" in checked.output


@pytest.mark.parametrize("place", ["a folder", "a link"])
def test_what_lies_in_the_way_of_loans_is_named(root: Path, place: str) -> None:
    remove(root)
    if place == "a folder":
        (root / LOANS).mkdir()
    else:
        (root / LOANS).symlink_to(root / "elsewhere")
    with kvstore.open(root, max_bytes=BOUND_BYTES) as store, pytest.raises(Overloaded, match=LOANS):
        store.namespace("model", LAYOUT).put(tokens(1, 1), kv(), required=True)
    adopted = CliRunner().invoke(fsck, [str(root), "--adopt"])
    assert adopted.exit_code == 0 and ("remove it" in adopted.output) == (place == "a folder"), adopted.output
    with kvstore.open(root, max_bytes=BOUND_BYTES) as store:
        eventually(lambda: put(store, 1), "a collector counted")


def test_a_process_that_is_killed_leaves_no_more_than_its_loans(root: Path) -> None:
    remove(root)
    code = WRITER.replace("stored += 1", "stored += 1; print(stored, flush=True)")
    for number in range(8):
        command = [sys.executable, "-c", code, str(root), str(number), str(BOUND_BYTES)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            writer.kill()
        assert taken(root) <= LENT_BYTES


def test_a_file_that_comes_back_ends_the_loans(root: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    for path in root.glob(f"{METADATA}*"):
        shutil.move(path, kept / path.name)
    with kvstore.open(root, max_bytes=BOUND_BYTES) as store:
        refused = fill(store, 1)
    for path in root.glob(f"{METADATA}*"):
        path.unlink()
    for path in kept.iterdir():
        shutil.move(path, root / path.name)
    with kvstore.open(root, max_bytes=BOUND_BYTES) as store:
        assert store.stats()["protected"] and has(store, 1)
        eventually(lambda: put(store, refused), "a collector counts: its level knows nothing of the loans")
        for number in range(refused + 1, refused + 20):
            put(store, number)
        assert taken(root) <= BOUND_BYTES
    assert not (root / LOANS).exists()


def test_where_the_metadata_are_well_nothing_is_borrowed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(View, "protects", False)  # as while a session is renewed
    with kvstore.open(root, max_bytes=BOUND_BYTES) as store:
        assert not put(store, 1)
    assert not (root / LOANS).exists()


def test_a_store_without_a_bound_borrows_nothing(root: Path) -> None:
    remove(root)
    with kvstore.open(root, max_bytes=None) as store:
        assert all(put(store, number) for number in range(1, 20))
    assert not (root / LOANS).exists()
    with closing(kvstore.open(root, max_bytes=BOUND_BYTES)) as store:
        put(store, 20)
    assert (root / LOANS).exists(), "one with a bound does"
