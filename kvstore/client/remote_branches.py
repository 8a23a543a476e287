"""Abandoned branches through workers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from kvstore.client.spreading import Marking, marks_of, marks_of_keys
from kvstore.client.tools import Tools
from kvstore.namespace import Namespace
from kvstore.tokens import TokenArray
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.messages import pack_keys, pack_tokens, sealed
from kvstore.wire.statuses import UnknownNamespace


class RemoteBranches:
    """Implements ``PortBranches``. Thread-safe."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def supersede(self, namespace: Namespace, tokens: TokenArray, first: int, unused_s: float) -> None:
        size = namespace.layout.chunk_tokens
        packed = pack_tokens(tokens[: len(tokens) // size * size])
        request = pb.SupersedeRequest(namespace=namespace.digest, tokens=packed, first=first, unused_s=unused_s)
        self._send(request, partial(marks_of, namespace, tokens))

    def supersede_blocks(self, namespace: Namespace, keys: Sequence[bytes], unused_s: float) -> None:
        request = pb.SupersedeRequest(namespace=namespace.digest, keys=pack_keys(keys), unused_s=unused_s)
        self._send(request, partial(marks_of_keys, keys))

    def _send(self, request: pb.SupersedeRequest, marks: Marking) -> None:
        if not request.tokens and not request.keys:
            self._tools.caller.check()
            return
        with suppress(UnknownNamespace):  # a root that is new holds no branch
            self._tools.caller.unary("Supersede", sealed(request), self._tools.limits.match_s, marks)
