"""Calls about a namespace that a worker may not know yet: on a new root it is opened again, and the call repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvstore.client.tools import Tools
from kvstore.counts import ClientCount
from kvstore.errors import KVStoreError, Overloaded, Unavailable
from kvstore.namespace import Namespace
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.messages import namespace_message, sealed
from kvstore.wire.statuses import BrokenTransfer, UnknownNamespace

T = TypeVar("T")


class Reopening:
    """Makes the calls of one port about its namespaces. Thread-safe."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def open(self, namespace: Namespace) -> None:
        """Claims the namespace. Raises LayoutMismatch, Unavailable."""
        self._tools.caller.unary("OpenNamespace", _opening(namespace), self._tools.limits.pin_s, even_aside=True)

    def __call__(self, namespace: Namespace, call: Callable[[], T]) -> T:
        """Makes the call. If a worker does not know the namespace (a new root), opens it at all workers and repeats."""
        try:
            return call()
        except UnknownNamespace:
            self._tools.counters.add(ClientCount.NAMESPACES_REOPENED)
        # At all workers: the call goes to the one that does not know it, and the others do nothing.
        opened = self._tools.caller.each("OpenNamespace", _opening(namespace), self._tools.limits.pin_s)
        errors = [answer for answer in opened.values() if isinstance(answer, KVStoreError)]
        if errors and len(errors) == len(opened):
            raise errors[0]
        try:
            return call()
        except UnknownNamespace as unknown:
            raise Unavailable(f"a worker forgot a namespace right after it was opened: {unknown}") from unknown

    def or_miss(self, namespace: Namespace, call: Callable[[], T], miss: T) -> T:
        """Returns the call's result, or ``miss`` if no worker could answer."""
        try:
            return self(namespace, call)
        except BrokenTransfer:
            raise
        except (Unavailable, Overloaded):
            self._tools.counters.add(ClientCount.MISSES_UNREACHABLE)
            return miss


def _opening(namespace: Namespace) -> bytes:
    return sealed(pb.OpenNamespaceRequest(namespace=namespace_message(namespace)))
