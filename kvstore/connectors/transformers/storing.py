"""Storing in the background: a prefill returns once the model has computed, and its KV is put beside what follows."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from kvstore.client import Cache, Store
from kvstore.errors import InvalidRequest

log = logging.getLogger(__name__)

BYTES_MAX = 4 << 30


class Storing:
    """A store, or a cache, and a thread that stores there what prefills computed, in their order. Thread-safe.

        with Storing(store) as storing:
            past = prefill_with_store(model, input_ids, storing)

    ``bytes_max`` bounds the host memory of the KV that waits. A prompt that does not fit beside what waits is stored
    before its prefill returns. Close it before the store. What waits when the process is killed is lost, as a miss.
    """

    def __init__(self, store: Store | Cache, bytes_max: int = BYTES_MAX) -> None:
        if not isinstance(bytes_max, int) or bytes_max < 0:
            raise InvalidRequest(f"bytes_max={bytes_max!r}: expected a number of bytes, 0 or more")
        self.store = store
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._bytes = 0
        # The standard one: its thread ends when this is dropped, and is waited for when the interpreter ends.
        self._thread = ThreadPoolExecutor(1, "kvstore-prefill-store")

    def submit(self, store: Callable[[], object], size_bytes: int) -> bool:
        """Has the thread call ``store``, which keeps so many bytes; False without room, and once closed."""
        with self._lock:
            if self._bytes + size_bytes > self._bytes_max:
                return False
            self._bytes += size_bytes
        try:
            self._thread.submit(self._do, store, size_bytes)
        except RuntimeError:  # closed, or the interpreter ends
            self._done(size_bytes)
            return False
        return True

    def close(self) -> None:
        """Waits until all is stored, or given up by the deadlines of puts. Idempotent."""
        self._thread.shutdown()

    def __enter__(self) -> Storing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _do(self, store: Callable[[], object], size_bytes: int) -> None:
        try:
            store()
        except Exception:
            log.exception("prefill.not_stored")
        finally:
            self._done(size_bytes)

    def _done(self, size_bytes: int) -> None:
        with self._lock:
            self._bytes -= size_bytes
