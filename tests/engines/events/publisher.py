"""A publisher with vLLM's format and sockets that loses what a test tells it to lose, and events as it sends them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from tests.engines.events.indexer import BLOCK_TOKENS

Event = dict[str, Any]
CLEARED: Event = {"type": "AllBlocksCleared"}
END = (-1).to_bytes(8, "big", signed=True)


def tokens(*numbers: int) -> list[int]:
    """The tokens of blocks, other ones for each number."""
    return [number * 1000 + place for number in numbers for place in range(BLOCK_TOKENS)]


def stored(*numbers: int, parent: int | None = None, medium: str | None = "STORAGE", **more: Any) -> Event:
    """``BlockStored`` as vLLM 0.32 encodes it, of blocks whose hash is their number."""
    event: Event = {"type": "BlockStored", "block_hashes": list(numbers), "parent_block_hash": parent}
    event |= {"token_ids": tokens(*numbers), "block_size": BLOCK_TOKENS, "lora_id": None}
    return event | {"medium": medium, "lora_name": None, **more}


def removed(*numbers: int, medium: str | None = "STORAGE") -> Event:
    """``BlockRemoved`` as vLLM 0.32 encodes it."""
    return {"type": "BlockRemoved", "block_hashes": list(numbers), "medium": medium}


class Publisher:
    """PUB and ROUTER on ports of loopback. Used by one thread; another one answers replays."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self.ports = [each.bind_to_random_port("tcp://127.0.0.1") for each in self._sockets]
        self.next = 0
        self.kept: list[tuple[int, bytes]] = []
        self.asked: list[int] = []
        """The numbers from which subscribers asked for a replay."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def send(self, *events: Event, lost: bool = False, rank: int | None = 0) -> None:
        """Publishes a batch; one that is ``lost`` is kept for replays only."""
        payload = encoded(events, rank)
        self.kept.append((self.next, payload))
        if not lost:
            self._sockets[0].send_multipart([b"kv@pod@tiny", self.next.to_bytes(8, "big"), payload])
        self.next += 1

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        router = self._sockets[1]
        while not self._closing.is_set():
            if not router.poll(50):
                continue
            name, _, start = router.recv_multipart()
            first = int.from_bytes(start, "big")
            for number, payload in list(self.kept):
                if number >= first:
                    router.send_multipart([name, b"", b"kv@pod@tiny", number.to_bytes(8, "big"), payload])
            router.send_multipart([name, b"", b"", END, b""])
            self.asked.append(first)


def encoded(events: Sequence[Event], rank: int | None = 0) -> bytes:
    """A batch."""
    return msgspec.msgpack.encode([time.time(), list(events), rank])
