"""A small router before vLLM servers that share a kvstore: it sends each request where most of its prefix is.

    python deploy/examples/router.py --listen 127.0.0.1:8000 \
        --engine http://127.0.0.1:8001=tcp://127.0.0.1:5557,tcp://127.0.0.1:5558 \
        --engine http://127.0.0.1:8002=tcp://127.0.0.1:5559,tcp://127.0.0.1:5560 \
        --store tcp://127.0.0.1:5561,tcp://127.0.0.1:5562,kv@kvstore@MODEL

Each engine is its URL, and the endpoint and the replay endpoint of its KV events (``--kv-events-config``). They count
for that engine alone. Those of the store are published by ``kvstore events`` (docs/events.md), under a topic for each
model. They count for all engines, because all can load those blocks.
Needs pyzmq and msgspec. An example to read: it has no TLS, no health checks and no retries.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import takewhile
from typing import Any

import msgspec
import zmq

STORE = ""
"""The name of the store among the engines."""
STORED_WORTH = 0.7
"""A block in the store, in blocks of the engine's own memory: it has to be loaded, but not computed."""
REQUEST_COST = 8
"""A request under way, in blocks: an engine that is so much busier gets the next one only for more of its prefix."""
END = (1 << 64) - 1
TIMEOUT_MS = 2_000
HTTP_TIMEOUT_S = 600


def chain(tokens: Sequence[int], size: int, key: bytes = b"") -> Iterator[bytes]:
    """Yields a key for each full block: a hash of its tokens and of those before it. No engine's hashes are needed."""
    for start in range(0, len(tokens) - size + 1, size):
        key = blake2b(key + msgspec.msgpack.encode(tokens[start : start + size]), digest_size=16).digest()
        yield key


@dataclass
class Index:
    """The blocks that one engine, or the store, has published."""

    size: int = 0
    """Tokens of a block, as events say it."""
    _keys: dict[int, bytes] = field(default_factory=dict)
    held: set[bytes] = field(default_factory=set)

    def apply(self, event: dict[str, Any]) -> None:
        """Takes in one event, as vLLM encodes it."""
        if event["type"] == "AllBlocksCleared":
            self._keys, self.held = {}, set()
            return
        hashes = event["block_hashes"]
        if event["type"] == "BlockRemoved":
            self.held.difference_update(self._keys[each] for each in hashes if each in self._keys)
            return
        parent, self.size = event["parent_block_hash"], event["block_size"]
        if parent is None or parent in self._keys:
            keys = chain(event["token_ids"], self.size, b"" if parent is None else self._keys[parent])
            self._keys.update(zip(hashes, keys, strict=True))
            self.held.update(self._keys[each] for each in hashes)


class Scorer:
    """Chooses an engine for each prompt. Thread-safe."""

    def __init__(self, engines: Iterable[str]) -> None:
        self.engines = list(engines)
        self.indexes = {each: Index() for each in (*self.engines, STORE)}
        self._busy: Counter[str] = Counter()
        self._turn = 0
        self.lock = threading.Lock()

    def apply(self, engine: str, events: Iterable[dict[str, Any]]) -> None:
        """Takes in a batch of an engine's events."""
        with self.lock:
            for event in events:
                self.indexes[engine].apply(event)

    def begin(self, tokens: Sequence[int]) -> str:
        """Returns the engine for a prompt; ``end`` says when it has answered."""
        with self.lock:
            scores = {engine: self._score(engine, tokens) for engine in self.engines}
            best = [engine for engine, score in scores.items() if score == max(scores.values())]
            self._turn += 1
            chosen = best[self._turn % len(best)]
            self._busy[chosen] += 1
        return chosen

    def end(self, engine: str) -> None:
        """The engine has answered a request."""
        with self.lock:
            self._busy[engine] -= 1

    def _score(self, engine: str, tokens: Sequence[int]) -> float:
        size = max(each.size for each in self.indexes.values())  # an engine without blocks can load those of the store
        keys = list(chain(tokens, size)) if size else []
        own = len(list(takewhile(self.indexes[engine].held.__contains__, keys)))
        pool = len(list(takewhile(self.indexes[STORE].held.__contains__, keys[own:])))
        return own + STORED_WORTH * pool - REQUEST_COST * self._busy[engine]


