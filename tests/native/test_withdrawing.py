"""A native read never writes into memory that was taken back, leaves no file open, and may end at any moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.buffers import BufferLoan, Withdrawn, planes_of
from kvstore.core.clock import RandomIds
from kvstore.engine.chunk_store import StoredRun
from kvstore.format.keyset import ChunkKeys
from kvstore.native import is_available
from kvstore.native import library as native
from kvstore.root.identity import create_or_open
from kvstore.root.posix import PosixRoot
from tests.kit.native_modes import Paused, chunks_of, open_files, opened
from tests.kit.patience import PATIENCE_S
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


def put_for_ever(root: str) -> None:
    """Runs in a separate process until it is killed."""
    with opened(Path(root), native=True) as store:
        cache = store.namespace("m", SMALL)
        for number in range(1_000_000):
            tokens = TOKENS + number * 7
            cache.put(tokens, kv_of(SMALL, tokens))
            print(number, flush=True)


@pytest.mark.slow
def test_killed_at_any_moment_of_native_puts_nothing_torn_is_ever_found(tmp_root: Path) -> None:
    create_or_open(PosixRoot(tmp_root), RandomIds())
    script = f"from tests.native.test_withdrawing import put_for_ever; put_for_ever({str(tmp_root)!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for attempt in range(5):
        writer = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        try:
            writer.stdout.readline()
            time.sleep(0.013 * attempt)
        finally:
            writer.send_signal(signal.SIGKILL)
            written = 1 + len(writer.stdout.read().splitlines())
            writer.stdout.close()
            writer.wait(PATIENCE_S)
        with opened(tmp_root, native=True) as store:
            cache = store.namespace("m", SMALL)
            for number in range(written + 1):
                tokens = TOKENS + number * 7
                count, found = cache.get(tokens)
                assert count == len(tokens) or number >= written
                assert same(found, kv_of(SMALL, tokens)[:, :, :count])
            assert store.stats()["miss_damaged"] == 0


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
