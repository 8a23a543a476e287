"""Fingerprints of the models that an engine names: taken from its settings, or computed in the background.

Hashing weights takes seconds to minutes, and requests must not wait for it: until it is done, everything is a miss.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping

from kvstore.connectors.weights import model_fingerprint
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.sources import SystemClock

log = logging.getLogger(__name__)

PAUSE_S = 5.0
"""Pause before weights that could not be read are tried again."""
REMEMBERED_MAX = 1024
"""Number of models whose digests are remembered; the oldest is forgotten first."""
TOLD_CHARACTERS_MAX = 200
"""Length to which a model's name is cut in the log."""


class _Computation:
    """One model's digest, computed by its own thread: even checking that it is a folder may hang."""

    def __init__(self, model: str, ends_s: float) -> None:
        self.ends_s = ends_s
        self.is_done = threading.Event()
        self.digest = ""
        self.why: InvalidRequest | None = None
        self._model = model
        threading.Thread(target=self._run, name="kvstore-fingerprint", daemon=True).start()

    def _run(self) -> None:
        told = self._model[:TOLD_CHARACTERS_MAX]
        try:
            if self._model and "\0" not in self._model and os.path.isdir(self._model):
                self.digest = model_fingerprint(self._model)
            else:
                log.warning(
                    "connector.no_fingerprint model=%s: its name is not a folder, so KV of other weights under it "
                    "would be served; give a digest of the weights, or their revision, as the setting fingerprint",
                    told,
                )
        except InvalidRequest as error:
            self.why = error
        except Exception as error:
            log.exception("connector.fingerprint_failed")
            self.why = InvalidRequest(f"no digest of the weights at {told}: {error}; give one as fingerprint")
        finally:
            self.is_done.set()


class Fingerprints:
    """The fingerprints by model. ``given`` is the setting: one digest, or a digest per model name. Thread-safe.

    The first caller for a model waits for it at most ``wait_s``, as do those that come in that time.
    """

    def __init__(self, given: str | Mapping[str, str], wait_s: float) -> None:
        self._given = given
        self._wait_s = wait_s
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._computed: dict[str, _Computation] = {}

    def of(self, model: str) -> str:
        """Returns the digest of a model's weights: given, or computed if the model's name is a folder; else empty.

        Raises Unavailable while it is being computed. Raises InvalidRequest if the weights in a folder cannot be read:
        without their digest, KV of other weights could be served.
        """
        given = self._given.get(model, "") if isinstance(self._given, Mapping) else self._given
        if given:
            return given
        with self._lock:
            computed = self._computed.get(model)
            now_s = self._clock.monotonic_s()
            if computed is None or (computed.why is not None and now_s > computed.ends_s + PAUSE_S):
                while len(self._computed) >= REMEMBERED_MAX:
                    del self._computed[next(iter(self._computed))]
                computed = self._computed[model] = _Computation(model, now_s + self._wait_s)
        if not computed.is_done.wait(max(0.0, computed.ends_s - self._clock.monotonic_s())):
            raise Unavailable(
                f"the weights of {model[:TOLD_CHARACTERS_MAX]} are being hashed: everything is a miss until "
                "that is done"
            )
        if computed.why is not None:
            raise InvalidRequest(str(computed.why))
        return computed.digest
