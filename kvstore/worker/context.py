"""The context of a call: what the worker's code may ask of gRPC, or of the bulk protocol.

Separate from both: calls of either kind are let in, timed and refused by the same code.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NoReturn, Protocol

import grpc

from kvstore.security.identity import NOTHING, Presented
from kvstore.tracing import Metadata
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.statuses import Refusal


class CallContext(Protocol):
    """What a call knows of its client: gRPC's context, or that of the bulk protocol."""

    def time_remaining(self) -> float | None:
        """Seconds the client still waits; None where it did not say."""
        ...

    def invocation_metadata(self) -> Any:
        """What the client sent with the call: pairs of a key and a value."""
        ...

    def is_active(self) -> bool:
        """Whether the client is there."""
        ...

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        """What goes with a refusal."""
        ...

    def abort(self, code: grpc.StatusCode, details: str) -> Any:
        """Raises, so that the call ends with this status."""
        ...


class Refused(Exception):
    """A request was answered with a status; carries it to the sender."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class BulkContext:
    """A ``CallContext`` of the bulk protocol: what a request allows: its time, and how it is refused."""

    def __init__(
        self, channel: Channel, timeout_s: float, metadata: Metadata = (), presented: Presented = NOTHING
    ) -> None:
        self._channel = channel
        self.presented = presented
        """The client's credentials from its request to connect."""
        self._metadata = metadata
        self._ends_s = time.monotonic() + timeout_s
        self._trailers: tuple[tuple[str, str], ...] = ()

    def time_remaining(self) -> float | None:
        """Seconds that the client still waits."""
        return max(0.0, self._ends_s - time.monotonic())

    @property
    def path(self) -> str:
        """The path that the request came on."""
        return "unix" if self._channel.is_unix else "tcp"

    def invocation_metadata(self) -> Metadata:
        """Metadata of the call that this request belongs to."""
        return self._metadata

    def is_active(self) -> bool:
        """True while the client is connected."""
        return self._channel.alive

    def set_trailing_metadata(self, trailing_metadata: Iterable[tuple[str, str]]) -> None:
        """Sets the metadata that a refusal carries."""
        self._trailers = tuple(trailing_metadata)

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """Raises Refused."""
        raise Refused(Refusal(code, details, self._trailers))
