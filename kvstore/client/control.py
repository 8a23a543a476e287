"""Control of workers: ``store.control`` of a connected store (proto/kvstore/v1/control.proto).

Separate from caches, because it is about workers and what they hold, not about one model's KV.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message

from kvstore.census.selection import Selection, checked_selection
from kvstore.client.failover import Caller, Endpoint, WorkerEndpoints
from kvstore.client.limits import ClientLimits
from kvstore.client.routing import marks_of
from kvstore.core.address import Address, Tokens
from kvstore.core.buffers import token_array
from kvstore.core.namespace import Namespace
from kvstore.core.results import ChunkPlace, MemoryCopy, RootCopy
from kvstore.core.validate import brief, checked_worker, is_whole
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.format.header import Encoding
from kvstore.transport.messages import hints_of, pack_tokens, sealed
from kvstore.v1 import control_pb2 as pb


class HasNamespace(Protocol):
    """A cache, of ``kvstore.aio`` too. The control service uses only its namespace."""

    @property
    def namespace(self) -> Namespace:
        """The namespace that the call is about."""


# Messages of the control service as values, and selections as messages.


def plain(message: Message) -> dict[str, Any]:
    """Returns a message as a dict of its fields: bytes in hex, absent messages as None."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None:
            found[field.name] = plain(value) if message.HasField(field.name) else None
        elif isinstance(value, bytes):
            found[field.name] = value.hex()
        else:
            found[field.name] = value if isinstance(value, bool | int | float | str) else list(value)
    return found


def selection_message(selection: Selection) -> pb.Selection:
    """Returns the message for a selection. Raises InvalidRequest for anything else."""
    checked_selection(selection)
    return pb.Selection(
        namespace=selection.namespace or b"",
        tenant=selection.tenant,
        fingerprint=selection.fingerprint,
    )


def limits_of(raw: bytes) -> dict[str, str]:
    """Returns the limits in an encoded ``LimitsResponse``, by name."""
    return dict(sorted(pb.LimitsResponse.FromString(raw).limits.items()))


def place_of(message: pb.ChunkPlace) -> ChunkPlace:
    """Returns the place of one chunk."""
    memory = message.memory
    return ChunkPlace(
        message.index,
        Address(message.address),
        _root_copy(message.root) if message.HasField("root") else None,
        MemoryCopy(memory.bytes, memory.dirty, memory.users) if message.HasField("memory") else None,
        message.disk,
        tuple(message.peers),
        message.pins if message.HasField("pins") else None,
    )


def _root_copy(message: pb.RootCopy) -> RootCopy:
    encoding = Encoding.COMPRESSED if message.compressed else Encoding.PLAIN
    encoding |= Encoding.ENCRYPTED if message.encrypted else Encoding.PLAIN
    return RootCopy(
        message.bytes,
        message.last_use_s,
        message.uses,
        hints_of(message.hints),
        encoding,
        message.key_id,
        message.condemned,
    )


T = TypeVar("T")

CHUNKS_MAX = (1 << 32) - 1

HEALTH_S = 8.0
"""Time for a health call: the worker waits up to two seconds for its root, and two for its etcd."""


class Control:
    """Controls the workers that a store is connected to. Made by ``Store.control``. Thread-safe.

    ``worker``, if given, is the address of the worker to ask; otherwise the best one is asked.
    """

    def __init__(self, port: object, caller: Caller, endpoints: WorkerEndpoints, limits: ClientLimits) -> None:
        self._port = port  # kept alive: a dropped port closes the connections
        self._caller = caller
        self._endpoints = endpoints
        self._limits = limits

    def __repr__(self) -> str:
        return f"<kvstore.client.control.Control {self._endpoints.place}>"

    def workers(self) -> list[str]:
        """The addresses of all workers."""
        self._endpoints.check()
        return [endpoint.address for endpoint in self._endpoints.every()]

    # Places of chunks

    def lookup(
        self, cache: HasNamespace, tokens: Tokens, chunks_max: int = 0, worker: str | None = None
    ) -> list[ChunkPlace]:
        """Returns the places of each leading chunk of a prompt, as one worker sees them, up to the first missing one.

        Returns at most ``chunks_max`` chunks, all for 0. Does not count as a use of the chunks. Raises Unavailable.
        """
        ids, namespace = token_array(tokens), cache.namespace
        if not is_whole(chunks_max) or not 0 <= chunks_max <= CHUNKS_MAX:
            raise InvalidRequest(f"chunks_max={brief(chunks_max)}: expected a whole number of chunks, or 0 for all")
        packed = pack_tokens(ids[: len(ids) // namespace.layout.chunk_tokens * namespace.layout.chunk_tokens])
        request = sealed(pb.LookupRequest(namespace=namespace.digest, tokens=packed, chunks_max=chunks_max))
        # At the worker that the prompt would be read from: its memory is the one to look into.
        raw = self._caller.at_worker(
            checked_worker(worker),
            lambda at, left_s: list(at.stream_in("Control.Lookup")(request, timeout=left_s)),
            self._limits.read_s,
            partial(marks_of, namespace, ids),
        )
        return [place_of(each) for message in raw for each in pb.LookupResponse.FromString(message).chunks]

    # Workers

    def limits(self) -> dict[str, dict[str, str] | KVStoreError]:
        """Returns the limits of each worker that can change while it runs, or why it did not answer."""
        return self._each("GetLimits", b"", self._limits.pin_s, limits_of)

    def set_limits(
        self, changes: Mapping[str, object], worker: str | None = None
    ) -> dict[str, dict[str, str] | KVStoreError]:
        """Changes limits of one worker, or of all, until they stop. Each worker changes all of them or none.

        Returns the new limits by worker, or why a worker refused.
        """
        if not isinstance(changes, Mapping):
            raise InvalidRequest(f'changes={brief(changes)}: expected limits by name, such as {{"calls_max": 100}}')
        request = sealed(pb.SetLimitsRequest(limits={str(name): str(value) for name, value in changes.items()}))
        if worker is not None:
            return {worker: limits_of(self._unary("SetLimits", request, checked_worker(worker)))}
        return self._each("SetLimits", request, self._limits.pin_s, limits_of)

    def health(self) -> dict[str, dict[str, Any] | KVStoreError]:
        """Returns the fields of ``HealthResponse`` (control.proto) of each worker, or why it did not answer."""
        return self._each("Health", b"", HEALTH_S, lambda raw: plain(pb.HealthResponse.FromString(raw)))

    # Calls

    def _each(
        self, name: str, request: bytes, timeout_s: float, read: Callable[[bytes], T]
    ) -> dict[str, T | KVStoreError]:
        """Asks every worker. Raises Unavailable if none is known."""
        answers = self._caller.each(f"Control.{name}", request, timeout_s)
        if not answers:
            raise self._endpoints.none_known()
        return {at: raw if isinstance(raw, KVStoreError) else read(raw) for at, raw in answers.items()}

    def _unary(self, name: str, request: bytes, worker: str | None) -> bytes:
        def send(endpoint: Endpoint, left_s: float) -> bytes:
            answer: bytes = endpoint.unary(f"Control.{name}")(request, timeout=left_s)
            return answer

        return self._caller.at_worker(worker, send, self._limits.pin_s, may_repeat=False)
