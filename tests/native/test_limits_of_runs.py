"""The limits of one native call: files open at once, files synced, and memory that it may read into."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.codec import image
from kvstore.codec.image import ChunkRun
from kvstore.core.buffers import BufferLoan, planes_of
from kvstore.core.executor import GROUP_FILES_MAX
from kvstore.errors import InvalidRequest
from kvstore.format.keyset import ChunkKeys
from kvstore.native import is_available
from kvstore.native import library as native
from tests.kit.native_modes import chunks_of, opened
from tests.kit.stores import SMALL, TINY, kv_of, same

pytestmark = pytest.mark.skipif(not is_available(), reason="the native library was not built, or is turned off")


class Noted:
    """The library, noting the sizes of each turn that one function was given."""

    def __init__(self, library: object, name: str) -> None:
        self._library = library
        self._name = name
        self.turns: list[Any] = []

    def __getattr__(self, name: str) -> object:
        found = getattr(self._library, name)
        if name != self._name:
            return found

        def noting(*arguments: Any) -> object:
            self.turns += [each for each in arguments if isinstance(each, native.Turn)]
            return found(*arguments)

        return noting


def test_a_get_of_small_chunks_needs_few_open_files(tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(native.library, "kv_read_turn")
    monkeypatch.setattr(native, "library", noted)
    tokens = np.arange(2000 * TINY.chunk_tokens)
    kv = kv_of(TINY, tokens)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with opened(tmp_root, native=True) as store:
        cache = store.namespace("m", TINY)
        cache.put(tokens, kv)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 6, hard))
        try:
            count, found = cache.get(tokens)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert count == len(tokens) and same(found, kv)
        assert store.stats()["miss_unreadable"] == 0
        assert {(turn.step, turn.files) for turn in noted.turns} == {(1, 1)}
        noted.turns.clear()
        assert cache.get(tokens)[0] == len(tokens)
        (sizes,) = {(turn.step, turn.files) for turn in noted.turns}
        assert 1 < min(sizes) <= max(sizes) <= GROUP_FILES_MAX, "more where there are more, but not without a limit"


def test_a_forked_child_does_not_read_into_memory_of_its_parent() -> None:
    with image._cold_memory() as at:
        ctypes.memset(at, 1, 4096)
        child = os.fork()
        if not child:
            ctypes.memset(at, 2, 4096)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert ctypes.string_at(at, 4096) == b"\1" * 4096


def test_an_array_whose_planes_share_memory_is_refused(tmp_root: Path) -> None:
    tokens = np.arange(4 * SMALL.chunk_tokens)
    kv = kv_of(SMALL, tokens)
    with opened(tmp_root, native=True) as store:
        cache = store.namespace("m", SMALL)
        cache.put(tokens, kv)
        memory = np.zeros(SMALL.shape(2 * len(tokens)), SMALL.numpy_dtype)
        for strides in (
            (0, *memory.strides[1:]),
            (memory.strides[0], 0, *memory.strides[2:]),
            (memory.strides[0], memory.strides[1] // 2 - memory.strides[2], *memory.strides[2:]),
        ):
            shared = np.lib.stride_tricks.as_strided(memory, SMALL.shape(len(tokens)), strides)
            with pytest.raises(InvalidRequest, match="share memory"):
                cache.get(tokens, shared)
        backwards = memory[::-1, ::-1, : len(tokens)]
        assert cache.get(tokens, backwards) == len(tokens) and same(backwards, kv)
        assert store.stats()["miss_damaged"] == 0


def test_a_lane_that_reads_what_is_not_cached_opens_no_more_files_than_it_may(
    tmp_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = np.arange(64 * SMALL.chunk_tokens)
    with opened(tmp_root, native=True) as store:
        cache = store.namespace("m", SMALL)
        cache.put(tokens, kv_of(SMALL, tokens))
        chain = ChunkKeys.of(cache.namespace, tokens.astype(np.uint32))
        out = np.zeros(SMALL.shape(len(tokens)), SMALL.numpy_dtype)
        run = chunks_of(store).run(chain, 0, 64, planes_of(out, SMALL))
        assert run is not None
        run.common.direct, run.common.may_wait = True, False  # tmpfs knows no RWF_NOWAIT: nothing there is cached
        most = 0

        def read_blocked(places: Any, borrowed: BufferLoan) -> None:
            nonlocal most
            most = max(most, int((run.items["fd"] >= 0).sum()))
            ChunkRun.read_blocked(run, places, borrowed)

        monkeypatch.setattr(run, "read_blocked", read_blocked)
        run.begin_turns(4, 64, 6)
        more = True
        while more:
            left, more = run.read_turn(BufferLoan())
            assert not left
        assert run.end_read().all() and same(out, kv_of(SMALL, tokens))
        assert most == 4, "a step more would be 8"
