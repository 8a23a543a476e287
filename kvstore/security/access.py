"""Who may do what: roles of methods, identities, rules of tenants, quotas and denials."""

from __future__ import annotations

import enum
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvstore.core.validate import parse_json
from kvstore.errors import InvalidRequest, Overloaded, PermissionDenied, Unauthenticated

# The one table of the role that each method needs (rule X5).


EVERY = "*"
"""Stands for every tenant, in access files and in questions about roles."""


class Role(enum.IntEnum):
    """A right of an identity in a tenant; each includes those before it."""

    READ = 1
    WRITE = 2
    ADMIN = 3


@dataclass(frozen=True, slots=True)
class Permission:
    """The role that a method needs in the tenant that the call is about, and in all if it is about all.

    An answer about several tenants is filtered by what the caller may read.
    """

    role: Role
    audited: bool = False
    """True if each call is written to the audit log."""
    of_worker: bool = False
    """True if the call is about the worker itself: then the role is needed in every tenant."""


_READ = Permission(Role.READ)
_WRITE = Permission(Role.WRITE)
_STEER = Permission(Role.ADMIN, audited=True)

PERMISSIONS: dict[str, Permission] = {
    # Opening a namespace that does not exist needs WRITE, because it is made (``Call.allow(..., role=)``).
    "OpenNamespace": _READ,
    "ListNamespaces": _READ,
    "Match": _READ,
    "Put": _WRITE,
    "Get": _READ,
    "Hold": _READ,
    "Renew": _READ,
    "Release": _READ,
    "Pin": Permission(Role.WRITE, audited=True),
    "Unpin": Permission(Role.WRITE, audited=True),
    "ListPins": _READ,
    "CountRefs": _READ,
    "MatchBlocks": _READ,
    "Clear": _STEER,
    "Stats": _READ,
    "OpenBulk": _READ,
    # All tenants' chunks lie in that memory, so only callers that may read them all may map it.
    "MapMemory": Permission(Role.READ, of_worker=True),
    "Reflection": _READ,
    "Control.Prefetch": Permission(Role.WRITE, audited=True),
    "Control.EvictFirst": _WRITE,
    "Control.ClearSelected": _STEER,
    "Control.ListOperations": _READ,
    "Control.GetOperation": _READ,
    # A clear needs ADMIN, as to begin it (``Call.allow(..., role=)``).
    "Control.CancelOperation": Permission(Role.WRITE, audited=True),
}
"""Permissions by the name given to ``Calls.serving``. A method that is not here is denied to every caller (rule X4)."""


# Quotas: each tenant's limits on one worker: calls and bytes a second, concurrent calls, pins.
#
# Bytes are counted when they have moved, because their number is unknown before. So a tenant may run into debt by
# its running calls, and begins no other call before the debt is paid (rule X9).


BURST_S = 1.0
"""Unused tokens may be used later, up to what comes in this time."""
TENANTS_MAX = 4096
"""Limit on remembered tenants; the least recently active one is forgotten, and starts again from zero."""


@dataclass(frozen=True, slots=True)
class TenantQuota:
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
        self._left = min(self._most, self._left + max(0.0, now_s - self._at_s) * self.rate)
        self._at_s = now_s
        return self._left

    def take(self, amount: float, now_s: float) -> None:
        self._left = self.left(now_s) - amount


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """A tenant's use of this worker since its first call."""

    calls: int
    bytes_in: int
    bytes_out: int
    calls_in_flight: int


class Meter:
    """One tenant's use. Its fields belong to ``Meters``, under its lock."""

    def __init__(self, quota: TenantQuota, now_s: float) -> None:
        self.inside = 0
        self.calls = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.limit(quota, now_s)

    def limit(self, quota: TenantQuota, now_s: float) -> None:
        """Puts the tenant under a quota, with all that it allows at first."""
        self.quota = quota
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
        self.inside += 1
        self.calls += 1
        if self._requests is not None:
            self._requests.take(1, now_s)

    def moved(self, bytes_in: int, bytes_out: int, now_s: float) -> None:
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

    def begin(self, tenant: str, quotas: Mapping[str, TenantQuota]) -> Meter:
        """Begins one call of a tenant; the caller owes ``end``. Raises OverQuota."""
        quota = quota_of(tenant, quotas)
        with self._lock:
            now_s = self._now_s()
            meter = self._meters.pop(tenant, None) or Meter(quota, now_s)
            if meter.quota != quota:
                meter.limit(quota, now_s)
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

    def end(self, meter: Meter) -> None:
        """Ends a call that ``begin`` began."""
        with self._lock:
            meter.inside -= 1

    def usage(self) -> dict[str, TenantUsage]:
        """Returns each tenant's use of this worker."""
        with self._lock:
            return {
                tenant: TenantUsage(meter.calls, meter.bytes_in, meter.bytes_out, meter.inside)
                for tenant, meter in self._meters.items()
            }


def quota_of(tenant: str, quotas: Mapping[str, TenantQuota]) -> TenantQuota:
    """Returns the quota of a tenant: its own, else the one for all others (EVERY), else none."""
    return quotas.get(tenant) or quotas.get(EVERY) or NO_QUOTA


NO_QUOTA = TenantQuota()


def _bucket(rate: float | None, now_s: float) -> Bucket | None:
    return None if rate is None else Bucket(rate, now_s)


# Identities of callers with their roles, and the proofs that callers present.


CERTIFICATE = "cert:"
"""The prefix of names of identities that come from a certificate."""
ACCOUNT = "account:"
"""The prefix of the name of a caller that proved the account that the worker runs as."""
ANYONE = "anyone"
"""The name of a caller that has to prove nothing."""


