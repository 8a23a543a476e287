"""The account that a worker on loopback runs as: its clients prove that they run as it too (rule X12).

A port of loopback is open to every account of a host, and TCP tells nobody whose the other end is. So workers and
clients of one account share a secret in a file that only this account can read. A client shows what follows from the
secret and the port or path that it calls: who listens there instead of the worker learns nothing for other workers.
"""

from __future__ import annotations

import hmac
import os
import pwd
import secrets
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from kvstore.errors import InvalidRequest
from kvstore.security.identity import ACCOUNT
from kvstore.security.secret_files import read_secret

HEADER = "kvstore-account"
"""The metadata of a call that has the proof."""
SECRET_BYTES = 32


class Account:
    """The account of this worker. Thread-safe."""

    def __init__(self, secret: bytes) -> None:
        self.name = ACCOUNT + _user()
        """The name of its clients."""
        self._secret = secret
        self._proofs: tuple[bytes, ...] = ()

    def serve(self, *addresses: str) -> None:
        """Sets the addresses by which clients call the worker."""
        self._proofs = tuple(proof(self._secret, address).encode() for address in addresses)

    def is_proved_by(self, shown: str) -> bool:
        """True if a client that shows this runs as the same account."""
        return any(hmac.compare_digest(shown.encode(errors="replace"), each) for each in self._proofs)


def proof(secret: bytes, address: str) -> str:
    """Returns what a client of ``host:port`` or ``unix:path`` shows. A host has several names: only its port counts."""
    if address.startswith("unix:"):
        door = os.path.realpath(address.removeprefix("unix:").removeprefix("//"))
    else:
        door = address.rpartition(":")[2]
    return hmac.new(secret, os.fsencode(door), sha256).hexdigest()


def account_secret() -> bytes:
    """Returns the secret of the account that this process runs as, and makes it at first. Raises InvalidRequest."""
    path = _home() / ".local/state/kvstore/account.secret"
    if not path.exists():
        _make(path)
    content = read_secret(path, "secret of this account", 2 * SECRET_BYTES)
    with suppress(ValueError):
        secret = bytes.fromhex(content.decode())
        if len(secret) == SECRET_BYTES:  # a shorter one could be guessed, an empty one is known to everybody
            return secret
    raise InvalidRequest(f"{path} holds no secret of this account: remove it, and start the workers again")


def said_account() -> str:
    """Returns the name and number of the account that this process runs as, for people."""
    name, uid = _user(), os.geteuid()
    return f"uid {uid}" if name == str(uid) else f"{name!r} (uid {uid})"


def _user() -> str:
    """The account's name; its number if the system knows no name."""
    with suppress(KeyError):
        return pwd.getpwuid(os.geteuid()).pw_name
    return str(os.geteuid())


def _home() -> Path:
    """The account's home as the system knows it: a worker and its clients may have different environments."""
    try:
        return Path(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError as cause:
        raise InvalidRequest(f"uid {os.geteuid()} has no entry in the system's list of accounts, so no home") from cause


def _make(path: Path) -> None:
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())  # or a power cut could leave the name of an empty file
        # A link, not a rename: of several processes that make it at once, all must use the first one's.
        with suppress(FileExistsError):
            os.link(new, path)
        new.unlink()
    except OSError as cause:
        raise InvalidRequest(f"cannot write {path}: {cause.strerror or cause}") from cause
