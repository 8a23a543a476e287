"""A batch file: read once, line by line, and written again in another order. The lines themselves do not change.

Kept of each request are its packed prompt, and the place and the checksum of its line: a file that changes later is
noticed before a line of it is used. A file that is one JSON array is read whole, and its requests are kept.
"""

from __future__ import annotations

import json
import os
from array import array
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

from kvstore.batches.forms import Asked, Form, asked, form_of
from kvstore.batches.output import replace_file
from kvstore.batches.tokenizer import Tokenizer
from kvstore.errors import InvalidRequest
from kvstore.parsing import parse_json
from kvstore.planning import Prompts
from kvstore.progress import Progress, unwatched
from kvstore.replay.trace import BLOCK_TOKENS

LINE_BYTES_MAX = 64 << 20
PROGRESS_BYTES = 1 << 20
ARRAY_BYTES_MAX = 2 << 30
"""Limit on a file that is one JSON array."""


@dataclass(slots=True)
class Batch:
    """The requests of a file. Made by ``read_batch``."""

    path: Path
    form: Form
    prompts: Prompts
    decode_tokens: list[int | None]
    """Output tokens of each request at most; None if it does not say."""
    starts: array[int] = field(default_factory=lambda: array("q"))
    """Where each request's line begins in the file; empty for a JSON array."""
    checksums: array[int] = field(default_factory=lambda: array("I"))
    """CRC-32 of each of these lines without its end."""
    records: list[Any] = field(default_factory=list)
    """The requests of a JSON array."""
    version: tuple[int, int] = (0, 0)
    """Size and mtime of the file before it was read."""

    def write(self, order: Iterable[int], output: Path) -> None:
        """Writes the requests in ``order``, as ``replace_file`` does.

        Raises InvalidRequest if ``output`` is the batch itself or cannot be written, or if the batch has changed.
        """
        self._check_version()
        try:
            replace_file(output, self._ordered(order), self.path)
        except OSError as cause:
            raise InvalidRequest(f"cannot write the output {str(output)!r}: {cause.strerror or cause}") from cause

    def requests(self, order: Iterable[int]) -> Iterator[Any]:
        """Yields the requests in ``order`` as JSON. Raises InvalidRequest if the batch has changed."""
        self._check_version()
        if self.records:
            yield from (self.records[index] for index in order)
            return
        for line in self._lines(order):
            yield parse_json(line)

    def _lines(self, order: Iterable[int]) -> Iterator[bytes]:
        """Yields the lines of requests in ``order``, without their ends."""
        with open(self.path, "rb") as file:
            for index in order:
                file.seek(self.starts[index])
                line = file.readline(LINE_BYTES_MAX + 1).rstrip(b"\r\n")
                if crc32(line) != self.checksums[index]:
                    raise self._changed()
                yield line

    def _check_version(self) -> None:
        try:
            version = _version(self.path)
        except OSError as cause:
            raise self._changed() from cause
        if self.version != version:
            raise self._changed()

    def _changed(self) -> InvalidRequest:
        return InvalidRequest(f"the batch {str(self.path)!r} changed after it was read: plan it again")

    def _ordered(self, order: Iterable[int]) -> Iterator[bytes]:
        if self.records:
            for place, index in enumerate(order):
                yield b",\n" if place else b"[\n"
                yield _text(self.records[index])
            yield b"\n]\n"
            return
        for line in self._lines(order):
            yield line + b"\n"


def read_batch(
    path: str | Path,
    tokenizer: Tokenizer | None = None,
    block_tokens: int = 16,
    progress: Progress = unwatched,
) -> Batch:
    """Reads a batch whose prompts share blocks of ``block_tokens``; those of a trace share the trace's own blocks.

    ``progress`` is called with bytes read and the size of the file.
    Raises InvalidRequest, naming the line, for a file that cannot be read, a line that is not a request, a prompt that
    is empty or text without a tokenizer, a custom_id that occurs twice, or an empty file.
    """
    reading = _Reading(Path(path), tokenizer, progress)
    try:
        return reading.batch(block_tokens)
    except OSError as cause:
        raise InvalidRequest(f"cannot read the batch {str(path)!r}: {cause.strerror or cause}") from cause
    except InvalidRequest as cause:
        where = f", {reading.where}" if reading.where else ""
        raise InvalidRequest(f"batch {str(path)!r}{where}: {cause}") from cause


