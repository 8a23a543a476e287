"""What ``kvstore up`` runs beside its workers: the collector and the dashboard, each a program of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvstore.cli.children import Program, gc_command, kvstore_command
from kvstore.cli.kinds import is_loopback, split
from kvstore.cli.securing import ServerAccess

log = logging.getLogger(__name__)

GC_INTERVAL_S = 60
"""Between two rounds; one that is needed sooner, because the root fills up, begins at once."""


def start_gc(
    common: list[str], max_bytes: int | None, ttl_s: float | None, metrics: str | None, programs: list[Program]
) -> Program | None:
    """The garbage collector. After the workers: there is a root then, and what it and etcd know of each other."""
    command = gc_command(*common, "--interval", f"{GC_INTERVAL_S}s")
    if command is None:
        log.warning(
            "up.no_gc garbage collection is not installed: nothing is ever deleted, watch the root's free space"
        )
        return None
    if max_bytes is not None:
        command += ["--max-bytes", str(max_bytes)]
    if ttl_s is not None:
        command += ["--ttl", f"{ttl_s}s"]
    if metrics is not None:
        command += ["--metrics", metrics]
    program = Program("gc", command)
    programs.append(program)
    program.start()
    return program


def start_dashboard(
    common: Sequence[str],
    secured: ServerAccess,
    listen: str,
    max_bytes: int | None,
    ttl_s: float | None,
    programs: list[Program],
    given_up: Callable[[], bool],
) -> tuple[Program, str]:
    """Starts it with what brings it to the same root and etcd (``common``); the program and its URL.

    Beyond this host it has the workers' certificate and access file. Raises Unavailable where it does not serve.
    """
    arguments = [*common, *_as_client(secured)]
    if max_bytes is not None:
        arguments += ["--max-bytes", str(max_bytes)]
    if ttl_s is not None:
        arguments += ["--ttl", f"{ttl_s}s"]
    if not is_loopback(listen):
        arguments += _to_browsers(secured)
    program = Program("dashboard", kvstore_command("dashboard", "--listen", listen, *arguments))
    programs.append(program)
    program.start()
    url = program.wait_ready(given_up)["dashboard"]
    port = url.rstrip("/").rpartition(":")[2]
    host, _ = split(listen)
    bound = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    program.command = kvstore_command("dashboard", "--listen", bound, *arguments)  # where it is, should it die
    return program, url


def _as_client(secured: ServerAccess) -> list[str]:
    """How it reaches the workers: as they reach each other."""
    given = {
        "--tls-ca": (secured.peers.ca_file or secured.client_ca_file) if secured.cert_file else None,
        "--tls-cert": secured.cert_file,
        "--tls-key": secured.key_file,
        "--tls-server-name": secured.peers.server_name,
        "--token-file": secured.peers.token_file,
    }
    return [part for option, value in given.items() if value is not None for part in (option, value)]


def _to_browsers(secured: ServerAccess) -> list[str]:
    given = {
        "--https-cert": secured.cert_file,
        "--https-key": secured.key_file,
        "--access": secured.access_file,
    }
    arguments = [part for option, value in given.items() if value is not None for part in (option, value)]
    return [*arguments, "--insecure"] if secured.insecure else arguments
