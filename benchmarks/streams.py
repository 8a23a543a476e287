"""Requests to vLLM's OpenAI server as a user sees them: the answer as a stream, with the time of its first token.

Separate from what is asked: prompts and answers are token ids, so answers can be compared exactly.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

ANSWER_S = 300.0


@dataclass(frozen=True)
class Reply:
    """An answer. ``cached_tokens``: how much of the prompt the server had or loaded."""

    tokens: list[int]
    first_token_s: float
    cached_tokens: int


def ask(url: str, prompt: list[int], count: int) -> Reply:
    """A greedy answer of ``count`` tokens. Raises OSError."""
    said: list[int] = []
    first_token_s, cached = 0.0, 0
    asked = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    began_s = time.perf_counter()
    for part in _events(url, _request(prompt, count, asked)):
        new = [token for choice in part["choices"] for token in choice["token_ids"]]
        if new and not said:
            first_token_s = time.perf_counter() - began_s
        said += new
        if part.get("usage"):
            cached = part["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Reply(said, first_token_s, cached)


def best_two(url: str, prompt: list[int]) -> dict[int, float]:
    """The log-probabilities of the two tokens that are likeliest to come next."""
    with _opened(url, _request(prompt, 1, {"logprobs": 2, "return_tokens_as_token_ids": True})) as answer:
        found = json.load(answer)["choices"][0]["logprobs"]["top_logprobs"][0]
    return {int(name.removeprefix("token_id:")): value for name, value in found.items()}


def _request(prompt: list[int], count: int, more: dict[str, Any]) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, **more}


def _events(url: str, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of a streamed answer, as they come."""
    with _opened(url, request) as answer:
        for line in answer:
            said = line.decode().removeprefix("data: ").strip()
            if said and said != "[DONE]":
                yield json.loads(said)


def _opened(url: str, request: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(request).encode(), headers)
    return urllib.request.urlopen(asked, timeout=ANSWER_S)