class _Reading:
    """A batch file while it is read."""

    def __init__(self, path: Path, tokenizer: Tokenizer | None, progress: Progress) -> None:
        self._path = path
        self._progress = progress
        self._tokenizer = tokenizer
        self._form: Form | None = None
        self._decode: list[int | None] = []
        self._starts = array("q")
        self._checksums = array("I")
        self._records: list[Any] = []
        self._seen: dict[str, str] = {}
        self.where = ""
        """The request that is being read, for errors."""

    def batch(self, block_tokens: int) -> Batch:
        """Reads the file."""
        version, requests = _version(self._path), self._requests()
        if not self._path.is_file() and not self._path.is_dir():
            raise InvalidRequest("not a regular file, and a batch is read twice: write it to a file first")
        first = next(requests, None)
        if first is None or self._form is None:
            self.where = ""
            raise InvalidRequest("it holds no requests")
        prompts = self._prompts(first, requests, block_tokens)
        return Batch(
            self._path, self._form, prompts, self._decode, self._starts, self._checksums, self._records, version
        )

    def _prompts(self, first: Asked, rest: Iterator[Asked], block_tokens: int) -> Prompts:
        if first.tokens is None:
            lengths = [first.length]
            blocks = [first.blocks]
            for each in rest:
                lengths.append(each.length)
                blocks.append(each.blocks)
            return Prompts.of_blocks(blocks, BLOCK_TOKENS, lengths)
        every = (each.tokens for request in ([first], rest) for each in request)
        return Prompts.of_tokens((tokens for tokens in every if tokens is not None), block_tokens)

    def _requests(self) -> Iterator[Asked]:
        for record in self._read():
            form = form_of(record)
            if self._form not in (None, form):
                raise InvalidRequest(
                    f"a request with {form.value} among others: expected one kind of requests in a file"
                )
            self._form = form
            found = asked(record, form, self._tokenizer)
            if found.custom_id is not None:
                before = self._seen.setdefault(found.custom_id, self.where)
                if before != self.where:
                    raise InvalidRequest(f"custom_id {found.custom_id!r} is that of {before} too: expected each once")
            self._decode.append(found.decode_tokens)
            yield found

    def _read(self) -> Iterator[Any]:
        """Yields the requests as JSON."""
        with open(self._path, "rb") as file:
            if file.read(4096).removeprefix(BOM_UTF8).lstrip()[:1] == b"[":
                yield from self._of_array()
                return
            file.seek(0)
            start = number = shown = 0
            size = os.fstat(file.fileno()).st_size
            while line := file.readline(LINE_BYTES_MAX + 1):
                number += 1
                self.where = f"line {number}"
                if len(line) > LINE_BYTES_MAX:
                    raise InvalidRequest(f"longer than {LINE_BYTES_MAX} bytes")
                request = line.removeprefix(BOM_UTF8)  # which would stand in the middle of the file in another order
                if request.strip():
                    record = _parsed(request)
                    self._starts.append(start + len(line) - len(request))
                    self._checksums.append(crc32(request.rstrip(b"\r\n")))
                    yield record
                start += len(line)
                if start - shown >= PROGRESS_BYTES:
                    shown = start
                    self._progress(start, size)

    def _of_array(self) -> Iterator[Any]:
        if self._path.stat().st_size > ARRAY_BYTES_MAX:
            raise InvalidRequest(f"a JSON array of over {ARRAY_BYTES_MAX} bytes: write one request a line")
        self._records = _parsed(self._path.read_bytes())
        for number, record in enumerate(self._records, 1):
            self.where = f"request {number}"
            yield record


def _version(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _parsed(text: bytes) -> Any:
    try:
        return parse_json(text)
    except UnicodeDecodeError as cause:
        raise InvalidRequest(f"not text in UTF-8 ({cause.reason}): is the file compressed?") from cause
    except ValueError as cause:
        raise InvalidRequest(f"not JSON: {cause}") from cause


def _text(record: Any) -> bytes:
    try:
        return json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a character, which only an escape can spell
        return json.dumps(record).encode()
