"""Reading traces, generating them, and the hits that they contain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest
from kvstore.replay import expect, generate, load_trace
from kvstore.replay.trace import BLOCK_TOKENS, TraceRequest
from tests.kit.cases import for_each


def line(**changes: object) -> str:
    fields: dict[str, object] = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
    return json.dumps({**fields, **changes})


def write_trace(path: Path, requests: list[TraceRequest]) -> None:
    """Writes a trace of the published form."""
    lines = [
        line(
            timestamp=each.timestamp_ms,
            input_length=each.input_length,
            output_length=each.output_length,
            hash_ids=each.hash_ids,
        )
        for each in requests
    ]
    path.write_text("".join(f"{each}\n" for each in lines))


def test_a_trace_is_read_as_written(tmp_path: Path) -> None:
    requests = generate(50, seed=3)
    write_trace(tmp_path / "trace.jsonl", requests)
    assert load_trace(tmp_path / "trace.jsonl") == requests
    assert load_trace(tmp_path / "trace.jsonl", 7) == requests[:7]


def test_a_line_of_the_published_form_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 27482, "input_length": 1400, "output_length": 52, "hash_ids": [46, 47, 2353]}\n\n')
    assert load_trace(path) == [TraceRequest(0, 27482, 1400, 52, (46, 47, 2353))]
    assert load_trace(path)[0].full_blocks == 2


@for_each(
    "text, said",
    [
        ("nonsense", "not a request"),
        ("[1, 2]", "not a request"),
        (line(hash_ids=None), "hash_ids are not a list"),
        (line(hash_ids=[0, "1"]), "hash_ids are not a list"),
        (line(hash_ids=[0, -1]), "hash_ids are not a list"),
        (line(hash_ids=[0]), "expected 2, one for each block"),
        (line(input_length=-1), "input_length=-1"),
        (line(input_length=1 << 40), "input_length"),
        (line(input_length="600"), "input_length"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{line()}\n{text}\n")
    with pytest.raises(InvalidRequest, match=r"line 2: ") as raised:
        load_trace(path)
    assert said in str(raised.value)


def test_an_empty_or_missing_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InvalidRequest, match="no requests"):
        load_trace(tmp_path / "empty.jsonl")
    with pytest.raises(InvalidRequest, match="cannot read"):
        load_trace(tmp_path / "missing.jsonl")


def asked(*prompts: tuple[int, ...], tail: int = 0) -> list[TraceRequest]:
    return [TraceRequest(at, 0, len(ids) * BLOCK_TOKENS - tail, 1, ids) for at, ids in enumerate(prompts)]


def test_hits_are_an_unbroken_run_of_full_blocks() -> None:
    found = expect(asked((1, 2, 3), (1, 2, 4), (9, 2, 3), (1, 2, 3, 4), (1, 2, 4)))
    assert found.hits == {0: 0, 1: 2, 2: 0, 3: 3, 4: 3}
    # 1, 12, 123, 124, 9, 92, 923, 1234
    assert found.chunks_unique == 8


def repeats(requests: list[TraceRequest]) -> float:
    seen: set[int] = set()
    total = again = 0
    for request in requests:
        for each in request.hash_ids:
            again += each in seen
            total += 1
            seen.add(each)
    return again / total


@for_each("seed", [0, 1, 2])
def test_generated_trace_repeats_as_many_blocks_as_the_published_one(seed: int) -> None:
    requests = generate(2000, seed=seed)
    assert repeats(requests) == pytest.approx(0.37, abs=0.05)
    assert 18 < sum(len(each.hash_ids) for each in requests) / len(requests) < 40
    # An id stands for one prefix: it always follows the same id.
    before: dict[int, int] = {}
    for request in requests:
        for parent, each in zip((-1, *request.hash_ids), request.hash_ids, strict=False):
            assert before.setdefault(each, parent) == parent
        assert len(request.hash_ids) == -(-request.input_length // BLOCK_TOKENS)
