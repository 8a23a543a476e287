"""The access file as a value: the identities, the rights of each, and the keys that sign tokens. Pure.

Separate from reading and watching it, so that a wrong file is found before anything uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.parsing import parse_json
from kvstore.security.permissions import Role
from kvstore.security.quotas import Quota

IDENTITIES_MAX = 100_000
NAME_BYTES_MAX = 256
KEYS_MAX = 16

_TOP = {"identities", "quotas", "token_keys"}
_QUOTA = {each.name for each in fields(Quota)}


@dataclass(frozen=True, slots=True)
class Rules:
    """The content of an access file. Without identities nobody may do anything."""

    identities: Mapping[str, Mapping[str, Role]] = field(default_factory=dict)
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    token_keys: tuple[str, ...] = ()
    """Files with public keys, relative to the folder of the access file."""

    @classmethod
    def parse(cls, text: bytes) -> Rules:
        """Parses an access file. Raises InvalidRequest with the place of the first mistake."""
        try:
            found = parse_json(text, object_pairs_hook=_without_repeats)
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
            tenant: Quota(**_object(f"quotas of {tenant!r}", values, _QUOTA))
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


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        repeated = next(key for at, (key, _) in enumerate(pairs) if any(key == other for other, _ in pairs[:at]))
        raise ValueError(f"{repeated!r} occurs twice")
    return found
