"""A batch sent to a server in a plan's order, so many requests at once, each result written as it comes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from kvstore.batches.file import Batch
from kvstore.batches.reasons import Reasons, Tell, message_of
from kvstore.batches.results import Results
from kvstore.batches.server import Answer, Server, Unreached

Progress = Callable[[int], None]
UNREACHED_MAX = 5
"""Different requests in a row that get no answer: the server is gone, and the run ends."""


@dataclass(slots=True)
class Sent:
    """The outcome of sending a batch. Tokens are those that the server reports for the requests of this time."""

    answered: int = 0
    """Requests with a result that is an answer."""
    known: int = 0
    """Requests whose result was there before."""
    refused: int = 0
    """Requests that the server calls wrong (status 4xx); that is their result."""
    refused_before: int = 0
    """Those of ``known`` that the server called wrong."""
    failed: int = 0
    """Requests that the server did not do, however often it was asked; they have no result."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were in the server's prefix cache, if it says so (prompt_tokens_details)."""


def send(
    batch: Batch,
    order: Sequence[int],
    server: Server,
    results: Results,
    concurrency: int,
    progress: Progress,
    tell: Tell = lambda _: None,
) -> Sent:
    """Sends the requests that have no result yet. ``tell`` is called with why some of them have no answer.

    A request that was in progress when a program was killed has no result, and is sent again. Raises InvalidRequest as
    ``Server.post`` does, and Unavailable if the server is silent, or several requests in a row were not answered.
    """
    reasons = Reasons(tell)
    sending = _Sending(results, progress, reasons)
    sent, flying = sending.sent, sending.flying
    threads = ThreadPoolExecutor(concurrency, thread_name_prefix="kvstore-batch")
    try:
        for custom_id, path, body in _requests(batch, order):
            if custom_id in results.known:
                sent.known += 1
                sent.refused_before += custom_id in results.refused
                progress(1)
                continue
            flying[threads.submit(server.post, path, body)] = custom_id
            if len(flying) == concurrency:
                sending.land()
        while flying:
            sending.land()
        sending.end()
    finally:
        if flying:
            server.close()  # an error, or Ctrl-C: nobody waits for the rest
        threads.shutdown(cancel_futures=True)
        for each in [each for each in flying if not each.cancelled() and each.exception() is None]:
            sending.write(flying.pop(each), each.result())
        reasons.tell_counts()
    return sent


@dataclass(slots=True)
class _Sending:
    """The requests that are on their way, and what came of the others."""

    results: Results
    progress: Progress
    reasons: Reasons
    sent: Sent = field(default_factory=Sent)
    flying: dict[Future[Answer], str] = field(default_factory=dict)
    unreached: list[tuple[str, Unreached]] = field(default_factory=list)
    """Requests without an answer since the last answer: of the server, or of these requests?"""
    is_answered: bool = False
    """True once an answer came."""

    def land(self) -> None:
        """Waits for an answer, and writes all that are there. Raises if the others need not be waited for."""
        done = wait(self.flying, return_when=FIRST_COMPLETED).done
        error: BaseException | None = None
        for each in sorted(done, key=lambda each: each.exception() is None):  # answers last: then the server is there
            custom_id = self.flying.pop(each)
            failed = each.exception()
            if failed is None:
                self.write(custom_id, each.result())
                self.progress(1)
            elif isinstance(failed, Unreached):
                self.unreached.append((custom_id, failed))
            else:
                error = error or failed
        if error is not None:
            raise error
        if len(self.unreached) >= UNREACHED_MAX:
            raise self.unreached[-1][1]

    def write(self, custom_id: str, answer: Answer) -> None:
        """Writes an answer, and counts it."""
        self.is_answered = True
        self._give_up()
        if not answer.is_result:
            self.sent.failed += 1
            self._explain(custom_id, answer)
            return
        body = self.results.add(custom_id, answer)
        if answer.status >= 400:
            self.sent.refused += 1
            self._explain(custom_id, answer)
            return
        self.sent.answered += 1
        usage = body.get("usage")
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details")
            self.sent.prompt_tokens += _whole(usage.get("prompt_tokens"))
            self.sent.cached_tokens += _whole(details.get("cached_tokens")) if isinstance(details, dict) else 0

    def end(self) -> None:
        """Counts the last requests that got no answer. Raises Unreached if no request got one."""
        if self.unreached and not self.is_answered:
            raise self.unreached[-1][1]
        self._give_up()

    def _give_up(self) -> None:
        """Counts requests that got no answer while others get one."""
        for custom_id, failed in self.unreached:
            self.sent.failed += 1
            self.reasons.add(custom_id, "no answer", str(failed))
            self.progress(1)
        self.unreached.clear()

    def _explain(self, custom_id: str, answer: Answer) -> None:
        self.reasons.add(custom_id, f"status {answer.status}", message_of(answer.body))


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _requests(batch: Batch, order: Sequence[int]) -> Iterator[tuple[str, str, bytes]]:
    """Yields custom_id, path and body of each request."""
    for record in batch.requests(order):
        body = record["body"]
        path = record.get("url") or ("/v1/chat/completions" if "messages" in body else "/v1/completions")
        yield record["custom_id"], path, json.dumps(body).encode()
