"""The port to workers over gRPC: the calls of a node in this process, each with a deadline and failover.

If no worker answers, a read is a miss (counted in ``stats()``), and all else raises Unavailable. It serves no fork.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from kvstore.census.selection import Selection
from kvstore.client.control import Control, selection_message
from kvstore.client.failover import Caller, CallFailed, Endpoint, WorkerEndpoints, addresses_in, check_address
from kvstore.client.fetch import BlockFetch, ChunkFetch, ReceivedViews, RemoteRead
from kvstore.client.limits import ClientLimits, checked_limits
from kvstore.client.operation import Operation
from kvstore.client.pool import PLAIN, Bulk, BulkName, Credentials
from kvstore.client.routing import Marking, marks_of, marks_of_keys
from kvstore.client.transport import Prompt
from kvstore.client.upload import BlockUpload, ChunkUpload, put_over_grpc, put_past_grpc
from kvstore.core.address import TokenArray
from kvstore.core.buffers import BlockBuffers, BufferMap, Pieces, Planes
from kvstore.core.clock import Clock, SystemClock
from kvstore.core.metrics import ClientCount, Counts, merged
from kvstore.core.namespace import Namespace
from kvstore.core.operations import NoOperation, OperationState, OperationStatus
from kvstore.core.recency import Hints
from kvstore.core.results import Cleared, LayerMemory, PinRecord, PutResult, StoredBlocks
from kvstore.core.validate import TierName, brief
from kvstore.core.write_mode import WriteMode, WriteModeName
from kvstore.errors import HoldBroken, InvalidRequest, KVStoreError, Overloaded, Unavailable
from kvstore.format.header import Ancestry
from kvstore.format.keyset import BlockKeys, ChunkKeys, leading
from kvstore.meta.etcd import EtcdMetadata, EtcdTls, EtcdUser
from kvstore.meta.keys import ID_BYTES, Keys, parse_id
from kvstore.meta.store import MetadataStore
from kvstore.meta.workers import WorkerRegistry
from kvstore.security.tls import ClientTls
from kvstore.transport.messages import (
    TOKEN_BYTES,
    hints_message,
    namespace_of,
    pack_descents,
    pack_keys,
    pack_prompts,
    pack_sizes,
    pack_tokens,
    pin_of,
    sealed,
    unpack_counts,
    unpack_tokens,
    write_message,
)
from kvstore.transport.status import BrokenTransfer, Busy, UnknownNamespace
from kvstore.v1 import control_pb2 as control
from kvstore.v1 import kvstore_pb2 as pb

# Discovery of workers in etcd, for one root.


ROOTS = "/kv/roots/"


class Discovery:
    """Looks up workers in a cluster's metadata. ``root`` is the root's id in hex, required if the cluster has several.

    Raises InvalidRequest if ``root`` is not an id.
    """

    def __init__(self, meta: MetadataStore, root: str | None) -> None:
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
        return cls(EtcdMetadata(etcd, tls=tls, user=user, timeout_s=timeout_s), root)

    def addresses(self) -> list[str]:
        """Returns the addresses of all workers of the root; none if no root is known yet.

        Raises InvalidRequest, which names them, if there are several roots; Unavailable or PermissionDenied.
        """
        if self._root is None:
            found = self._meta.list(ROOTS)
            roots = sorted({kv.value for kv in found.items if len(kv.value) == ID_BYTES})
            if len(roots) > 1:
                # A root without workers, perhaps made from a mistyped path, must not hide the others.
                roots = [root for root in roots if WorkerRegistry(self._meta, Keys(root)).list()] or roots
            if len(roots) > 1:
                names = ", ".join(root.hex() for root in roots)
                raise InvalidRequest(
                    f"etcd knows {len(roots)} roots: say which one is meant, root= (--root-id) one of {names}"
                )
            if not roots:
                return []
            self._root = roots[0]
        workers = WorkerRegistry(self._meta, Keys(self._root)).list()
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
) -> RemoteTransport:
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
        return RemoteTransport(addresses, limits, clock=clock, bulk=way, write=mode, credentials=credentials)
    discovery = Discovery.of_etcd(etcd, root, etcd_tls, etcd_user, limits.probe_s)
    try:
        return RemoteTransport(
            [], limits, discovery=discovery, clock=clock, bulk=way, write=mode, credentials=credentials
        )
    except BaseException:
        discovery.close()
        raise


H = TypeVar("H")


class RemoteTransport:
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
        self.reports_fresh = False
        clock = clock or SystemClock()
        self.limits = limits = limits or ClientLimits()
        self.counters = counters = Counts(ClientCount)
        addresses = discovery.addresses if discovery else None
        self.endpoints = WorkerEndpoints(workers, addresses, limits, counters, clock, bulk, credentials)
        self._caller = caller = Caller(self.endpoints, counters, limits, clock, write)
        self.shared: dict[Hashable, Any] = {}
        self.parts = ExitStack()
        """What is closed with the port, last first; it does not refer to the port."""
        for part in (caller.lanes, caller.watch, self.endpoints, caller.renewing):
            self.parts.callback(part.close)
        self.parts.callback(self.endpoints.stop)
        if discovery is not None:
            self.parts.callback(discovery.close)  # first: the thread of the endpoints may be waiting for it

    @property
    def place(self) -> str:
        return self.endpoints.place

    # Namespaces

    def open_namespace(self, namespace: Namespace) -> None:
        self._caller.open(namespace)

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

    def get(self, namespace: Namespace, tokens: TokenArray, chunks_max: int, memory: Callable[[int], BufferMap]) -> int:
        layout = namespace.layout
        chunks_max = min(chunks_max, len(tokens) // layout.chunk_tokens)
        if not chunks_max:
            self._caller.check()
            memory(0)
            return 0
        packed = pack_tokens(tokens[: chunks_max * layout.chunk_tokens])
        request = pb.GetRequest(namespace=namespace.digest, tokens=packed)
        fetch = ChunkFetch(namespace, unpack_tokens(packed), request, chunks_max, memory, self._caller)
        self._receive(namespace, fetch, partial(marks_of, namespace, tokens))
        return leading(fetch.done)

    def hold(self, namespace: Namespace, tokens: TokenArray, ttl_s: float | None, *, counts: bool = True) -> RemoteHold:
        packed = pack_tokens(_full_chunks(namespace, tokens))

        def held(answer: pb.HoldResponse, endpoint: Endpoint | None) -> RemoteHold:
            return RemoteHold(namespace, packed, answer, endpoint, self._caller)

        if not packed:
            self._caller.check()
            return held(pb.HoldResponse(), None)
        request = pb.HoldRequest(namespace=namespace.digest, tokens=packed, ttl_s=ttl_s or 0.0, uncounted=not counts)
        return self._hold(namespace, request, partial(marks_of, namespace, tokens), held)

    # Publishing

    def put(
        self,
        namespace: Namespace,
        tokens: TokenArray,
        first: int,
        sections: Planes,
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
            write=write_message(write or self._caller.write),
        )
        timeout_s = self._caller.stream_s(self.limits.write_s, (count - first) * namespace.layout.chunk_bytes)

        cargo = ChunkUpload(sections, namespace.layout, count)

        def send(endpoint: Endpoint, left_s: float) -> pb.PutResponse:
            answer = put_past_grpc(endpoint, start, cargo, self._caller, left_s)
            if answer is None:
                answer = put_over_grpc(endpoint, start, ChunkKeys.of(namespace, tokens), sections, self._caller, left_s)
            return answer

        answer = self._caller.within(
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
        # A repeated request would make a second pin, which no caller knows.
        answer = self._caller.within(
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
        answer = self._caller.within(
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
        if not keys:
            self._caller.check()
            return StoredBlocks((), ())
        sizes, ancestry = [len(buffer) for buffer in buffers], ancestry or Ancestry()
        start = pb.PutStart(
            namespace=namespace.digest,
            keys=pack_keys(keys),
            sizes=pack_sizes(sizes),
            hints=hints_message(hints),
            write=write_message(write or self._caller.write),
            first=ancestry.first,
            descents=pack_descents(ancestry.descents) if ancestry.descents else b"",
        )

        cargo = BlockUpload(buffers)

        def send(endpoint: Endpoint, left_s: float) -> StoredBlocks:
            answer = put_past_grpc(endpoint, start, cargo, self._caller, left_s)
            if answer is None:
                wanted, sections = BlockKeys.of(namespace, keys, sizes), BlockBuffers(buffers)
                answer = put_over_grpc(endpoint, start, wanted, sections, self._caller, left_s)
            each = _each(answer.stored, keys)
            return StoredBlocks(each, each, answer.reason)

        timeout_s, marks = self._caller.stream_s(self.limits.write_s, sum(sizes)), partial(marks_of_keys, keys)
        return self._caller.within(namespace, lambda: self._caller.anywhere(send, timeout_s, marks, even_aside=True))

    def match_blocks(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        if not keys:
            self._caller.check()
            return 0
        look = partial(self._look_for, namespace, keys)
        return self._caller.or_miss(namespace, lambda: min(look().blocks, len(keys)), 0)

    def present_blocks(self, namespace: Namespace, keys: Sequence[bytes]) -> list[bool]:
        if not keys:
            self._caller.check()
            return []
        look = partial(self._look_for, namespace, keys, each=True)
        return self._caller.or_miss(namespace, lambda: _each(look().present, keys), [False] * len(keys))

    def block_sizes(self, namespace: Namespace, keys: Sequence[bytes]) -> list[int]:
        try:
            answer = self._caller.within(namespace, partial(self._look_for, namespace, keys, sizes=True))
        except (Unavailable, Overloaded):
            return [0] * len(keys)  # the read that asks has counted its miss
        found: list[int] = np.frombuffer(answer.sizes, "<u4").tolist()
        return found if len(found) == len(keys) else [0] * len(keys)

    def hold_blocks(self, namespace: Namespace, keys: Sequence[bytes], ttl_s: float | None) -> RemoteBlockHold:
        def held(answer: pb.HoldResponse, endpoint: Endpoint | None) -> RemoteBlockHold:
            present = [False] * len(keys) if endpoint is None else _each(answer.present, keys)
            return RemoteBlockHold(namespace, present, answer, endpoint, self._caller)

        if not keys:
            self._caller.check()
            return held(pb.HoldResponse(), None)
        request = pb.HoldRequest(namespace=namespace.digest, ttl_s=ttl_s or 0.0, keys=pack_keys(keys))
        return self._hold(namespace, request, partial(marks_of_keys, keys), held)

    def get_blocks(self, namespace: Namespace, keys: Sequence[bytes], buffers: Pieces) -> list[bool]:
        if not keys:
            self._caller.check()
            return []
        fetch = BlockFetch(BlockKeys.of(namespace, keys, [len(buffer) for buffer in buffers]), buffers, self._caller)
        self._receive(namespace, fetch, partial(marks_of_keys, keys))
        return list(map(bool, fetch.done))

    # Branches, memory and disk

    def supersede(self, namespace: Namespace, prompt: Prompt, first: int, unused_s: float) -> None:
        fields, marks = naming_of(namespace, prompt)
        if not any(fields.values()):
            self._caller.check()
            return
        request = pb.SupersedeRequest(namespace=namespace.digest, first=first, unused_s=unused_s, **fields)
        with suppress(UnknownNamespace):  # a root that is new holds no branch
            self._caller.unary("Supersede", sealed(request), self.limits.match_s, marks)

    def evict_first(self, namespace: Namespace, tokens: TokenArray) -> None:
        fields, marks = naming_of(namespace, tokens)
        request = control.EvictFirstRequest(namespace=namespace.digest, **fields)
        with suppress(UnknownNamespace):  # a new root has none of it
            self._caller.unary("Control.EvictFirst", sealed(request), self.limits.match_s, marks)

    # Operations

    def prefetch(self, namespace: Namespace, tokens: TokenArray, tier: TierName, worker: str | None) -> Operation:
        fields, marks = naming_of(namespace, tokens)
        request = control.PrefetchRequest(namespace=namespace.digest, tier=tier, **fields)
        return self._caller.within(namespace, partial(self._begin, "Prefetch", request, worker, marks))

    def clear_selected(self, selection: Selection, *, dry_run: bool, pinned: bool, worker: str | None) -> Operation:
        request = control.ClearSelectedRequest(selection=selection_message(selection), dry_run=dry_run, pinned=pinned)
        return self._begin("ClearSelected", request, worker)

    def operations(self) -> list[Operation]:
        found: list[OperationStatus] = []
        errors: list[KVStoreError] = []
        endpoints = self.endpoints.every()
        for endpoint in endpoints:
            stub = endpoint.stream_in("Control.ListOperations")
            try:
                raw = self._caller.at(endpoint, lambda: list(stub(b"", timeout=self.limits.pin_s)))  # noqa: B023
            except CallFailed as failed:
                errors.append(failed.failed.error)
            else:
                found += [status_of(control.OperationResponse.FromString(each), endpoint.address) for each in raw]
        if len(errors) == len(endpoints):
            raise errors[0] if errors else self.endpoints.none_known()
        return [Operation(RemoteRun(self, each)) for each in sorted(found, key=lambda each: -each.began_s)]

    def operation_call(self, name: str, request: Message, worker: str, wait_s: float) -> OperationStatus:
        """Returns the answer of its worker to a call about an operation.

        Raises NoOperation if the worker has none, or has left, and what the call raises.
        """
        send = partial(_send_operation, name, sealed(request))
        try:
            return self._caller.at_worker(worker, send, wait_s + self.limits.pin_s)
        except NoOperation as gone:
            raise NoOperation(
                "the worker has no record of it: it ended long ago, or the worker was restarted"
            ) from gone
        except InvalidRequest as gone:
            if worker not in {each.address for each in self.endpoints.every()}:
                raise NoOperation(f"worker {worker} has left, and its operations have ended: begin it again") from gone
            raise

    def _begin(self, name: str, request: Message, worker: str | None, marks: Marking | None = None) -> Operation:
        """Begins an operation by the call ``name`` at a worker, by default the best one. Raises what it raised."""
        # A repeated request would begin a second operation, which no caller follows.
        send = partial(_send_operation, name, sealed(request))
        status = self._caller.at_worker(worker, send, self.limits.pin_s, marks, may_repeat=False)
        return Operation(RemoteRun(self, status))

    # Statistics and closing

    def clear(self, namespace: Namespace) -> Cleared:
        request = sealed(pb.ClearRequest(namespace=namespace.digest))
        raw = self._caller.within(
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

    def _receive(self, namespace: Namespace, fetch: RemoteRead, marks: Marking) -> None:
        """Reads from one worker after the other; what none of them could give is a miss."""
        try:
            self._caller.within(namespace, partial(self._caller.anywhere, fetch.receive, fetch.timeout_s, marks))
        except BrokenTransfer:
            pass  # counted where it was found; what came before it is good
        except (Unavailable, Overloaded):
            self.counters.add(ClientCount.MISSES_UNREACHABLE)

    def _hold(self, namespace: Namespace, request: pb.HoldRequest, marks: Marking, held: Callable[..., H]) -> H:
        """Takes a hold at a worker; one of nothing if no worker answers. ``held(answer, endpoint)`` makes it."""

        def send(endpoint: Endpoint, left_s: float) -> H:
            answer = pb.HoldResponse.FromString(endpoint.call("Hold", request, left_s))
            return held(answer, endpoint if answer.hold else None)

        try:
            return self._caller.within(namespace, lambda: self._caller.anywhere(send, self.limits.match_s, marks))
        except Unavailable:
            self.counters.add(ClientCount.MISSES_UNREACHABLE)
            return held(pb.HoldResponse(), None)

    def _look_for(self, namespace: Namespace, keys: Sequence[bytes], **fields: bool) -> pb.MatchBlocksResponse:
        request = pb.MatchBlocksRequest(namespace=namespace.digest, keys=pack_keys(keys), **fields)

        def send(endpoint: Endpoint, left_s: float) -> pb.MatchBlocksResponse:
            return pb.MatchBlocksResponse.FromString(endpoint.call("MatchBlocks", request, left_s))

        return self._caller.anywhere(send, self.limits.match_s, partial(marks_of_keys, keys))

    def _matched(self, namespace: Namespace, like: TokenArray, **asked: Any) -> pb.MatchResponse | None:
        """Asks the worker that would serve the prompt ``like``. Returns None if no worker could answer."""
        raw = sealed(pb.MatchRequest(namespace=namespace.digest, **asked))
        call = partial(self._caller.unary, "Match", raw, self.limits.match_s, partial(marks_of, namespace, like))
        answer: bytes | None = self._caller.or_miss(namespace, call, None)
        return pb.MatchResponse.FromString(answer) if answer is not None else None


def _counts(answer: pb.StatsResponse) -> dict[str, int | float]:
    """Returns counters and gauges in one dict; whole numbers as int."""
    gauges = {name: int(value) if value.is_integer() else value for name, value in answer.gauges.items()}
    return {**answer.counters, **gauges}


def _full_chunks(namespace: Namespace, tokens: TokenArray) -> TokenArray:
    """Returns the tokens without the trailing part chunk, which is never stored."""
    return tokens[: len(tokens) - len(tokens) % namespace.layout.chunk_tokens]


def naming_of(namespace: Namespace, prompt: TokenArray | list[bytes]) -> tuple[dict[str, bytes], Marking]:
    """Returns the field of a request that names a prompt by its full chunks, or blocks, and what chooses the worker."""
    if isinstance(prompt, list):
        return {"keys": pack_keys(prompt)}, partial(marks_of_keys, prompt)
    size = namespace.layout.chunk_tokens
    return {"tokens": pack_tokens(prompt[: len(prompt) // size * size])}, partial(marks_of, namespace, prompt)


def _each(present: bytes, keys: Sequence[bytes]) -> list[bool]:
    """Returns the worker's answer for each key. Raises Unavailable if some are missing."""
    if len(present) != len(keys):
        raise Unavailable(f"the worker answered for {len(present)} blocks of {len(keys)}: repeat the call")
    return [bool(each) for each in present]


