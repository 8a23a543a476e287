"""A batch sent to a server in a plan's order, so many requests at once, each result written as it comes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from kvstore.batches.file import Batch
from kvstore.batches.results import Results
from kvstore.batches.server import Answer, Server

Progress = Callable[[int], None]


@dataclass(slots=True)
class Sent:
    """The outcome of sending a batch. Tokens are those that the server reports for the requests of this time."""

    answered: int = 0
    """Requests with a result that is an answer."""
    known: int = 0
    """Requests whose result was there before."""
    refused: int = 0
    """Requests that the server calls wrong (status 4xx); that is their result."""
    failed: int = 0
    """Requests that the server did not do, however often it was asked; they have no result."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were in the server's prefix cache, if it says so (prompt_tokens_details)."""


def send(
    batch: Batch, order: Sequence[int], server: Server, results: Results, concurrency: int, progress: Progress
) -> Sent:
    """Sends the requests that have no result yet. Raises Unavailable and InvalidRequest as ``Server.post`` does.

    A request that was in progress when a program was killed has no result, and is sent again.
    """
    sent = Sent()
    flying: dict[Future[Answer], str] = {}
    threads = ThreadPoolExecutor(concurrency, thread_name_prefix="kvstore-batch")
    try:
        for custom_id, path, body in _requests(batch, order):
            if custom_id in results.known:
                sent.known += 1
                progress(1)
                continue
            flying[threads.submit(server.post, path, body)] = custom_id
            if len(flying) == concurrency:
                _land(flying, results, sent, progress)
        while flying:
            _land(flying, results, sent, progress)
    finally:
        if flying:
            server.close()  # an error, or Ctrl-C: nobody waits for the rest
        threads.shutdown(cancel_futures=True)
        for each in [each for each in flying if not each.cancelled() and each.exception() is None]:
            _write(each.result(), flying.pop(each), results, sent)
    return sent


def _land(flying: dict[Future[Answer], str], results: Results, sent: Sent, progress: Progress) -> None:
    """Waits for an answer, and writes all that are there. Raises what the first one raised that failed."""
    done = wait(flying, return_when=FIRST_COMPLETED).done
    error: BaseException | None = None
    for each in done:
        custom_id = flying.pop(each)
        if (failed := each.exception()) is not None:
            error = error or failed
            continue
        progress(1)
        _write(each.result(), custom_id, results, sent)
    if error is not None:
        raise error


def _write(answer: Answer, custom_id: str, results: Results, sent: Sent) -> None:
    if not answer.is_result:
        sent.failed += 1
        return
    body = results.add(custom_id, answer)
    if answer.status >= 400:
        sent.refused += 1
        return
    sent.answered += 1
    usage = body.get("usage")
    if isinstance(usage, dict):
        details = usage.get("prompt_tokens_details")
        sent.prompt_tokens += _whole(usage.get("prompt_tokens"))
        sent.cached_tokens += _whole(details.get("cached_tokens")) if isinstance(details, dict) else 0


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _requests(batch: Batch, order: Sequence[int]) -> Iterator[tuple[str, str, bytes]]:
    """Yields custom_id, path and body of each request."""
    for record in batch.requests(order):
        body = record["body"]
        path = record.get("url") or ("/v1/chat/completions" if "messages" in body else "/v1/completions")
        yield record["custom_id"], path, json.dumps(body).encode()
