"""A process that forks while it has a store with memory: the child touches nothing of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np

import kvstore
from kvstore.errors import InvalidRequest
from tests.kit.patience import eventually

LAYOUT = kvstore.Layout(layers=1, kv_heads=1, head_dim=8, dtype="float16", chunk_tokens=4)
TOKENS = list(range(64))


def asked_in_child(store: kvstore.Store, cache: kvstore.Cache) -> int:
    """The number of calls that were refused as they should be."""
    kv = np.ones(LAYOUT.shape(len(TOKENS)), np.float16)
    refused = 0
    for call in (lambda: cache.match(TOKENS), lambda: cache.get(TOKENS), lambda: cache.put(TOKENS, kv)):
        try:
            call()
        except InvalidRequest as error:
            refused += "open it in the child" in str(error)
    store.close()
    return refused


def test_i2_a_forked_child_is_refused_at_once_and_changes_nothing(tmp_root: Path) -> None:
    """With a lock of the memory held at the fork, as by a thread that writes behind: nobody gives it back there."""
    kv = np.arange(LAYOUT.shape(len(TOKENS))[2] * 16, dtype=np.float16).reshape(LAYOUT.shape(len(TOKENS)))
    with kvstore.open(str(tmp_root), memory=16 << 20) as store:
        cache = store.namespace("m", LAYOUT)
        assert cache.put(TOKENS, kv).tokens_present == len(TOKENS)
        with store._port._store.member.node.memory._lock:  # type: ignore[attr-defined]
            child = os.fork()
            if child == 0:
                try:
                    os._exit(asked_in_child(store, cache))
                finally:
                    os._exit(99)
        try:
            eventually(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT), "the child's end")
        finally:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 3
        got_count, got = cache.get(TOKENS)
        assert got_count == len(TOKENS) and np.array_equal(got, kv)
