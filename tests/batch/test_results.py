"""A file of results: every answer is read again, and a last line without an end is kept."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.batch.upload import Results, ServerAnswer
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
def test_result_of_any_answer_is_read_again(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "results"
    path.unlink(missing_ok=True)
    custom_id = "\U0001f600" * 1024
    with Results(path) as opened:
        opened.add(custom_id, ServerAnswer(200, body))
    with Results(path) as opened:
        assert opened.known == {custom_id}


@for_each("last", ['{"custom_id":"c0","response":{}}', line("c0")])
def test_a_last_result_without_a_newline_stays_and_the_next_begins_a_line(tmp_path: Path, last: str) -> None:
    path = tmp_path / "results"
    path.write_text(last)
    with Results(path) as opened:
        assert opened.known == {"c0"}
        opened.add("c1", ServerAnswer(200, b"{}"))
    assert path.read_text().startswith(f"{last}\n")
    assert ids(path) == ["c0", "c1"]
