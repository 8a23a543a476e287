"""A request of the bulk protocol with the interface of gRPC's context."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NoReturn

import grpc

from kvstore.security.identity import NOTHING, Presented
from kvstore.tracing import Metadata
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.statuses import Refusal


class Refused(Exception):
    """A request was answered with a status; carries it to the sender."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class BulkContext:
    """A request's deadline, credentials, and refusal."""

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
