"""A publisher put together: root, etcd, sockets and the answers for those who ask."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from urllib.parse import quote

from kvstore.events.doomed import Doomed
from kvstore.events.fence import Fence
from kvstore.events.limits import EventLimits
from kvstore.events.messages import MEDIUM, Naming
from kvstore.events.query import Answers
from kvstore.events.service import Service
from kvstore.events.sockets import Curve, Sockets
from kvstore.events.speaker import Speaker
from kvstore.events.truth import Truth
from kvstore.events.web import Serving, application, serve
from kvstore.meta.interface import Meta
from kvstore.meta.keys import Keys
from kvstore.meta.roots import check_bound
from kvstore.namespace import Namespace
from kvstore.root.identity import create_or_open
from kvstore.root.interface import Root
from kvstore.security.authenticator import Authenticator
from kvstore.sources import Clock, RandomIds, SystemClock


@dataclass(frozen=True, slots=True)
class Told:
    """The names and the selection of what is told."""

    pod: str = "kvstore"
    """The publisher's name in topics. Publishers of one name elect one that speaks."""
    namespaces: frozenset[str] = frozenset()
    """Names of namespaces; all if empty."""
    tenants: frozenset[str] | None = None
    """Tenants; all if None. Those without one have the empty name."""
    medium: str = MEDIUM
    whole_hashes: bool = False

    def wants(self, namespace: Namespace) -> bool:
        """True if a namespace is told of."""
        is_named = not self.namespaces or namespace.name in self.namespaces
        return is_named and (self.tenants is None or namespace.tenant in self.tenants)

    def topic(self, namespace: Namespace) -> str:
        """Returns ``kv@POD@MODEL``; with a tenant, ``kv@POD.TENANT@MODEL``. An ``@`` in a name becomes ``%40``."""
        pod = self.pod + (f".{namespace.tenant}" if namespace.tenant else "")
        return f"kv@{_quoted(pod)}@{_quoted(namespace.name)}"


@dataclass(frozen=True, slots=True)
class At:
    """Where a publisher listens. Endpoints are ZeroMQ's; ``query`` is ``host`` and ``port``."""

    publish: str
    replay: str | None = None
    query: tuple[str, int] = ("127.0.0.1", 0)
    curve: Curve | None = None
    authenticator: Authenticator | None = None


@dataclass(slots=True)
class Publisher:
    """An open publisher. ``run`` it, then close it."""

    publish: str
    replay: str
    query: str
    truth: Truth
    speaker: Speaker
    service: Service
    undo: ExitStack = field(repr=False)

    def run(self, ended: Callable[[], bool]) -> None:
        """Works until ``ended``."""
        self.service.run(ended)

    def close(self) -> None:
        """Ends everything; another publisher of this name may speak at once. Idempotent."""
        self.undo.close()


def open_publisher(
    root: Root,
    meta: Meta,
    told: Told,
    at: At,
    *,
    limits: EventLimits | None = None,
    clock: Clock | None = None,
    folder: str | None = None,
) -> Publisher:
    """Opens a publisher on a root and its metadata, which stay the caller's to close.

    ``folder`` is where tokens lie in a file without a name. Raises RootMismatch, InvalidRequest, Unavailable.
    """
    limits, clock, ids = limits or EventLimits(), clock or SystemClock(), RandomIds()
    identity = create_or_open(root, ids, create=False)
    check_bound(meta, root.url, identity.root)
    keys = Keys(identity.root)
    with ExitStack() as undo:
        truth = Truth(root, identity.shard_bits, Doomed(meta, keys, limits), told.wants, limits, clock, folder)
        undo.callback(truth.close)
        sockets = Sockets(at.publish, at.replay, at.curve)
        undo.callback(sockets.close)
        fence = Fence(meta, keys.speaker(told.pod), limits, clock, ids)
        undo.callback(fence.close)
        naming = Naming(told.medium, told.whole_hashes)
        speaker = Speaker(truth, fence, sockets.send, told.topic, naming, limits, clock)
        service = Service(truth, speaker, sockets, limits, clock)
        serving = _serving(Answers(truth, told.pod, told.medium), at)
        undo.callback(serving.close)
        return Publisher(sockets.publish, sockets.replay, serving.address, truth, speaker, service, undo.pop_all())


def _serving(answers: Answers, at: At) -> Serving:
    return serve(application(answers.answer, at.authenticator), *at.query)


def _quoted(text: str) -> str:
    """Quotes what separates the parts of a topic; anything else stays readable."""
    return quote(text, safe="/:.-_~ ")
