"""A native read never writes into memory that was taken back, by a deadline or Ctrl-C, and leaves no file open."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.buffers import BufferLoan, Withdrawn, planes_of
from kvstore.engine.chunk_store import StoredRun
from kvstore.format.keyset import ChunkKeys
from kvstore.native import is_available
from kvstore.native import library as native
from tests.kit.native_modes import Paused, chunks_of, open_files, opened
from tests.kit.patience import PATIENCE_S, eventually
from tests.kit.stores import SMALL, kv_of, same

pytestmark = pytest.mark.skipif(not is_available(), reason="the native library was not built, or is turned off")

CHUNKS = 64
TOKENS = np.arange(CHUNKS * SMALL.chunk_tokens)


@pytest.fixture
def paused_open(monkeypatch: pytest.MonkeyPatch) -> Iterator[Paused]:
    paused = Paused(native.library, "kv_open")
    monkeypatch.setattr(native, "library", paused)
    yield paused
    paused.release.set()


def test_a_read_that_was_given_up_while_opening_writes_nothing(tmp_root: Path, paused_open: Paused) -> None:
    paused_open.release.set()
    with opened(tmp_root, native=True) as store:
        cache = store.namespace("m", SMALL)
        cache.put(TOKENS, kv_of(SMALL, TOKENS))
        cache.get(TOKENS)
        before = open_files(tmp_root)
        out = np.full(SMALL.shape(len(TOKENS)), 7, SMALL.numpy_dtype)
        chunks = chunks_of(store)
        chain = ChunkKeys.of(cache.namespace, TOKENS.astype(np.uint32))
        run = chunks.run(chain, 0, CHUNKS, planes_of(out, SMALL))
        assert run is not None
        borrowed, ended = BufferLoan(), []
        paused_open.reached.clear()
        paused_open.release.clear()

        def read() -> None:
            try:
                run.read(0, CHUNKS, borrowed)
            except Withdrawn:
                ended.append(True)

        reader = threading.Thread(target=read)
        reader.start()
        assert paused_open.reached.wait(PATIENCE_S)
        borrowed.withdraw()
        paused_open.release.set()
        reader.join(PATIENCE_S)
        assert ended == [True]
        assert (out == 7).all()
        assert open_files(tmp_root) == before


def test_memory_taken_back_at_any_moment_is_not_written_afterwards(tmp_root: Path) -> None:
    with opened(tmp_root, native=True) as store:
        cache = store.namespace("m", SMALL)
        cache.put(TOKENS, kv_of(SMALL, TOKENS))
        chunks = chunks_of(store)
        chain = ChunkKeys.of(cache.namespace, TOKENS.astype(np.uint32))
        before = open_files(tmp_root)
        for attempt in range(80):
            out = np.zeros(SMALL.shape(len(TOKENS)), SMALL.numpy_dtype)
            run = chunks.run(chain, 0, CHUNKS, planes_of(out, SMALL))
            assert run is not None
            borrowed = BufferLoan()

            def read(start: int, run: StoredRun = run, borrowed: BufferLoan = borrowed) -> None:
                try:
                    for at in range(start, CHUNKS, 8):
                        run.read(at, at + 4, borrowed)
                except Withdrawn:
                    pass

            def take_turns(shared: StoredRun, borrowed: BufferLoan = borrowed) -> None:
                more = True
                try:
                    while more:
                        _, more = shared.read_turn(borrowed)
                except Withdrawn:
                    pass

            readers = [threading.Thread(target=read, args=(start,)) for start in (0, 4)]
            if attempt % 2:
                run.begin_turns(2, 4)
                readers = [threading.Thread(target=take_turns, args=(run,)) for _ in range(2)]
            for reader in readers:
                reader.start()
            time.sleep(attempt / 80 * 0.001)
            borrowed.withdraw()
            out.fill(9)
            for reader in readers:
                reader.join(PATIENCE_S)
            assert (out == 9).all()
        assert open_files(tmp_root) == before


def test_a_group_of_files_is_given_up_between_two_of_them(tmp_root: Path) -> None:
    """Otherwise a caller that takes its memory back would wait for tens of MiB."""
    with opened(tmp_root, native=True) as store:
        cache = store.namespace("m", SMALL)
        cache.put(TOKENS, kv_of(SMALL, TOKENS))
        cache.get(TOKENS)
        before = open_files(tmp_root)
        out = np.full(SMALL.shape(len(TOKENS)), 7, SMALL.numpy_dtype)
        run = chunks_of(store).run(
            ChunkKeys.of(cache.namespace, TOKENS.astype(np.uint32)), 0, CHUNKS, planes_of(out, SMALL)
        )
        assert run is not None
        borrowed = BufferLoan()
        borrowed.natively.stop = 1  # as it is at the moment when ``withdraw`` begins to wait for those who write
        assert not run.read(0, CHUNKS, borrowed).any()
        run.begin_turns(4, 16)
        with pytest.raises(Withdrawn):
            run.read_turn(borrowed)
        assert (out == 7).all()
        assert open_files(tmp_root) == before
        assert run.read(0, CHUNKS, BufferLoan()).all()
        borrowed.withdraw()
        with pytest.raises(Withdrawn):
            run.read(0, CHUNKS, borrowed)


FEW = np.arange(8 * SMALL.chunk_tokens)


@contextmanager
def interrupted_at(reached: threading.Event) -> Iterator[None]:
    """Expects that its body is interrupted, which happens once ``reached`` is set."""
    main = threading.main_thread().ident
    assert main is not None and threading.get_ident() == main

    def interrupt() -> None:
        assert reached.wait(PATIENCE_S)
        time.sleep(0.05)  # until the call waits
        signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        thread.join(PATIENCE_S)
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def pause(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Paused]:
    """Makes native code stand still at one of its functions."""

    def paused_at(name: str) -> Paused:
        paused = Paused(native.library, name)
        monkeypatch.setattr(native, "library", paused)
        return paused

    return paused_at


def wait_for_threads(root: Path) -> None:
    time.sleep(0.1)  # they may not have begun to write
    eventually(lambda: not list(root.glob("staging/*/*")), "no file stays in staging")


def test_interrupted_get_writes_nothing_afterwards(tmp_root: Path, pause: Callable[[str], Paused]) -> None:
    with opened(tmp_root, native=True) as store:
        cache = store.namespace("m", SMALL)
        cache.put(FEW, kv_of(SMALL, FEW))
        out = np.full(SMALL.shape(len(FEW)), 7, SMALL.numpy_dtype)
        paused = pause("kv_read_turn")
        with interrupted_at(paused.reached):
            cache.get(FEW, out)
        paused.release.set()
        assert cache.get(FEW)[0] == len(FEW), "by then the threads are done with the other"
        assert (out == 7).all()


def test_interrupted_put_stores_nothing_written_later(tmp_root: Path, pause: Callable[[str], Paused]) -> None:
    with opened(tmp_root, native=True) as store:
        cache, kv = store.namespace("m", SMALL), kv_of(SMALL, FEW)
        cache.put(FEW + 1, kv)
        changing = kv.copy()
        paused = pause("kv_stage_turn")
        with interrupted_at(paused.reached):
            cache.put(FEW, changing)
        changing[:] = 99
        paused.release.set()
        wait_for_threads(tmp_root)
        count, found = cache.get(FEW)
        assert same(found, kv[:, :, :count])


def test_interrupted_put_of_blocks_stores_nothing_written_later(tmp_root: Path, pause: Callable[[str], Paused]) -> None:
    with opened(tmp_root, native=True) as store:
        blocks = store.namespace("m", SMALL).blocks
        blocks.put([b"first".ljust(16)], [b"makes the folders"])
        keys, buffers = [bytes([at]) * 16 for at in range(8)], [np.full(5000, 1, np.uint8) for _ in range(8)]
        paused = pause("kv_stage_turn")
        with interrupted_at(paused.reached):
            blocks.put(keys, buffers)
        for buffer in buffers:
            buffer[:] = 99
        paused.release.set()
        wait_for_threads(tmp_root)
        assert blocks.get(keys, [np.zeros(5000, np.uint8) for _ in keys]) == [False] * len(keys)