# Operations at workers.


FRESH_S = 0.1
"""A younger status is not requested again, unless a caller waits for the end."""
PAUSE_S = 0.2
"""Pause before the next call to a worker that did not wait for the end."""


class RemoteRun:
    """One operation at one worker; implements ``OperationSource``. Thread-safe."""

    def __init__(self, port: RemoteTransport, status: OperationStatus) -> None:
        self._port = port
        self.status = status
        self._seen_s = time.monotonic()

    def poll(self, wait_s: float = 0.0) -> OperationStatus:
        began_s = time.monotonic()
        if wait_s or began_s - self._seen_s > FRESH_S:
            try:
                self._call("GetOperation", control.GetOperationRequest(id=self.status.id, wait_s=wait_s), wait_s)
            except Busy:
                pass  # the operation continues
            spent_s = time.monotonic() - began_s
            if spent_s < wait_s and not self.status.state.ended:
                time.sleep(min(PAUSE_S, wait_s - spent_s))
        return self.status

    def cancel(self) -> OperationStatus:
        self._call("CancelOperation", control.CancelOperationRequest(id=self.status.id), 0.0)
        return self.status

    def _call(self, name: str, request: Message, wait_s: float) -> None:
        self.status = self._port.operation_call(name, request, self.status.worker, wait_s)
        self._seen_s = time.monotonic()


