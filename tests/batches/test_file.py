"""Batch files: what is read of each form, what is refused, and that a reordered file loses nothing."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.batches import Batch, file, load_tokenizer, read_batch
from kvstore.errors import InvalidRequest
from tests.kit.cases import for_each


class Letters:
    """A tokenizer: the code point of each letter."""

    def text(self, text: str) -> Sequence[int]:
        return list(map(ord, text))

    def chat(self, messages: Sequence[dict[str, Any]]) -> Sequence[int]:
        return self.text("".join(f"<{each['role']}>{each['content']}" for each in messages))


def openai(custom_id: str = "a", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body})


def trace(**changes: Any) -> str:
    return json.dumps({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1], **changes})


def batch_of(folder: Path, *lines: str, **settings: Any) -> Batch:
    path = folder / "batch.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return read_batch(path, **settings)


def tokens_of(batch: Batch) -> list[list[int]]:
    return [batch.prompts.tokens(at).tolist() for at in range(len(batch.prompts))]


def test_token_ids_of_an_openai_batch_are_read(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, openai("a", prompt=[1, 2], max_tokens=9), "", openai("b", prompt=[3]), block_tokens=1)
    assert tokens_of(batch) == [[1, 2], [3]]
    assert batch.decode_tokens == [9, None]


def test_text_and_messages_are_tokenized(tmp_path: Path) -> None:
    batch = batch_of(
        tmp_path,
        openai("a", prompt="hi"),
        openai("b", messages=[{"role": "user", "content": "x"}], max_completion_tokens=4),
        tokenizer=Letters(),
    )
    assert tokens_of(batch) == [list(map(ord, "hi")), list(map(ord, "<user>x"))]
    assert batch.decode_tokens == [None, 4]


@for_each("is_array", [True, False])
def test_a_conversation_ends_with_the_human_and_is_answered_next(tmp_path: Path, is_array: bool) -> None:
    records = [
        {"id": "1", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "bcd"}]},
        {"id": "2", "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "e"}]},
    ]
    path = tmp_path / "batch.json"
    path.write_text(json.dumps(records, indent=1) if is_array else "\n".join(map(json.dumps, records)))
    batch = read_batch(path, Letters())
    assert tokens_of(batch) == [list(map(ord, "<user>a")), list(map(ord, "<system>s<user>e"))]
    assert batch.decode_tokens == [3, None]
    batch.write([1, 0], tmp_path / "out.json")
    text = (tmp_path / "out.json").read_text()
    assert (json.loads(text) if is_array else list(map(json.loads, text.splitlines()))) == records[::-1]


def test_a_trace_shares_its_full_blocks(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, trace(), trace(input_length=1024, output_length=7))
    assert batch.prompts.block_tokens == 512
    assert batch.prompts.lengths.tolist() == [600, 1024]
    assert batch.decode_tokens == [5, 7]


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


@for_each("is_linked", [False, True])
def test_only_a_file_is_replaced(tmp_path: Path, is_linked: bool) -> None:
    batch = batch_of(tmp_path, openai("a", prompt=[1]))
    pipe = output = tmp_path / "pipe"
    os.mkfifo(pipe)
    if is_linked:
        output = tmp_path / "link"
        output.symlink_to(pipe)
    for each in (output, Path("/dev/null")):
        with pytest.raises(InvalidRequest, match=rf"the output '{each}' is a device or a pipe: give a file"):
            batch.write([0], each)
    assert pipe.is_fifo() and Path("/dev/null").is_char_device()


@for_each("is_dangling", [False, True])
def test_a_link_stays_one_and_its_target_is_written(tmp_path: Path, is_dangling: bool) -> None:
    batch = batch_of(tmp_path, openai("a", prompt=[1]))
    (tmp_path / "folder").mkdir()
    link, target = tmp_path / "link", tmp_path / "folder" / "target"
    link.symlink_to(target)
    if not is_dangling:
        target.write_text("before")
    batch.write([0], link)
    assert link.is_symlink() and target.read_text() == batch.path.read_text()


@for_each("mode", [0o600, 0o640, 0o666])
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    batch = batch_of(tmp_path, openai("a", prompt=[1]))
    output = tmp_path / "out.jsonl"
    output.touch()
    output.chmod(mode)
    batch.write([0], output)
    assert output.stat().st_mode & 0o777 == mode and output.stat().st_size


def test_a_line_that_changes_while_the_batch_is_read_again_is_noticed(tmp_path: Path) -> None:
    long = "x" * (1 << 20)  # more than is read ahead
    batch = batch_of(tmp_path, *(openai(name, prompt=[1], note=long) for name in "abc"))
    requests = batch.requests([0, 2, 1])
    assert next(requests)["custom_id"] == "a"
    content = batch.path.read_text()
    batch.path.write_text(content[:-2] + " \n")  # the same size, and no JSON
    with pytest.raises(InvalidRequest, match=r"batch.jsonl' changed after it was read: plan it again"):
        next(requests)
    batch.path.unlink()
    with pytest.raises(InvalidRequest, match=r"batch.jsonl' changed after it was read: plan it again"):
        batch.write([0], tmp_path / "out.jsonl")


@for_each("is_array", [False, True])
def test_a_mark_of_the_byte_order_is_no_part_of_a_request(tmp_path: Path, is_array: bool) -> None:
    records = [json.loads(openai(name, prompt=[at])) for at, name in enumerate("ab")]
    path, output = tmp_path / "batch.jsonl", tmp_path / "out.jsonl"
    text = json.dumps(records) if is_array else "".join(f"{json.dumps(each)}\n" for each in records)
    path.write_text(text, encoding="utf-8-sig")
    batch = read_batch(path)
    assert list(batch.requests([1, 0])) == records[::-1]
    batch.write([1, 0], output)
    assert codecs.BOM_UTF8 not in output.read_bytes()
    assert list(read_batch(output).requests([0, 1])) == records[::-1]


def test_half_of_a_character_in_an_array_stays_what_it_is(tmp_path: Path) -> None:
    records = [json.loads(openai("a", prompt=[1], note="\ud800"))]
    path, output = tmp_path / "batch.jsonl", tmp_path / "out.jsonl"
    path.write_text(json.dumps(records))
    read_batch(path).write([0], output)
    assert json.loads(output.read_text()) == records


def test_a_batch_is_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidRequest, match=r"batch '.*/pipe': not a regular file.*: write it to a file first"):
        read_batch(tmp_path / "pipe")


def test_a_compressed_file_is_called_that(tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl.gz"
    path.write_bytes(gzip.compress(openai("a", prompt=[1]).encode()))
    with pytest.raises(InvalidRequest, match=r"line 1: not text in UTF-8 .*: is the file compressed"):
        read_batch(path)


def test_a_long_file_shows_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "PROGRESS_BYTES", 100)
    path, shown = tmp_path / "batch.jsonl", list[tuple[int, int]]()
    path.write_text("".join(f"{openai(str(at), prompt=[at])}\n" for at in range(9)))
    read_batch(path, progress=lambda done, total: shown.append((done, total)))
    assert 4 <= len(shown) <= 9 and {total for _, total in shown} == {path.stat().st_size}
    assert sorted(shown) == shown


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
        (trace(), "a request with hash_ids among others"),
        (openai("a", prompt=[1]), "custom_id 'a' is that of line 1 too"),
        (openai("", prompt=[1]), "custom_id=''"),
        (json.dumps({"body": {"prompt": [1]}}), "custom_id=None"),
        (json.dumps({"custom_id": "b", "body": 3}), "body is an int"),
        (openai("b", prompt=[]), "the prompt is empty"),
        (openai("b", prompt=""), "the prompt is empty"),
        (openai("b", messages=[]), "the prompt is empty"),
        (openai("b", prompt=[1, -2]), "token -2 at position 1"),
        (openai("b", prompt=[[1], [2]]), "one dimension"),
        (openai("b", prompt="text"), "the prompt is text: give --tokenizer NAME"),
        (openai("b", messages=["x"]), "the body has no prompt"),
        (openai("b"), "the body has no prompt"),
        (openai("b", prompt=[1], max_tokens=-1), "max_tokens=-1"),
        (openai("b", prompt=[1], max_tokens="9"), "max_tokens='9'"),
        (openai("b", prompt=[1], stream=True), "the body asks for a stream"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=r"batch '.*batch.jsonl', line 3: ") as raised:
        batch_of(tmp_path, openai("a", prompt=[1]), "", line)
    assert said in str(raised.value)


@for_each(
    "line, said",
    [
        (json.dumps({"conversations": 1}), "conversations are not turns"),
        (json.dumps({"conversations": [{"from": "cat", "value": "x"}]}), "conversations are not turns"),
        (json.dumps({"conversations": [{"from": "gpt", "value": "x"}]}), "the prompt is empty"),
        (trace(input_length=0, hash_ids=[]), "the prompt is empty"),
        (trace(hash_ids=[1]), "expected 2, one for each block"),
    ],
)
def test_a_wrong_first_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match="line 1: ") as raised:
        batch_of(tmp_path, line, tokenizer=Letters())
    assert said in str(raised.value)


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"batch.jsonl': it holds no requests"):
        batch_of(tmp_path, "", "")
    with pytest.raises(InvalidRequest, match="it holds no requests"):
        batch_of(tmp_path, "[]")
    with pytest.raises(InvalidRequest, match=r"cannot read the batch .*: No such file"):
        read_batch(tmp_path / "missing")
    with pytest.raises(InvalidRequest, match=r"cannot read the batch .*: Is a directory"):
        read_batch(tmp_path)


TURNS = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
GOOD = [
    f"{openai('a', prompt=[1, 2])}\n{openai('b', prompt='x')}\n",
    f"{trace()}\n{trace(input_length=1024)}\n",
    json.dumps([{"conversations": TURNS}, {"conversations": TURNS[:1]}]),
]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(GOOD), st.binary(max_size=20), st.integers(0, 250), st.integers(0, 8))
def test_damaged_files_are_read_or_refused(tmp_path: Path, good: str, junk: bytes, at: int, cut: int) -> None:
    whole = good.encode()
    path = tmp_path / "fuzzed.jsonl"
    path.write_bytes(whole[:at] + junk + whole[at + cut :])
    try:
        batch = read_batch(path, Letters())
    except InvalidRequest as error:
        assert str(error).startswith("batch ")
    else:
        assert len(batch.prompts) == len(batch.decode_tokens) == max(len(batch.starts), len(batch.records)) > 0


def test_a_tokenizer_that_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InvalidRequest, match="pip install transformers"):
        load_tokenizer("some/model")
    fake = ModuleType("transformers")
    fake.AutoTokenizer = _Missing  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", fake)
    with pytest.raises(InvalidRequest, match=r"cannot load the tokenizer 'some/model': no such model$"):
        load_tokenizer("some/model")


class _Missing:
    @staticmethod
    def from_pretrained(name: str) -> object:
        raise OSError("no such model\nand more")


def test_a_tokenizer_of_transformers_is_asked_for_text_and_chats(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("transformers")
    fake.AutoTokenizer = _Known  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", fake)
    tokenizer = load_tokenizer("some/model")
    assert tokenizer.text("hi") == [1, 2]
    assert tokenizer.chat([{"role": "user", "content": "x"}]) == [4]


class _Known:
    @staticmethod
    def from_pretrained(name: str) -> _Known:
        return _Known()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return {"hi": [1, 2], "template x": [4]}[text] if add_special_tokens == (text == "hi") else []

    def apply_chat_template(self, messages: list[Any], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        return f"template {messages[0]['content']}"


class PanicException(BaseException):
    """As the error of a tokenizer in Rust."""


class _Refusing:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def from_pretrained(self, name: str) -> _Refusing:
        if name == "broken":
            raise self.error
        return self

    def encode(self, text: str) -> list[int]:
        raise self.error

    def apply_chat_template(self, messages: list[Any], **_: Any) -> str:
        raise self.error


REFUSALS: list[tuple[BaseException, str]] = [
    (TypeError("roles must alternate\nand more"), "roles must alternate"),
    (RuntimeError(), "RuntimeError"),
    (PanicException("a panic"), "a panic"),
    (ZeroDivisionError("x" * 1000), "x" * 200),
]


@for_each("error, said", REFUSALS)
def test_what_a_tokenizer_refuses_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, said: str
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


def test_ctrl_c_in_a_tokenizer_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("transformers")
    fake.AutoTokenizer = _Refusing(KeyboardInterrupt())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", fake)
    with pytest.raises(KeyboardInterrupt):
        load_tokenizer("refusing").text("x")
