"""A file of results: every answer fits, only a torn end is cut off, and no other file is touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.batches import Results, sending
from kvstore.batches.sending import ANSWER_BYTES_MAX, Answer
from kvstore.errors import InvalidRequest
from tests.kit.cases import for_each


def line(custom_id: str, **response: object) -> str:
    return json.dumps({"id": "result-0", "custom_id": custom_id, "response": response})


def ids(path: Path) -> list[str]:
    return [json.loads(each)["custom_id"] for each in path.read_text().splitlines()]


BODIES = st.one_of(
    st.binary(max_size=50),
    st.text(max_size=50).map(lambda text: json.dumps(text, ensure_ascii=False).encode(errors="replace")),
    st.sampled_from([b"\xff" * 50, b"\x01" * 50, '"ü"'.encode() * 25, b"[1e15,1e15]", b"[[],[],{}]", b'"\\ud800"']),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(BODIES)
def test_the_line_of_any_answer_fits(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "results"
    path.unlink(missing_ok=True)
    with Results(path) as opened:
        opened.add("\U0001f600" * 1024, Answer(200, body))
    assert path.stat().st_size <= sending.GROWTH_MAX * len(body) + sending.FRAME_BYTES_MAX
    assert sending.GROWTH_MAX * ANSWER_BYTES_MAX + sending.FRAME_BYTES_MAX <= sending.LINE_BYTES_MAX


def test_a_line_that_is_too_long_is_an_error_and_cuts_nothing_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "LINE_BYTES_MAX", 100)
    path = tmp_path / "results"
    content = f"{line('a')}\n{line('b', body='x' * 100)}\n{line('c')}\n"
    path.write_text(content)
    with pytest.raises(InvalidRequest, match=r"results', line 2 has over 100 bytes: give another --results FILE"):
        Results(path)
    assert path.read_text() == content


@for_each("last", ['{"custom_id":"c0","response":{}}', line("c0")])
def test_a_last_result_without_a_newline_stays_and_the_next_begins_a_line(tmp_path: Path, last: str) -> None:
    path = tmp_path / "results"
    path.write_text(last)
    with Results(path) as opened:
        assert opened.known == {"c0"}
        opened.add("c1", Answer(200, b"{}"))
    assert path.read_text().startswith(f"{last}\n")
    assert ids(path) == ["c0", "c1"]