def _send_operation(name: str, request: bytes, endpoint: Endpoint, left_s: float) -> OperationStatus:
    answer = endpoint.unary(f"Control.{name}")(request, timeout=left_s)
    return status_of(control.OperationResponse.FromString(answer), endpoint.address)


def status_of(response: control.OperationResponse, worker: str) -> OperationStatus:
    """Returns the status in a message of ``worker``."""
    message = response.operation
    states = {each.value: each for each in OperationState}
    return OperationStatus(
        message.id,
        message.kind,
        message.about,
        message.unit,
        message.began_s,
        states.get(message.state, OperationState.RUNNING),
        message.ended_s,
        message.done,
        message.total,
        message.message,
        dict(message.counts),
        message.identity,
        worker=worker,
    )


# Holds at one worker: if that worker is gone, so is the hold, and reading raises.
#
# A chunk or block lost under a live hold is a miss. ``HoldBroken`` means that the hold has ended, or that its worker
# does not answer, so the client cannot know whether the hold still protects.


RELEASE_S = 2.0


@dataclass(slots=True, eq=False, weakref_slot=True)
class _RemoteLease:
    """Implements ``LeasedHold``."""

    id: bytes
    lease_s: float
    endpoint: Endpoint
    renewed_s: float
    ended: bool = False


