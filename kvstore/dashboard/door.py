"""Access to the dashboard: open to everybody on this host, or with a token that may read every tenant."""

from __future__ import annotations

import ipaddress

from kvstore.errors import PermissionDenied
from kvstore.security.authenticator import Authenticator
from kvstore.security.identity import Presented
from kvstore.security.permissions import EVERY, Role

BEARER = "bearer "


class OpenDoor:
    """Access without tokens. ``is_local``: it listens on loopback only, so ``Host`` must name this host."""

    def __init__(self, is_local: bool) -> None:
        self._is_local = is_local

    def admit(self, authorization: str | None, host: str) -> None:
        """Raises PermissionDenied if ``Host`` is not a name of this host."""
        if self._is_local and not _is_this_host(host):
            raise PermissionDenied(f"the dashboard is for this host: ask for it as localhost, not as {host[:100]!r}")


class TokenDoor:
    """Access with a bearer token whose identity may read every tenant; the dashboard shows all of them."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    @classmethod
    def of_file(cls, path: str) -> TokenDoor:
        """Makes it from an access file, which is reloaded when it changes. Raises InvalidRequest for a bad one."""
        authenticator = Authenticator(path)
        authenticator.load()
        return cls(authenticator)

    def admit(self, authorization: str | None, host: str) -> None:
        """Raises Unauthenticated without a good token, PermissionDenied for one that may not see everything."""
        given = authorization or ""
        token = given[len(BEARER) :].strip() if given.lower().startswith(BEARER) else None
        identity = self._authenticator.identify(Presented(token=token))
        if not identity.may(Role.READ, EVERY):
            raise PermissionDenied(
                f"{identity.name} may not read every tenant, and the dashboard shows all of them: ask the operator"
            )


def _is_this_host(host: str) -> bool:
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.removeprefix("[").removesuffix("]").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
