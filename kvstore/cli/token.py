"""``kvstore token``: keys that sign bearer tokens, tokens, and the list of those that were revoked."""

from __future__ import annotations

import hashlib
import json
import os
import re
import ssl
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvstore.cli.app import Command
from kvstore.cli.options import DURATION, json_option
from kvstore.errors import InvalidRequest

if TYPE_CHECKING:
    from kvstore.security.authentication import Claims

PUBLIC = ".pub"
TOKEN_ID = "[0-9a-f]{24}"


@click.group(no_args_is_help=True, short_help="Make and revoke bearer tokens, which authenticate clients.")
def token() -> None:
    """Bearer tokens: a client's identity, signed, for a limited time.

    \b
    Example:
      kvstore token key issuer.key               # issuer.key signs, issuer.key.pub goes next to the access file
      kvstore token issue --key issuer.key --identity alice --ttl 8h --out alice.token
      kvstore stats --connect 10.0.0.7:7070 --tls-ca ca.crt --token-file alice.token
      kvstore token revoke --access access.json --token-file alice.token
    """


@token.command(cls=Command)
@click.argument("file", type=click.Path(dir_okay=False))
def key(file: str) -> None:
    """Create a key pair that signs tokens: FILE, readable only by its owner, and FILE.pub.

    List the name of FILE.pub in "token_keys" of the access file, and put the file next to it. To rotate, list two keys:
    sign with the new one, and remove the old one when its last token has expired.
    """
    from kvstore.security.authentication import new_key

    private, public = new_key()
    _write_new(Path(file), private, 0o600)
    _write_new(Path(file + PUBLIC), public, 0o644)
    print(f"{file} signs tokens: keep it where only they are issued; {file}{PUBLIC} verifies them", flush=True)


@token.command(cls=Command)
@click.option(
    "--key", "key_file", required=True, metavar="FILE", help="The key that signs, as kvstore token key made it."
)
@click.option("--identity", required=True, metavar="NAME", help="The identity of its holder, as in the access file.")
@click.option("--ttl", "ttl_s", type=DURATION, default="1h", show_default=True, help="Its lifetime; at most 7d.")
@click.option("--bind", metavar="CERT", help="PEM certificate that the token is bound to (mutual TLS).")
@click.option(
    "--out", metavar="FILE", help="File for the token, readable by its owner alone; standard output by default."
)
def issue(key_file: str, identity: str, ttl_s: float, bind: str | None, out: str | None) -> None:
    """Issue a token. Clients reload its file when it changes: run this before the old token expires."""
    from kvstore.security import authentication
    from kvstore.security.tls import read_secret, read_trusted

    thumbprint = b""
    if bind is not None:
        try:
            der = ssl.PEM_cert_to_DER_cert(read_trusted(bind, "certificate").decode("ascii"))
        except ValueError as cause:
            raise InvalidRequest(f"the certificate {bind!r} is not in PEM format") from cause
        thumbprint = hashlib.sha256(der).digest()
    id = os.urandom(12).hex()
    text = authentication.issue(read_secret(key_file, "token key"), identity, id, time.time(), ttl_s, thumbprint)
    if out is None:
        print(text, flush=True)
    else:
        _replace(Path(out), text.encode() + b"\n", 0o600)
        print(f"{out}: token {id} of {identity} for {ttl_s:g} s", flush=True)


@token.command(cls=Command)
@click.option("--access", required=True, metavar="FILE", help="The access file; the list is revoked.json next to it.")
@click.option("--token-file", metavar="FILE", help="File with the token to revoke.")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@json_option
def revoke(access: str, token_file: str | None, ids: tuple[str, ...], as_json: bool) -> None:
    """Revoke tokens, by their IDs (which `token issue` prints) or by the file that holds one.

    Workers with this access file deny them within about a second; copy revoked.json to the others.
    """
    from kvstore.security.authentication import REVOKED, SKEW_S, TTL_S_MAX, read_revoked

    now_s = time.time()
    wanted = dict.fromkeys(ids, now_s + TTL_S_MAX)  # by then each has expired
    if token_file is not None:
        claims = _claims_in(token_file, access)
        wanted[claims.id] = claims.expires_s
    if not wanted:
        raise InvalidRequest("no token is given: give its ID, or --token-file FILE")
    for each in ids:
        if not re.fullmatch(TOKEN_ID, each):
            raise InvalidRequest(
                f"{each!r} is no ID of a token: expected the 24 hexadecimal digits that issue printed; if another "
                "issuer made it, give --token-file FILE"
            )
    path = Path(access).parent / REVOKED
    # Expired tokens need not be listed; clocks of workers may differ by SKEW_S.
    listed = {id: ends_s for id, ends_s in read_revoked(path).items() if ends_s + SKEW_S > now_s} | wanted
    _replace(path, json.dumps(listed, indent=1).encode() + b"\n", 0o644)
    if as_json:
        print(json.dumps({"revoked": sorted(wanted), "listed": len(listed)}), flush=True)
    else:
        print(f"revoked {', '.join(sorted(wanted))}; {path} lists {len(listed)}", flush=True)


def _claims_in(token_file: str, access: str) -> Claims:
    from kvstore.security import authentication
    from kvstore.security.access import Rules
    from kvstore.security.tls import read_secret, read_trusted

    rules = Rules.parse(read_trusted(access, "access file"))
    files = [Path(access).parent / name for name in rules.token_keys]
    keys = [authentication.PublicKey.of_pem(read_trusted(file, "token key"), str(file)) for file in files]
    text = read_secret(token_file, "token file", authentication.TOKEN_BYTES_MAX).decode("ascii", "replace").strip()
    return authentication.verified(text, {each.id: each for each in keys})


def _write_new(path: Path, content: bytes, mode: int) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError as cause:
        raise InvalidRequest(f"{path} exists: keys are never overwritten, choose another name") from cause
    with open(fd, "wb") as file:
        os.fchmod(fd, mode)  # whatever the umask: workers of another account read some
        file.write(content)


def _replace(path: Path, content: bytes, mode: int) -> None:
    """Replaces a file in one step: a reader sees the old or the new content."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _write_new(new, content, mode)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
