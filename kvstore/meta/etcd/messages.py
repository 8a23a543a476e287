"""etcd's messages, and its errors in ours."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import ModuleType
from typing import Any, cast

import grpc

from kvstore.core.grpc_channels import unreached
from kvstore.errors import InvalidRequest, KVStoreError, PermissionDenied, Unavailable
from kvstore.meta.store import Absent, Compare, Delete, Event, KeyValue, LeaseId, ModifiedAt, Put

# The meaning of errors from etcd and gRPC for the call that met them.
#
# One table instead of cases in the callers: whether the request can have taken effect, whether another member may do
# better, and which of our errors it becomes. The texts are those of etcd 3.4 and 3.5 and of gRPC's core.


class Effect(Enum):
    """The possible effect of a request that failed, and so the options of its caller."""

    NONE = auto()  # it took no effect, another try may work: even a transaction is sent again
    UNSURE = auto()  # it may have taken effect, or may yet: only an idempotent call is sent again
    TOKEN = auto()  # refused before it was looked at, for its token: authenticate and send again, once
    DENIED = auto()
    INVALID = auto()
    FAILED = auto()  # no effect, and another try will not help
    LEASE_GONE = auto()
    LEASE_EXISTS = auto()
    COMPACTED = auto()
    TOO_LARGE = auto()  # the answer is larger than we accept


@dataclass(frozen=True, slots=True)
class Fault:
    """An error, understood. ``text`` is what etcd said or what failed, ``advice`` what to do about it."""

    effect: Effect
    text: str
    advice: str

    def error(self, what: str) -> KVStoreError:
        message = f"etcd: {what}: {self.text}: {self.advice}"
        if self.effect in (Effect.DENIED, Effect.TOKEN):
            return PermissionDenied(message)
        if self.effect is Effect.INVALID:
            return InvalidRequest(message)
        return Unavailable(message)


_RETRY = "check that etcd runs and is reachable at these endpoints; the call may be repeated"
_USER = "check user and password, and that the user's role covers the prefix /kv/"

# (part of the text, lower case; effect; advice), first match wins.
_TEXTS: tuple[tuple[str, Effect, str], ...] = (
    ("requested lease not found", Effect.LEASE_GONE, "the lease ended; start again with a new one"),
    ("lease already exists", Effect.LEASE_EXISTS, "use another lease id"),
    ("revision has been compacted", Effect.COMPACTED, "read afresh at a newer revision"),
    ("future revision", Effect.COMPACTED, "etcd is older than it was (restored?); read afresh"),
    ("invalid auth token", Effect.TOKEN, _USER),
    ("revision of auth store is old", Effect.TOKEN, _USER),
    ("user name is empty", Effect.TOKEN, "etcd demands authentication: give user and password"),
    ("authentication failed", Effect.DENIED, _USER),
    ("permission denied", Effect.DENIED, _USER),
    ("request is too large", Effect.INVALID, "store less in one key, or raise etcd's --max-request-bytes"),
    ("too many operations in txn", Effect.INVALID, "split the transaction"),
    ("duplicate key given in txn", Effect.INVALID, "name each key once"),
    ("trying to send message larger", Effect.INVALID, "store less in one key"),
    ("grpc: received message larger", Effect.INVALID, "store less in one key, or raise etcd's --max-request-bytes"),
    ("larger than max", Effect.TOO_LARGE, "request less at a time"),
    ("too large lease ttl", Effect.INVALID, "ask for a shorter lease"),
    (
        "database space exceeded",
        Effect.FAILED,
        "etcd is full: compact and defragment it, or raise --quota-backend-bytes, then `etcdctl alarm disarm`",
    ),
    ("corrupt", Effect.FAILED, "etcd reports a corrupt member: restore it before going on"),
    ("too many requests", Effect.NONE, "etcd sheds load; the call may be repeated later"),
    ("failed to connect to all addresses", Effect.NONE, _RETRY),
    ("errors resolving", Effect.NONE, "the host name of the endpoint cannot be resolved: check it"),
    ("dns resolution failed", Effect.NONE, "the host name of the endpoint cannot be resolved: check it"),
)

_CODES: dict[grpc.StatusCode, tuple[Effect, str]] = {
    grpc.StatusCode.PERMISSION_DENIED: (Effect.DENIED, _USER),
    grpc.StatusCode.UNAUTHENTICATED: (Effect.DENIED, _USER),
    grpc.StatusCode.INVALID_ARGUMENT: (Effect.INVALID, "this etcd does not accept the request; is it 3.4 or newer?"),
    grpc.StatusCode.UNIMPLEMENTED: (
        Effect.FAILED,
        "whatever answers there is not etcd 3.4 or newer: check the endpoint",
    ),
    grpc.StatusCode.DATA_LOSS: (Effect.FAILED, "etcd reports lost data: restore the member before going on"),
}


_FAILED = {
    grpc.StatusCode.DEADLINE_EXCEEDED: "it did not answer in time",
    grpc.StatusCode.CANCELLED: "the call was cut off",
    grpc.StatusCode.UNIMPLEMENTED: "it does not know the call",
}


def fault_of(error: grpc.RpcError) -> Fault:
    """Returns the meaning of ``error``. Unknown errors are UNSURE, so nothing is sent twice that must not be."""
    code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
    details = ((error.details() if isinstance(error, grpc.Call) else "") or "")[:1000]
    lower = details.lower()
    effect, advice = next(
        ((effect, advice) for part, effect, advice in _TEXTS if part in lower),
        _CODES.get(code, (Effect.UNSURE, _RETRY)),
    )
    if any(word in lower for word in ("ssl", "certificate")):
        advice = "check the CA, the client certificate, and the host name that the server's certificate is made for"
    return Fault(effect, _plain(code, details), advice)


def _plain(code: grpc.StatusCode, details: str) -> str:
    """Returns etcd's own message, or our description of the failure: gRPC's messages do not help users."""
    if "etcdserver" in details:
        return details
    if code is grpc.StatusCode.UNAVAILABLE:
        found = unreached(details)
        return found.why if found is not None else "the connection to it ended"
    return _FAILED.get(code) or details or "it gave no reason"


# etcd's protocol messages, and the only import of ``pyetcd``, whose generated code they are.
#
# Only its messages and stubs are used. Its client (0.0.7) has one timeout for all calls instead of a deadline for
# each. It drops the text of an error, so that a lost lease looks like any other refusal, and the revision of a
# transaction. It never renews a token, marks a lone endpoint as failed for 300 s after one failure, and may wait for
# ever in a watch. The package is imported on first use: it takes a while, and a store without etcd
# does not need it.


Message = Any
"""A generated protobuf message; untyped, because the package ships no types that tools accept."""


@functools.cache
def rpc() -> ModuleType:
    """Returns the generated module: messages and stubs."""
    from pyetcd import etcdrpc

    return cast(ModuleType, etcdrpc)


def prefix_range(prefix: str) -> tuple[bytes, bytes]:
    """Returns first key and end (exclusive) of all keys that start with ``prefix``."""
    if not prefix:
        return b"\0", b"\0"
    first = prefix.encode()
    # The last byte of UTF-8 text is never 0xff, so adding one to it needs no carry.
    return first, first[:-1] + bytes([first[-1] + 1])


def txn_request(compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> Message:
    """Makes a TxnRequest."""
    return rpc().TxnRequest(
        compare=[_compare(compare) for compare in compares], success=[_operation(each) for each in operations]
    )


def put_request(put: Put) -> Message:
    """Makes a PutRequest."""
    return rpc().PutRequest(key=put.key.encode(), value=put.value, lease=put.lease)


def key_value(message: Message) -> KeyValue:
    """Converts an mvccpb.KeyValue."""
    return KeyValue(
        _text(message.key), message.value, message.create_revision, message.mod_revision, LeaseId(message.lease)
    )


def event(message: Message) -> Event:
    """Converts an mvccpb.Event. Type 1 is a deletion, and its mod_revision is that of the deletion."""
    deleted = message.type == 1
    kv = message.kv
    return Event(_text(kv.key), None if deleted else key_value(kv), kv.mod_revision)


def _text(key: bytes) -> str:
    # A key that is not text is not ours, and must not stop us from reading the others.
    return key.decode(errors="replace")


def _operation(operation: Put | Delete) -> Message:
    if isinstance(operation, Put):
        return rpc().RequestOp(request_put=put_request(operation))
    return rpc().RequestOp(request_delete_range=rpc().DeleteRangeRequest(key=operation.key.encode()))


def _compare(compare: Compare) -> Message:
    kind = rpc().Compare
    key = compare.key.encode()
    match compare:
        case Absent():
            return kind(result=kind.EQUAL, target=kind.CREATE, key=key, create_revision=0)
        case ModifiedAt():
            return kind(result=kind.EQUAL, target=kind.MOD, key=key, mod_revision=compare.mod_revision)
    # A compare of values fails for a key that does not exist, as ValueIs requires.
    return kind(result=kind.EQUAL, target=kind.VALUE, key=key, value=compare.value)
