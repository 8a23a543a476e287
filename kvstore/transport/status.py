"""Converts errors to gRPC statuses and back, in one table, so that each keeps its class.

The class's name travels in trailing metadata; a client that ignores it still has the status code.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import grpc

from kvstore.core.grpc_channels import UnreachableReason, unreached
from kvstore.core.operations import NoOperation
from kvstore.errors import (
    HoldBroken,
    InvalidRequest,
    KVStoreError,
    LayoutMismatch,
    Overloaded,
    PermissionDenied,
    RootMismatch,
    SessionLost,
    StoreClosed,
    StoreFull,
    Unauthenticated,
    Unavailable,
)

ERROR_KEY = "kvstore-error"
REFUSED_KEY = "kvstore-refused"
TOKENS_VALID_KEY = "kvstore-tokens-valid"
MESSAGE_BYTES_MAX = 4096
"""A status message is a header, percent-encoded, and gRPC limits headers to 8 KiB in all."""


class UnknownNamespace(InvalidRequest):
    """No client ever opened this namespace on this root. Call OpenNamespace, then repeat the call."""


class BrokenTransfer(Unavailable):
    """Bytes changed between client and worker, or a worker's answer is invalid. Repeat the call."""


class Draining(Unavailable):
    """The worker is about to stop and takes no new calls. Nothing was done; turn to another worker."""


class Busy(Overloaded):
    """The worker has as many calls or bytes in flight as it allows. Nothing was done; back off, or turn to another."""


STATUSES: dict[type[KVStoreError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownNamespace: grpc.StatusCode.NOT_FOUND,
    NoOperation: grpc.StatusCode.NOT_FOUND,
    LayoutMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    RootMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    StoreClosed: grpc.StatusCode.FAILED_PRECONDITION,
    PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StoreFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Busy: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    Draining: grpc.StatusCode.UNAVAILABLE,
    BrokenTransfer: grpc.StatusCode.DATA_LOSS,
    HoldBroken: grpc.StatusCode.ABORTED,
    SessionLost: grpc.StatusCode.ABORTED,
}
"""The status of each class. If several classes share a code, a code alone means the first."""

_BY_NAME = {error.__name__: error for error in STATUSES}
_BY_CODE = {code: error for error, code in reversed(STATUSES.items())}
_NOTHING_DONE = (Draining, Busy)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A worker's answer in place of a result."""

    code: grpc.StatusCode
    message: str
    trailers: tuple[tuple[str, str], ...]


def refusal(error: KVStoreError) -> Refusal:
    """Returns the status for an error. A class that is not in the table goes out as its nearest base class that is."""
    kind = next(kind for kind in type(error).__mro__ if kind in STATUSES or kind is KVStoreError)
    message = _fitting(str(error))
    if kind is KVStoreError:
        return Refusal(grpc.StatusCode.UNKNOWN, message, ())
    trailers = [(ERROR_KEY, kind.__name__)]
    if issubclass(kind, _NOTHING_DONE):
        trailers.append((REFUSED_KEY, "1"))
    if isinstance(error, HoldBroken):
        trailers.append((TOKENS_VALID_KEY, str(error.tokens_valid)))
    return Refusal(STATUSES[kind], message, tuple(trailers))


class CallFailed(Exception):
    """A call to one worker failed; carries the error to raise."""

    def __init__(self, error: KVStoreError, answered: bool, unsent: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.answered = answered
        """True if a worker of ours gave this answer, rather than the connection or a deadline."""
        self.unsent = unsent
        """True if nothing at all was done, so that even a call that must not run twice may be sent again."""


def failure(
    code: grpc.StatusCode,
    message: str,
    trailers: Iterable[tuple[str, str | bytes]],
    where: str,
    within_s: float | None = None,
) -> CallFailed:
    """Converts a status to one of our errors, in our words.

    ``where`` names the worker, and ``within_s`` says how long it had, in messages that are not its own.
    """
    tags = {key: value for key, value in trailers if isinstance(value, str)}
    kind = _BY_NAME.get(tags.get(ERROR_KEY, ""))
    if kind is HoldBroken:
        return CallFailed(HoldBroken(message, _count(tags.get(TOKENS_VALID_KEY, "0"))), True, False)
    if kind is not None:
        return CallFailed(kind(message), True, REFUSED_KEY in tags)
    if code is grpc.StatusCode.UNAVAILABLE:
        return _unreached(message, where)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        time = "in time" if within_s is None else f"within {round(within_s, 1):g} s"
        said = f"worker {where} did not answer {time}: it has too much to do, is frozen, or its root hangs; retry later"
        return CallFailed(Unavailable(said), False, False)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and message.startswith("Concurrent RPC limit"):
        return CallFailed(
            Busy(f"worker {where} has too many concurrent calls: back off"), True, True
        )  # gRPC itself says so
    kind, said = _BY_CODE.get(code, Unavailable), _SAID.get(code) or message or "it gave no reason; see its log"
    return CallFailed(kind(f"worker {where}: {said}"), code is grpc.StatusCode.INTERNAL, False)


_SAID = {
    grpc.StatusCode.UNIMPLEMENTED: "what answers there does not know this call: check the address, and that the worker "
    "has the version of its clients",
    grpc.StatusCode.CANCELLED: "it ended the call, as a worker does that stops; retry later",
}
"""Our words for a status that no worker of ours gives, instead of gRPC's."""


_CHECKS = {
    UnreachableReason.REFUSED: "check that the worker runs, and the port: its ready line has both",
    UnreachableReason.NO_SOCKET: "check that the worker runs, and the path",
    UnreachableReason.NO_PERMISSION: "run as the account of the worker",
    UnreachableReason.NO_ADDRESS: "check the name of the host",
    UnreachableReason.OTHER_NAME: "give that name (tls= server_name, --tls-server-name), or check the address",
    UnreachableReason.HUNG_UP: "if it speaks TLS, give tls= (--tls-ca); else check the port",
    UnreachableReason.TLS: "check that the worker has TLS, and the files of tls= (--tls-ca, --tls-cert, --tls-key)",
    UnreachableReason.OTHER_PROTOCOL: "check the port: that of gRPC, not that of metrics",
    UnreachableReason.SILENT: "check the port, and that the worker is not frozen",
    UnreachableReason.NO_WAY: "check the host, its network and firewalls",
}
"""The things to check where there is no connection to a worker."""


def _unreached(message: str, where: str) -> CallFailed:
    """A failure of the connection to a worker, with advice instead of gRPC's text."""
    unsent = message.lower().startswith("failed to connect")
    if (found := unreached(message)) is not None:
        return CallFailed(Unavailable(f"cannot reach worker {where}: {found.why}; {_CHECKS[found]}"), False, unsent)
    said = f"the connection to worker {where} ended: it was stopped or restarted, perhaps; retry later"
    return CallFailed(Unavailable(said), False, unsent)


def _fitting(message: str) -> str:
    """Cuts a message to what a header holds. Each byte of UTF-8 that is not printable ASCII takes three."""
    room = MESSAGE_BYTES_MAX
    for at, character in enumerate(message):
        room -= 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode(errors="replace"))
        if room < 3:
            return message[:at] + "..."
    return message


def _count(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else 0
