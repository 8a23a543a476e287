"""Abandoned branches through workers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from kvstore.client.remote_blocks import naming_of
from kvstore.client.tools import Tools
from kvstore.namespace import Namespace
from kvstore.tokens import TokenArray
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.messages import sealed
from kvstore.wire.statuses import UnknownNamespace


class RemoteBranches:
    """Implements ``PortBranches``. Thread-safe."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def supersede(self, namespace: Namespace, tokens: TokenArray, first: int, unused_s: float) -> None:
        self._send(namespace, tokens, first, unused_s)

    def supersede_blocks(self, namespace: Namespace, keys: Sequence[bytes], unused_s: float) -> None:
        self._send(namespace, list(keys), 0, unused_s)

    def _send(self, namespace: Namespace, prompt: TokenArray | list[bytes], first: int, unused_s: float) -> None:
        fields, marks = naming_of(namespace, prompt)
        if not any(fields.values()):
            self._tools.caller.check()
            return
        request = pb.SupersedeRequest(namespace=namespace.digest, first=first, unused_s=unused_s, **fields)
        with suppress(UnknownNamespace):  # a root that is new holds no branch
            self._tools.caller.unary("Supersede", sealed(request), self._tools.limits.match_s, marks)