def follow(scorer: Scorer, engine: str, publish: str, replay: str, topic: str = "") -> None:
    """Feeds an engine's events to the scorer, for ever. What was missed is asked for, as vLLM's example does.

    Each topic has numbers of its own, so follow one.
    """
    context: zmq.Context[Any] = zmq.Context.instance()
    subscriber = context.socket(zmq.SUB)
    subscriber.connect(publish)
    subscriber.subscribe(topic.encode())
    heard, before = 0, -1
    while True:
        name, number, payload = subscriber.recv_multipart()
        if topic and name != topic.encode():
            continue  # a subscription takes all topics that begin with it
        seq = int.from_bytes(number, "big")
        if seq <= before:  # the engine was started again
            scorer.apply(engine, [{"type": "AllBlocksCleared"}])
            heard = 0
        before = seq
        missed = replayed(context, replay, heard, topic) if seq > heard else []
        # A snapshot counts as a whole, with what was published on its way: that comes here too, and is passed over.
        for at, batch in missed or ([(seq, payload)] if seq >= heard else []):
            scorer.apply(engine, msgspec.msgpack.decode(batch)[1])
            heard = at + 1


def replayed(context: zmq.Context[Any], endpoint: str, first: int, topic: str) -> list[tuple[int, bytes]]:
    """Returns the batches from ``first`` on that the engine still has, with their numbers."""
    found: list[tuple[int, bytes]] = []
    with context.socket(zmq.DEALER) as asking:
        asking.linger = 0
        asking.connect(endpoint)
        asking.send_multipart([b"", first.to_bytes(8, "big"), *([topic.encode()] if topic else [])])
        while asking.poll(TIMEOUT_MS):
            number, payload = asking.recv_multipart()[-2:]
            if (at := int.from_bytes(number, "big")) == END:
                break
            found.append((at, payload))
    return found


def tokens_of(body: dict[str, Any], engine: str) -> list[int]:
    """The tokens of a request; an engine makes them from text."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and all(isinstance(each, int) for each in prompt):
        return prompt
    asked = {key: body[key] for key in ("model", "prompt", "messages") if key in body}
    with urllib.request.urlopen(post(f"{engine}/tokenize", json.dumps(asked).encode()), timeout=60) as answer:
        tokens: list[int] = json.load(answer)["tokens"]
    return tokens


def post(url: str, body: bytes) -> urllib.request.Request:
    """A request with a body in JSON."""
    return urllib.request.Request(url, body, {"Content-Type": "application/json"})


def server(scorer: Scorer, host: str, port: int) -> ThreadingHTTPServer:
    """Passes each POST on to the engine that the scorer chooses."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            engine = scorer.begin(tokens_of(json.loads(body), scorer.engines[0]))
            try:
                with urllib.request.urlopen(post(engine + self.path, body), timeout=HTTP_TIMEOUT_S) as answer:
                    self.passed_on(answer, engine)
            except urllib.error.HTTPError as error:
                self.passed_on(error, engine)
            finally:
                scorer.end(engine)

        def passed_on(self, answer: Any, engine: str) -> None:
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.send_header("X-Engine", engine)
            self.end_headers()
            while part := answer.read1():
                self.wfile.write(part)

    return ThreadingHTTPServer((host, port), Handler)


def main() -> None:
    """Serves until it is interrupted."""
    parser = argparse.ArgumentParser(description="Route requests to vLLM servers by their KV events.")
    parser.add_argument("--listen", default="127.0.0.1:8000")
    parser.add_argument("--engine", action="append", required=True, metavar="URL=EVENTS,REPLAY")
    parser.add_argument("--store", required=True, metavar="EVENTS,REPLAY,TOPIC")
    given = parser.parse_args()
    engines = {url: ends.split(",") for url, _, ends in (each.rpartition("=") for each in given.engine)}
    scorer = Scorer(engines)
    for url, ends in {**engines, STORE: given.store.split(",")}.items():
        threading.Thread(target=follow, args=(scorer, url, *ends), daemon=True).start()
    host, _, port = given.listen.rpartition(":")
    with server(scorer, host, int(port)) as serving:
        sys.stdout.write(f"ready http={host}:{serving.server_address[1]}\n")
        sys.stdout.flush()
        try:
            serving.serve_forever()
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
