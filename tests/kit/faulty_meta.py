"""A metadata store that fails on purpose: a wrapper over any other, with faults by rule, scripted or from a seed.

It knows the two ways in which a call can fail: before it took effect and after; and the third, worst one: it fails
now and takes effect later (``LATE``), as a packet held up in the network does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from kvstore.errors import PermissionDenied, Unavailable
from kvstore.meta.store import (
    NO_LEASE,
    Compare,
    Delete,
    Event,
    KeyValue,
    LeaseGone,
    LeaseId,
    MetadataStore,
    Put,
    Snapshot,
    TxnResult,
    Watch,
    WatchLost,
)

Result = TypeVar("Result")
TIMEOUT_S = 5.0


class Fault(Enum):
    """The fault of a call."""

    NOT_SENT = "unavailable before it was sent"
    REPLY_LOST = "takes effect, then unavailable"
    LATE = "unavailable; takes effect when land() is called"
    DELAY = "takes delay_s longer, or times out unsent where its deadline is nearer"
    HANG = "waits for its deadline, then unavailable"
    DENIED = "permission denied"


@dataclass(slots=True)
class Rule:
    """The calls that meet ``fault``: those of ``operations`` (all when empty) on keys that contain ``key``.

    The first ``skip_count`` matching calls are spared; then ``times`` are hit (None: all).
    """

    fault: Fault
    operations: tuple[str, ...] = ()
    key: str = ""
    times: int | None = None
    skip_count: int = 0
    delay_s: float = 0.0


class FaultyWatch:
    """A watch that can be cut."""

    def __init__(self, inner: Watch) -> None:
        self._inner = inner
        self._cut = False

    def next(self, timeout_s: float) -> tuple[Event, ...] | None:
        if self._cut:
            raise WatchLost("the watch was cut")
        return self._inner.next(timeout_s)

    def cut(self) -> None:
        """Loses the watch, as a compaction would."""
        self._cut = True

    def close(self) -> None:
        self._inner.close()


class FaultyMeta:
    """``inner`` with faults. Without rules it is ``inner``. Waits with ``sleep``, so that a fake clock can be moved."""

    def __init__(self, inner: MetadataStore, sleep: Callable[[float], None] = time.sleep) -> None:
        self._inner = inner
        self._sleep = sleep
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._late: list[Callable[[], object]] = []
        self._watches: list[FaultyWatch] = []

    @property
    def operations_count(self) -> int:
        """Calls that reached the store below."""
        return self._inner.operations_count

    def add(self, *rules: Rule) -> None:
        """Adds rules; for each call the first that matches decides."""
        with self._lock:
            self._rules.extend(rules)

    def heal(self) -> None:
        """Drops all rules."""
        with self._lock:
            self._rules.clear()

    def land(self) -> int:
        """Makes calls of ``LATE`` take effect, in order; returns how many there were."""
        with self._lock:
            late, self._late = self._late, []
        for call in late:
            try:
                call()
            except LeaseGone:
                pass  # the store refuses it; nobody waits for the answer
        return len(late)

    def cut_watches(self) -> None:
        """Loses every open watch."""
        for watch in self._watches:
            watch.cut()

    def get(self, key: str, timeout_s: float | None = None) -> KeyValue | None:
        return self._call("get", key, timeout_s, lambda: self._inner.get(key, timeout_s))

    def list(self, prefix: str, timeout_s: float | None = None) -> Snapshot:
        return self._call("list", prefix, timeout_s, lambda: self._inner.list(prefix, timeout_s))

    def count(self, prefix: str, timeout_s: float | None = None) -> int:
        return self._call("count", prefix, timeout_s, lambda: self._inner.count(prefix, timeout_s))

    def txn(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete], timeout_s: float | None = None
    ) -> TxnResult:
        keys = "\n".join(operation.key for operation in operations)
        return self._call("txn", keys, timeout_s, lambda: self._inner.txn(compares, operations, timeout_s))

    def put(self, key: str, value: bytes, lease: LeaseId = NO_LEASE, timeout_s: float | None = None) -> int:
        return self._call("put", key, timeout_s, lambda: self._inner.put(key, value, lease, timeout_s))

    def delete(self, key: str, timeout_s: float | None = None) -> bool:
        return self._call("delete", key, timeout_s, lambda: self._inner.delete(key, timeout_s))

    def grant(self, ttl_s: int, timeout_s: float | None = None) -> LeaseId:
        return self._call("grant", "", timeout_s, lambda: self._inner.grant(ttl_s, timeout_s))

    def keep_alive(self, lease: LeaseId, timeout_s: float | None = None) -> bool:
        return self._call("keep_alive", "", timeout_s, lambda: self._inner.keep_alive(lease, timeout_s))

    def revoke(self, lease: LeaseId, timeout_s: float | None = None) -> None:
        self._call("revoke", "", timeout_s, lambda: self._inner.revoke(lease, timeout_s))

    def watch(self, prefix: str, from_revision: int) -> FaultyWatch:
        watch = FaultyWatch(self._call("watch", prefix, None, lambda: self._inner.watch(prefix, from_revision)))
        self._watches.append(watch)
        return watch

    def close(self) -> None:
        """Closes the store below."""
        self._inner.close()

    def _call(self, operation: str, key: str, timeout_s: float | None, call: Callable[[], Result]) -> Result:
        rule = self._met(operation, key)
        if rule is None:
            return call()
        limit_s = TIMEOUT_S if timeout_s is None else timeout_s
        match rule.fault:
            case Fault.DENIED:
                raise PermissionDenied(f"injected: {operation} denied")
            case Fault.DELAY if rule.delay_s < limit_s:
                self._sleep(rule.delay_s)
                return call()
            case Fault.HANG | Fault.DELAY:
                self._sleep(limit_s)
            case Fault.REPLY_LOST:
                call()
            case Fault.LATE:
                with self._lock:
                    self._late.append(call)
            case Fault.NOT_SENT:
                pass
        raise Unavailable(f"injected: {operation} {rule.fault.value}")

    def _met(self, operation: str, key: str) -> Rule | None:
        with self._lock:
            for rule in self._rules:
                if (rule.operations and operation not in rule.operations) or rule.key not in key:
                    continue
                if rule.skip_count > 0:
                    rule.skip_count -= 1
                    continue
                if rule.times == 0:
                    continue
                if rule.times is not None:
                    rule.times -= 1
                return rule
        return None
