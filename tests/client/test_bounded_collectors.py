"""Which process of a bounded folder runs its collector: one is elected, others take over, and none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from kvstore.meta.sqlite.client import SqliteMeta

import kvstore
from kvstore.meta.bounds import Bounds
from kvstore.meta.keys import Keys
from kvstore.node import collecting
from kvstore.root.identity import create_or_open
from kvstore.root.open import open_root
from kvstore.sources import RandomIds
from tests.kit.bound_process import PROMPT_BYTES
from tests.kit.bounding import (
    BOUND_BYTES,
    TOKENS_COUNT,
    collector,
    collectors,
    matched,
    put,
    stopped_between_writes,
    writing,
)
from tests.kit.cases import for_each
from tests.kit.patience import eventually


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "START_S", 0.0)


# One is elected, others take over


@pytest.mark.slow
def test_another_takes_over_from_a_killed_process_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with writing(root, 2) as writers:
        eventually(lambda: any(each.stats()[0] for each in writers), "one is elected")
        first, second = sorted(writers, key=lambda each: not each.stats()[0])
        before = collector(root)
        first.child.kill()
        eventually(lambda: before not in collectors(root), "the child ends with its parent")
        eventually(lambda: second.stats()[0] and len(collectors(root)) == 1, "the other one takes over")
        stored = second.stats()[1]
        eventually(lambda: second.stats()[1] > stored + BOUND_BYTES // PROMPT_BYTES, "it goes on making room")


@pytest.mark.slow
def test_another_takes_over_from_a_process_that_was_stopped_past_its_lease(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with writing(root, 2) as writers:
        eventually(lambda: any(each.stats()[0] for each in writers), "one is elected")
        first, second = sorted(writers, key=lambda each: not each.stats()[0])
        with stopped_between_writes(root, [first.child.pid, collector(root)]):
            eventually(lambda: second.stats()[0], "the other one takes over")
            stored = second.stats()[1]
            eventually(lambda: second.stats()[1] > stored + BOUND_BYTES // PROMPT_BYTES, "it makes room")
        eventually(lambda: not first.stats()[0] and len(collectors(root)) == 1, "the first one's child ends")


@pytest.mark.parametrize("since", ["its start", "it was among the collectors"])
def test_a_collector_that_hangs_is_replaced(
    tmp_path: Path, at_once: None, monkeypatch: pytest.MonkeyPatch, since: str
) -> None:
    root = tmp_path / "root"
    with kvstore.open(root) as store, closing(SqliteMeta(str(root))) as meta:
        put(store, 1)
        eventually(lambda: store.stats()["collecting"])
        before = collector(root)
        if since != "its start":
            with closing(open_root(str(root))) as opened:
                keys = Keys(create_or_open(opened, RandomIds(), create=False).root)
            eventually(lambda: meta.list(keys.collectors).items)
        os.kill(before, signal.SIGSTOP)
        monkeypatch.setattr(collecting, "HUNG_S" if since == "its start" else "LOST_S", 0.0)
        eventually(lambda: before not in collectors(root), "it is killed")
        monkeypatch.undo()
        eventually(lambda: collectors(root), "another is started")


def test_the_lease_of_a_killed_collector_has_ended_when_another_is_started(tmp_path: Path, at_once: None) -> None:
    root = tmp_path / "root"
    with kvstore.open(root) as store, closing(SqliteMeta(str(root))) as meta:
        put(store, 1)
        eventually(lambda: store.stats()["collecting"])
        killed = collector(root)
        with closing(open_root(str(root))) as opened:
            keys = Keys(create_or_open(opened, RandomIds(), create=False).root)
        eventually(lambda: meta.list(keys.collectors).items)
        (record,) = meta.list(keys.collectors).items
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: collectors(root) and killed not in collectors(root), "another is started")
        eventually(lambda: meta.get(record.key) is None, "its lease has ended")


# Nothing is left


def test_no_collector_is_left_after_close(tmp_path: Path, at_once: None) -> None:
    root = tmp_path / "root"
    with kvstore.open(root) as store:
        put(store, 1)
        eventually(lambda: collectors(root))
    assert collectors(root) == []


@for_each("how", ["kill", "exit"])
def test_no_collector_is_left_after_a_process_that_did_not_close(tmp_path: Path, how: str) -> None:
    root = tmp_path / "root"
    with writing(root) as (writer,):
        eventually(lambda: collectors(root))
        if how == "kill":
            writer.child.kill()
        else:
            writer.tell("exit")
        eventually(lambda: not collectors(root), "the child ends with its parent")


def test_a_program_that_ends_without_closing_leaves_its_room_to_the_next(tmp_path: Path) -> None:
    root, size = tmp_path / "root", 4 * PROMPT_BYTES
    program = (
        "import sys, kvstore\nfrom tests.kit.bound_process import *\n"
        f"store = kvstore.open(sys.argv[1], max_bytes={size})\n"
        "store.namespace('model', LAYOUT).put(tokens(0, 1), kv())\n"
    )
    for _ in range(3):
        assert subprocess.run([sys.executable, "-c", program, str(root)], check=False).returncode == 0
        with closing(open_root(str(root))) as opened, closing(SqliteMeta(str(root))) as meta:
            keys = Keys(create_or_open(opened, RandomIds(), create=False).root)
            assert 0 < Bounds(meta, keys).level_bytes() <= PROMPT_BYTES
    with kvstore.open(root, max_bytes=size) as store:
        put(store, 2)
        assert matched(store, 2) == TOKENS_COUNT


def test_a_forked_child_leaves_the_collector_alone(tmp_path: Path, at_once: None) -> None:
    root = tmp_path / "root"
    with kvstore.open(root) as store:
        put(store, 1)
        eventually(lambda: store.stats()["collecting"])
        before = collector(root)
        child = os.fork()
        if child == 0:
            store.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert collectors(root) == [before] and store.stats()["collecting"]
