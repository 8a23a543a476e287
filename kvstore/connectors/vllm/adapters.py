"""LoRA adapters by content: requests share KV with those that use the same adapter files, in any engine.

vLLM's block hashes have an adapter's name and path, and not its weights. So the keys of its requests end with a digest
of its files, provided that vLLM surely loaded these files: they must not have changed since the engine started, because
vLLM loads adapters later than that, and reloads those it had no room for. A worker checks the files again before it
stores what was computed. Whatever is not sure is a miss, and is not stored.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvstore.connectors.common import RecentMap, weights_fingerprint
from kvstore.core.executor import Tasks
from kvstore.errors import InvalidRequest

log = logging.getLogger(__name__)

MARGIN_S = 10.0
"""How much a file server's clock may lag behind this host's for a change to be noticed by its time."""
QUEUE_MAX = 4096
DIGESTS_MAX = 4096
SETTINGS_FILE = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class AdapterSnapshot:
    """The files of an adapter as they were at one moment: name, inode, size and times of each."""

    path: str
    files: tuple[tuple[str, int, int, int, int], ...]

    @classmethod
    def of(cls, path: str) -> AdapterSnapshot:
        """Raises OSError for a path that is no folder, or cannot be looked at."""
        found = []
        with os.scandir(path) as entries:
            for each in sorted(entries, key=lambda entry: entry.name):
                stat = each.stat()
                found.append((each.name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
        return cls(path, tuple(found))

    @property
    def changed_ns(self) -> int:
        """The time of the last change to any of the files."""
        return max((file[-1] for file in self.files), default=0)

    def holds(self) -> bool:
        """True if the files are the same now."""
        try:
            return AdapterSnapshot.of(self.path) == self
        except OSError:
            return False


@dataclass(slots=True)
class Check:
    """One request's adapter, being looked at; complete once ``done`` is set."""

    seal: AdapterSnapshot | None = None
    digest: bytes = b""
    """16 bytes; empty if nothing may be shared."""
    done: threading.Event = field(default_factory=threading.Event)


class Adapters:
    """The adapters of one engine. Used by one thread; ``begin`` never blocks: another looks at files and hashes them.

    ``settings`` are the engine's settings for all adapters, which also determine their KV.
    """

    def __init__(self, settings: str, started_ns: int | None = None) -> None:
        self._settings = settings
        self._started_ns = time.time_ns() if started_ns is None else started_ns
        self._paths: dict[int, str] = {}
        """The path for each number, by which vLLM identifies adapters; empty if a number had two paths."""
        self._digests: RecentMap[tuple[AdapterSnapshot, bool], bytes] = RecentMap(DIGESTS_MAX)
        self._said: set[str] = set()
        self._thread: Tasks | None = None

    def begin(self, lora: Any) -> Check:
        """Starts to look at the adapter of a request."""
        check = Check()
        number, path = lora.lora_int_id, lora.lora_path
        if self._paths.setdefault(number, path) != path or getattr(lora, "load_inplace", False):
            self._paths[number] = ""  # vLLM may have either of two under this number
        is_3d = bool(getattr(lora, "is_3d_lora_weight", False))
        if self._thread is None:
            self._thread = Tasks("kvstore-vllm-adapter", 1, QUEUE_MAX)
        if not self._paths[number] or not self._thread.submit(partial(self._serve, check, path, is_3d)):
            check.done.set()
        return check

    def close(self) -> None:
        """Ends the thread; one that is stuck ends with the process."""
        if self._thread is not None:
            self._thread.close(0.0)

    def _serve(self, check: Check, path: str, is_3d: bool) -> None:
        try:
            seal = AdapterSnapshot.of(path)
            if seal.changed_ns > self._started_ns - int(MARGIN_S * 1e9):
                raise InvalidRequest("its files are younger than the engine, which may have loaded others")
            key = (seal, is_3d)
            if key not in self._digests:
                digest = self._digest(path, is_3d)
                if not seal.holds():
                    raise InvalidRequest("its files change")
                self._digests[key] = digest
            check.digest, check.seal = self._digests[key], seal
        except (InvalidRequest, OSError) as error:
            if path not in self._said and len(self._said) < DIGESTS_MAX:
                self._said.add(path)
                log.warning("kvstore: requests with the adapter at %.200s share nothing: %s", path, error)
        finally:
            check.done.set()

    def _digest(self, path: str, is_3d: bool) -> bytes:
        content = Path(path, SETTINGS_FILE).read_bytes()
        prefix = f"{self._settings}\n{is_3d}\n{weights_fingerprint(path)}\n".encode()
        return blake2b(prefix + content, digest_size=16).digest()
