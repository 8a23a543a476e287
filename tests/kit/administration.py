"""Workers with their control service, for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.v1.control_pb2_grpc import ControlStub
from tests.kit.stores import SMALL, flip
from tests.kit.wire import raw_channel
from tests.kit.workers import Served

SIZE = SMALL.chunk_tokens


@contextmanager
def raw_control(served: Served) -> Iterator[ControlStub]:
    """The generated stub, all that a client in another language has."""
    with raw_channel(served) as channel:
        yield ControlStub(channel)


def damage_payload(path: Path) -> None:
    """Turns the last byte of a chunk, which no reader would take then."""
    before = path.stat()
    flip(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
