"""Traces of requests in the form that Mooncake publishes: JSON lines, prompts as runs of hashed 512-token blocks.

Each line has ``timestamp`` (ms), ``input_length`` and ``output_length`` (tokens) and ``hash_ids``: one id per block
of 512 tokens of the prompt; the last may be a part block.  Equal ids mean equal tokens, and an equal prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvstore.core.address import TOKENS_MAX
from kvstore.core.validate import parse_json
from kvstore.errors import InvalidRequest

BLOCK_TOKENS = 512
LINE_BYTES_MAX = 1 << 20
REQUESTS_MAX = 10_000_000
HASH_ID_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. ``number`` is its place in the trace, from 0."""

    number: int
    timestamp_ms: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    @property
    def full_blocks(self) -> int:
        """Number of full blocks of the prompt; a part block at the end is never stored."""
        return self.input_length // BLOCK_TOKENS


def load_trace(path: str | Path, requests_max: int | None = None) -> list[TraceRequest]:
    """Loads the first ``requests_max`` requests of a trace (None: all).

    Raises InvalidRequest, naming the line, for a file that cannot be read, a line that is not a request, or an empty
    file.
    """
    most = REQUESTS_MAX if requests_max is None else requests_max
    found: list[TraceRequest] = []
    line_number = 0
    try:
        with open(path, "rb") as file:
            while len(found) < most:
                line = file.readline(LINE_BYTES_MAX + 1)
                line_number += 1
                if not line:
                    break
                if line.strip():
                    found.append(_parse(line, len(found)))
    except OSError as cause:
        raise InvalidRequest(f"cannot read the trace {str(path)!r}: {cause.strerror}") from cause
    except InvalidRequest as cause:
        raise InvalidRequest(f"trace {str(path)!r}, line {line_number}: {cause}") from cause
    if not found:
        raise InvalidRequest(f"the trace {str(path)!r} holds no requests")
    return found


def _parse(line: bytes, number: int) -> TraceRequest:
    if len(line) > LINE_BYTES_MAX:
        raise InvalidRequest(f"longer than {LINE_BYTES_MAX} bytes")
    try:
        fields = parse_json(line)
    except ValueError as cause:
        raise InvalidRequest(f"not a request ({cause}); expected JSON with input_length and hash_ids") from cause
    try:
        ids = fields["hash_ids"]
        lengths = [fields["input_length"], fields.get("output_length", 0), int(fields.get("timestamp", 0))]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as cause:
        raise InvalidRequest(
            f"not a request ({type(cause).__name__}: {cause}); expected JSON with input_length and hash_ids"
        ) from cause
    if not isinstance(ids, list) or not all(type(each) is int and 0 <= each <= HASH_ID_MAX for each in ids):
        raise InvalidRequest("hash_ids are not a list of integers from 0")
    if not all(type(each) is int for each in lengths) or not 0 <= lengths[0] <= TOKENS_MAX:
        raise InvalidRequest(f"input_length={lengths[0]!r}: expected an integer from 0 to {TOKENS_MAX}")
    expected = -(-lengths[0] // BLOCK_TOKENS)
    if len(ids) != expected:
        raise InvalidRequest(
            f"{len(ids)} hash_ids for {lengths[0]} tokens: expected {expected}, one for each block of {BLOCK_TOKENS}"
        )
    return TraceRequest(number, lengths[2], lengths[0], lengths[1], tuple(ids))
