"""etcd's protocol messages, and the only import of ``pyetcd``, whose generated code they are.

Only its messages and stubs are used. Its client (0.0.7) has one timeout for all calls instead of a deadline for each.
It drops the text of an error, so that a lost lease looks like any other refusal, and the revision of a transaction. It
never renews a token, marks a lone endpoint as failed for 300 s after one failure, and may wait for ever in a watch. The
package is imported on first use, so that a store without etcd does not need it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any, cast

from kvstore.errors import InvalidRequest
from kvstore.meta.interface import Absent, Compare, Delete, Event, KeyValue, LeaseId, ModifiedAt, Put

Message = Any
"""A generated protobuf message; untyped, because the package ships no types that tools accept."""


@functools.cache
def rpc() -> ModuleType:
    """The generated module: messages and stubs. Raises InvalidRequest if the package is not installed."""
    try:
        from pyetcd import etcdrpc
    except ImportError as cause:
        raise InvalidRequest(
            f"etcd endpoints were given but its client cannot be imported ({cause}): pip install etcd-sdk-python"
        ) from cause
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
