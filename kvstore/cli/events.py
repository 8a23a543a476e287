"""``kvstore events``: publishes KV events of the shared root, and answers routers that ask."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from kvstore.cli.access import ClusterAccess, ServerAccess
from kvstore.cli.app import Command
from kvstore.cli.options import HOST_PORT, Logging, flag, option, split, takes
from kvstore.cli.selectors import local_path, open_existing
from kvstore.cli.signals import Stopper
from kvstore.errors import InvalidRequest
from kvstore.security.tls import is_loopback

if TYPE_CHECKING:
    from kvstore.events.publisher import At, PublishScope
    from kvstore.events.stream import Curve
    from kvstore.meta.store import MetadataStore
    from kvstore.root.interface import Root

EVERYWHERE = "tcp://*:"
HERE = "tcp://127.0.0.1:"
TCP = re.compile(r"tcp://(?:\*|\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):([0-9]{1,5})")
ELSE = re.compile(r"(?:ipc|inproc)://\S+")
PORT_MAX = 65_535
ANYWHERE = "tcp://*:0"
ANY_PORT = "127.0.0.1:0"


@dataclass(frozen=True, slots=True)
class EventAddresses:
    """Addresses on which the publisher listens, and clients that may connect."""

    publish: str = option(
        "--publish",
        metavar="ENDPOINT",
        required=True,
        help="Where subscribers connect, such as tcp://*:5557 or ipc:///run/kvstore/events; port 0: any free one.",
    )
    replay: str | None = option(
        "--replay", metavar="ENDPOINT", help="Where they ask for what they missed; by default nowhere."
    )
    query: str = option(
        "--query",
        type=HOST_PORT,
        default="127.0.0.1:0",
        show_default=True,
        help="Where to answer POST /query; port 0: any free one.",
    )
    certificate: str | None = option(
        "--curve-certificate",
        metavar="FILE",
        help="The publisher's CURVE certificate, with its secret key (zmq.auth.create_certificates).",
    )
    clients: str | None = option(
        "--curve-clients", metavar="FOLDER", help="Folder with the public keys of allowed subscribers."
    )
    access_file: str | None = option(
        "--access", metavar="FILE", help="Access file, as workers have it: a question needs a token that may read."
    )
    insecure: bool = flag("--insecure", help="Serve other hosts without CURVE, and questions without TLS.")

    def at(self) -> At:
        """Returns the addresses. Raises InvalidRequest if other hosts could read prompts from them."""
        try:
            from kvstore.events.publisher import At
            from kvstore.events.stream import Curve
        except ModuleNotFoundError as missing:
            raise InvalidRequest(f"events need {missing.name}: pip install 'kvstore-llm[events]'") from missing
        from kvstore.security.authentication import Authenticator

        if (self.certificate is None) != (self.clients is None):
            raise InvalidRequest("the CURVE certificate and the folder of clients go together: give both, or neither")
        curve = Curve(self.certificate, self.clients) if self.certificate and self.clients else None
        if not (is_loopback(self.query) or self.insecure):
            raise InvalidRequest(
                f"other hosts can reach queries at {self.query}, which are plain HTTP: keep them on this host behind a "
                "proxy with TLS, or give --insecure if the network itself is trusted"
            )
        authenticator = None
        if self.access_file is not None:
            authenticator = Authenticator(self.access_file)
            authenticator.load()
        publish = self._bound(self.publish, curve)
        replay = None if self.replay is None else self._bound(self.replay, curve)
        return At(publish, replay, split(self.query), curve, authenticator)

    def _bound(self, endpoint: str, curve: Curve | None) -> str:
        """The endpoint to bind: without CURVE, ``*`` stands for this host alone, because events carry prompts.

        Raises InvalidRequest for what is no endpoint, which ZeroMQ might read as another one.
        """
        is_tcp = TCP.fullmatch(endpoint)
        if not (is_tcp or ELSE.fullmatch(endpoint)) or (is_tcp and int(is_tcp[1]) > PORT_MAX):
            raise InvalidRequest(
                f"{endpoint!r} is no endpoint: expected tcp://ADDRESS:PORT, with a port up to {PORT_MAX}, or ipc://PATH"
            )
        if curve is not None or self.insecure or endpoint.startswith(("ipc://", "inproc://")):
            return endpoint
        if endpoint.startswith(EVERYWHERE):
            return HERE + endpoint.removeprefix(EVERYWHERE)
        if not is_loopback(endpoint.removeprefix("tcp://")):
            raise InvalidRequest(
                f"other hosts can reach {endpoint}, and events carry prompts: give a CURVE certificate and the folder "
                "of clients, or --insecure if the network itself is trusted"
            )
        return endpoint


@dataclass(frozen=True, slots=True)
class Publishing:
    """Where the publisher listens."""

    publish: str | None = option(
        "--events",
        metavar="ENDPOINT",
        help="Where subscribers of KV events connect, such as tcp://*:5557; by default there are no events.",
    )
    replay: str = option(
        "--events-replay",
        metavar="ENDPOINT",
        default=ANYWHERE,
        show_default=True,
        help="Where subscribers ask for events they missed.",
    )
    query: str = option(
        "--events-query",
        type=HOST_PORT,
        default=ANY_PORT,
        show_default=True,
        help="Where the publisher answers POST /query.",
    )
    certificate: str | None = option(
        "--events-curve-certificate", metavar="FILE", help="The publisher's CURVE certificate, with its secret key."
    )
    clients: str | None = option(
        "--events-curve-clients", metavar="FOLDER", help="Folder with the public keys of allowed subscribers."
    )

    def endpoints(self, secured: ServerAccess) -> EventAddresses | None:
        """Returns the options of ``kvstore events``; None if there is to be none. Raises InvalidRequest."""
        if self.publish is None:
            if self.certificate or self.clients or self.replay != ANYWHERE or self.query != ANY_PORT:
                raise InvalidRequest("--events-... are for a publisher of KV events: give --events ENDPOINT too")
            return None
        found = EventAddresses(
            self.publish,
            self.replay,
            self.query,
            self.certificate,
            self.clients,
            secured.access_file,
            secured.insecure,
        )
        found.at()
        return found


@dataclass(frozen=True, slots=True)
class EventNames:
    """Names in the published events, and the namespaces and tenants that they cover."""

    pod: str = option(
        "--pod",
        default="kvstore",
        show_default=True,
        help="Name of this publisher in topics; of several publishers of one name, one speaks.",
    )
    namespaces: tuple[str, ...] = option(
        "--namespace", multiple=True, metavar="NAME", help="Publish this namespace; may be repeated. By default all."
    )
    tenants: tuple[str, ...] = option(
        "--tenant", multiple=True, metavar="NAME", help="Publish this tenant; may be repeated. By default all."
    )
    medium: str = option("--medium", default="STORAGE", show_default=True, help="The medium that events name.")

    def scope(self) -> PublishScope:
        """Returns the names and the selection."""
        from kvstore.events.publisher import PublishScope

        tenants = frozenset(self.tenants) if self.tenants else None
        return PublishScope(self.pod, frozenset(self.namespaces), tenants, self.medium)


@click.command(cls=Command, short_help="Publish what the root stores and deletes, for routers.")
@takes("cluster", ClusterAccess)
@takes("endpoints", EventAddresses)
@takes("names", EventNames)
@takes("logging", Logging)
def events(cluster: ClusterAccess, endpoints: EventAddresses, names: EventNames, logging: Logging) -> None:
    """Publish KV events of ROOT in vLLM's format over ZeroMQ, removals before they happen, and answer POST /query.

    Prints one line when it is ready:

    \b
      ready publish=ENDPOINT replay=ENDPOINT query=HOST:PORT

    Events carry prompts. Without CURVE, tcp://*:PORT serves this host alone. Of several publishers with one --pod, one
    speaks; another goes on within seconds when it dies. Without --etcd the root must be a folder of this host.

    \b
    Examples:
      kvstore events --root /mnt/kv --etcd 10.0.0.5:2379 --publish tcp://*:5557 --replay tcp://*:5558
      kvstore events --root /mnt/kv --etcd 10.0.0.5:2379 --publish tcp://*:5557 --replay tcp://*:5558 \\
          --curve-certificate events.key_secret --curve-clients routers/ --namespace llama-3.1-8b
    """
    logging.configure()
    at = endpoints.at()
    from kvstore.events.publisher import open_publisher

    with ExitStack() as undo:
        stopper = undo.enter_context(Stopper())
        root = open_existing(cluster.root, cluster.root_options.read())
        undo.callback(root.close)
        meta = _meta(cluster, root)
        undo.callback(meta.close)
        publisher = open_publisher(root, meta, names.scope(), at)
        undo.callback(publisher.close)
        ready = f"ready publish={publisher.publish} replay={publisher.replay} query={publisher.query}"
        print(ready, flush=True)
        publisher.run(lambda: stopper.asked)


def _meta(cluster: ClusterAccess, root: Root) -> MetadataStore:
    """The metadata of the root. A folder of one host has none: then listings show what was removed.

    Raises InvalidRequest without etcd for a root of a cluster: removals would be published after they happened.
    """
    if cluster.etcd is not None:
        return cluster.etcd.open()
    from kvstore.meta.memory import MemoryMetadata, MemoryStore
    from kvstore.root.identity import newest_number

    if local_path(cluster.root) is None or newest_number(root):
        raise InvalidRequest("which etcd? give --etcd ENDPOINTS: only a folder of this host can do without")
    # Numbers of events begin at a revision, and a later publisher's must be higher. Hundredths of a second distinguish
    # restarts, and fit the 40 bits of a term.
    return MemoryMetadata(MemoryStore(revision=int(time.time() * 100)))
