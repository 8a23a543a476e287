"""``kvstore dashboard``: a web page about one cluster."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import click

from kvstore.cli import logs
from kvstore.cli.access import Access
from kvstore.cli.children import gc_command
from kvstore.cli.command import Command
from kvstore.cli.kinds import DURATION, HOST_PORT, SIZE, is_loopback, split
from kvstore.cli.options import access_options, etcd_arguments, log_format_option, log_level_option
from kvstore.cli.rooted import local_path, open_existing
from kvstore.cli.signals import Stopper
from kvstore.errors import InvalidRequest

if TYPE_CHECKING:
    from kvstore.dashboard.board import Reach

log = logging.getLogger(__name__)


@click.command(cls=Command, no_args_is_help=True, short_help="A web page about a cluster.")
@access_options
@click.option(
    "--listen",
    type=HOST_PORT,
    default="127.0.0.1:8080",
    show_default=True,
    metavar="HOST:PORT",
    help="Where to serve the page; port 0: any free one.",
)
@click.option("--https-cert", metavar="FILE", help="PEM file of the page's certificate; needed beyond this host.")
@click.option("--https-key", metavar="FILE", help="PEM file of its key.")
@click.option(
    "--access",
    "access_file",
    metavar="FILE",
    help="Access file, as workers have it: who looks needs a token with the role read on every tenant.",
)
@click.option("--insecure", is_flag=True, help="Serve it beyond this host without TLS or without tokens all the same.")
@click.option("--max-bytes", type=SIZE, metavar="SIZE", help="As the collector has it, for what it would take next.")
@click.option("--ttl", "ttl_s", type=DURATION, metavar="TIME", help="The same.")
@click.option("--policy", metavar="FILE", help="The same.")
@log_level_option
@log_format_option
def dashboard(
    access: Access,
    listen: str,
    https_cert: str | None,
    https_key: str | None,
    access_file: str | None,
    insecure: bool,
    max_bytes: int | None,
    ttl_s: float | None,
    policy: str | None,
    log_level: str,
    log_format: str,
) -> None:
    """Serve a web page about the cluster of --root and --etcd: hit ratio and bandwidth, capacity and what garbage
    collection would take next, namespaces, pins, workers, the prefixes that are stored, damage. It only reads.

    Prints one line when it serves:

    \b
      ready dashboard=URL

    It shows names of models, tenants and owners, never tokens. On this host anybody may look; elsewhere it needs
    --https-cert, --https-key and --access.

    \b
    Examples:
      kvstore dashboard --root /mnt/kv --etcd 10.0.0.5:2379
      kvstore dashboard --root /mnt/kv --etcd 10.0.0.5:2379 --listen 0.0.0.0:8443 --access /etc/kvstore/access.json \\
          --https-cert /etc/kvstore/page.crt --https-key /etc/kvstore/page.key
    """  # fmt: skip
    if access.root is None or access.etcd is None:
        raise InvalidRequest("the dashboard looks at a cluster: give --root URL and --etcd ENDPOINTS")
    if (https_cert is None) != (https_key is None):
        raise InvalidRequest("--https-cert and --https-key go together: give both, or neither")
    is_local = is_loopback(listen)
    if not is_local and not insecure and not (https_cert and access_file):
        raise InvalidRequest(
            f"--listen {listen} is not this host alone: give --https-cert, --https-key and --access, or say --insecure"
        )
    logs.configure(log_level, log_format)
    with ExitStack() as undo:
        stopper = undo.enter_context(Stopper())
        from kvstore.dashboard.board import open_board
        from kvstore.dashboard.documents import Documents
        from kvstore.dashboard.door import OpenDoor, TokenDoor
        from kvstore.security.tls import ServerTls

        try:
            from kvstore.dashboard.serving import Serving
            from kvstore.dashboard.web import application
        except ModuleNotFoundError as missing:
            raise InvalidRequest(f"the dashboard needs {missing.name}: pip install 'kvstore[server]'") from missing

        door = OpenDoor(is_local) if access_file is None else TokenDoor.of_file(access_file)
        board = open_board(_reach(access, max_bytes, ttl_s, policy))
        undo.callback(board.close)
        tls = ServerTls(https_cert, https_key) if https_cert and https_key else None
        serving = Serving(application(Documents(board), door), *split(listen), tls)
        undo.callback(serving.close)
        url = serving.start()
        board.start()
        print(f"ready dashboard={url}", flush=True)
        stopper.wait()


def _reach(access: Access, max_bytes: int | None, ttl_s: float | None, policy: str | None) -> Reach:
    """How the board reaches the cluster: as the options say, each source when it is needed."""
    from kvstore.dashboard.board import Reach

    assert access.root is not None and access.etcd is not None
    path = local_path(access.root)
    through_workers = replace(access, root=None)
    return Reach(
        root_url=access.root if path is None else f"file://{path}",
        open_root=partial(open_existing, access.root, access.root_options),
        open_meta=access.etcd.open,
        connect=lambda root_id: replace(through_workers, root_id=root_id).open(),
        collector=_collector(access.root, max_bytes, ttl_s, policy),
    )


def _collector(root: str, max_bytes: int | None, ttl_s: float | None, policy: str | None) -> list[str] | None:
    command = gc_command("--root", root, *etcd_arguments(click.get_current_context()))
    if command is None:
        return None
    context = click.get_current_context()
    if context.params.get("root_options_file"):
        command += ["--root-options", context.params["root_options_file"]]
    if max_bytes is not None:
        command += ["--max-bytes", str(max_bytes)]
    if ttl_s is not None:
        command += ["--ttl", f"{ttl_s}s"]
    if policy is not None:
        command += ["--policy", policy]
    return command
