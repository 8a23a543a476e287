"""A batch file: read once, line by line, and written again in another order. The lines themselves do not change.

Kept of each request are its packed prompt and the place of its line. A file that was changed since is refused.
"""

from __future__ import annotations

import os
import re
from array import array
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from kvstore.batch.prompts import PromptSet
from kvstore.core.operations import Progress, unwatched
from kvstore.core.validate import kind_of, parse_json
from kvstore.errors import InvalidRequest

# The file that a reordered batch is written to.


def replace_file(output: Path, pieces: Iterable[bytes], source: Path) -> None:
    """Writes ``pieces``, made from the file ``source``. A file is replaced once all is written.

    A symlink stays one: its target is written. Raises InvalidRequest if ``output`` is ``source``, or neither a regular
    file nor absent; and OSError.
    """
    target = Path(os.path.realpath(output))
    if target.exists() and not target.is_file():
        raise InvalidRequest(f"the output {str(output)!r} is not a regular file: give a file")
    if target.exists() and target.samefile(source):
        raise InvalidRequest(f"the output {str(output)!r} is the batch itself: give another file")
    staged = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(staged, "xb") as file:
            file.writelines(pieces)
        staged.replace(target)
    finally:
        with suppress(OSError):  # it is the output now, or its folder is gone
            staged.unlink()


# Tokenizers of the transformers package, which is imported only where a batch has text.


Message = dict[str, Any]
SAID_CHARS_MAX = 200
"""Characters of a tokenizer's error that are shown."""


class Tokenizer:
    """Makes token ids of text, as the engine that runs the batch does."""

    def __init__(self, tokenizer: Any) -> None:
        """``tokenizer`` is one of transformers."""
        self._tokenizer = tokenizer

    def text(self, text: str) -> Sequence[int]:
        """Returns the tokens of a prompt."""
        with _translated("the tokenizer refuses the prompt"):
            found: Sequence[int] = self._tokenizer.encode(text)
            return found

    def chat(self, messages: Sequence[Message]) -> Sequence[int]:
        """Returns the tokens of a conversation, by the model's chat template, up to where the answer begins."""
        # The template gives text: versions of transformers differ in how they return tokens.
        with _translated("the tokenizer refuses the messages"):
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
            found: Sequence[int] = self._tokenizer.encode(text, add_special_tokens=False)
            return found


def load_tokenizer(name: str) -> Tokenizer:
    """Loads a tokenizer by its model's name or folder. Raises InvalidRequest if it, or transformers, is missing."""
    with _translated(f"cannot load the tokenizer {name!r}"):
        try:
            transformers = import_module("transformers")
        except ModuleNotFoundError as cause:
            raise InvalidRequest(
                "a tokenizer needs the transformers package: pip install transformers, or give token ids as prompts"
            ) from cause
        return Tokenizer(transformers.AutoTokenizer.from_pretrained(name))


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Raises InvalidRequest for any error of a tokenizer: its models bring code, and chat templates, of their own."""
    try:
        yield
    except InvalidRequest:
        raise
    except Exception as cause:
        lines = str(cause).strip().splitlines()
        said = lines[0][:SAID_CHARS_MAX] if lines else type(cause).__name__
        raise InvalidRequest(f"{what}: {said}") from cause


# What a plan needs of each request: its prompt. A request is one of OpenAI's batch format, with ``custom_id`` and
# ``body``, which has ``prompt`` (text or token ids) or ``messages``.


CUSTOM_ID_CHARS_MAX = 1024
_PATH = re.compile(r"/[!-~]*")


def parse_request(record: Any, tokenizer: Tokenizer | None) -> tuple[str, Sequence[int]]:
    """The custom_id and the prompt of the request in ``record``. Raises InvalidRequest."""
    if not isinstance(record, dict) or "body" not in record:
        raise InvalidRequest("not a request of a batch: expected an object with custom_id and body")
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
    return custom_id, _prompt_of(body, tokenizer)


def _prompt_of(body: dict[str, Any], tokenizer: Tokenizer | None) -> Sequence[int]:
    prompt, messages = body.get("prompt"), body.get("messages")
    if isinstance(prompt, list):
        return prompt
    is_chat = isinstance(messages, list) and all(isinstance(each, dict) for each in messages)
    if not isinstance(prompt, str) and not is_chat:
        raise InvalidRequest(
            "the body has no prompt: expected prompt (text or token ids), or messages (a list of objects)"
        )
    if not (prompt or messages):
        return []
    if tokenizer is None:
        raise InvalidRequest("the prompt is text: give --tokenizer NAME, or token ids as the prompt")
    return tokenizer.text(prompt) if isinstance(prompt, str) else tokenizer.chat(messages or ())


LINE_BYTES_MAX = 64 << 20
PROGRESS_BYTES = 1 << 20


@dataclass(slots=True)
class RequestFile:
    """The requests of a file. Made by ``read_batch``."""

    path: Path
    prompts: PromptSet
    starts: array[int]
    """Where each request's line begins in the file."""
    changed_ns: int
    """The time of the file's last change."""

    def write(self, order: Iterable[int], output: Path) -> None:
        """Writes the requests in ``order``, as ``replace_file`` does.

        Raises InvalidRequest if ``output`` is the batch itself or cannot be written, or if the batch has changed.
        """
        try:
            replace_file(output, (line + b"\n" for line in self._lines(order)), self.path)
        except OSError as cause:
            raise InvalidRequest(f"cannot write the output {str(output)!r}: {cause.strerror or cause}") from cause

    def requests(self, order: Iterable[int]) -> Iterator[Any]:
        """Yields the requests in ``order`` as JSON. Raises InvalidRequest if the batch has changed."""
        return map(parse_json, self._lines(order))

    def _lines(self, order: Iterable[int]) -> Iterator[bytes]:
        """Yields the lines of requests in ``order``, without their ends."""
        with open(self.path, "rb") as file:
            if os.fstat(file.fileno()).st_mtime_ns != self.changed_ns:
                raise InvalidRequest(f"the batch {str(self.path)!r} changed after it was read: plan it again")
            for index in order:
                file.seek(self.starts[index])
                yield file.readline(LINE_BYTES_MAX + 1).rstrip(b"\r\n")


