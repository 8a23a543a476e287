"""Engine-hashed blocks through workers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from kvstore.buffers import Buffers, Pieces
from kvstore.client.bulk.sending import BlockCargo
from kvstore.client.caller import Tools
from kvstore.client.endpoints import Endpoint
from kvstore.client.fetching import BlockFetch
from kvstore.client.putting import put_over_grpc, put_past_grpc
from kvstore.client.remote_hold import HeldAtWorker
from kvstore.client.spreading import Marking, marks_of, marks_of_keys
from kvstore.errors import Overloaded, Unavailable
from kvstore.format.header import Ancestry
from kvstore.hints import Hints
from kvstore.keyset import BlockKeys
from kvstore.namespace import Namespace
from kvstore.results import StoredBlocks
from kvstore.tokens import TokenArray
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.messages import (
    hints_message,
    pack_descents,
    pack_keys,
    pack_sizes,
    pack_tokens,
    sealed,
    write_message,
)
from kvstore.wire.statuses import UnknownNamespace
from kvstore.writes import WriteMode


class RemoteBlocks:
    """The calls about blocks. Thread-safe."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def put(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Pieces,
        hints: Hints,
        write: WriteMode | None,
        ancestry: Ancestry | None,
    ) -> StoredBlocks:
        """Implements ``Port.put_blocks``."""
        if not keys:
            self._tools.caller.check()
            return StoredBlocks((), ())
        limits, sizes, ancestry = self._tools.limits, [len(buffer) for buffer in buffers], ancestry or Ancestry()
        start = pb.PutStart(
            namespace=namespace.digest,
            keys=pack_keys(keys),
            sizes=pack_sizes(sizes),
            hints=hints_message(hints),
            write=write_message(write or self._tools.write),
            first=ancestry.first,
            descents=pack_descents(ancestry.descents) if ancestry.descents else b"",
        )

        def send(endpoint: Endpoint, left_s: float) -> StoredBlocks:
            answer = put_past_grpc(endpoint, start, partial(BlockCargo, buffers), self._tools, left_s)
            if answer is None:
                wanted, sections = BlockKeys.of(namespace, keys, sizes), Buffers(buffers)
                answer = put_over_grpc(endpoint, start, wanted, sections, self._tools, left_s)
            each = _each(answer.stored, keys)
            return StoredBlocks(each, each, answer.reason)

        timeout_s = limits.stream_s(limits.write_s, sum(sizes))
        return self._tools.caller.anywhere(send, timeout_s, partial(marks_of_keys, keys), even_aside=True)

    def match(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        """Implements ``Port.match_blocks``. Raises Unavailable."""
        if not keys:
            self._tools.caller.check()
            return 0
        request = pb.MatchBlocksRequest(namespace=namespace.digest, keys=pack_keys(keys))
        answer = self._asked(request, keys)
        return min(pb.MatchBlocksResponse.FromString(answer).blocks, len(keys))

    def present(self, namespace: Namespace, keys: Sequence[bytes]) -> list[bool]:
        """Implements ``Port.present_blocks``. Raises Unavailable."""
        if not keys:
            self._tools.caller.check()
            return []
        request = pb.MatchBlocksRequest(namespace=namespace.digest, keys=pack_keys(keys), each=True)
        raw = self._asked(request, keys)
        return _each(pb.MatchBlocksResponse.FromString(raw).present, keys)

    def sizes(self, namespace: Namespace, keys: Sequence[bytes]) -> list[int]:
        """Implements ``Port.block_sizes``."""
        request = pb.MatchBlocksRequest(namespace=namespace.digest, keys=pack_keys(keys), sizes=True)
        nobody = [0] * len(keys)
        try:
            raw = self._asked(request, keys)
        except (Unavailable, Overloaded):
            return nobody  # the read that asks has counted its miss
        found = np.frombuffer(pb.MatchBlocksResponse.FromString(raw).sizes, "<u4").tolist()
        return found if len(found) == len(keys) else nobody

    def hold(self, namespace: Namespace, keys: Sequence[bytes], ttl_s: float | None) -> RemoteBlockHold:
        """Implements ``Port.hold_blocks``. Raises Unavailable, Overloaded."""
        if not keys:
            self._tools.caller.check()
            return self.unheld(namespace, keys)
        request = pb.HoldRequest(namespace=namespace.digest, ttl_s=ttl_s or 0.0, keys=pack_keys(keys))

        def send(endpoint: Endpoint, left_s: float) -> RemoteBlockHold:
            answer = pb.HoldResponse.FromString(endpoint.call("Hold", request, left_s))
            present = _each(answer.present, keys)
            return RemoteBlockHold(namespace, present, answer, endpoint if answer.hold else None, self._tools)

        return self._tools.caller.anywhere(send, self._tools.limits.match_s, partial(marks_of_keys, keys))

    def _asked(self, request: pb.MatchBlocksRequest, keys: Sequence[bytes]) -> bytes:
        return self._tools.caller.short(
            "MatchBlocks", request, self._tools.limits.match_s, partial(marks_of_keys, keys)
        )

    def unheld(self, namespace: Namespace, keys: Sequence[bytes]) -> RemoteBlockHold:
        """A hold of nothing, for keys that no worker could look for."""
        return RemoteBlockHold(namespace, [False] * len(keys), pb.HoldResponse(), None, self._tools)


class RemoteBlockHold(HeldAtWorker):
    """Blocks held by a worker."""

    def __init__(
        self,
        namespace: Namespace,
        present: list[bool],
        answer: pb.HoldResponse,
        endpoint: Endpoint | None,
        tools: Tools,
    ) -> None:
        super().__init__(answer, endpoint, tools)
        self._namespace = namespace
        self.present = present

    def read(self, keys: Sequence[bytes], buffers: Pieces) -> list[bool]:
        wanted = BlockKeys.of(self._namespace, keys, [len(buffer) for buffer in buffers])
        fetch = BlockFetch(wanted, buffers, self._tools, self._hold_id)
        self._receive(fetch)
        return list(map(bool, fetch.done))


def naming_of(namespace: Namespace, prompt: TokenArray | list[bytes]) -> tuple[dict[str, bytes], Marking]:
    """Returns the field of a request that names a prompt by its full chunks, or blocks, and what chooses the worker."""
    if isinstance(prompt, list):
        return {"keys": pack_keys(prompt)}, partial(marks_of_keys, prompt)
    size = namespace.layout.chunk_tokens
    return {"tokens": pack_tokens(prompt[: len(prompt) // size * size])}, partial(marks_of, namespace, prompt)


def _each(present: bytes, keys: Sequence[bytes]) -> list[bool]:
    """Returns the worker's answer for each key. Raises Unavailable if some are missing."""
    if len(present) != len(keys):
        raise Unavailable(f"the worker answered for {len(present)} blocks of {len(keys)}: repeat the call")
    return [bool(each) for each in present]


# Abandoned branches through workers.


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
