"""Limits and deadlines that are not kept: sizes of requests, calls, bytes and holds at once, timeouts."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from tests.mutants.catalogue.interfaces import PINS, VIEW, at, giving
from tests.mutants.mutant import Mutant, mutant
from tests.mutants.planters import several

MESSAGES = "kvstore.transport.messages"
CONTEXT = "kvstore.worker.context"
USAGE = "kvstore.engine.capacity:NodeUsage"


def _any_tokens(real: Any, packed: bytes) -> Any:
    import numpy as np

    return np.frombuffer(packed[: len(packed) // 4 * 4], "<u4")


def _any_keys(real: Any, packed: bytes) -> list[bytes]:
    keys, at_ = [], 0
    while at_ < len(packed):
        keys.append(packed[at_ + 1 : at_ + 1 + packed[at_]])
        at_ += 1 + packed[at_]
    return keys


def _any_sizes(real: Any, packed: bytes, count: int) -> list[int]:
    import numpy as np

    found: list[int] = np.frombuffer(packed, "<u4").tolist()
    return found


def _add_unlimited(real: Any, self: Any, hold: Any) -> Any:
    most = self.holds_max, self.tokens_max
    self.holds_max, self.tokens_max = 1 << 60, 1 << 60
    try:
        return real(self, hold)
    finally:
        self.holds_max, self.tokens_max = most


def _pin_unlimited(real: Any, self: Any, owner: str, *what: Any, **how: Any) -> Any:
    from unittest.mock import patch

    from kvstore.meta.memory import MemoryMetadata

    with patch.object(MemoryMetadata, "count", lambda *rest: 0):
        return real(self, owner, *what, **how)


def _help_late(real: Any, self: Any, deadline: Any) -> Any:
    class Endless:
        passed = False

        def left_s(self) -> float:
            return 60.0

    return real(self, Endless())


MUTANTS: list[Mutant] = [
    mutant("limit-tokens", at(MESSAGES, "unpack_tokens", _any_tokens), "worker/test_wire.py"),
    mutant("limit-keys", at(MESSAGES, "unpack_keys", _any_keys), "worker/test_wire.py"),
    mutant("limit-sizes", at(MESSAGES, "unpack_sizes", _any_sizes), "worker/test_wire.py"),
    mutant(
        "limit-calls",
        at(f"{CONTEXT}:Gate", "passing", lambda real, self, *, light: nullcontext()),
        "worker/test_requests.py",
    ),
    mutant("limit-draining", at(f"{CONTEXT}:Gate", "close", giving(None)), "worker/test_lifecycle.py"),
    mutant(
        "limit-bytes-in-flight",
        at(f"{CONTEXT}:BytesInFlight", "reserved", lambda real, self, *count: nullcontext()),
        "security/test_rules.py",
    ),
    mutant(
        "limit-client-holds", at("kvstore.worker.context:ClientHolds", "add", _add_unlimited), "security/test_rules.py"
    ),
    mutant("limit-pins-of-an-owner", at(PINS, "pin", _pin_unlimited), "meta/test_pins.py"),
    mutant("limit-full-root", at(VIEW, "check_room", giving(None)), "node/test_view.py"),
    mutant("credit-is-ignored", at(USAGE, "received", giving(None)), "node/test_usage.py"),
    mutant(
        "credit-counts-no-bytes",
        several(
            at(USAGE, "reserve", lambda real, self, size_bytes=1, *rest, **how: real(self, min(size_bytes, 1))),
            at(USAGE, "wrote", giving(None)),
        ),
        "node/test_usage.py",
    ),
    mutant(
        "full-store-keeps-its-credit",
        at("kvstore_gc.capacity:Accounts", "reported", giving(None)),
        "gc/test_capacity.py",
    ),
    mutant(
        "deadline-of-shared-work",
        at("kvstore.core.executor:IndexedWork", "help", _help_late),
        "node/test_background.py",
    ),
]
