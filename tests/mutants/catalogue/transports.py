"""Transports that break their promises: frames, streams, shared memory, failover, deadlines."""

from __future__ import annotations

from typing import Any

from tests.mutants.catalogue.interfaces import at, giving
from tests.mutants.mutant import Mutant, mutant

FRAMES = "kvstore.transport.channel"
CALLER = "kvstore.client.failover:Caller"
CONNECTION = "kvstore.worker.data_put:Connection"


def _unlimited(real: Any, raw: Any) -> Any:
    from kvstore.transport.channel import HEAD, FrameKind, Head

    _, kind, request, length = HEAD.unpack(raw)
    return Head(FrameKind(kind), request, length) if kind in FrameKind._value2member_map_ else real(raw)


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
        at("kvstore.transport.images", "fill_verified", _damage_ignored),
        "worker/test_wire.py",
    ),
    mutant("message-seal-ignored", at("kvstore.transport.messages", "is_whole", giving(None)), "worker/test_wire.py"),
    mutant(
        "run-unverified",
        at("kvstore.transport.channel", "plane_sums", lambda real, planes, first, count: _anything()),
        "bulk/test_hostile.py bulk/test_arrivals.py",
    ),
    mutant(
        "blocks-unverified",
        at("kvstore.transport.channel", "receive_planes", lambda real, *what: real(*what) or True),
        "bulk/test_hostile.py -k checksums",
    ),
    mutant("frame-of-any-length", at(FRAMES, "decode_head", _unlimited), "bulk/test_hostile.py -k length"),
    mutant(
        "grant-unproven",
        at("kvstore.transport.channel:Grant", "is_hello", giving(True)),
        "bulk/test_hostile.py -k 'grant or proof'",
    ),
    mutant(
        "worker-unproven",
        at("kvstore.transport.channel:Grant", "is_welcome", giving(True)),
        "bulk/test_hostile.py -k welcome",
    ),
    mutant(
        "arena-reused-one-chunk-early",
        at("kvstore.client.pool:UploadArena", "take", lambda real, self, size, last: real(self, size, last - 1)),
        "contract/test_transport.py -k larger_than_a_message",
    ),
    mutant("arena-placed-outside", at(CONNECTION, "placed", _outside), "bulk/test_hostile.py -k arena"),
    mutant(
        "lease-ends-with-its-answer",
        at("kvstore.worker.data_get:Leases", "keep", _ended_at_once),
        "bulk/test_memory_hostile.py -k lease",
    ),
    mutant(
        "lost-hold-is-a-miss",
        at("kvstore.client.remote:RemoteHold", "read", _broken_is_a_miss),
        "client/test_remote_failover.py -k hold",
    ),
    mutant(
        "call-repeated",
        at(CALLER, "anywhere", lambda real, self, *what, may_repeat=True, **how: real(self, *what, **how)),
        "contract/test_failover.py",
    ),
    mutant("call-has-the-time-twice", at(CALLER, "anywhere", _whole_timeout), "contract/test_failover.py"),
]