class HeldAtWorker:
    """A hold at one worker, renewed until it is released. ``endpoint`` is None if nothing is held.

    Reads of what is held are given to ``_receive``.
    """

    def __init__(self, answer: pb.HoldResponse, endpoint: Endpoint | None, caller: Caller) -> None:
        self._caller = caller
        self._lock = threading.Lock()
        self._released = False
        self._lease: _RemoteLease | None = None
        self._hold_id: bytes = answer.hold
        if endpoint is not None:
            endpoint.use()
            self._lease = _RemoteLease(answer.hold, answer.lease_s, endpoint, caller.lanes.clock.monotonic_s())
            caller.renewing.add(self._lease)

    @property
    def protects(self) -> bool:
        lease = self._lease
        return lease is not None and not (lease.ended or self._released or self._caller.is_closed)

    def release(self) -> None:
        """Ends the hold; idempotent, never raises."""
        with self._lock:
            if self._released:
                return
            self._released = True
        if self._lease is None:
            return
        self._caller.renewing.remove(self._lease)
        request = pb.ReleaseRequest(hold=self._lease.id)
        endpoint = self._lease.endpoint
        try:
            self._caller.at(endpoint, lambda: endpoint.call("Release", request, RELEASE_S))
        except (CallFailed, KVStoreError):
            pass  # a worker that is gone holds nothing; any other lets go when the hold's lease is over
        endpoint.leave()

    def _receive(self, fetch: RemoteRead, tokens_valid: Callable[[], int] = lambda: 0) -> None:
        """Reads from the worker that has the hold; nothing if nothing is held.

        Raises HoldBroken, with what ``tokens_valid`` says then.
        """
        self.check()
        if self._lease is None:
            return
        endpoint = self._lease.endpoint
        try:
            self._caller.at(endpoint, partial(fetch.receive, endpoint))
        except BrokenTransfer:
            pass  # counted where it was found; what came before it is good
        except CallFailed as failed:
            error = failed.failed.error
            if isinstance(error, HoldBroken):
                raise error from failed
            self._caller.counters.add(ClientCount.MISSES_UNREACHABLE)
            if not failed.failed.answered:
                raise HoldBroken(
                    f"the worker that has the hold does not answer ({error}): match again", tokens_valid()
                ) from failed

    def check(self) -> None:
        """Raises HoldBroken once the hold has ended, as far as this process knows."""
        lease = self._lease
        if self._released or lease is None or lease.ended:
            self._caller.check()  # raises if the store is closed; nothing is sent
        if self._released:
            raise HoldBroken("the hold has ended (it was released): match again")
        if lease is not None and lease.ended:
            raise HoldBroken(
                "the hold has ended (its worker was restarted or lost its session, or this process did not renew it in "
                "time): match again"
            )


