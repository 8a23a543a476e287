"""Ctrl-C in a call gives the memory back as a deadline does: nobody writes to it or stores its content later."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstore.native import is_available
from kvstore.native import library as native
from tests.kit.native_modes import Paused, opened
from tests.kit.patience import PATIENCE_S, eventually
from tests.kit.stores import SMALL, kv_of, same

pytestmark = pytest.mark.skipif(not is_available(), reason="the native library was not built, or is turned off")

TOKENS = np.arange(8 * SMALL.chunk_tokens)


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


def wait_for_lanes(root: Path) -> None:
    time.sleep(0.1)  # they may not have begun to write
    eventually(lambda: not list(root.glob("staging/*/*")), "no file stays in staging")


def test_interrupted_get_writes_nothing_afterwards(tmp_root: Path, pause: Callable[[str], Paused]) -> None:
    with opened(tmp_root, native=True) as store:
        cache = store.namespace("m", SMALL)
        cache.put(TOKENS, kv_of(SMALL, TOKENS))
        out = np.full(SMALL.shape(len(TOKENS)), 7, SMALL.numpy_dtype)
        paused = pause("kv_read_turn")
        with interrupted_at(paused.reached):
            cache.get(TOKENS, out)
        paused.release.set()
        assert cache.get(TOKENS)[0] == len(TOKENS), "by then the lanes are done with the other"
        assert (out == 7).all()


def test_interrupted_put_stores_nothing_written_later(tmp_root: Path, pause: Callable[[str], Paused]) -> None:
    with opened(tmp_root, native=True) as store:
        cache, kv = store.namespace("m", SMALL), kv_of(SMALL, TOKENS)
        cache.put(TOKENS + 1, kv)
        changing = kv.copy()
        paused = pause("kv_stage_turn")
        with interrupted_at(paused.reached):
            cache.put(TOKENS, changing)
        changing[:] = 99
        paused.release.set()
        wait_for_lanes(tmp_root)
        count, found = cache.get(TOKENS)
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
        wait_for_lanes(tmp_root)
        assert blocks.get(keys, [np.zeros(5000, np.uint8) for _ in keys]) == [False] * len(keys)
