"""The settings that LMCache and SGLang share, a store that may be down at first, and the keys of their blocks."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

from kvstore.client import Cache, Store
from kvstore.connectors.fingerprints import Fingerprints
from kvstore.connectors.opening import Kind, Settings, number, setting
from kvstore.errors import Unavailable
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.sources import SystemClock

log = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT_S_MAX = 300.0
"""Maximum of a look-up's and a read's time-out: no node keeps a hold for longer, and a hold must outlast its read."""
PAUSE_S = 5.0
"""After the store could not be opened, calls are misses for this long."""
OPAQUE_LAYOUT = Layout(1, 1, 1, "int8", 1)
"""The layout of namespaces whose keys describe their blocks."""
_ENGINE_KEY = blake2b(digest_size=32, person=b"kvstore.engine")  # a copy costs less than a new one


def _marks(given: Any) -> list[Any]:
    return [*given.values()] if isinstance(given, Mapping) else [given]


def _are_marks(given: Any) -> bool:
    return all(isinstance(each, str) for each in _marks(given))


@dataclass(frozen=True)
class StoreSettings(Settings):
    """The settings that LMCache and SGLang share."""

    lookup_timeout_s: float = number(2.0, most=TIMEOUT_S_MAX)
    load_timeout_s: float = number(10.0, most=TIMEOUT_S_MAX)
    store_timeout_s: float = number(30.0, most=TIMEOUT_S_MAX)
    fingerprint: str | Mapping[str, str] = setting("", Kind("text, or a mapping of models to text", _are_marks))
    """Digest of the weights, or one for each model by its name. A model that is a folder has its own computed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for mark in _marks(self.fingerprint):
            Namespace.of("checked", OPAQUE_LAYOUT, mark, self.tenant)  # their lengths and characters


class LateStore:
    """A store that may be down when the engine starts: it is opened when it is needed and answers.

    Thread-safe. Raises what ``kvstore.open`` raises, except Unavailable.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._fingerprints = Fingerprints(settings.fingerprint, settings.lookup_timeout_s)
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._again_s = 0.0
        self._closed = False
        with suppress(Unavailable):
            self._try(self._opened)

    def open(self) -> Store:
        """Returns the store. Raises Unavailable while it is down."""
        return self._store or self._try(self._opened)

    def model(self, engine: str, model: str, attributes: Mapping[str, str], path: str | None = None) -> Cache:
        """Returns the cache of a model's blocks; ``path`` is the folder of its weights, if that is not its name.

        Raises what opening it raises; after that, and while weights are hashed, Unavailable at once for a while.
        """
        # The name is for people, and a model's may be a path of any length: the attributes have all of it.
        readable = os.path.basename(model.rstrip("/"))[-100:].encode("ascii", "replace").decode()
        name = f"{engine}-{readable or 'model'}"
        told = {**attributes, "model": blake2b(text(model), digest_size=16).hexdigest()}
        fingerprint = self._fingerprints.of(path or model)

        def opened() -> Cache:
            return self._opened().namespace(name, OPAQUE_LAYOUT, fingerprint, self._settings.tenant, told)

        return self._try(opened)

    def close(self) -> None:
        """Ends threads and connections. Idempotent."""
        with self._lock:
            self._closed = True
            store, self._store = self._store, None
        if store is not None:
            store.close()

    def _opened(self) -> Store:
        if self._closed:
            raise Unavailable("the store is closed: open it again")
        if self._store is None:
            self._store = self._settings.open()
        return self._store

    def _try(self, call: Callable[[], T]) -> T:
        # One at a time: a thread that comes while another waits for a dead store need not wait as long again.
        with self._lock:
            if self._clock.monotonic_s() < self._again_s:
                raise Unavailable("the store could not be opened a moment ago")
            try:
                return call()
            except Unavailable as error:
                log.warning("connector.store_unavailable why=%s", error)
                self._again_s = self._clock.monotonic_s() + PAUSE_S
                raise


def block_key(*parts: bytes) -> bytes:
    """Returns the 32-byte key of a block that all ``parts`` identify together."""
    return key_of(packed(*parts))


def packed(*parts: bytes) -> bytes:
    """Returns ``parts`` one after the other, each behind its length."""
    return b"".join([each for part in parts for each in (len(part).to_bytes(8, "little"), part)])


def key_of(identity: bytes) -> bytes:
    """Returns the key of a block that ``packed`` parts identify: for many keys that share parts."""
    state = _ENGINE_KEY.copy()
    state.update(identity)
    return state.digest()


def text(value: str) -> bytes:
    """Returns the bytes of a foreign text, whatever is in it."""
    return value.encode(errors="surrogatepass")
