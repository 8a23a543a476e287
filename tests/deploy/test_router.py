"""The example router: what it makes of events, and whom it chooses. Events are made up here; no engine runs."""

from __future__ import annotations

import json
import threading
import urllib.request
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvstore.events.stream import EventBatch, Sockets, encoded, ended
from tests.deploy.examples import answering
from tests.engines.events.publisher import CLEARED, Publisher
from tests.kit.patience import PATIENCE_S, eventually
from tests.kit.programs import load_program

BLOCK = 16
ENGINES = ("http://one", "http://two")
Events = list[dict[str, Any]]


router = load_program("deploy/examples/router.py")


def stored(tokens: list[int], medium: str | None, first: int = 0) -> dict[str, Any]:
    """``BlockStored`` of the blocks of a prompt from ``first`` on, as vLLM 0.32 encodes it."""
    hashes = [hash(tuple(tokens[: end * BLOCK])) for end in range(1, len(tokens) // BLOCK + 1)]
    return {
        "type": "BlockStored",
        "block_hashes": hashes[first:],
        "parent_block_hash": hashes[first - 1] if first else None,
        "token_ids": tokens[first * BLOCK : len(hashes) * BLOCK],
        "block_size": BLOCK,
        "medium": medium,
    }


def removed(tokens: list[int], medium: str | None, at: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [hash(tuple(tokens[: (at + 1) * BLOCK]))], "medium": medium}


def chosen(scorer: Any, tokens: list[int]) -> set[str]:
    """Whom it chooses in four tries while nobody is busy."""
    found = set()
    for _ in range(4):
        engine = scorer.begin(tokens)
        scorer.end(engine)
        found.add(engine)
    return found


def test_a_prompt_goes_where_its_prefix_is_until_that_is_removed() -> None:
    scorer, tokens = router.Scorer(ENGINES), list(range(5 * BLOCK))
    assert chosen(scorer, tokens) == {*ENGINES}
    scorer.apply("http://two", [stored(tokens, "GPU")])
    assert chosen(scorer, tokens) == {"http://two"}
    assert chosen(scorer, [7, *tokens]) == {*ENGINES}
    scorer.apply("http://two", [removed(tokens, "GPU", 0)])
    assert chosen(scorer, tokens) == {*ENGINES}


def test_what_the_store_has_counts_for_all_and_less_than_memory() -> None:
    scorer, tokens = router.Scorer(ENGINES), list(range(5 * BLOCK))
    scorer.apply(router.STORE, [stored(tokens, "STORAGE")])
    assert chosen(scorer, tokens) == {*ENGINES}
    scorer.apply("http://two", [stored(tokens[: 2 * BLOCK], None)])
    assert chosen(scorer, tokens) == {"http://two"}
    scorer.apply("http://two", [{"type": "AllBlocksCleared"}])
    assert chosen(scorer, tokens) == {*ENGINES}


def test_a_busy_engine_gets_only_what_is_worth_the_wait() -> None:
    scorer, tokens = router.Scorer(ENGINES), list(range(20 * BLOCK))
    scorer.apply("http://one", [stored(tokens, "GPU")])
    assert [scorer.begin(tokens) for _ in range(4)] == ["http://one", "http://one", "http://one", "http://two"]


class Echo(BaseHTTPRequestHandler):
    """An engine that answers with the request."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def test_requests_go_to_the_engine_whose_events_it_heard_and_lost_ones_are_asked_for() -> None:
    tokens = list(range(3 * BLOCK))
    with (
        Publisher() as publisher,
        answering(ThreadingHTTPServer(("127.0.0.1", 0), Echo)) as one,
        answering(ThreadingHTTPServer(("127.0.0.1", 0), Echo)) as two,
    ):
        scorer = router.Scorer([one, two])
        ends = [f"tcp://127.0.0.1:{port}" for port in publisher.ports]
        threading.Thread(target=router.follow, args=(scorer, two, *ends), daemon=True).start()
        publisher.send(stored(tokens, "GPU"), lost=True)

        def heard() -> bool:
            publisher.send()
            return bool(scorer.indexes[two].size == BLOCK)

        eventually(heard)
        with answering(router.server(scorer, "127.0.0.1", 0)) as url:
            for _ in range(3):
                asked = json.dumps({"prompt": tokens}).encode()
                with urllib.request.urlopen(router.post(f"{url}/v1/completions", asked), timeout=PATIENCE_S) as answer:
                    assert (answer.headers["X-Engine"], answer.read()) == (two, asked)
    assert not +scorer._busy


def test_one_topic_is_followed_and_a_whole_snapshot_counts() -> None:
    topic, seq = "kv@kvstore@m", 0
    first, second = stored(list(range(3 * BLOCK)), "STORAGE"), stored([7] * 2 * BLOCK, "STORAGE")
    with closing(Sockets("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")) as sockets:
        scorer, ends = router.Scorer(ENGINES), (sockets.publish, sockets.replay, topic)
        threading.Thread(target=router.follow, args=(scorer, router.STORE, *ends), daemon=True).start()
        while not (asked := [each for each in sockets.requests(0.05) if each.topic == topic]):
            sockets.send(topic, EventBatch(seq := seq + 1, encoded([], 0)))
        sockets.reply(asked[0].client, [EventBatch(1001, encoded([CLEARED, first], 0)), ended()])
        for name, number, events in ((f"{topic}2", 1, [CLEARED]), (topic, 1001, []), (topic, 1002, [second])):
            sockets.send(name, EventBatch(number, encoded(events, 0)))
        eventually(lambda: len(scorer.indexes[router.STORE].held) == 5)