class RemoteHold(HeldAtWorker):
    """Held leading chunks of one prompt."""

    def __init__(
        self,
        namespace: Namespace,
        packed_tokens: bytes,
        answer: pb.HoldResponse,
        endpoint: Endpoint | None,
        caller: Caller,
    ) -> None:
        super().__init__(answer, endpoint, caller)
        self.chunks = min(answer.chunks, len(packed_tokens) // TOKEN_BYTES // namespace.layout.chunk_tokens)
        self._namespace = namespace
        self._packed = packed_tokens
        self._layout = namespace.layout

    def read(self, sections: BufferMap) -> int:
        return self._fetch(lambda _: sections)

    def view(self) -> list[npt.NDArray[Any]]:
        views = ReceivedViews(self._layout)
        return views.leading(self._fetch(views.sections, views))

    def layers(self, memory: Callable[[int], LayerMemory], band: int) -> Iterator[tuple[int, LayerMemory]]:
        """Slices of the chunks, which are all received or lent before the first layer: ``band`` has no effect."""
        chunks, layout = self.view(), self._layout
        if len(chunks) < self.chunks:
            valid, end = len(chunks) * layout.chunk_tokens, (len(chunks) + 1) * layout.chunk_tokens
            raise HoldBroken(f"the chunk of tokens {valid} to {end} was lost: compute from token {valid} on", valid)
        parts = [chunk.view(np.uint8).reshape(layout.layers, 2, -1) for chunk in chunks]
        for layer in range(layout.layers if parts else 0):
            self.check()  # what was given can be read on, but nothing protects it any more
            into = memory(layer)
            for plane, target in enumerate((into.k, into.v)):
                np.concatenate([part[layer, plane] for part in parts], out=np.frombuffer(target, np.uint8))
            yield layer, into

    def _fetch(self, memory: Callable[[int], BufferMap], views: ReceivedViews | None = None) -> int:
        request, tokens = pb.GetRequest(hold=self._hold_id), unpack_tokens(self._packed)
        fetch = ChunkFetch(self._namespace, tokens, request, self.chunks, memory, self._caller, views)
        self._receive(fetch, lambda: leading(fetch.done) * self._layout.chunk_tokens)
        return leading(fetch.done)


class RemoteBlockHold(HeldAtWorker):
    """Blocks held by a worker."""

    def __init__(
        self,
        namespace: Namespace,
        present: list[bool],
        answer: pb.HoldResponse,
        endpoint: Endpoint | None,
        caller: Caller,
    ) -> None:
        super().__init__(answer, endpoint, caller)
        self._namespace = namespace
        self.present = present

    def read(self, keys: Sequence[bytes], buffers: Pieces) -> list[bool]:
        wanted = BlockKeys.of(self._namespace, keys, [len(buffer) for buffer in buffers])
        fetch = BlockFetch(wanted, buffers, self._caller, self._hold_id)
        self._receive(fetch)
        return list(map(bool, fetch.done))
