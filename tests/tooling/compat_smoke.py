"""A smoke test of an installed wheel alone: kvstore must work with the versions that this environment has.

``python compat_smoke.py core|server``, by .ci/compat.py. `core` puts and gets through a store opened in this process;
and fills the capacity of another one twice over, which its collector makes possible; `server` also does so over gRPC,
through a worker that the installed command starts. Prints one line of versions at the end.
"""

from __future__ import annotations

import importlib.metadata
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

import kvstore
from kvstore import Layout

if TYPE_CHECKING:
    from kvstore.client import Store

READY_S = 90.0
STOP_S = 30.0
LAYOUT = Layout(layers=2, kv_heads=2, head_dim=8, dtype="bfloat16", chunk_tokens=16)
TOKEN_COUNT = 70
CHUNK_COUNT = TOKEN_COUNT // LAYOUT.chunk_tokens
FULL = CHUNK_COUNT * LAYOUT.chunk_tokens
CAPACITY_BYTES = 16 << 20
FILL_S = 120.0


def put_and_get(store: Store, name: str) -> None:
    """One prompt written, matched, read and pinned; every byte compared, and an unknown prompt missed."""
    cache = store.namespace(name, LAYOUT, fingerprint="smoke")
    tokens = np.arange(TOKEN_COUNT, dtype=np.uint32)
    bits = np.random.default_rng(7).integers(0, 1 << 16, LAYOUT.shape(TOKEN_COUNT), dtype=np.uint16)
    kv = bits.view(ml_dtypes.bfloat16)

    assert cache.match(tokens) == 0
    result = cache.put(tokens, kv)
    assert (result.tokens_present, result.chunks_written) == (FULL, CHUNK_COUNT), result
    assert cache.match(tokens) == FULL

    count, got = cache.get(tokens)
    assert count == FULL and got.dtype == ml_dtypes.bfloat16 and got.shape == LAYOUT.shape(FULL)
    assert np.array_equal(np.ascontiguousarray(got).view(np.uint16), bits[:, :, :FULL])

    out = np.zeros(LAYOUT.shape(TOKEN_COUNT), dtype=ml_dtypes.bfloat16)
    assert cache.get(tokens, out=out) == FULL
    assert np.array_equal(out.view(np.uint16)[:, :, :FULL], bits[:, :, :FULL])

    assert cache.match(tokens + 1) == 0
    assert cache.get(tokens + 1)[0] == 0


def in_process(folder: Path) -> None:
    """The root opened by this process."""
    store = kvstore.open(f"file://{folder / 'root'}")
    try:
        put_and_get(store, "in-process")
    finally:
        store.close()


def fill_twice(folder: Path) -> None:
    """More puts than the folder may hold: its collector runs with what this environment has."""
    layout = Layout(layers=4, kv_heads=4, head_dim=64, dtype="int8", chunk_tokens=128)
    end_s = time.monotonic() + FILL_S
    with kvstore.open(folder / "full", max_bytes=CAPACITY_BYTES) as store:
        cache = store.namespace("full", layout)
        kv = np.ones(layout.shape(layout.chunk_tokens), np.int8)
        number = 0
        while store.stats()["bytes_written"] < 2 * CAPACITY_BYTES:
            assert time.monotonic() < end_s, f"{store.stats()['bytes_written']} bytes were stored"
            cache.put(np.full(layout.chunk_tokens, number, np.uint32), kv)
            number += 1


def over_grpc(folder: Path) -> None:
    """A worker, with its bundled etcd, started by the command that the wheel installs; stopped with SIGTERM."""
    command = [str(Path(sys.executable).parent / "kvstore"), "up", "--root", f"file://{folder / 'served'}"]
    command += ["--etcd-folder", str(folder / "etcd")]
    with subprocess.Popen([*command, "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True) as server:
        alarm = threading.Timer(READY_S, server.kill)
        alarm.start()
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            assert line.startswith("ready "), f"kvstore up said {line!r}"
            address = dict(field.split("=", 1) for field in line.split()[1:])["grpc"]
            store = kvstore.connect(address)
            try:
                put_and_get(store, "over-grpc")
            finally:
                store.close()
            server.send_signal(signal.SIGTERM)
            assert server.wait(STOP_S) == 0
        finally:
            alarm.cancel()
            if server.poll() is None:
                server.kill()


def main() -> None:
    """Imports what generated code and etcd's client need, then puts and gets."""
    mode = sys.argv[1]
    import pyetcd  # noqa: F401  # its own generated code must load beside ours

    from kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc

    assert kvstore_pb2.DESCRIPTOR.package == "kvstore.v1"
    assert kvstore_pb2_grpc.GRPC_GENERATED_VERSION
    assert "site-packages" in kvstore.__file__, f"{kvstore.__file__} is not the wheel's"

    with tempfile.TemporaryDirectory(prefix="kvstore-smoke-") as folder:
        in_process(Path(folder))
        fill_twice(Path(folder))
        if mode == "server":
            over_grpc(Path(folder))
    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "protobuf", "grpcio"))
    print(f"{mode}: python {platform.python_version()} {versions}: put, matched and read back")


if __name__ == "__main__":
    main()
