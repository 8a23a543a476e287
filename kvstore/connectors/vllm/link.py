"""The engine's link to the store: opened when the engine starts, or later if the store does not answer yet.

Wrong settings stop the engine at once. A store that is down does not: everything is a miss until it is up.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from kvstore.client import Store
from kvstore.client.cache import BlockCache
from kvstore.connectors.common import Settings
from kvstore.errors import KVStoreError, Overloaded, Unavailable
from kvstore.namespace import Namespace

log = logging.getLogger(__name__)

RETRY_S = 5.0


class Link:
    """Block caches of some namespaces; None until the store has answered once."""

    def __init__(self, settings: Settings, namespaces: Sequence[Namespace]) -> None:
        self._settings = settings
        self._namespaces = list(namespaces)
        self._store: Store | None = None
        self._caches: list[BlockCache] | None = None
        self._closing = threading.Event()
        self._opener: threading.Thread | None = None
        if not self._try():
            self._opener = threading.Thread(target=self._retry, name="kvstore-vllm-opener", daemon=True)
            self._opener.start()

    def caches(self) -> list[BlockCache] | None:
        """The caches, one per namespace, in the order of the namespaces; None until the store answers."""
        return self._caches

    def close(self) -> None:
        """Closes the store. Idempotent."""
        self._closing.set()
        if self._opener is not None:
            self._opener.join(RETRY_S)
        self._caches = None
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def _try(self) -> bool:
        try:
            if self._store is None:
                self._store = self._settings.open()
            self._caches = [
                self._store.namespace(
                    each.name, each.layout, each.fingerprint, each.tenant, dict(each.attributes)
                ).blocks
                for each in self._namespaces
            ]
        except (Unavailable, Overloaded) as error:
            log.warning("kvstore: the store does not answer, everything is a miss until it does: %s", error)
            return False
        return True

    def _retry(self) -> None:
        while not self._closing.wait(RETRY_S):
            try:
                if self._try():
                    log.warning("kvstore: the store answers now")
                    return
            except KVStoreError:
                # Not raised at the start, since nobody answered then; it would end this thread unseen.
                log.exception("kvstore: the store cannot be used, everything stays a miss")
                return
