"""The keys of tenants: a file of secrets, and its current content.

Separate from sealing, which uses one key: this module chooses the key, and lets a node learn a new one without a
restart.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from kvstore.counts import NodeCount
from kvstore.encodings import sealing
from kvstore.errors import InvalidRequest
from kvstore.format.encoded import KEY_ID_BYTES
from kvstore.parsing import parse_json
from kvstore.security.secret_files import LOOK_S, Watched, read_secret

log = logging.getLogger(__name__)

KEY_BYTES = 32
_WHAT = "key file"


@dataclass(frozen=True, slots=True)
class Key:
    """One secret of a tenant."""

    name: str
    secret: bytes = field(repr=False)

    @property
    def id(self) -> bytes:
        """The key's id in the files encrypted with it.

        It is derived from the secret, not from its name: a name that is reused for another secret then opens no file
        wrongly.
        """
        digest = hashlib.blake2b(key=self.secret, digest_size=KEY_ID_BYTES, person=b"kvstore.keyid.1")
        return digest.digest()


@dataclass(frozen=True, slots=True)
class KeyRing:
    """All keys of all tenants, as of one reading of the file."""

    current: Mapping[str, Key | None]
    """For each listed tenant, the key of new files; None if new files are not encrypted any more."""
    by_id: Mapping[bytes, Key]

    @classmethod
    def parse(cls, content: bytes) -> KeyRing:
        """Parses the content of a key file. Raises InvalidRequest, which never shows a secret."""
        current: dict[str, Key | None] = {}
        by_id: dict[bytes, Key] = {}
        tenants = _object(_loaded(content).get("tenants"), "tenants")
        for tenant, fields in tenants.items():
            said = _object(fields, f"tenant {tenant!r}")
            keys = {name: _key(tenant, name, text) for name, text in _object(said.get("keys"), "keys").items()}
            # Check its type first: a list cannot be a dict's key, and looking it up would raise a TypeError that no
            # caller expects.
            name = said.get("current")
            if "current" not in said or not (name is None or (isinstance(name, str) and name in keys)):
                raise InvalidRequest(
                    f"the {_WHAT} names no current key of tenant {tenant!r}: expected one of {sorted(keys)}, or null "
                    "(new chunks are not encrypted any more)"
                )
            current[tenant] = None if name is None else keys[name]
            by_id.update((key.id, key) for key in keys.values())
        return cls(current, by_id)


EMPTY = KeyRing({}, {})


class KeyFile:
    """A key file, read again when it changes. Thread-safe. ``load`` it first."""

    def __init__(self, path: str | PathLike[str], *, look_s: float = LOOK_S) -> None:
        """``look_s`` is the time between two looks for a change."""
        self._path = Path(path)
        self._watched = Watched([self._path], look_s)
        self._loading = threading.Lock()  # lets only one thread read the key file again
        self._ring: KeyRing | None = None
        self.noted: Callable[[NodeCount], object] = lambda counter: None
        """Called with ``keys_reloaded`` or ``keys_refused``."""

    def load(self) -> KeyFile:
        """Reads the file. Raises InvalidRequest if others may read it, or if it is not a key file."""
        sealing.check_available()
        self._watched.changed()  # before reading: later changes are then seen
        self._ring = KeyRing.parse(read_secret(self._path, _WHAT))
        return self

    @property
    def ring(self) -> KeyRing:
        """The current keys; if the file cannot be read or understood, the keys from before."""
        # One thread reads the file again while the others use the old keys: it may lie on a slow mount.
        if self._loading.acquire(blocking=False):
            try:
                counter = self._reload() if self._watched.changed() else None
            finally:
                self._loading.release()
            if counter is not None:
                self.noted(counter)
        assert self._ring is not None, "load it first: without keys, chunks would be written as plain text"
        return self._ring

    def _reload(self) -> NodeCount:
        try:
            ring = KeyRing.parse(read_secret(self._path, _WHAT))
            before = self._ring or EMPTY
            gone = [tenant for tenant, key in before.current.items() if key and tenant not in ring.current]
            if gone:
                # Refuse: a slip of the editor would make this node write that tenant's chunks as plain text from now
                # on.
                raise InvalidRequest(
                    f'the {_WHAT} no longer lists tenants {gone}: say "current": null first, then restart without them'
                )
        except InvalidRequest as error:
            log.error("keys.refused %s; the previous keys stay in use", error)
            return NodeCount.KEYS_REFUSED
        self._ring = ring
        log.info("keys.reloaded tenants=%d keys=%d", len(ring.current), len(ring.by_id))
        return NodeCount.KEYS_RELOADED


def _loaded(content: bytes) -> Mapping[str, Any]:
    try:
        loaded = parse_json(content, object_pairs_hook=_once)
    except InvalidRequest:  # our own error says more than the next line would
        raise
    except ValueError:
        # Without the cause, which would show a piece of the file.
        raise InvalidRequest(f"the {_WHAT} is not JSON") from None
    return _object(loaded, "the whole")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds an object whose names are all different.

    Of two equal names JSON keeps the last: a key, or a tenant's whole encryption, would disappear silently.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise InvalidRequest(f"the {_WHAT} has {twice} twice in one object: expected each tenant and key once")
    return found


def _object(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(
            f'the {_WHAT} has no object for {what}: expected {{"tenants": {{NAME: {{"current": KEY, "keys": '
            '{KEY: "base64 of 32 bytes", ...}}}, ...}}'
        )
    return value


def _key(tenant: str, name: str, text: object) -> Key:
    try:
        secret = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (ValueError, binascii.Error):
        secret = b""
    if len(secret) != KEY_BYTES:
        raise InvalidRequest(
            f"key {name!r} of tenant {tenant!r} is not {KEY_BYTES} bytes in base64: make one with "
            "`openssl rand -base64 32`"
        )
    return Key(name, secret)
