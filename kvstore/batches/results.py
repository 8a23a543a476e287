"""The results of a batch, one JSON line each, as OpenAI's batch output has them. What is written is not asked again.

A line is appended once its answer is there. A program that is killed in between leaves at most one part of a line, at
the end, which the next one cuts off. Nothing else is ever cut off.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvstore.batches.server import ANSWER_BYTES_MAX, Answer
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.parsing import DEPTH_MAX, parse_json

GROWTH_MAX = 6
"""Bytes of a line for one byte of an answer at most: a byte that is no text becomes an escape, ``\\ufffd``."""
FRAME_BYTES_MAX = 16 << 10
"""Bytes of a line beside its answer at most. A custom_id has 1024 characters, and 12 bytes for each at most."""
LINE_BYTES_MAX = GROWTH_MAX * ANSWER_BYTES_MAX + FRAME_BYTES_MAX
"""The line of any answer that ``Server`` returns fits."""
_BEGINNING = b'{"id": "result-'
_LINE_DEPTH = 2
"""Levels of a line above its answer."""


class Results:
    """A file of results, open for one program at a time. Close it, or use it as a context."""

    def __init__(self, path: Path) -> None:
        """Opens the file and reads whose results it has.

        Raises InvalidRequest for a file of another kind, a device or a pipe, or a file that cannot be written.
        """
        self.path = path
        self.known: set[str] = set()
        """The custom_id of each request whose result is in the file."""
        self.refused: set[str] = set()
        """Those of them that the server called wrong, when this was opened."""
        self._whole_bytes = 0
        if path.exists() and not path.is_file():
            raise InvalidRequest(f"the results {str(path)!r} are not a regular file: give another --results FILE")
        try:
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed by close
        except OSError as cause:
            raise InvalidRequest(f"cannot write the results {str(path)!r}: {cause.strerror or cause}") from cause
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def add(self, custom_id: str, answer: Answer) -> dict[str, Any]:
        """Writes a result, and returns the answer's body as JSON, empty if it is none. Raises Unavailable."""
        try:
            body = parse_json(answer.body, depth_max=DEPTH_MAX - _LINE_DEPTH)
            line = self._line(custom_id, answer.status, body)
        except ValueError:
            body = {"text": answer.body.decode(errors="replace")}
            line = self._line(custom_id, answer.status, body)
        self._append(line)
        self.known.add(custom_id)
        return body if isinstance(body, dict) else {}

    def close(self) -> None:
        """Closes the file; results are on the disk."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, custom_id: str, status: int, body: Any) -> bytes:
        response = {"status_code": status, "request_id": "", "body": body}
        line = {"id": f"result-{len(self.known)}", "custom_id": custom_id, "response": response, "error": None}
        return json.dumps(line).encode() + b"\n"

    def _append(self, line: bytes) -> None:
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError as cause:
            with suppress(OSError):
                self._file.truncate(self._whole_bytes)  # or the next line would go on in the middle of this one
            raise Unavailable(f"cannot write the results {str(self.path)!r}: {cause.strerror or cause}") from cause
        self._whole_bytes += len(line)

    def _lock(self) -> None:
        import fcntl

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as cause:
            raise InvalidRequest(f"the results {str(self.path)!r} are being written by another program") from cause

    def _read(self) -> None:
        number, is_ended = 0, True
        with open(self.path, "rb") as file:
            while line := file.readline(LINE_BYTES_MAX + 1):
                number += 1
                where = f"{str(self.path)!r}, line {number}"
                if len(line) > LINE_BYTES_MAX:
                    raise InvalidRequest(f"{where} has over {LINE_BYTES_MAX} bytes: give another --results FILE")
                try:
                    record = parse_json(line)
                    custom_id, response = str(record["custom_id"]), record["response"]
                except (ValueError, KeyError, TypeError) as cause:
                    if not line.endswith(b"\n") and line[: len(_BEGINNING)] == _BEGINNING[: len(line)]:
                        break  # the end of the file, cut off when its writer was killed
                    raise InvalidRequest(f"{where} is not a result of a batch: give another --results FILE") from cause
                self.known.add(custom_id)
                if _is_refusal(response):
                    self.refused.add(custom_id)
                self._whole_bytes += len(line)
                is_ended = line.endswith(b"\n")
        self._file.truncate(self._whole_bytes)
        if not is_ended:
            self._append(b"\n")  # a whole result by another program: the next one begins a line of its own


def _is_refusal(response: Any) -> bool:
    status = response.get("status_code") if isinstance(response, dict) else None
    return isinstance(status, int) and status >= 400
