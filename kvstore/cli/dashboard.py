"""``kvstore dashboard``: a web page about one cluster."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from ssl import SSLContext

import click

from kvstore.cli.access import Access, ClientAccess, ClusterAccess
from kvstore.cli.app import Command
from kvstore.cli.options import HOST_PORT, Logging, StorageLimits, arguments, flag, option, split, takes
from kvstore.cli.selectors import local_path, open_existing
from kvstore.cli.signals import Stopper
from kvstore.core.http_server import HttpServer
from kvstore.core.process import gc_command
from kvstore.errors import InvalidRequest
from kvstore.security.tls import Certificate, is_loopback


@dataclass(frozen=True, slots=True)
class PageAccess:
    """The security of the page."""

    cert_file: str | None = option(
        "--https-cert", metavar="FILE", help="PEM file of the page's certificate; needed beyond this host."
    )
    key_file: str | None = option("--https-key", metavar="FILE", help="PEM file of that certificate's key.")
    access_file: str | None = option(
        "--access",
        metavar="FILE",
        help="Access file, as workers have it: a viewer needs a token with the role read on every tenant.",
    )
    insecure: bool = flag("--insecure", help="Serve other hosts even without TLS or without tokens.")

    def check(self, listen: str) -> None:
        """Raises InvalidRequest if others could reach the page without TLS, or without tokens."""
        if (self.cert_file is None) != (self.key_file is None):
            raise InvalidRequest("--https-cert and --https-key go together: give both, or neither")
        if not (is_loopback(listen) or self.insecure or (self.cert_file and self.access_file)):
            raise InvalidRequest(
                f"others can reach --listen {listen}: give --https-cert, --https-key and --access, or --insecure"
            )

    def tls(self) -> Callable[[], SSLContext] | None:
        """Returns what gives each new connection the certificate of the files at that moment; None for plain HTTP.

        Raises InvalidRequest if the files are not valid.
        """
        if not (self.cert_file and self.key_file):
            return None
        context = partial(Certificate(None, self.cert_file, self.key_file).context, server=True)
        context()
        return context


@click.command(cls=Command, short_help="Serve a web page that shows a cluster.")
@takes("cluster", ClusterAccess)
@takes("client", ClientAccess)
@click.option(
    "--listen",
    type=HOST_PORT,
    default="127.0.0.1:8080",
    show_default=True,
    help="Where to serve the page; port 0: any free one.",
)
@takes("page", PageAccess)
@takes("room", StorageLimits)
@click.option("--policy", metavar="FILE", help="The collector's policy file, to show what it would delete next.")
@takes("logging", Logging)
def dashboard(
    cluster: ClusterAccess,
    client: ClientAccess,
    listen: str,
    page: PageAccess,
    room: StorageLimits,
    policy: str | None,
    logging: Logging,
) -> None:
    """Serve a read-only web page about the cluster of --root and --etcd.

    It shows hit ratio and bandwidth, capacity and what garbage collection would take next, namespaces, pins, workers,
    stored prefixes, and damage. While etcd or the root does not answer, it serves and says so. Prints one line when it
    serves:

    \b
      ready dashboard=URL

    It shows names of models, tenants and owners, never tokens. Everybody on this host may look; other hosts need
    --https-cert, --https-key and --access.

    \b
    Examples:
      kvstore dashboard --root /mnt/kv --etcd 10.0.0.5:2379
      kvstore dashboard --root /mnt/kv --etcd 10.0.0.5:2379 --listen 0.0.0.0:8443 --access /etc/kvstore/access.json \\
          --https-cert /etc/kvstore/page.crt --https-key /etc/kvstore/page.key
    """
    if cluster.etcd is None:
        raise InvalidRequest("the dashboard is about a cluster: give --etcd ENDPOINTS, or set KVSTORE_ETCD")
    page.check(listen)
    logging.configure()
    from kvstore.dashboard.server import DashboardAuth, application
    from kvstore.dashboard.views import Board

    with ExitStack() as undo:
        stopper = undo.enter_context(Stopper())
        door = DashboardAuth(page.access_file, is_local=is_loopback(listen))
        tls = page.tls()
        path = local_path(cluster.root)
        board = Board(
            cluster.root if path is None else f"file://{path}",
            partial(open_existing, cluster.root, cluster.root_options.read()),
            cluster.etcd.open,
            lambda root_id: Access(root_id=root_id, etcd=cluster.etcd, client=client).open(),
            gc_command(*arguments(cluster), *arguments(room), *(("--policy", policy) if policy else ())),
        )
        undo.callback(board.close)
        server = HttpServer(application(board, door), *split(listen), tls)
        undo.callback(server.close)
        board.start()
        print(f"ready dashboard={'https' if tls else 'http'}://{server.address}/", flush=True)
        stopper.wait()
