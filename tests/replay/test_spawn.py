"""Processes of a replay whose parent gives up: they end, and say nothing."""

from __future__ import annotations

import functools
import multiprocessing
import os
from pathlib import Path

import kvstore
from kvstore.errors import Unavailable
from kvstore.replay import Plan, generate
from kvstore.replay.runner import OpenStore, _child
from tests.kit.patience import PATIENCE_S

REQUESTS = generate(4, seed=1)


def unavailable() -> kvstore.Store:
    raise Unavailable("it does not answer")


def exit_code_of_a_child(open_store: OpenStore, *, hears_it_first: bool) -> int | None:
    """Closes the connection to a process, either at once or with what it said unread."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    child = context.Process(target=_child, args=(theirs, os.getpid(), REQUESTS, open_store, Plan("m")), daemon=True)
    child.start()
    theirs.close()
    if hears_it_first:
        assert mine.poll(PATIENCE_S)
    mine.close()
    child.join(PATIENCE_S)
    return child.exitcode


def test_a_store_that_fails_after_the_parent_gave_up() -> None:
    assert exit_code_of_a_child(unavailable, hears_it_first=False) == 0


def test_what_it_said_is_unread_as_the_parent_gives_up(tmp_root: Path) -> None:
    assert exit_code_of_a_child(functools.partial(kvstore.open, str(tmp_root)), hears_it_first=True) == 0
