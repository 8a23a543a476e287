"""A whole replay: its callers as threads, in this process or in several, and the verdict.

With one caller requests keep the order of the trace, and every hit is compared. With several the order is undefined:
bytes are still compared, each chunk must be written exactly once, and at the end every prompt must be stored.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvstore.errors import InvalidRequest
from kvstore.replay.callers import OpenStore, Plan, Progress, run_threads
from kvstore.replay.content import Content, replay_layout
from kvstore.replay.lane import Lane
from kvstore.replay.oracle import expect
from kvstore.replay.report import Report
from kvstore.replay.trace import BLOCK_TOKENS, Request


def replay(
    requests: Sequence[Request], open_store: OpenStore, plan: Plan, progress: Progress = lambda count: None
) -> Report:
    """Replays ``requests``; the namespace must hold none of them, so that expected hits are exact.

    Raises InvalidRequest if it holds some, and the store's error if the store could not go on.
    """
    expected = expect(requests)
    content = Content(replay_layout(plan.bytes_per_token), plan.seed)
    with open_store() as store:
        cache = store.namespace(plan.namespace, content.layout)
        for request in {each.hash_ids[0]: each for each in requests if each.full_blocks}.values():
            if cache.match(content.tokens(request)[:BLOCK_TOKENS], counts=False):
                raise InvalidRequest(
                    f"namespace {plan.namespace!r} holds chunks of this trace already, so its hits cannot be told from "
                    f"new ones: give another --namespace, or kvstore clear it"
                )
        start_s = time.perf_counter()
        if plan.processes > 1:
            from kvstore.replay.spawn import run_processes  # multiprocessing only where it is used

            tally = run_processes(requests, open_store, plan, progress)
        else:
            hits = expected.hits if plan.lanes == 1 else None
            tally = run_threads(lambda: Lane(cache, content, hits), requests, plan.threads, progress)
        seconds = time.perf_counter() - start_s
        if plan.lanes > 1:
            finder = Lane(cache, content, None)
            for request in requests:
                finder.find(request)
            tally.add(finder.tally)
    tokens_expected = expected.blocks * BLOCK_TOKENS if plan.lanes == 1 else None
    return Report(tally, plan.lanes, expected.chunks_unique, tokens_expected, seconds)
