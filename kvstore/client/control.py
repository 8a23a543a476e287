"""Control of workers: ``store.control`` of a connected store (proto/kvstore/v1/control.proto).

Separate from caches, because it is about workers and what they hold, not about one model's KV.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

from kvstore.census.selection import Selection, checked_selection
from kvstore.client.failover import Caller, WorkerEndpoints
from kvstore.client.limits import ClientLimits
from kvstore.client.routing import marks_of
from kvstore.core.address import Address, Tokens
from kvstore.core.buffers import token_array
from kvstore.core.namespace import Namespace
from kvstore.core.results import ChunkPlace, MemoryCopy, RootCopy
from kvstore.core.validate import brief, checked_worker, is_whole
from kvstore.errors import InvalidRequest
from kvstore.format.header import Encoding
from kvstore.transport.messages import hints_of, pack_tokens, sealed
from kvstore.v1 import control_pb2 as pb


class HasNamespace(Protocol):
    """A cache, of ``kvstore.aio`` too. The control service uses only its namespace."""

    @property
    def namespace(self) -> Namespace:
        """The namespace that the call is about."""


# Messages of the control service as values, and selections as messages.


def selection_message(selection: Selection) -> pb.Selection:
    """Returns the message for a selection. Raises InvalidRequest for anything else."""
    checked_selection(selection)
    return pb.Selection(
        namespace=selection.namespace or b"",
        tenant=selection.tenant,
        fingerprint=selection.fingerprint,
    )


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


CHUNKS_MAX = (1 << 32) - 1


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