@dataclass(frozen=True, slots=True)
class Presented:
    """The proofs of a caller: the names in a certificate that TLS has verified, its SHA-256, a token, and its
    account.

    Only the certificate is verified so far. It has no representation: tokens are secrets.
    """

    names: tuple[str, ...] = ()
    """URIs of the subject alternative name; the common name if there are none."""
    thumbprint: bytes = b""
    """SHA-256 over the certificate (DER); empty without one."""
    token: str | None = field(default=None, repr=False)
    account: str = field(default="", repr=False)
    """What proves the account that the caller runs as (rule X12)."""


NOTHING = Presented()


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller whose name is proved, and its roles by tenant, from the access file."""

    name: str
    roles: Mapping[str, Role] = field(default_factory=dict)

    def role_in(self, tenant: str) -> int:
        """Returns the highest role in a tenant, or in every tenant (EVERY); 0 for none."""
        return max(self.roles.get(tenant, 0), self.roles.get(EVERY, 0))

    def may(self, role: Role, tenant: str) -> bool:
        """True if it has at least this role in a tenant, or in every tenant (EVERY)."""
        return self.role_in(tenant) >= role


# The access file as a value: the identities, the rights of each, and the keys that sign tokens. Pure.


IDENTITIES_MAX = 100_000
NAME_BYTES_MAX = 256
KEYS_MAX = 16

_TOP = {"identities", "quotas", "token_keys"}
_QUOTA = {each.name for each in fields(TenantQuota)}


@dataclass(frozen=True, slots=True)
class Rules:
    """The content of an access file. Without identities every call is denied."""

    identities: Mapping[str, Mapping[str, Role]] = field(default_factory=dict)
    quotas: Mapping[str, TenantQuota] = field(default_factory=dict)
    token_keys: tuple[str, ...] = ()
    """Files with public keys, relative to the folder of the access file."""

    @classmethod
    def parse(cls, text: bytes) -> Rules:
        """Parses an access file. Raises InvalidRequest with the place of the first mistake."""
        try:
            found = parse_json(text, once=True)
        except ValueError as cause:
            raise InvalidRequest(f"the access file is not JSON: {cause}") from cause
        top = _object("the access file", found, _TOP)
        identities = {
            _name("identities", name): _roles(name, roles)
            for name, roles in _object("identities", top.get("identities", {})).items()
        }
        if len(identities) > IDENTITIES_MAX:
            raise InvalidRequest(f"the access file has {len(identities)} identities: expected at most {IDENTITIES_MAX}")
        quotas = {
            tenant: TenantQuota(**_object(f"quotas of {tenant!r}", values, _QUOTA))
            for tenant, values in _object("quotas", top.get("quotas", {})).items()
        }
        keys = top.get("token_keys", [])
        if not isinstance(keys, list) or len(keys) > KEYS_MAX or not all(isinstance(key, str) and key for key in keys):
            raise InvalidRequest(f"the access file's token_keys: expected a list of at most {KEYS_MAX} file names")
        return cls(identities, quotas, tuple(keys))


def _object(what: str, value: Any, known: set[str] | None = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{what}: expected a JSON object, found {type(value).__name__}")
    # A misspelt word would silently be a missing rule.
    unknown = sorted(value.keys() - known) if known is not None else []
    if unknown:
        raise InvalidRequest(f"{what}: {unknown[0]!r} is not known: expected {', '.join(sorted(known or ()))}")
    return value


def _roles(name: str, value: Any) -> dict[str, Role]:
    roles: dict[str, Role] = {}
    for tenant, role in _object(f"roles of {name!r}", value).items():
        if not isinstance(role, str) or role.upper() not in Role.__members__ or role != role.lower():
            raise InvalidRequest(f"roles of {name!r}: {role!r} for tenant {tenant!r}: expected read, write or admin")
        roles[tenant] = Role[role.upper()]
    return roles


def _name(what: str, name: str) -> str:
    if not name or len(name.encode(errors="surrogatepass")) > NAME_BYTES_MAX or not name.isprintable():
        raise InvalidRequest(f"{what}: {name!r} is not a name: expected 1 to {NAME_BYTES_MAX} bytes of printable text")
    return name


# Denials: errors with the reason under which they are counted and written to the audit log.


class DenialReason(enum.Enum):
    """The reasons of denials; each has a counter, ``denied_<value>``."""

    UNAUTHENTICATED = "unauthenticated"
    """Neither a token nor a certificate that names an identity."""
    TOKEN_INVALID = "token_invalid"
    """Not one of our tokens: garbage, another key, another issuer, or changed."""
    TOKEN_EXPIRED = "token_expired"
    TOKEN_REVOKED = "token_revoked"
    TOKEN_BINDING = "token_binding"
    """A token that is bound to a certificate came without it."""
    UNKNOWN_IDENTITY = "unknown_identity"
    """The caller's name is proved, but is not in the access file."""
    METHOD = "method"
    """The method is not in the table."""
    TENANT = "tenant"
    """The identity has no role at all in that tenant."""
    ROLE = "role"
    """The identity has a role there, and the method needs a higher one."""


class Denial(PermissionDenied):
    """A call that is not allowed."""

    def __init__(self, reason: DenialReason, message: str, claimed: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.claimed = claimed


class NotKnown(Denial, Unauthenticated):
    """The caller's identity is not proved. ``claimed`` is the one that its token names, if the signature is right."""


class Denied(Denial):
    """The caller's identity is proved, and may not do this. ``claimed`` is it, if the access file does not name it."""
