"""Control of workers: ``store.control`` of a connected store (proto/kvstore/v1/control.proto).

Separate from caches, because it is about workers and what they hold, not about one model's KV.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from kvstore.checks import checked_worker
from kvstore.client.caller import Caller
from kvstore.client.control_arguments import (
    HasNamespace,
    checked_changes,
    checked_chunks_max,
    checked_seconds,
    namespace_of,
)
from kvstore.client.control_values import limits_of, place_of, plain
from kvstore.client.endpoint import Endpoint
from kvstore.client.endpoints import Endpoints
from kvstore.client.limits import ClientLimits
from kvstore.client.spreading import marks_of
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.node.looking import ChunkPlace
from kvstore.results import Draining, LimitValue
from kvstore.tokens import Tokens, token_array
from kvstore.v1 import control_pb2 as pb
from kvstore.wire.messages import pack_tokens, sealed

T = TypeVar("T")

HEALTH_S = 8.0
"""Time for a health call: the worker waits up to two seconds for its root, and two for its etcd."""


class Control:
    """Controls the workers that a store is connected to. Made by ``Store.control``. Thread-safe.

    ``worker``, if given, is the address of the worker to ask; otherwise the best one is asked.
    """

    def __init__(self, port: object, caller: Caller, endpoints: Endpoints, limits: ClientLimits) -> None:
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
        ids, namespace, chunks_max = token_array(tokens), namespace_of(cache), checked_chunks_max(chunks_max)
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

    def drain(self, worker: str | None = None, within: float = 0.0) -> Draining:
        """Stops a worker in good order, as SIGTERM does. Returns before it has stopped.

        Calls in progress get ``within`` seconds; 0 means the time that the worker was started with. ``worker`` must be
        given if there are several.

        Raises InvalidRequest if it is unclear which worker is meant, or if its program cannot be drained.
        """
        request = sealed(pb.DrainRequest(within_s=checked_seconds("within", within)))
        raw = self._unary("Drain", request, _only(self.workers(), worker))
        answer = pb.DrainResponse.FromString(raw)
        return Draining(answer.calls, answer.behind_bytes, answer.operations, answer.within_s)

    def limits(self) -> dict[str, list[LimitValue] | KVStoreError]:
        """Returns the limits of each worker that can change while it runs, or why it did not answer."""
        return self._each("GetLimits", b"", self._limits.pin_s, limits_of)

    def set_limits(
        self, changes: Mapping[str, object], worker: str | None = None
    ) -> dict[str, list[LimitValue] | KVStoreError]:
        """Changes limits of one worker, or of all, until they stop. Each worker changes all of them or none.

        Returns the new limits by worker, or why a worker refused.
        """
        request = sealed(pb.SetLimitsRequest(limits=checked_changes(changes)))
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


def _only(known: list[str], worker: str | None) -> str | None:
    """Returns the worker that was named, or the only one there is; None if there is none. Raises InvalidRequest."""
    if checked_worker(worker) is None and len(known) > 1:
        raise InvalidRequest(f"which worker? there are {len(known)}: give one of {', '.join(known)}")
    return worker or next(iter(known), None)