def read_batch(
    path: str | Path,
    tokenizer: Tokenizer | None = None,
    block_tokens: int = 16,
    progress: Progress = unwatched,
) -> RequestFile:
    """Reads a batch whose prompts share blocks of ``block_tokens``.

    ``progress`` is called with bytes read and the size of the file.
    Raises InvalidRequest, naming the line, for a file that cannot be read, a line that is not a request, a prompt that
    is empty or text without a tokenizer, a custom_id that occurs twice, or an empty file.
    """
    source, starts, changed_ns, where = Path(path), array("q"), 0, ""
    seen: dict[str, str] = {}

    def records() -> Iterator[Any]:
        """Yields the requests as JSON."""
        nonlocal changed_ns, where
        with open(source, "rb") as file:
            start = number = shown = 0
            stat = os.fstat(file.fileno())
            changed_ns = stat.st_mtime_ns
            while line := file.readline(LINE_BYTES_MAX + 1):
                number += 1
                where = f", line {number}"
                if len(line) > LINE_BYTES_MAX:
                    raise InvalidRequest(f"longer than {LINE_BYTES_MAX} bytes")
                request = line.removeprefix(BOM_UTF8)  # which would stand in the middle of the file in another order
                if request.strip():
                    record = _parsed(request)
                    starts.append(start + len(line) - len(request))
                    yield record
                start += len(line)
                if start - shown >= PROGRESS_BYTES:
                    shown = start
                    progress(start, stat.st_size)
        where = ""

    def token_lists() -> Iterator[Sequence[int]]:
        for record in records():
            custom_id, tokens = parse_request(record, tokenizer)
            before = seen.setdefault(custom_id, where)
            if before != where:
                raise InvalidRequest(f"custom_id {custom_id!r} is that of{before[1:]} too: expected each once")
            yield tokens

    try:
        if source.exists() and not source.is_file() and not source.is_dir():
            raise InvalidRequest("not a regular file, and a batch is read twice: write it to a file first")
        prompts = PromptSet.of_tokens(token_lists(), block_tokens)
        if not len(prompts):
            raise InvalidRequest("it holds no requests")
        return RequestFile(source, prompts, starts, changed_ns)
    except OSError as cause:
        raise InvalidRequest(f"cannot read the batch {str(path)!r}: {cause.strerror or cause}") from cause
    except InvalidRequest as cause:
        raise InvalidRequest(f"batch {str(path)!r}{where}: {cause}") from cause


def _parsed(text: bytes) -> Any:
    try:
        return parse_json(text)
    except UnicodeDecodeError as cause:
        raise InvalidRequest(f"not text in UTF-8 ({cause.reason}): is the file compressed?") from cause
    except ValueError as cause:
        raise InvalidRequest(f"not JSON: {cause}") from cause
