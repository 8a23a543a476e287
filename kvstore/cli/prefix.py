"""``kvstore match``, ``pin`` and ``unpin``: one prompt's prefix, looked up by hand."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvstore.cli.access import Access
from kvstore.cli.command import CHECK_FAILED, Command
from kvstore.cli.kinds import DURATION
from kvstore.cli.naming import choose_namespace, namespace_options
from kvstore.cli.options import access_options, json_option
from kvstore.errors import InvalidRequest
from kvstore.tokens import TOKENS_MAX

if TYPE_CHECKING:
    from kvstore.client.cache import Cache
    from kvstore.client.store import Store

TEXT_BYTES_MAX = 16 * TOKENS_MAX

tokens_argument = click.argument("tokens", required=False)
tokens_file_option = click.option(
    "--tokens-file", metavar="FILE", help="Read the token ids from FILE, - for standard input, instead."
)


@click.command(cls=Command, no_args_is_help=True, short_help="How many leading tokens of a prompt are stored.")
@click.argument("name")
@tokens_argument
@tokens_file_option
@namespace_options
@access_options
@json_option
def match(
    name: str,
    tokens: str | None,
    tokens_file: str | None,
    tenant: str,
    fingerprint: str | None,
    access: Access,
    as_json: bool,
) -> None:
    """Print how many leading tokens of a prompt are stored.

    NAME is a namespace, as `kvstore ls` lists it; TOKENS are token ids with commas between. A file or standard input
    may have them with commas, spaces or as a JSON list.

    \b
    Examples:
      kvstore match llama-3.1-8b 101,2023,2003 --root /mnt/kv
      tokenize prompt.txt | kvstore match llama-3.1-8b --tokens-file - --connect 10.0.0.7:7070
    """
    ids = read_tokens(tokens, tokens_file)
    with access.open() as store:
        cache = open_cache(store, name, tenant, fingerprint)
        matched = cache.match(ids)
    from kvstore.cli.output import print_json

    if as_json:
        print_json({"namespace": name, "tokens": len(ids), "tokens_matched": matched})
    else:
        print(f"{matched} of {len(ids)} tokens")


@click.command(cls=Command, no_args_is_help=True, short_help="Protect a stored prefix from garbage collection.")
@click.argument("name")
@tokens_argument
@tokens_file_option
@namespace_options
@click.option("--ttl", type=DURATION, default="1h", show_default=True, help="The pin ends by itself after this time.")
@click.option("--owner", default="", help="Who pins, as `kvstore ls --pins` shows it; the host's name if not given.")
@access_options
@json_option
def pin(
    name: str,
    tokens: str | None,
    tokens_file: str | None,
    tenant: str,
    fingerprint: str | None,
    ttl: float,
    owner: str,
    access: Access,
    as_json: bool,
) -> None:
    """Protect a stored prefix from garbage collection, and print the pin's id.

    Needs a cluster (--etcd or --connect): a pin is a lease in etcd, and outlives this command. Exit code 1 where
    nothing of the prefix is stored.

    \b
    Examples:
      kvstore pin llama-3.1-8b --tokens-file system_prompt.txt --ttl 7d --connect 10.0.0.7:7070
      kvstore pin llama-3.1-8b 101,2023 --root /mnt/kv --etcd 10.0.0.5:2379
    """
    _needs_cluster(access)
    ids = read_tokens(tokens, tokens_file)
    with access.open() as store:
        record = open_cache(store, name, tenant, fingerprint).pin(ids, ttl=ttl, owner=owner).record
    from kvstore.cli.output import print_json

    if as_json:
        print_json(
            {"id": record.id, "owner": record.owner, "tokens_pinned": record.tokens, "expires_s": record.expires_s}
        )
    elif record.id:
        print(f"{record.id}  {record.tokens} of {len(ids)} tokens")
    else:
        print("nothing of it is stored: nothing is pinned", file=sys.stderr)
    if not record.id:
        click.get_current_context().exit(CHECK_FAILED)


@click.command(cls=Command, no_args_is_help=True, short_help="End a pin.")
@click.argument("pin_id", metavar="ID")
@access_options
@json_option
def unpin(pin_id: str, access: Access, as_json: bool) -> None:
    """End a pin by its id, as `kvstore pin` and `kvstore ls --pins` print it. Exit code 1 where there is none.

    \b
    Example:
      kvstore unpin host-7/5f0c7a1e9b2d4c3f8a6e1d2c3b4a5968 --connect 10.0.0.7:7070
    """
    _needs_cluster(access)
    with access.open() as store:
        ended = store.unpin(pin_id)
    from kvstore.cli.output import print_json

    if as_json:
        print_json({"id": pin_id, "ended": ended})
    else:
        print("ended" if ended else "there is no such pin (any more)")
    if not ended:
        click.get_current_context().exit(CHECK_FAILED)


def open_cache(store: Store, name: str, tenant: str, fingerprint: str | None) -> Cache:
    """The cache of a namespace that exists, its layout taken from the store's records."""
    found = choose_namespace(store.namespaces(), name, tenant, fingerprint)
    return store.namespace(
        found.name, found.layout, fingerprint=found.fingerprint, tenant=found.tenant, attributes=dict(found.attributes)
    )


def read_tokens(text: str | None, file: str | None) -> list[int]:
    """Token ids from an argument, a file or standard input (``-``). Raises InvalidRequest, naming what is no number."""
    if (text is None) == (file is None):
        raise InvalidRequest("which tokens? give them as TOKENS, or with --tokens-file FILE (- for standard input)")
    if file is not None:
        try:
            text = sys.stdin.read(TEXT_BYTES_MAX + 1) if file == "-" else Path(file).read_text()
        except (OSError, UnicodeDecodeError) as cause:
            raise InvalidRequest(f"cannot read the tokens from {file!r}: {cause}") from cause
    assert text is not None
    if len(text) > TEXT_BYTES_MAX:
        raise InvalidRequest(f"the tokens are over {TEXT_BYTES_MAX} bytes of text: at most {TOKENS_MAX} tokens")
    words = re.split(r"[\s,]+", text.strip().removeprefix("[").removesuffix("]").strip())
    try:
        return [int(word) for word in words if word]
    except ValueError as cause:
        odd = next(word for word in words if not re.fullmatch(r"[+-]?[0-9]+", word))
        raise InvalidRequest(
            f"token {odd[:40]!r} is no number: give ids with commas between, such as 101,2023"
        ) from cause


def _needs_cluster(access: Access) -> None:
    if access.is_given and not access.connect and access.etcd is None:
        raise InvalidRequest(
            "pins live in etcd: give --etcd ENDPOINTS beside --root, or --connect HOST:PORT; "
            "a root opened alone would forget the pin when this command ends"
        )
