"""Options that several commands share, as decorators that give one value: ``access`` or ``etcd``."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvstore.cli import logs
from kvstore.cli.access import Access, EtcdAccess
from kvstore.cli.securing import ClientAccess, client_options
from kvstore.errors import InvalidRequest

F = TypeVar("F", bound=Callable[..., Any])

SECRET_BYTES_MAX = 1 << 20

root_option = click.option(
    "--root", metavar="URL", help="The root itself: a folder, file:///path, s3://bucket/prefix, or any fsspec URL."
)
root_options_option = click.option(
    "--root-options",
    "root_options_file",
    metavar="FILE",
    envvar="KVSTORE_ROOT_OPTIONS",
    help="JSON file with options for a root that is not mounted (endpoint, keys); also KVSTORE_ROOT_OPTIONS.",
)
durability_option = click.option(
    "--durability",
    type=click.Choice(["none", "fsync"]),
    default="none",
    show_default=True,
    help="none: a host crash may lose the last chunks (a miss); fsync: each put is on the device before it returns.",
)
label_option = click.option(
    "--label",
    default="",
    metavar="TEXT",
    help="What this roll-out is called: `kvstore ls --lineage` shows it, `kvstore clear --written-by` takes it back.",
)
keys_option = click.option(
    "--keys",
    "keys_file",
    metavar="FILE",
    help="Keys of tenants whose chunks are encrypted on the root and the local disk. Read again when it changes.",
)
log_level_option = click.option("--log-level", type=click.Choice(logs.LEVELS), default="info", show_default=True)
log_format_option = click.option(
    "--log-format",
    type=click.Choice(logs.FORMATS),
    default="text",
    show_default=True,
    help="text for people, json for one object a line.",
)
tracing_option = click.option(
    "--tracing/--no-tracing",
    default=None,
    help="Send OpenTelemetry spans, as OTEL_... variables say; by default if OTEL_EXPORTER_OTLP_ENDPOINT is set.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")


def etcd_options(command: F) -> F:
    """``--etcd`` and what proves who we are; gives ``etcd``, an EtcdAccess or None."""

    @click.option("--etcd", "etcd_endpoints", metavar="ENDPOINTS", help="etcd as HOST:PORT[,HOST:PORT...].")
    @click.option("--etcd-ca", metavar="FILE", help="PEM file of the authority that signed etcd's certificate.")
    @click.option("--etcd-cert", metavar="FILE", help="PEM file of our certificate for etcd.")
    @click.option("--etcd-key", metavar="FILE", help="PEM file of its key.")
    @click.option("--etcd-user", metavar="NAME", envvar="KVSTORE_ETCD_USER", help="User of etcd's authentication.")
    @click.option(
        "--etcd-password-file", metavar="FILE", help="File with that user's password; else KVSTORE_ETCD_PASSWORD."
    )
    @functools.wraps(command)
    def wrapped(
        *args: Any,
        etcd_endpoints: str | None,
        etcd_ca: str | None,
        etcd_cert: str | None,
        etcd_key: str | None,
        etcd_user: str | None,
        etcd_password_file: str | None,
        **kwargs: Any,
    ) -> Any:
        etcd = None
        if etcd_endpoints:
            password = _password(etcd_password_file)
            etcd = EtcdAccess(etcd_endpoints, etcd_ca, etcd_cert, etcd_key, etcd_user, password)
        elif etcd_ca or etcd_cert or etcd_key or etcd_password_file:
            raise InvalidRequest("--etcd-... options say how to reach etcd: give --etcd ENDPOINTS as well")
        return command(*args, etcd=etcd, **kwargs)

    return wrapped  # type: ignore[return-value]


def etcd_arguments(context: click.Context) -> list[str]:
    """The arguments that bring another program to the same etcd: those of ``etcd_options`` as they were given here."""
    arguments = ["--etcd", context.params["etcd_endpoints"]]
    for option in ("etcd_ca", "etcd_cert", "etcd_key", "etcd_user", "etcd_password_file"):
        if context.params.get(option):
            arguments += [f"--{option.replace('_', '-')}", context.params[option]]
    return arguments


def access_options(command: F) -> F:
    """``--root``, ``--connect`` and the etcd options; gives ``access``."""

    @root_option
    @root_options_option
    @click.option("--connect", metavar="HOST:PORT[,...]", help="One or several workers.")
    @click.option("--root-id", metavar="HEX", help="Which root is meant, where --etcd alone knows several.")
    @keys_option
    @etcd_options
    @client_options
    @functools.wraps(command)
    def wrapped(
        *args: Any,
        keys_file: str | None,
        root: str | None,
        root_options_file: str | None,
        connect: str | None,
        root_id: str | None,
        etcd: EtcdAccess | None,
        client: ClientAccess,
        **kwargs: Any,
    ) -> Any:
        workers = tuple(part.strip() for part in (connect or "").split(",") if part.strip())
        options = read_root_options(root_options_file)
        access = Access(root, workers, etcd, root_id, options, client=client, keys=keys_file)
        return command(*args, access=access, **kwargs)

    return wrapped  # type: ignore[return-value]


def read_root_options(path: str | None) -> dict[str, Any]:
    """The options of a root from a JSON file. Raises InvalidRequest where it holds none."""
    if path is None:
        return {}
    try:
        found = json.loads(_read(path, "root options"))
    except ValueError as cause:
        raise InvalidRequest(f"the root options {path!r} are not JSON: {cause}") from cause
    if not isinstance(found, dict):
        raise InvalidRequest(f"the root options {path!r} are not a JSON object")
    return found


def _password(path: str | None) -> str | None:
    if path is None:
        return os.environ.get("KVSTORE_ETCD_PASSWORD")
    return _read(path, "password file").rstrip("\r\n")


def _read(path: str, what: str) -> str:
    try:
        if Path(path).stat().st_size > SECRET_BYTES_MAX:
            raise InvalidRequest(f"the {what} {path!r} is over {SECRET_BYTES_MAX} bytes")
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as cause:
        raise InvalidRequest(f"cannot read the {what} {path!r}: {cause}") from cause


shard_bits_option = click.option(
    "--shard-bits",
    type=click.IntRange(0, 16),
    default=8,
    show_default=True,
    help="A new root gets 2^N folders: 8 suits ten million chunks, 12 a billion. An existing root keeps its own.",
)
