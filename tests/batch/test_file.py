"""Batch files: what is read of each form, what is refused, what a reordered file and one of results keep."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.batch.file import RequestFile, load_tokenizer, read_batch
from kvstore.batch.upload import Results, ServerAnswer
from kvstore.errors import InvalidRequest
from tests.kit.cases import for_each


def openai(custom_id: str = "a", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body})


def batch_of(folder: Path, *lines: str, **settings: Any) -> RequestFile:
    path = folder / "batch.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return read_batch(path, **settings)


def tokens_of(batch: RequestFile) -> list[list[int]]:
    return [batch.prompts.tokens(at).tolist() for at in range(len(batch.prompts))]


def test_token_ids_of_an_openai_batch_are_read(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, openai("a", prompt=[1, 2], max_tokens=9), "", openai("b", prompt=[3]), block_tokens=1)
    assert tokens_of(batch) == [[1, 2], [3]]


def test_a_reordered_file_has_the_same_lines(tmp_path: Path) -> None:
    lines = [openai(name, prompt=[1, at], note="ü") + " " * at for at, name in enumerate("abc")]
    path = tmp_path / "batch.jsonl"
    path.write_text("\n\n".join(lines))
    batch = read_batch(path)
    batch.write([2, 0, 1], tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text().splitlines() == [lines[2], lines[0], lines[1]]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["batch.jsonl", "out.jsonl"]


def test_a_batch_is_never_written_over_or_mixed_up(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, openai("a", prompt=[1]), openai("b", prompt=[2]))
    with pytest.raises(InvalidRequest, match="is the batch itself"):
        batch.write([0, 1], batch.path)
    batch.path.write_text(openai("c", prompt=[3]))
    with pytest.raises(InvalidRequest, match="changed after it was read"):
        batch.write([0, 1], tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_write_that_fails_leaves_the_output_as_it_was(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, openai("a", prompt=[1]))
    (tmp_path / "out.jsonl").write_text("before")
    with pytest.raises(IndexError):
        batch.write([0, 7], tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 2


@for_each(
    "line, said",
    [
        ("nonsense", "not JSON"),
        ("7", "not a request of a batch"),
        ("{}", "not a request of a batch"),
        (openai("a", prompt=[1]), "custom_id 'a' is that of line 1 too"),
        (openai("", prompt=[1]), "custom_id=''"),
        (json.dumps({"body": {"prompt": [1]}}), "custom_id=None"),
        (json.dumps({"custom_id": "b", "body": 3}), "body is an int"),
        (openai("b", prompt=[]), "prompt 1 is empty"),
        (openai("b", prompt=""), "prompt 1 is empty"),
        (openai("b", messages=[]), "prompt 1 is empty"),
        (openai("b", prompt=[1, True, 3]), "a boolean among them"),
        (openai("b", prompt=[1, -2]), "item 1 is -2"),
        (openai("b", prompt=[[1], [2]]), "item 0 is [1]"),
        (openai("b", prompt="text"), "the prompt is text: give --tokenizer NAME"),
        (openai("b", messages=["x"]), "the body has no prompt"),
        (openai("b"), "the body has no prompt"),
        (openai("b", prompt=[1], stream=True), "the body asks for a stream"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=r"batch '.*batch.jsonl', line 3: ") as raised:
        batch_of(tmp_path, openai("a", prompt=[1]), "", line)
    assert said in str(raised.value)


def test_a_tokenizer_of_transformers_is_asked_for_text_and_chats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = ModuleType("transformers")
    fake.AutoTokenizer = _Known  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", fake)
    tokenizer = load_tokenizer("some/model")
    assert tokenizer.text("hi") == [1, 2]
    assert tokenizer.chat([{"role": "user", "content": "x"}]) == [4]
    chat = openai("b", messages=[{"role": "user", "content": "x"}], max_completion_tokens=4)
    assert tokens_of(batch_of(tmp_path, openai("a", prompt="hi"), chat, tokenizer=tokenizer)) == [[1, 2], [4]]


class _Known:
    @staticmethod
    def from_pretrained(name: str) -> _Known:
        return _Known()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return {"hi": [1, 2], "template x": [4]}[text] if add_special_tokens == (text == "hi") else []

    def apply_chat_template(self, messages: list[Any], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        return f"template {messages[0]['content']}"


class _Refusing:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def from_pretrained(self, name: str) -> _Refusing:
        if name == "broken":
            raise self.error
        return self

    def encode(self, text: str) -> list[int]:
        raise self.error

    def apply_chat_template(self, messages: list[Any], **_: Any) -> str:
        raise self.error


REFUSALS: list[tuple[Exception, str]] = [
    (TypeError("roles must alternate\nand more"), "roles must alternate"),
    (RuntimeError(), "RuntimeError"),
    (ZeroDivisionError("x" * 1000), "x" * 200),
]


@for_each("error, said", REFUSALS)
def test_what_a_tokenizer_refuses_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    fake = ModuleType("transformers")
    fake.AutoTokenizer = _Refusing(error)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", fake)
    with pytest.raises(InvalidRequest, match=f"cannot load the tokenizer 'broken': {said}$"):
        load_tokenizer("broken")
    tokenizer, good = load_tokenizer("refusing"), openai("a", prompt=[1])
    with pytest.raises(InvalidRequest, match=f"line 2: the tokenizer refuses the prompt: {said}$"):
        batch_of(tmp_path, good, openai("b", prompt="x"), tokenizer=tokenizer)
    with pytest.raises(InvalidRequest, match=f"line 2: the tokenizer refuses the messages: {said}$"):
        batch_of(tmp_path, good, openai("b", messages=[{"role": "user"}]), tokenizer=tokenizer)


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
