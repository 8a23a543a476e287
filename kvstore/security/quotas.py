"""Quotas: each tenant's limits on one worker: calls and bytes a second, concurrent calls, pins.

Bytes are counted when they have moved, because nobody knows their number before. So a tenant may run into debt by its
running calls, and begins no other call before the debt is paid (rule X9).
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from kvstore.errors import InvalidRequest, Overloaded
from kvstore.security.permissions import EVERY

BURST_S = 1.0
"""Unused tokens may be used later, up to what comes in this time."""
TENANTS_MAX = 4096
"""Limit on remembered tenants; the one not heard of for longest is forgotten, and starts again from zero."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one tenant on one worker; for pins, on all workers together. None: no limit."""

    requests_per_s: float | None = None
    bytes_in_per_s: float | None = None
    bytes_out_per_s: float | None = None
    calls_max: int | None = None
    pins_max: int | None = None
    pinned_tokens_max: int | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None:
                continue
            is_count = each.name.endswith("_max")
            if isinstance(value, bool) or not isinstance(value, (int,) if is_count else (int, float)):
                raise InvalidRequest(f"quota {each.name}={value!r}: expected a {'whole ' if is_count else ''}number")
            if not (value >= 0 if is_count else 0 < value < math.inf):
                raise InvalidRequest(f"quota {each.name}={value!r}: expected {'0 or more' if is_count else 'over 0'}")


class Bucket:
    """Tokens that come at a rate. More may be taken than there are: then the bucket is in debt."""

    __slots__ = ("_at_s", "_left", "_most", "rate")

    def __init__(self, rate: float, now_s: float) -> None:
        self.rate = rate
        self._most = max(1.0, rate * BURST_S)
        self._left = self._most
        self._at_s = now_s

    def left(self, now_s: float) -> float:
        """Returns the tokens left; under 0 in debt."""
        self._left = min(self._most, self._left + max(0.0, now_s - self._at_s) * self.rate)
        self._at_s = now_s
        return self._left

    def take(self, amount: float, now_s: float) -> None:
        """Takes tokens, even if that means debt."""
        self._left = self.left(now_s) - amount


@dataclass(frozen=True, slots=True)
class Usage:
    """A tenant's use of this worker since it was first heard of."""

    calls: int
    bytes_in: int
    bytes_out: int
    calls_in_flight: int


class Meter:
    """One tenant's use. Its fields belong to ``Meters``, under its lock."""

    def __init__(self, quota: Quota, now_s: float) -> None:
        self.quota = quota
        self.inside = 0
        self.calls = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self._requests = _bucket(quota.requests_per_s, now_s)
        self._in = _bucket(quota.bytes_in_per_s, now_s)
        self._out = _bucket(quota.bytes_out_per_s, now_s)

    def refusal(self, now_s: float) -> tuple[str, str] | None:
        """Returns why no call may begin now, as the quota's name and a sentence; None if one may."""
        if self.quota.calls_max is not None and self.inside >= self.quota.calls_max:
            return "calls", f"has {self.inside} calls in progress, its limit here"
        if self._requests is not None and self._requests.left(now_s) < 1:
            return "requests", f"may begin {self._requests.rate:g} calls a second here"
        for bucket, way in ((self._in, "send"), (self._out, "read")):
            if bucket is not None and bucket.left(now_s) < 0:
                return "bytes", f"may {way} {bucket.rate:g} bytes a second here"
        return None

    def begin(self, now_s: float) -> None:
        """Counts a call that began."""
        self.inside += 1
        self.calls += 1
        if self._requests is not None:
            self._requests.take(1, now_s)

    def moved(self, bytes_in: int, bytes_out: int, now_s: float) -> None:
        """Counts bytes that came in or went out."""
        self.bytes_in += bytes_in
        self.bytes_out += bytes_out
        if self._in is not None and bytes_in:
            self._in.take(bytes_in, now_s)
        if self._out is not None and bytes_out:
            self._out.take(bytes_out, now_s)


class OverQuota(Overloaded):
    """A tenant has used up its quota. ``quota`` names which."""

    def __init__(self, quota: str, message: str) -> None:
        super().__init__(message)
        self.quota = quota


class Meters:
    """The use of all tenants. Thread-safe."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()  # guards all meters
        self._meters: OrderedDict[str, Meter] = OrderedDict()

    def begin(self, tenant: str, quotas: Mapping[str, Quota]) -> Meter:
        """Begins one call of a tenant; the caller owes ``end``. Raises OverQuota."""
        quota = quota_of(tenant, quotas)
        with self._lock:
            now_s = self._now_s()
            meter = self._meters.pop(tenant, None)
            if meter is None or meter.quota != quota:
                inside = meter.inside if meter is not None else 0
                meter = Meter(quota, now_s)
                meter.inside = inside  # counts calls that began under the quota before
            self._meters[tenant] = meter
            while len(self._meters) > TENANTS_MAX:
                self._meters.popitem(last=False)
            why = meter.refusal(now_s)
            if why is None:
                meter.begin(now_s)
                return meter
        raise OverQuota(why[0], f"tenant {tenant!r} {why[1]}: back off, or ask the operator for a higher quota")

    def moved(self, meter: Meter, bytes_in: int = 0, bytes_out: int = 0) -> None:
        """Counts bytes of a call that came in or went out."""
        with self._lock:
            meter.moved(bytes_in, bytes_out, self._now_s())

    def end(self, tenant: str, meter: Meter) -> None:
        """Ends a call that ``begin`` began."""
        with self._lock:
            # After a quota change another meter counts the tenant's other calls.
            current = self._meters.get(tenant, meter)
            current.inside = max(0, current.inside - 1)

    def usage(self, tenant: str) -> Usage | None:
        """Returns what a tenant has used here; None for one that was never heard of."""
        with self._lock:
            meter = self._meters.get(tenant)
            return Usage(meter.calls, meter.bytes_in, meter.bytes_out, meter.inside) if meter is not None else None

    def tenants(self) -> list[str]:
        """Returns the tenants heard of."""
        with self._lock:
            return list(self._meters)


def quota_of(tenant: str, quotas: Mapping[str, Quota]) -> Quota:
    """Returns the quota of a tenant: its own, else the one for all others (EVERY), else none."""
    return quotas.get(tenant) or quotas.get(EVERY) or NO_QUOTA


NO_QUOTA = Quota()


def _bucket(rate: float | None, now_s: float) -> Bucket | None:
    return None if rate is None else Bucket(rate, now_s)
