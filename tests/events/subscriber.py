"""A router's subscriber as vLLM's example has it: decodes batches, sees gaps by numbers, asks for what it missed."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import zmq

END = (1 << 64) - 1


class Index:
    """Blocks by hash, as batches say: with their parents and tokens."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}
        self.last: int | None = None
        self.cleared = 0
        self.batches = 0

    def apply(self, seq: int, payload: bytes) -> None:
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        self.batches += 1
        for event in events:
            self._apply(event)
        self.last = seq

    def _apply(self, event: list[Any]) -> None:
        if event[0] == "AllBlocksCleared":
            self.blocks.clear()
            self.cleared += 1
        elif event[0] == "BlockRemoved":
            for each in event[1]:
                del self.blocks[each]
        else:
            _, hashes, parent, tokens, size, lora, medium, lora_name = event
            assert (lora, lora_name) == (None, None) and medium and len(tokens) == size * len(hashes)
            assert parent is None or parent in self.blocks, "a parent is told before its child"
            for at, each in enumerate(hashes):
                self.blocks[each] = (parent, tokens[at * size : (at + 1) * size])
                parent = each


class Subscriber:
    """Keeps an index from a publisher's endpoints, in a thread, until closed."""

    def __init__(self, publish: str, replay: str, topic: str = "kv@") -> None:
        self.index = Index()
        self.lock = threading.Lock()
        self.replays = 0
        self._replay = replay
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._sub.connect(publish)
        self._ended = threading.Event()
        self.failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def hashes(self) -> set[int]:
        if self.failed is not None:
            raise self.failed
        with self.lock:
            return set(self.index.blocks)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._sub.close(0)
        self._context.term()
        if self.failed is not None:
            raise self.failed

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                if self._sub.poll(20):
                    _, raw, payload = self._sub.recv_multipart()
                    self._hear(int.from_bytes(raw, "big"), payload)
        except BaseException as error:  # noqa: BLE001 - carried to the test
            self.failed = error

    def _hear(self, seq: int, payload: bytes) -> None:
        with self.lock:
            last = self.index.last
        if last is not None and seq <= last:
            return  # came with a replay
        if last is None or seq != last + 1:
            self._ask(0 if last is None else last + 1)
            with self.lock:
                if self.index.last is not None and seq <= self.index.last:
                    return
        with self.lock:
            self.index.apply(seq, payload)

    def _ask(self, seq: int) -> None:
        self.replays += 1
        request = self._context.socket(zmq.DEALER)
        request.setsockopt(zmq.LINGER, 0)
        request.connect(self._replay)
        request.send_multipart((b"", seq.to_bytes(8, "big")))
        while not self._ended.is_set():
            if request.poll(20):
                _, raw, payload = request.recv_multipart()
                found = int.from_bytes(raw, "big")
                if found == END:
                    break
                with self.lock:
                    self.index.apply(found, payload)
        request.close()
