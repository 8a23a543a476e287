"""Transports that break their promises: frames, streams, shared memory, failover, deadlines."""

from __future__ import annotations

from typing import Any

from tests.mutants.catalogue.interfaces import at, giving
from tests.mutants.mutant import Mutant, mutant

FRAMES = "kvstore.wire.bulk.frames"
SUMS = "bulk/test_sums.py"
HOSTILE = "bulk/test_hostile.py"
BLOCKS_HOSTILE = "bulk/test_blocks_hostile.py"
WIRE = "worker/test_wire.py"
SEALS = "worker/test_seals.py"
CALLER = "kvstore.client.caller:Caller"
CONNECTION = "kvstore.worker.data_put:Connection"


def _unlimited(real: Any, raw: Any) -> Any:
    from kvstore.wire.bulk.frames import HEAD, Head, Kind

    _, kind, request, length = HEAD.unpack(raw)
    return Head(Kind(kind), request, length) if kind in Kind._value2member_map_ else real(raw)


def _whole_timeout(real: Any, self: Any, send: Any, timeout_s: float, *rest: Any, **how: Any) -> Any:
    return real(self, lambda endpoint, left_s: send(endpoint, timeout_s), timeout_s, *rest, **how)


def _damage_ignored(real: Any, fill: Any, expected: Any, sections: Any) -> Any:
    from kvstore.format.header import Damaged

    try:
        return real(fill, expected, sections)
    except Damaged:
        return None


def _outside(real: Any, self: Any, offset: int, size_bytes: int) -> Any:
    try:
        return real(self, offset, size_bytes)
    except ValueError:
        return memoryview(bytes(size_bytes))


class _Equal:
    """Equals all checksums."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return 0


def _anything() -> Any:
    return _Equal()


def _ended_at_once(real: Any, self: Any, lease: Any) -> None:
    lease.handed_over()
    self._end(lease)


def _broken_is_a_miss(real: Any, self: Any, sections: Any) -> Any:
    from kvstore.errors import HoldBroken

    try:
        return real(self, sections)
    except HoldBroken:
        return 0


MUTANTS: list[Mutant] = [
    mutant(
        "stream-image-unverified",
        "gRPC: a received image is verified",
        at("kvstore.wire.images", "fill_verified", _damage_ignored),
        WIRE,
    ),
    mutant(
        "message-seal-ignored",
        "gRPC: seal of a request",
        at("kvstore.wire.messages", "is_whole", giving(None)),
        SEALS,
    ),
    mutant(
        "run-unverified",
        "BULK: checksums of a run",
        at("kvstore.wire.bulk.runs", "plane_sums", lambda real, planes, first, count: _anything()),
        SUMS,
        HOSTILE,
        "bulk/test_failures.py",
    ),
    mutant(
        "blocks-unverified",
        "BULK: checksums of a run of blocks",
        at("kvstore.wire.bulk.runs", "block_sums", lambda real, blocks: _anything()),
        BLOCKS_HOSTILE,
    ),
    mutant(
        "file-unverified",
        "BULK: a received file is verified",
        at("kvstore.wire.images", "fill_verified", _damage_ignored),
        SUMS,
    ),
    mutant(
        "frame-of-any-length", "BULK: limit of a frame", at(FRAMES, "decode_head", _unlimited), HOSTILE, "-k", "length"
    ),
    mutant(
        "grant-unproven",
        "BULK: a grant is proven",
        at("kvstore.wire.bulk.channel:Grant", "is_hello", giving(True)),
        HOSTILE,
        "-k",
        "grant or proof",
    ),
    mutant(
        "worker-unproven",
        "BULK: the worker proves the grant",
        at("kvstore.wire.bulk.channel:Grant", "is_welcome", giving(True)),
        "contract/test_transport_rules.py",
    ),
    mutant(
        "arena-placed-outside",
        "BULK: bytes lie in the arena",
        at(CONNECTION, "placed", _outside),
        HOSTILE,
        "-k",
        "arena",
    ),
    mutant(
        "lease-ends-with-its-answer",
        "BULK: lent slots stay until the client ends",
        at("kvstore.worker.data_get:Leases", "keep", _ended_at_once),
        "bulk/test_memory_hostile.py",
        "-k",
        "lease",
    ),
    mutant(
        "lost-hold-is-a-miss",
        "Client: a hold whose worker is gone is broken",
        at("kvstore.client.remote:RemoteHold", "read", _broken_is_a_miss),
        "client/test_remote_failover.py",
        "-k",
        "hold",
    ),
    mutant(
        "call-repeated",
        "Client: a call that must not run twice is sent once",
        at(CALLER, "anywhere", lambda real, self, *what, may_repeat=True, **how: real(self, *what, **how)),
        "contract/test_failover.py",
    ),
    mutant(
        "call-has-the-time-twice",
        "Client: one deadline for all workers",
        at(CALLER, "anywhere", _whole_timeout),
        "contract/test_failover.py",
    ),
]
