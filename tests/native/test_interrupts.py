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

from kvstore.buffers import Pieces
from kvstore.client.local import LocalPort
from kvstore.client.store import Store
from kvstore.format.places import Name
from kvstore.native import is_available
from kvstore.native import library as native
from kvstore.root.posix import PosixReader, PosixRoot
from tests.kit.native_modes import Paused, opened
from tests.kit.patience import PATIENCE_S
from tests.kit.stores import SMALL, kv_of, member_on, same

TOKENS = np.arange(8 * SMALL.chunk_tokens)


class PausedRoot(PosixRoot):
    """Stands still at opening or staging a file, once ``is_on``; not for native code."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_on = False
        self.reached, self.release = threading.Event(), threading.Event()

    def open(self, name: Name) -> PosixReader | None:
        self._pause()
        return super().open(name)

    def stage(self, name: Name, pieces: Pieces, *, stamp_ns: int, durable: bool) -> None:
        self._pause()
        super().stage(name, pieces, stamp_ns=stamp_ns, durable=durable)

    def _pause(self) -> None:
        if self.is_on:
            self.reached.set()
            assert self.release.wait(PATIENCE_S)


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


Way = Callable[[str], tuple[threading.Event, threading.Event]]


@pytest.fixture(params=["native", "python"])
def store_and_pause(
    request: pytest.FixtureRequest, tmp_root: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Store, Way]]:
    """A store, and how to make it stand still at a native function, or at a file; returns reached and release."""
    if request.param == "python":
        root = PausedRoot(tmp_root)
        store = Store(LocalPort(member_on(root)))

        def pause(_: str) -> tuple[threading.Event, threading.Event]:
            root.is_on = True
            return root.reached, root.release

        try:
            yield store, pause
        finally:
            root.release.set()
            store.close()
        return
    if not is_available():
        pytest.skip("the native library was not built, or is turned off")

    def pause_native(name: str) -> tuple[threading.Event, threading.Event]:
        paused = Paused(native.library, name)
        monkeypatch.setattr(native, "library", paused)
        return paused.reached, paused.release

    with opened(tmp_root, native=True) as store:
        yield store, pause_native


def test_an_interrupted_get_writes_nothing_afterwards(store_and_pause: tuple[Store, Way]) -> None:
    store, pause = store_and_pause
    cache = store.namespace("m", SMALL)
    cache.put(TOKENS, kv_of(SMALL, TOKENS))
    out = np.full(SMALL.shape(len(TOKENS)), 7, SMALL.numpy_dtype)
    reached, release = pause("kv_read_turn")
    with interrupted_at(reached):
        cache.get(TOKENS, out)
    release.set()
    assert cache.get(TOKENS)[0] == len(TOKENS), "by then the lanes are done with the other"
    assert (out == 7).all()


def test_an_interrupted_put_of_blocks_stores_nothing_that_came_later(
    store_and_pause: tuple[Store, Way], tmp_root: Path
) -> None:
    store, pause = store_and_pause
    blocks = store.namespace("m", SMALL).blocks
    blocks.put([b"first".ljust(16)], [b"makes the folders"])
    keys, buffers = [bytes([at]) * 16 for at in range(8)], [np.full(5000, 1, np.uint8) for _ in range(8)]
    reached, release = pause("kv_stage_turn")
    with interrupted_at(reached):
        blocks.put(keys, buffers)
    for buffer in buffers:
        buffer[:] = 99
    release.set()
    found = [np.zeros(5000, np.uint8) for _ in keys]
    wait_until_staged_is_empty(tmp_root)
    assert blocks.get(keys, found) == [False] * len(keys)


def test_an_interrupted_put_stores_nothing_that_came_later(store_and_pause: tuple[Store, Way], tmp_root: Path) -> None:
    store, pause = store_and_pause
    cache, kv = store.namespace("m", SMALL), kv_of(SMALL, TOKENS)
    cache.put(TOKENS + 1, kv)
    changing = kv.copy()
    reached, release = pause("kv_stage_turn")
    with interrupted_at(reached):
        cache.put(TOKENS, changing)
    changing[:] = 99
    release.set()
    wait_until_staged_is_empty(tmp_root)
    count, found = cache.get(TOKENS)
    assert same(found, kv[:, :, :count])


def wait_until_staged_is_empty(root: Path) -> None:
    limit = time.monotonic() + PATIENCE_S
    time.sleep(0.1)  # lanes may not have begun to write
    while list(root.glob("staging/*/*")):
        assert time.monotonic() < limit, "a file stayed in staging"
        time.sleep(0.01)
