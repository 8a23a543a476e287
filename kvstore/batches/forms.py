"""The kinds of requests in a batch file, and what a plan needs of each: its prompt and its output tokens.

- OpenAI: one request a line with ``custom_id`` and ``body``, which has ``prompt`` (text or token ids) or ``messages``.
- ShareGPT: ``conversations``, turns with ``from`` and ``value``; the prompt ends with the last turn of the human.
- Mooncake: ``input_length``, ``output_length`` and ``hash_ids``, no tokens (kvstore/replay/trace.py).
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvstore.batches.tokenizer import Tokenizer
from kvstore.brief import kind_of
from kvstore.errors import InvalidRequest
from kvstore.replay.trace import parse_request
from kvstore.tokens import TOKENS_MAX, TokenArray, token_array

CUSTOM_ID_CHARS_MAX = 1024
OUTPUTS = ("max_completion_tokens", "max_tokens")
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_PATH = re.compile(r"/[!-~]*")


class Form(Enum):
    """A kind of request. The value is the field that tells it."""

    OPENAI = "body"
    SHAREGPT = "conversations"
    MOONCAKE = "hash_ids"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a batch."""

    tokens: TokenArray | None
    """The prompt; None for a trace, which has only ``blocks``."""
    blocks: Sequence[Hashable] = ()
    length: int = 0
    """Tokens of the prompt."""
    decode_tokens: int | None = None
    """Output tokens at most; None if the request does not say."""
    custom_id: str | None = None


def form_of(record: Any) -> Form:
    """The form of a request. Raises InvalidRequest."""
    if isinstance(record, dict):
        for form in Form:
            if form.value in record:
                return form
    raise InvalidRequest(
        "not a request of a batch: expected an object with custom_id and body (OpenAI), conversations (ShareGPT) or "
        "hash_ids (Mooncake)"
    )


def asked(record: dict[str, Any], form: Form, tokenizer: Tokenizer | None) -> Asked:
    """The request in ``record``. Raises InvalidRequest."""
    found = _READERS[form](record, tokenizer)
    if not found.length:
        raise InvalidRequest("the prompt is empty: expected 1 token or more")
    return found


def _of_mooncake(record: dict[str, Any], _: Tokenizer | None) -> Asked:
    request = parse_request(record, 0)
    blocks = request.hash_ids[: request.full_blocks]
    return Asked(None, blocks, request.input_length, max(0, request.output_length))


def _of_openai(record: dict[str, Any], tokenizer: Tokenizer | None) -> Asked:
    body, custom_id = record["body"], record.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= CUSTOM_ID_CHARS_MAX:
        raise InvalidRequest(f"custom_id={custom_id!r}: expected text of 1 to {CUSTOM_ID_CHARS_MAX} characters")
    if not isinstance(body, dict):
        raise InvalidRequest(f"body is {kind_of(body)}: expected an object")
    if body.get("stream"):
        raise InvalidRequest("the body asks for a stream: a batch has one answer to each request, leave out stream")
    method, url = record.get("method", "POST"), record.get("url", "/")
    if method != "POST" or not isinstance(url, str) or not _PATH.fullmatch(url):
        raise InvalidRequest(f"method={method!r}, url={url!r}: expected POST, and a path such as /v1/completions")
    output = next((body[name] for name in OUTPUTS if body.get(name) is not None), None)
    if output is not None and (type(output) is not int or not 0 <= output <= TOKENS_MAX):
        raise InvalidRequest(f"max_tokens={output!r}: expected a whole number up to {TOKENS_MAX}")
    tokens = _prompt_of(body, tokenizer)
    return Asked(tokens, length=len(tokens), decode_tokens=output, custom_id=custom_id)


def _prompt_of(body: dict[str, Any], tokenizer: Tokenizer | None) -> TokenArray:
    prompt, messages = body.get("prompt"), body.get("messages")
    if isinstance(prompt, str):
        return token_array(_named(tokenizer).text(prompt)) if prompt else token_array([])
    if isinstance(prompt, list):
        return token_array(prompt)
    if isinstance(messages, list) and all(isinstance(each, dict) for each in messages):
        return _conversation(messages, tokenizer)
    raise InvalidRequest("the body has no prompt: expected prompt (text or token ids), or messages (a list of objects)")


def _of_sharegpt(record: dict[str, Any], tokenizer: Tokenizer | None) -> Asked:
    turns = record["conversations"]
    if not isinstance(turns, list) or not all(
        isinstance(turn, dict) and isinstance(turn.get("value"), str) and turn.get("from") in ROLES for turn in turns
    ):
        raise InvalidRequest(
            f"conversations are not turns: expected objects with value (text) and from ({', '.join(ROLES)})"
        )
    messages = [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in turns]
    end = max((at + 1 for at, each in enumerate(messages) if each["role"] == "user"), default=0)
    tokens = _conversation(messages[:end], tokenizer)
    answer = messages[end]["content"] if end < len(messages) else ""
    output = len(_named(tokenizer).text(answer)) if answer else None
    return Asked(tokens, length=len(tokens), decode_tokens=output)


def _conversation(messages: list[dict[str, Any]], tokenizer: Tokenizer | None) -> TokenArray:
    return token_array(_named(tokenizer).chat(messages)) if messages else token_array([])


def _named(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise InvalidRequest("the prompt is text: give --tokenizer NAME, or token ids as the prompt")
    return tokenizer


_READERS = {Form.OPENAI: _of_openai, Form.SHAREGPT: _of_sharegpt, Form.MOONCAKE: _of_mooncake}
