"""Prompts that a user gives to compare on: a file of JSON lines, and the answers that the model itself gives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvstore.connectors.transformers.comparing import Case
from kvstore.errors import InvalidRequest
from kvstore.parsing import parse_json

LINE_BYTES_MAX = 16 << 20
PROMPTS_MAX = 10_000
Encode = Callable[[str], Sequence[int]]
FORM = (
    '{"system": ..., "documents": [..., ...], "question": ..., "answer": ..., "kind": ...}, "kind" a text, the others '
    "texts or lists of token ids"
)


def load_model(name: str, device: str) -> tuple[Any, Encode]:
    """Returns a model by its name or folder, ready to run, and its tokenizer's function. Raises InvalidRequest."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").to(device).eval()
    except (OSError, ValueError, RuntimeError, ImportError) as cause:
        raise InvalidRequest(f"cannot load the model {name!r}: {_first_line(cause)}") from cause

    @functools.cache
    def tokenizer() -> Any:
        try:
            return AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError, KeyError, ImportError) as cause:
            raise InvalidRequest(
                f"cannot load the tokenizer of {name!r}: {_first_line(cause)}; or give token ids"
            ) from cause

    def encode(text: str) -> Sequence[int]:
        found: Sequence[int] = tokenizer().encode(text, add_special_tokens=False)
        return found

    return model, encode


def read_cases(path: str, model: Any, encode: Encode, *, chunk_tokens: int, answer_tokens: int) -> list[Case]:
    """Reads prompts, one JSON object a line: ``FORM``; "system", "answer" and "kind" may be left out.

    The prompt is BOS, system, documents, question, answer. Segments are the documents, but for one that follows BOS,
    cut to full chunks. Without an answer, it is what full prefill says: ``answer_tokens`` tokens.
    Raises InvalidRequest, naming the line.
    """
    bos = getattr(model.config, "bos_token_id", None)
    if not isinstance(bos, int):
        raise InvalidRequest("the model has no BOS token, behind which segments are computed")
    found, number = list[Case](), 0
    try:
        with open(path, "rb") as file:
            while line := file.readline(LINE_BYTES_MAX + 1):
                number += 1
                if line.strip():
                    found.append(_case(line, bos, encode, chunk_tokens, lambda ids: _said(model, ids, answer_tokens)))
                if len(found) > PROMPTS_MAX:
                    raise InvalidRequest(f"more than {PROMPTS_MAX} prompts")
    except OSError as cause:
        raise InvalidRequest(f"cannot read the prompts {path!r}: {cause.strerror}") from cause
    except InvalidRequest as cause:
        raise InvalidRequest(f"prompts {path!r}, line {number}: {cause}") from cause
    if not any(each.segments for each in found):
        raise InvalidRequest(
            f"prompts {path!r}: no document of {chunk_tokens} tokens or more behind a system prompt or another document"
        )
    return found


def _case(line: bytes, bos: int, encode: Encode, chunk_tokens: int, said: Callable[[list[int]], list[int]]) -> Case:
    if len(line) > LINE_BYTES_MAX:
        raise InvalidRequest(f"longer than {LINE_BYTES_MAX} bytes")
    try:
        record = parse_json(line)
    except ValueError as cause:
        raise InvalidRequest(f"not JSON: {cause}") from cause
    if (
        not isinstance(record, dict)
        or not isinstance(record.get("documents"), list)
        or "question" not in record
        or not isinstance(record.get("kind", ""), str)
    ):
        raise InvalidRequest(f"expected {FORM}")
    ids, segments = [bos, *_tokens(record.get("system", []), encode)], list[range]()
    for document in record["documents"]:
        tokens = _tokens(document, encode)
        full = len(tokens) // chunk_tokens * chunk_tokens
        if full and len(ids) > 1:
            segments.append(range(len(ids), len(ids) + full))
        ids += tokens
    ids += _tokens(record["question"], encode)
    answer = _tokens(record["answer"], encode) if "answer" in record else said(ids)
    place = range(len(ids), len(ids) + len(answer))
    return Case((*ids, *answer), tuple(segments), (place,), (record.get("kind", ""),))


def _tokens(value: Any, encode: Encode) -> list[int]:
    if isinstance(value, str):
        return list(encode(value))
    if isinstance(value, list) and all(type(each) is int and each >= 0 for each in value):
        return value
    raise InvalidRequest(f"expected {FORM}")


def _said(model: Any, ids: list[int], count: int) -> list[int]:
    """Returns the model's own continuation: the most likely tokens behind full prefill."""
    given = torch.tensor([ids], device=model.get_input_embeddings().weight.device)
    out = model.generate(given, max_new_tokens=count, do_sample=False)
    found: list[int] = out[0, len(ids) :].tolist()
    return found


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
