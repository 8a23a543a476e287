"""Storing in the background: a prefill returns once the model has computed, and its KV is put beside what follows."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from kvstore.client import Cache, Store
from kvstore.connectors.transformers.namespace import not_a_store
from kvstore.errors import InvalidRequest, KVStoreError

log = logging.getLogger(__name__)

BYTES_MAX = 4 << 30
CLOSE_S = 60.0


class Storing:
    """A store, or a cache, and a thread that stores there what prefills computed, in their order. Thread-safe.

        with Storing(store) as storing:
            past = prefill_with_store(model, input_ids, storing)

    ``bytes_max`` bounds the host memory of the KV that waits. A prompt that does not fit beside what waits is stored
    before its prefill returns. Close it before the store. What waits when the process is killed is lost, as a miss.

    Raises InvalidRequest for anything but a store or a cache.
    """

    def __init__(self, store: Store | Cache, bytes_max: int = BYTES_MAX) -> None:
        if not isinstance(store, Store | Cache):
            raise not_a_store(store)
        if not isinstance(bytes_max, int) or isinstance(bytes_max, bool) or bytes_max < 0:
            raise InvalidRequest(f"bytes_max={bytes_max!r}: expected a number of bytes, 0 or more")
        self.store = store
        self._bytes_max = bytes_max
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._bytes = 0  # guarded by _changed, as the next two
        self._prompts = 0
        self._closed = False
        self._ends_s = 0.0
        """When the thread, which alone sets it, stores nothing more because the interpreter ends; 0 before that."""
        # The standard one: its thread ends when this is dropped, and is waited for when the interpreter ends.
        self._thread = ThreadPoolExecutor(1, "kvstore-prefill-store")

    def __repr__(self) -> str:
        return f"<kvstore.Storing {self._prompts} prompts wait, {self.store!r}>"

    def submit(self, store: Callable[[], object], size_bytes: int) -> bool:
        """Has the thread call ``store``, which keeps so many bytes; False without room, once closed, after a fork."""
        with self._changed:
            if self._closed or self._process != os.getpid() or self._bytes + size_bytes > self._bytes_max:
                return False
            self._bytes += size_bytes
            self._prompts += 1
        try:
            self._thread.submit(self._do, store).add_done_callback(lambda _: self._done(size_bytes))
        except RuntimeError:  # the interpreter ends
            self._done(size_bytes)
            return False
        return True

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Waits until nothing waits any more; True if that was in time. Prompts that still do are given up and logged.

        After Ctrl-C all of it is still being stored: close it again to wait for it. Idempotent.
        """
        if self._process != os.getpid():
            return True  # the thread, and what waits, are the parent's
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._prompts, timeout_s)
            left = self._prompts
        self._thread.shutdown(wait=False, cancel_futures=True)
        if left:
            log.warning("prefill.not_stored prompts=%d: the store took longer than %g s", left, timeout_s)
        return not left

    def __enter__(self) -> Storing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _done(self, size_bytes: int) -> None:
        with self._changed:
            self._bytes -= size_bytes
            self._prompts -= 1
            self._changed.notify_all()

    def _do(self, store: Callable[[], object]) -> None:
        if not threading.main_thread().is_alive():  # the interpreter ends, and waits for this thread
            self._ends_s = self._ends_s or time.monotonic() + CLOSE_S
            if time.monotonic() > self._ends_s:
                log.warning("prefill.not_stored the program ends, and the store takes longer than %g s", CLOSE_S)
                return
        try:
            store()
        except KVStoreError as error:
            log.warning("prefill.not_stored %s", error)
        except Exception:
            log.exception("prefill.not_stored")
