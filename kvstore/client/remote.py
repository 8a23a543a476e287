"""The port to workers over gRPC: the same calls as on a node in this process, with a deadline and failover on each.

Where no worker answers, a read is a miss (counted in ``stats()``), and everything else raises Unavailable.
gRPC does not survive a fork: connect in the child.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstore.buffers import Pieces
from kvstore.client.caller import Caller, CallFailed
from kvstore.client.counters import ClientCounters
from kvstore.client.discovery import Discovery
from kvstore.client.endpoint import Endpoint, check_address
from kvstore.client.endpoints import Endpoints
from kvstore.client.fetching import ChunkFetch
from kvstore.client.limits import ClientLimits
from kvstore.client.port import Sections
from kvstore.client.remote_blocks import RemoteBlocks
from kvstore.client.remote_hold import RemoteHold, Tools
from kvstore.client.streams import Outgoing, send_stream
from kvstore.errors import InvalidRequest, KVStoreError, Overloaded, Unavailable
from kvstore.hints import Hints
from kvstore.meta.etcd import EtcdTls, EtcdUser
from kvstore.namespace import Namespace
from kvstore.results import Cleared, PinRecord, PutResult
from kvstore.sources import Clock, SystemClock
from kvstore.tokens import TokenArray
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.messages import hints_message, namespace_message, namespace_of, pack_tokens, pin_of
from kvstore.wire.statuses import BrokenTransfer, UnknownNamespace
from kvstore.wire.watch import Watch

T = TypeVar("T")

PUT_ROUNDS_MAX = 3
"""A put begins again where chunks vanished after it looked for them; more often means that they keep vanishing."""


def remote_port(
    workers: Sequence[str],
    *,
    etcd: str | Sequence[str] | None = None,
    root: str | None = None,
    limits: ClientLimits | None = None,
    etcd_tls: EtcdTls | None = None,
    etcd_user: EtcdUser | None = None,
    clock: Clock | None = None,
) -> RemotePort:
    """A port to the workers given, or to those that etcd lists. Raises InvalidRequest."""
    if bool(workers) == bool(etcd):
        raise InvalidRequest("connect needs workers (host:port, one or several) or etcd=host:port: give one of the two")
    if root is not None and not etcd:
        raise InvalidRequest("root= says which of the roots in etcd is meant: it needs etcd=host:port")
    limits = limits or ClientLimits()
    if not etcd:
        return RemotePort([check_address(each) for text in workers for each in text.split(",")], limits, clock=clock)
    discovery = Discovery.of_etcd(etcd, root, etcd_tls, etcd_user, limits.probe_s)
    try:
        return RemotePort([], limits, discovery=discovery, clock=clock)
    except BaseException:
        discovery.close()
        raise


class RemotePort:
    """Workers as a port. Thread-safe. ``discovery``, where given, is closed with it."""

    def __init__(
        self,
        workers: Sequence[str],
        limits: ClientLimits | None = None,
        *,
        discovery: Discovery | None = None,
        clock: Clock | None = None,
    ) -> None:
        clock = clock or SystemClock()
        self.limits = limits = limits or ClientLimits()
        self.counters = counters = ClientCounters()
        self._discovery = discovery
        self.endpoints = Endpoints(workers, discovery.addresses if discovery else None, limits, counters, clock)
        self._caller = Caller(self.endpoints, counters, clock)
        self._watch = Watch(clock, "kvstore-client-watch")
        self._tools = Tools(self._caller, counters, limits, self._watch)
        self._blocks = RemoteBlocks(self._tools)

    # Namespaces

    def open_namespace(self, namespace: Namespace) -> None:
        request = pb.OpenNamespaceRequest(namespace=namespace_message(namespace))
        self._caller.unary("OpenNamespace", request.SerializeToString(), self.limits.pin_s, even_aside=True)

    def namespaces(self) -> list[Namespace]:
        raw = self._caller.every_message("ListNamespaces", b"", self.limits.read_s)
        return [namespace_of(pb.ListNamespacesResponse.FromString(each).namespace) for each in raw]

    # Prefixes

    def match(self, namespace: Namespace, tokens: TokenArray) -> int:
        return self._or_miss(lambda: self._match(namespace, tokens), 0)

    def get(self, namespace: Namespace, tokens: TokenArray, chunks_max: int, memory: Callable[[int], Sections]) -> int:
        layout = namespace.layout
        chunks_max = min(chunks_max, len(tokens) // layout.chunk_tokens)
        if not chunks_max:
            memory(0)
            return 0
        packed = pack_tokens(tokens[: chunks_max * layout.chunk_tokens])
        request = pb.GetRequest(namespace=namespace.digest, tokens=packed)
        fetch = ChunkFetch(layout, request, chunks_max, memory, self._caller, self.counters, self.limits, self._watch)
        timeout_s = self.limits.stream_s(self.limits.read_s, chunks_max * layout.chunk_bytes)

        def send(endpoint: Endpoint, _: float) -> None:
            fetch.run(endpoint)

        def read() -> None:
            self._caller.anywhere(send, timeout_s, _affinity(namespace, tokens))

        try:
            self._or_miss(lambda: self._reopening(namespace, read), None)
        except BrokenTransfer:
            pass  # counted where it was found; what came before it is good
        return fetch.good

    def hold(self, namespace: Namespace, tokens: TokenArray, ttl_s: float | None) -> RemoteHold:
        tokens = _full_chunks(namespace, tokens)
        nothing = RemoteHold(namespace, 0, b"", None, self._tools)
        if not len(tokens):
            return nothing
        request = pb.HoldRequest(namespace=namespace.digest, tokens=pack_tokens(tokens), ttl_s=ttl_s or 0.0)
        raw = request.SerializeToString()

        def send(endpoint: Endpoint, left_s: float) -> RemoteHold:
            answer = pb.HoldResponse.FromString(endpoint.unary("Hold")(raw, timeout=left_s))
            if not answer.chunks:
                return nothing
            return RemoteHold(namespace, answer.chunks, answer.hold, endpoint, self._tools)

        def take() -> RemoteHold:
            return self._caller.anywhere(send, self.limits.match_s, _affinity(namespace, tokens))

        try:
            return self._reopening(namespace, take)
        except Unavailable:
            self.counters.add("client_misses_unreachable")
            return nothing

    # Publishing

    def put(self, namespace: Namespace, tokens: TokenArray, first: int, sections: Sections, hints: Hints) -> PutResult:
        tokens = _full_chunks(namespace, tokens)
        size = namespace.layout.chunk_tokens
        count = len(tokens) // size
        if not count:
            return PutResult(0, 0, 0, 0)
        start = pb.PutStart(namespace=namespace.digest, tokens=pack_tokens(tokens), hints=hints_message(hints))
        begin = max(first, self._present(namespace, tokens))
        answer = self._put(namespace, start, begin, count, sections, tokens)
        for _ in range(PUT_ROUNDS_MAX - 1):
            if answer.tokens_present >= begin * size or answer.tokens_present < first * size:
                break
            # What the worker believed to be there is not: begin at the first chunk that is missing.
            begin = max(first, answer.tokens_present // size)
            answer = self._put(namespace, start, begin, count, sections, tokens)
        found_before = begin - first if answer.tokens_present >= begin * size else 0
        return PutResult(
            answer.tokens_present, answer.chunks_written, answer.chunks_found + found_before, answer.bytes_written
        )

    # Pins

    def pin(self, namespace: Namespace, tokens: TokenArray, ttl_s: float, owner: str) -> PinRecord:
        packed = pack_tokens(_full_chunks(namespace, tokens))
        request = pb.PinRequest(namespace=namespace.digest, tokens=packed, ttl_s=ttl_s, owner=owner)
        raw = request.SerializeToString()
        # Sent twice it would be two pins, one of which nobody knows of.
        answer = self._reopening(
            namespace,
            lambda: self._caller.unary(
                "Pin", raw, self.limits.pin_s, _affinity(namespace, tokens), may_repeat=False, even_aside=True
            ),
        )
        return pin_of(pb.PinResponse.FromString(answer).pin)

    def unpin(self, pin_id: str) -> bool:
        request = pb.UnpinRequest(id=pin_id).SerializeToString()
        return pb.UnpinResponse.FromString(
            self._caller.unary("Unpin", request, self.limits.pin_s, even_aside=True)
        ).found

    def pins(self) -> list[PinRecord]:
        raw = self._caller.every_message("ListPins", b"", self.limits.read_s)
        return [pin_of(pb.ListPinsResponse.FromString(each).pin) for each in raw]

    def refcount(self, namespace: Namespace, tokens: TokenArray) -> int:
        packed = pack_tokens(_full_chunks(namespace, tokens))
        request = pb.CountRefsRequest(namespace=namespace.digest, tokens=packed).SerializeToString()
        answer = self._reopening(
            namespace, lambda: self._caller.unary("CountRefs", request, self.limits.pin_s, even_aside=True)
        )
        return pb.CountRefsResponse.FromString(answer).refs

    # Blocks

    def put_blocks(self, namespace: Namespace, keys: Sequence[bytes], buffers: Pieces, hints: Hints) -> list[bool]:
        return self._reopening(namespace, lambda: self._blocks.put(namespace, keys, buffers, hints))

    def match_blocks(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        return self._or_miss(lambda: self._reopening(namespace, lambda: self._blocks.match(namespace, keys)), 0)

    def get_blocks(self, namespace: Namespace, keys: Sequence[bytes], buffers: Pieces) -> list[bool]:
        hits = [False] * len(keys)
        try:
            self._or_miss(
                lambda: self._reopening(namespace, lambda: self._blocks.get(namespace, keys, buffers, hits)), None
            )
        except BrokenTransfer:
            self.counters.add("client_misses_damaged")
        return hits

    # Looking after it

    def clear(self, namespace: Namespace) -> Cleared:
        request = pb.ClearRequest(namespace=namespace.digest).SerializeToString()
        answer = pb.ClearResponse.FromString(
            self._reopening(
                namespace, lambda: self._caller.unary("Clear", request, self.limits.clear_s, even_aside=True)
            )
        )
        return Cleared(answer.chunks, answer.bytes)

    def stats(self) -> dict[str, int | float]:
        """The sums over all workers that answer, and this client's own counts. Raises Unavailable where none does."""
        sums: dict[str, int | float] = {}
        answered = 0
        error: KVStoreError = Unavailable("no worker is known: start one")
        for endpoint in self.endpoints.every():
            try:
                raw = self._caller.at(
                    endpoint,
                    lambda at=endpoint: at.unary("Stats")(b"", timeout=self.limits.probe_s),  # type: ignore[misc]
                )
            except CallFailed as failed:
                error = failed.failed.error
                continue
            answered += 1
            answer = pb.StatsResponse.FromString(raw)
            for name, count in answer.counters.items():
                sums[name] = sums.get(name, 0) + count
            for name, value in answer.gauges.items():
                sums[name] = sums.get(name, 0) + (int(value) if value.is_integer() else value)
        if not answered:
            raise error
        return {**sums, "workers": answered, **self.counters.snapshot()}

    def close(self) -> None:
        if self._discovery is not None:
            self._discovery.close()  # first: the thread of the endpoints may be waiting for it
        self.endpoints.close()
        self._watch.close()

    def _match(self, namespace: Namespace, tokens: TokenArray) -> int:
        tokens = _full_chunks(namespace, tokens)
        if not len(tokens):
            return 0
        request = pb.MatchRequest(namespace=namespace.digest, tokens=pack_tokens(tokens)).SerializeToString()
        answer = self._reopening(
            namespace,
            lambda: self._caller.unary("Match", request, self.limits.match_s, _affinity(namespace, tokens)),
        )
        return pb.MatchResponse.FromString(answer).chunks

    def _present(self, namespace: Namespace, tokens: TokenArray) -> int:
        """What need not be sent. Not knowing costs only bytes, so an error is left to the put itself to meet."""
        try:
            return self._match(namespace, tokens)
        except (Unavailable, Overloaded):
            return 0

    def _put(
        self, namespace: Namespace, start: pb.PutStart, begin: int, count: int, sections: Sections, tokens: TokenArray
    ) -> pb.PutResponse:
        start.first = begin
        opening = start.SerializeToString()
        timeout_s = self.limits.stream_s(self.limits.write_s, (count - begin) * namespace.layout.chunk_bytes)

        def send(endpoint: Endpoint, left_s: float) -> bytes:
            outgoing = Outgoing((part for index in range(begin, count) for part in sections(index)), opening)
            return send_stream(endpoint.stream_out("Put"), outgoing, self._watch, self.limits.write_s, left_s)

        answer = self._reopening(
            namespace,
            lambda: self._caller.anywhere(send, timeout_s, _affinity(namespace, tokens), even_aside=True),
        )
        return pb.PutResponse.FromString(answer)

    def _reopening(self, namespace: Namespace, call: Callable[[], T]) -> T:
        """The call's result. Where the worker does not know the namespace (a new root), tells it and repeats."""
        try:
            return call()
        except UnknownNamespace:
            self.counters.add("client_namespaces_reopened")
        self.open_namespace(namespace)
        try:
            return call()
        except UnknownNamespace as unknown:
            raise Unavailable(f"a worker forgets what it is told: {unknown}") from unknown

    def _or_miss(self, call: Callable[[], T], miss: T) -> T:
        """The call's result, or ``miss`` where no worker could answer."""
        try:
            return call()
        except BrokenTransfer:
            raise
        except (Unavailable, Overloaded):
            self.counters.add("client_misses_unreachable")
            return miss


def _full_chunks(namespace: Namespace, tokens: TokenArray) -> TokenArray:
    """Without the trailing part chunk, which nobody can have stored."""
    return tokens[: len(tokens) - len(tokens) % namespace.layout.chunk_tokens]


def _affinity(namespace: Namespace, tokens: TokenArray) -> bytes:
    """The same for prompts that begin alike: the worker that saw one remembers which chunks of it are there."""
    return namespace.digest + tokens[: namespace.layout.chunk_tokens].tobytes()
