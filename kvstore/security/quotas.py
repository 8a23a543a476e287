"""What each tenant may use of one worker: calls and bytes a second, calls at once, pins.

Bytes are counted when they have moved, which nobody knows before; so a tenant may run into debt by the calls that it
has in progress, and begins no other one before that is paid (rule X9).
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
"""What was not used may be used later, as much as comes together in this time."""
TENANTS_MAX = 4096
"""Tenants remembered; the one not heard of for longest is forgotten, and begins anew."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one tenant on one worker; of all workers together where it is about pins. None: no limit."""

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
    """Tokens that come at a rate, and of which more may be taken than there are: then it is in debt."""

    __slots__ = ("_at_s", "_left", "_most", "rate")

    def __init__(self, rate: float, now_s: float) -> None:
        self.rate = rate
        self._most = max(1.0, rate * BURST_S)
        self._left = self._most
        self._at_s = now_s

    def left(self, now_s: float) -> float:
        """How much there is; under 0 in debt."""
        self._left = min(self._most, self._left + max(0.0, now_s - self._at_s) * self.rate)
        self._at_s = now_s
        return self._left

    def take(self, amount: float, now_s: float) -> None:
        """Takes it, be it there or not."""
        self._left = self.left(now_s) - amount


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tenant has done on this worker since it was first heard of."""

    calls: int
    bytes_in: int
    bytes_out: int
    calls_in_flight: int


class Meter:
    """One tenant's use. Its fields are those of ``Meters``, under its lock."""

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
        """Why no call may begin now: the quota's name, and a sentence; None where one may."""
        if self.quota.calls_max is not None and self.inside >= self.quota.calls_max:
            return "calls", f"has {self.inside} calls in progress, its limit here"
        if self._requests is not None and self._requests.left(now_s) < 1:
            return "requests", f"may begin {self._requests.rate:g} calls a second here"
        for bucket, way in ((self._in, "send"), (self._out, "read")):
            if bucket is not None and bucket.left(now_s) < 0:
                return "bytes", f"may {way} {bucket.rate:g} bytes a second here"
        return None

    def begin(self, now_s: float) -> None:
        """A call of it began."""
        self.inside += 1
        self.calls += 1
        if self._requests is not None:
            self._requests.take(1, now_s)

    def moved(self, bytes_in: int, bytes_out: int, now_s: float) -> None:
        """Bytes of it came in or went out."""
        self.bytes_in += bytes_in
        self.bytes_out += bytes_out
        if self._in is not None and bytes_in:
            self._in.take(bytes_in, now_s)
        if self._out is not None and bytes_out:
            self._out.take(bytes_out, now_s)


class OverQuota(Overloaded):
    """A tenant uses as much as it may. ``quota`` names which."""

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
        """Lets one call of a tenant begin; ``end`` is owed for it. Raises OverQuota."""
        quota = quota_of(tenant, quotas)
        with self._lock:
            now_s = self._now_s()
            meter = self._meters.pop(tenant, None)
            if meter is None or meter.quota != quota:
                inside = meter.inside if meter is not None else 0
                meter = Meter(quota, now_s)
                meter.inside = inside  # those that began under the quota before
            self._meters[tenant] = meter
            while len(self._meters) > TENANTS_MAX:
                self._meters.popitem(last=False)
            why = meter.refusal(now_s)
            if why is None:
                meter.begin(now_s)
                return meter
        raise OverQuota(why[0], f"tenant {tenant!r} {why[1]}: back off, or ask the operator for a higher quota")

    def moved(self, meter: Meter, bytes_in: int = 0, bytes_out: int = 0) -> None:
        """Bytes of a call came in or went out."""
        with self._lock:
            meter.moved(bytes_in, bytes_out, self._now_s())

    def end(self, tenant: str, meter: Meter) -> None:
        """The end of ``begin``."""
        with self._lock:
            # After a new quota the tenant's other calls are counted by another meter.
            current = self._meters.get(tenant, meter)
            current.inside = max(0, current.inside - 1)

    def usage(self, tenant: str) -> Usage | None:
        """What a tenant has done here; None for one that was never heard of."""
        with self._lock:
            meter = self._meters.get(tenant)
            return Usage(meter.calls, meter.bytes_in, meter.bytes_out, meter.inside) if meter is not None else None

    def tenants(self) -> list[str]:
        """Those heard of."""
        with self._lock:
            return list(self._meters)


def quota_of(tenant: str, quotas: Mapping[str, Quota]) -> Quota:
    """The quota of a tenant: its own, else the one for all others (EVERY), else none."""
    return quotas.get(tenant) or quotas.get(EVERY) or NO_QUOTA


NO_QUOTA = Quota()


def _bucket(rate: float | None, now_s: float) -> Bucket | None:
    return None if rate is None else Bucket(rate, now_s)
