"""``lmcache server`` as a child process, with our adapter as its only L2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tests.kit.ports import free_port

CHECKOUT = Path(__file__).resolve().parents[3]
CHUNK_TOKENS = 64
START_S = 300.0
STOP_S = 60.0
UNHURRIED_S = 60.0
"""The timeouts of the adapter. On a busy machine its defaults could end a call as a miss."""


class LMCacheServer:
    """One server. It is started at once, so that an engine can start beside it."""

    def __init__(self, folder: Path, root: Path) -> None:
        timeouts = {f"{call}_timeout_s": UNHURRIED_S for call in ("lookup", "load", "store")}
        adapter = {
            "type": "plugin",
            "module_path": "kvstore.connectors.lmcache",
            "class_name": "KVStoreL2Adapter",
            "adapter_params": {"root": str(root), "fingerprint": "tiny", **timeouts},
            "shared": True,
        }
        self.port, http = free_port(), free_port()
        self._url = f"http://127.0.0.1:{http}"
        self._log = folder / f"lmcache-{self.port}.log"
        metrics = folder / f"metrics-{self.port}"
        metrics.mkdir()
        words = ["--host", "127.0.0.1", "--port", str(self.port), "--http-host", "127.0.0.1", "--http-port", str(http)]
        words += ["--supported-transfer-mode", "engine_driven", "--chunk-size", str(CHUNK_TOKENS)]
        words += ["--l1-size-gb", "0.25", "--eviction-policy", "LRU", "--l2-adapter", json.dumps(adapter)]
        with open(self._log, "wb") as log:
            self._child = subprocess.Popen(
                [str(Path(sys.executable).parent / "lmcache"), "server", *words],
                stdout=log,
                stderr=log,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(CHECKOUT), "PROMETHEUS_MULTIPROC_DIR": str(metrics)},
            )

    def wait_ready(self) -> LMCacheServer:
        """Returns when it answers. Its own memory is empty then, and our adapter is its only L2."""
        ends_s = time.monotonic() + START_S
        while True:
            assert self._child.poll() is None and time.monotonic() < ends_s, self.tail()
            try:
                storage = json.loads(self._read("/status"))["storage_manager"]
            except (OSError, KeyError):
                time.sleep(0.2)
                continue
            [l2] = storage["l2_adapters"]
            assert (l2["type"], l2["is_healthy"]) == ("KVStoreL2Adapter", True)
            assert storage["l1_manager"]["total_object_count"] == 0
            return self

    def counter(self, name: str) -> float:
        """Returns one of its counters, summed over labels; 0 if it has not moved."""
        lines = self._read("/metrics").splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def wait_counter(self, name: str, value: float, within_s: float = 60.0) -> None:
        """Returns once a counter has that value: LMCache counts behind the request."""
        ends_s = time.monotonic() + within_s
        while (seen := self.counter(name)) != value:
            assert time.monotonic() < ends_s, f"{name} is {seen}, not {value}; the server's last words:\n{self.tail()}"
            time.sleep(0.1)

    def tail(self) -> str:
        """Returns the end of its output."""
        return self._log.read_text(errors="replace")[-6000:]

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if it takes too long."""
        self._child.terminate()
        try:
            self._child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _read(self, path: str) -> str:
        with urllib.request.urlopen(f"{self._url}{path}", timeout=30) as answer:
            text: str = answer.read().decode()
            return text
