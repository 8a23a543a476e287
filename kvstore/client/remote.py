"""The port to workers over gRPC: the calls of a node in this process, each with a deadline and failover.

If no worker answers, a read is a miss (counted in ``stats()``), and all else raises Unavailable. It serves no fork.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from kvstore.buffers import Pieces, Planes, Sections
from kvstore.census.selection import Selection
from kvstore.client.bulk.lanes import FileLanes
from kvstore.client.bulk.links import Bulk, BulkName
from kvstore.client.bulk.sending import ChunkCargo
from kvstore.client.caller import Caller, Renewing, Reopening, Tools
from kvstore.client.control import Control, selection_message
from kvstore.client.credentials import PLAIN, Credentials
from kvstore.client.endpoints import Endpoint, Endpoints, addresses_in, check_address
from kvstore.client.fetching import BlockFetch, ChunkFetch, Fetch
from kvstore.client.limits import ClientLimits, checked_limits
from kvstore.client.operation import Operation
from kvstore.client.port import PortBranches
from kvstore.client.putting import put_over_grpc, put_past_grpc
from kvstore.client.remote_blocks import RemoteBlockHold, RemoteBlocks, RemoteBranches, naming_of
from kvstore.client.remote_hold import RemoteHold
from kvstore.client.remote_operations import RemoteOperations
from kvstore.client.spreading import Marking, marks_of, marks_of_keys
from kvstore.counts import ClientCount, merged
from kvstore.errors import InvalidRequest, KVStoreError, Overloaded, Unavailable
from kvstore.format.header import Ancestry
from kvstore.hints import Hints
from kvstore.keyset import BlockKeys, ChunkKeys, leading
from kvstore.meta.etcd import EtcdMeta, EtcdTls, EtcdUser
from kvstore.meta.keys import ID_BYTES, Keys, parse_id
from kvstore.meta.store import Meta
from kvstore.meta.workers import Workers
from kvstore.namespace import Namespace
from kvstore.node.counters import Counts
from kvstore.node.prefetch import TierName
from kvstore.results import Cleared, PinRecord, PutResult, StoredBlocks
from kvstore.security.tls import ClientTls
from kvstore.sources import Clock, SystemClock
from kvstore.text import brief
from kvstore.tokens import TokenArray
from kvstore.v1 import control_pb2 as control
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.messages import (
    hints_message,
    namespace_of,
    pack_prompts,
    pack_tokens,
    pin_of,
    sealed,
    unpack_counts,
    unpack_tokens,
    write_message,
)
from kvstore.wire.statuses import BrokenTransfer, UnknownNamespace
from kvstore.wire.watch import Watch
from kvstore.writes import WriteMode, WriteModeName

# Discovery of workers in etcd, for one root.


ROOTS = "/kv/roots/"


class Discovery:
    """Looks up workers in a cluster's metadata. ``root`` is the root's id in hex, required if the cluster has several.

    Raises InvalidRequest if ``root`` is not an id.
    """

    def __init__(self, meta: Meta, root: str | None) -> None:
        self._meta = meta
        self._root: bytes | None = None
        if root is not None:
            self._root = parse_id(root) if isinstance(root, str) else None
            if self._root is None:
                raise InvalidRequest(
                    f"root={brief(root)}: expected the root's id, {2 * ID_BYTES} hex digits, as its FORMAT has it"
                )

    @classmethod
    def of_etcd(
        cls,
        etcd: str | Sequence[str],
        root: str | None,
        tls: EtcdTls | None,
        user: EtcdUser | None,
        timeout_s: float,
    ) -> Discovery:
        """Connects to etcd at ``host:port``; several as a list or separated by commas."""
        return cls(EtcdMeta(etcd, tls=tls, user=user, timeout_s=timeout_s), root)

    def addresses(self) -> list[str]:
        """Returns the addresses of all workers of the root; none if no root is known yet.

        Raises InvalidRequest, which names them, if there are several roots; Unavailable or PermissionDenied.
        """
        if self._root is None:
            found = self._meta.list(ROOTS)
            roots = sorted({kv.value for kv in found.items if len(kv.value) == ID_BYTES})
            if len(roots) > 1:
                # A root without workers, perhaps made from a mistyped path, must not hide the others.
                roots = [root for root in roots if Workers(self._meta, Keys(root)).list()] or roots
            if len(roots) > 1:
                names = ", ".join(root.hex() for root in roots)
                raise InvalidRequest(
                    f"etcd knows {len(roots)} roots: say which one is meant, root= (--root-id) one of {names}"
                )
            if not roots:
                return []
            self._root = roots[0]
        workers = Workers(self._meta, Keys(self._root)).list()
        return sorted({record.address for record in workers.values()})

    def close(self) -> None:
        """Closes the connection to etcd; idempotent."""
        self._meta.close()


def remote_port(
    workers: Sequence[str],
    *,
    etcd: str | Sequence[str] | None = None,
    root: str | None = None,
    limits: ClientLimits | None = None,
    etcd_tls: EtcdTls | None = None,
    etcd_user: EtcdUser | None = None,
    clock: Clock | None = None,
    bulk: Bulk | BulkName | None = None,
    write: WriteMode | WriteModeName | None = None,
    tls: ClientTls | None = None,
    token_file: str | Path | None = None,
) -> RemotePort:
    """Returns a port to the given workers, or to those that etcd lists. Raises InvalidRequest.

    ``bulk`` is the path of chunk bytes: ``shared`` (memory and files of this host), ``tcp`` (a separate connection),
    ``grpc``, or ``auto`` (the first of these that works); None reads KVSTORE_BULK from the environment. A required path
    that no worker offers raises InvalidRequest; a worker that offers it and is silent on it counts as silent. ``write``
    is the default write mode; None is the worker's. ``tls`` and ``token_file`` authenticate client and workers.
    """
    if bool(workers) == bool(etcd):
        raise InvalidRequest("connect needs workers (host:port, one or several) or etcd=host:port: give one of the two")
    if root is not None and not etcd:
        raise InvalidRequest("root= chooses one of the roots in etcd: give etcd=host:port as well")
    limits = ClientLimits() if limits is None else checked_limits(limits)
    way, mode = Bulk.of(bulk), None if write is None else WriteMode.of(write)
    credentials = Credentials(tls, token_file)
    if not etcd:
        addresses = [check_address(each) for text in workers for each in addresses_in(text)]
        return RemotePort(addresses, limits, clock=clock, bulk=way, write=mode, credentials=credentials)
    discovery = Discovery.of_etcd(etcd, root, etcd_tls, etcd_user, limits.probe_s)
    try:
        return RemotePort([], limits, discovery=discovery, clock=clock, bulk=way, write=mode, credentials=credentials)
    except BaseException:
        discovery.close()
        raise


class RemotePort:
    """Workers as a port. Thread-safe. Closes ``discovery``, if given."""

    def __init__(
        self,
        workers: Sequence[str],
        limits: ClientLimits | None = None,
        *,
        discovery: Discovery | None = None,
        clock: Clock | None = None,
        bulk: Bulk = Bulk.AUTO,
        write: WriteMode | None = None,
        credentials: Credentials = PLAIN,
    ) -> None:
        self.tells_fresh = False
        self._clock = clock = clock or SystemClock()
        self.limits = limits = limits or ClientLimits()
        self.counters = counters = Counts(ClientCount)
        addresses = discovery.addresses if discovery else None
        self.endpoints = Endpoints(workers, addresses, limits, counters, clock, bulk, credentials)
        self._caller = Caller(self.endpoints, counters, clock)
        watch, lanes = Watch(clock, "kvstore-client-watch"), FileLanes(clock)
        self._tools = Tools(self._caller, counters, limits, watch, lanes, Renewing(clock), write)
        self._blocks, self._reopening = RemoteBlocks(self._tools), Reopening(self._caller, counters, limits.pin_s)
        self.branches: PortBranches = RemoteBranches(self._tools)
        self.shared: dict[Hashable, Any] = {}
        self.parts = ExitStack()
        """What is closed with the port, last first; it does not refer to the port."""
        for close in (lanes.close, watch.close, self.endpoints.close, self._tools.renewing.close, self.endpoints.stop):
            self.parts.callback(close)
        if discovery is not None:
            self.parts.callback(discovery.close)  # first: the thread of the endpoints may be waiting for it

    @property
    def place(self) -> str:
        return self.endpoints.place

    @property
    def _operations(self) -> RemoteOperations:
        return RemoteOperations(self, self._caller, self.endpoints, self.limits)

    # Namespaces

    def open_namespace(self, namespace: Namespace) -> None:
        self._reopening.open(namespace)

    def namespaces(self) -> list[Namespace]:
        raw = self._caller.every_message("ListNamespaces", b"", self.limits.read_s)
        return [namespace_of(pb.ListNamespacesResponse.FromString(each).namespace) for each in raw]

    # Prefixes

    def match(self, namespace: Namespace, tokens: TokenArray, *, counts: bool = True) -> int:
        tokens = _full_chunks(namespace, tokens)
        if not len(tokens):
            self._caller.check()
            return 0
        answer = self._matched(namespace, tokens, tokens=pack_tokens(tokens), uncounted=not counts)
        return answer.chunks if answer is not None else 0

    def match_each(self, namespace: Namespace, prompts: Sequence[TokenArray]) -> list[int]:
        answer = self._matched(namespace, prompts[0], uncounted=True, **pack_prompts(prompts))
        return unpack_counts(answer.each, len(prompts)) if answer is not None else []

    def get(self, namespace: Namespace, tokens: TokenArray, chunks_max: int, memory: Callable[[int], Sections]) -> int:
        layout = namespace.layout
        chunks_max = min(chunks_max, len(tokens) // layout.chunk_tokens)
        if not chunks_max:
            self._caller.check()
            memory(0)
            return 0
        packed = pack_tokens(tokens[: chunks_max * layout.chunk_tokens])
        request = pb.GetRequest(namespace=namespace.digest, tokens=packed)
        fetch = ChunkFetch(namespace, unpack_tokens(packed), request, chunks_max, memory, self._tools)
        self._receive(namespace, fetch, partial(marks_of, namespace, tokens))
        return leading(fetch.done)

    def hold(self, namespace: Namespace, tokens: TokenArray, ttl_s: float | None, *, counts: bool = True) -> RemoteHold:
        tokens = _full_chunks(namespace, tokens)
        nothing = RemoteHold(namespace, b"", pb.HoldResponse(), None, self._tools)
        if not len(tokens):
            self._caller.check()
            return nothing
        packed = pack_tokens(tokens)
        request = pb.HoldRequest(namespace=namespace.digest, tokens=packed, ttl_s=ttl_s or 0.0, uncounted=not counts)

        def send(endpoint: Endpoint, left_s: float) -> RemoteHold:
            answer = pb.HoldResponse.FromString(endpoint.call("Hold", request, left_s))
            if not answer.chunks:
                return nothing
            return RemoteHold(namespace, packed, answer, endpoint, self._tools)

        def take() -> RemoteHold:
            return self._caller.anywhere(send, self.limits.match_s, partial(marks_of, namespace, tokens))

        try:
            return self._reopening(namespace, take)
        except Unavailable:
            self.counters.add(ClientCount.MISSES_UNREACHABLE)
            return nothing

    # Publishing

    def put(
        self,
        namespace: Namespace,
        tokens: TokenArray,
        first: int,
        sections: Sections,
        hints: Hints,
        write: WriteMode | None = None,
    ) -> PutResult:
        tokens = _full_chunks(namespace, tokens)
        count = len(tokens) // namespace.layout.chunk_tokens
        if not count:
            self._caller.check()
            return PutResult(0, 0, 0, 0)
        start = pb.PutStart(
            namespace=namespace.digest,
            tokens=pack_tokens(tokens),
            hints=hints_message(hints),
            first=first,
            write=write_message(write or self._tools.write),
        )
        timeout_s = self.limits.stream_s(self.limits.write_s, (count - first) * namespace.layout.chunk_bytes)

        def send(endpoint: Endpoint, left_s: float) -> pb.PutResponse:
            answer: pb.PutResponse | None = None
            if isinstance(sections, Planes):
                cargo = partial(ChunkCargo, sections, namespace.layout, count)
                answer = put_past_grpc(endpoint, start, cargo, self._tools, left_s)
            if answer is None:
                answer = put_over_grpc(endpoint, start, ChunkKeys.of(namespace, tokens), sections, self._tools, left_s)
            return answer

        answer = self._reopening(
            namespace,
            lambda: self._caller.anywhere(send, timeout_s, partial(marks_of, namespace, tokens), even_aside=True),
        )
        return PutResult(
            answer.tokens_present, answer.chunks_written, answer.chunks_found, answer.bytes_written, answer.reason
        )

    # Pins

    def pin(self, namespace: Namespace, prompt: TokenArray | list[bytes], ttl_s: float, owner: str) -> PinRecord:
        fields, marks = naming_of(namespace, prompt)
        raw = sealed(pb.PinRequest(namespace=namespace.digest, ttl_s=ttl_s, owner=owner, **fields))
        # Sent twice it would be two pins, one of which nobody knows of.
        answer = self._reopening(
            namespace,
            lambda: self._caller.unary("Pin", raw, self.limits.pin_s, marks, may_repeat=False, even_aside=True),
        )
        return pin_of(pb.PinResponse.FromString(answer).pin)

    def unpin(self, pin_id: str) -> bool:
        answer = self._caller.unary("Unpin", sealed(pb.UnpinRequest(id=pin_id)), self.limits.pin_s, even_aside=True)
        return pb.UnpinResponse.FromString(answer).found

    def pins(self) -> list[PinRecord]:
        raw = self._caller.every_message("ListPins", b"", self.limits.read_s)
        return [pin_of(pb.ListPinsResponse.FromString(each).pin) for each in raw]

    def refcount(self, namespace: Namespace, tokens: TokenArray) -> int:
        chunks = _full_chunks(namespace, tokens)
        request = sealed(pb.CountRefsRequest(namespace=namespace.digest, tokens=pack_tokens(chunks)))
        answer = self._reopening(
            namespace, lambda: self._caller.unary("CountRefs", request, self.limits.pin_s, even_aside=True)
        )
        return pb.CountRefsResponse.FromString(answer).refs

    # Blocks

    def put_blocks(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Pieces,
        hints: Hints,
        write: WriteMode | None = None,
        ancestry: Ancestry | None = None,
    ) -> StoredBlocks:
        return self._reopening(namespace, lambda: self._blocks.put(namespace, keys, buffers, hints, write, ancestry))

    def match_blocks(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        return self._reopening.or_miss(namespace, lambda: self._blocks.match(namespace, keys), 0)

    def present_blocks(self, namespace: Namespace, keys: Sequence[bytes]) -> list[bool]:
        return self._reopening.or_miss(namespace, lambda: self._blocks.present(namespace, keys), [False] * len(keys))

    def block_sizes(self, namespace: Namespace, keys: Sequence[bytes]) -> list[int]:
        return self._reopening(namespace, lambda: self._blocks.sizes(namespace, keys))

    def hold_blocks(self, namespace: Namespace, keys: Sequence[bytes], ttl_s: float | None) -> RemoteBlockHold:
        try:
            return self._reopening(namespace, lambda: self._blocks.hold(namespace, keys, ttl_s))
        except Unavailable:
            self.counters.add(ClientCount.MISSES_UNREACHABLE)
            return self._blocks.unheld(namespace, keys)

    def get_blocks(self, namespace: Namespace, keys: Sequence[bytes], buffers: Pieces) -> list[bool]:
        if not keys:
            self._caller.check()
            return []
        fetch = BlockFetch(BlockKeys.of(namespace, keys, [len(buffer) for buffer in buffers]), buffers, self._tools)
        self._receive(namespace, fetch, partial(marks_of_keys, keys))
        return list(map(bool, fetch.done))

    # Prefetch

    def prefetch(self, namespace: Namespace, tokens: TokenArray, tier: TierName, worker: str | None) -> Operation:
        request = control.PrefetchRequest(
            namespace=namespace.digest, tokens=pack_tokens(_full_chunks(namespace, tokens)), tier=tier
        )
        begin = partial(self._operations.begin, "Prefetch", request, worker, partial(marks_of, namespace, tokens))
        return self._reopening(namespace, begin)

    def evict_first(self, namespace: Namespace, tokens: TokenArray) -> None:
        request = control.EvictFirstRequest(
            namespace=namespace.digest, tokens=pack_tokens(_full_chunks(namespace, tokens))
        )
        with suppress(UnknownNamespace):  # a new root has none of it
            self._caller.unary(
                "Control.EvictFirst", sealed(request), self.limits.match_s, partial(marks_of, namespace, tokens)
            )

    def operations(self) -> list[Operation]:
        return self._operations.every()

    # Statistics and closing

    def clear(self, namespace: Namespace) -> Cleared:
        request = sealed(pb.ClearRequest(namespace=namespace.digest))
        raw = self._reopening(
            namespace, lambda: self._caller.unary("Clear", request, self.limits.clear_s, even_aside=True)
        )
        answer = pb.ClearResponse.FromString(raw)
        return Cleared(answer.chunks, answer.bytes, answer.pinned, unconfirmed=tuple(answer.unconfirmed))

    def stats(self) -> dict[str, int | float]:
        """Returns the sums over all workers that answer, and this client's counts. Raises Unavailable if none does.

        Some gauges are no sums: see ``counts.merged``.
        """
        answers = list(self.stats_each().values())
        found = [each for each in answers if not isinstance(each, KVStoreError)]
        if not found:
            raise next((each for each in answers if isinstance(each, KVStoreError)), self._caller.none_known())
        return {**merged(found), "workers": len(found), **self.counters.snapshot()}

    def clear_selected(self, selection: Selection, *, dry_run: bool, pinned: bool, worker: str | None) -> Operation:
        request = control.ClearSelectedRequest(selection=selection_message(selection), dry_run=dry_run, pinned=pinned)
        return self._operations.begin("ClearSelected", request, worker)

    def control(self) -> Control:
        return Control(self, self._caller, self.endpoints, self.limits)

    def stats_each(self) -> dict[str, dict[str, int | float] | KVStoreError]:
        answers = self._caller.each("Stats", b"", self.limits.stats_s)
        return {
            address: raw if isinstance(raw, KVStoreError) else _counts(pb.StatsResponse.FromString(raw))
            for address, raw in answers.items()
        }

    def close(self) -> None:
        if self.endpoints.owner.is_here:  # in a forked child, threads and connections belong to the parent
            self.parts.close()

    def _receive(self, namespace: Namespace, fetch: Fetch, marks: Marking) -> None:
        """Reads from one worker after the other; what none of them could give is a miss."""
        try:
            self._reopening(namespace, partial(self._caller.anywhere, fetch.receive, fetch.timeout_s, marks))
        except BrokenTransfer:
            pass  # counted where it was found; what came before it is good
        except (Unavailable, Overloaded):
            self.counters.add(ClientCount.MISSES_UNREACHABLE)

    def _matched(self, namespace: Namespace, like: TokenArray, **asked: Any) -> pb.MatchResponse | None:
        """Asks the worker that would serve the prompt ``like``. Returns None if no worker could answer."""
        raw = sealed(pb.MatchRequest(namespace=namespace.digest, **asked))
        call = partial(self._caller.unary, "Match", raw, self.limits.match_s, partial(marks_of, namespace, like))
        answer: bytes | None = self._reopening.or_miss(namespace, call, None)
        return pb.MatchResponse.FromString(answer) if answer is not None else None


def _counts(answer: pb.StatsResponse) -> dict[str, int | float]:
    """Returns counters and gauges in one dict; whole numbers as int."""
    gauges = {name: int(value) if value.is_integer() else value for name, value in answer.gauges.items()}
    return {**answer.counters, **gauges}


def _full_chunks(namespace: Namespace, tokens: TokenArray) -> TokenArray:
    """Returns the tokens without the trailing part chunk, which is never stored."""
    return tokens[: len(tokens) - len(tokens) % namespace.layout.chunk_tokens]
