"""The result of a replay: the figures, and whether the store passed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvstore.replay.lane import Tally

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a replay. ``lanes`` callers worked at once; with one, hits are compared request by request."""

    tally: Tally
    lanes: int
    chunks_unique: int
    tokens_expected: int | None
    """Number of tokens that must match; None if several callers make it undefined."""
    seconds: float

    @property
    def failures(self) -> list[str]:
        """Returns a line for each kind of failure; empty if the store passed."""
        tally = self.tally
        found = [
            (tally.wrong_bytes, f"{tally.wrong_bytes} wrong bytes in {tally.wrong_requests} requests"),
            (tally.hit_differences, f"{tally.hit_differences} requests did not match what the trace contains"),
            (tally.short_gets, f"{tally.short_gets} gets read another number of tokens than matched before"),
            (tally.short_puts, f"{tally.short_puts} puts left tokens out"),
            (tally.not_found, f"{tally.not_found} requests were not all in the store afterwards"),
            (
                tally.chunks_written != self.chunks_unique,
                f"{tally.chunks_written} chunks written, expected {self.chunks_unique}: each chain once",
            ),
        ]
        return [text for wrong, text in found if wrong]

    @property
    def ok(self) -> bool:
        """True if every byte was right and every hit as expected."""
        return not self.failures

    @property
    def hit_ratio(self) -> float:
        """Share of the tokens in full blocks that matched."""
        return self.tally.tokens_matched / self.tally.tokens if self.tally.tokens else 0.0

    @property
    def put_mib_per_s(self) -> float:
        """MiB put per second spent in put, over all callers."""
        return _rate(self.tally.bytes_put, self.tally.put_s / self.lanes)

    @property
    def get_mib_per_s(self) -> float:
        """MiB got per second spent in get, over all callers."""
        return _rate(self.tally.bytes_got, self.tally.get_s / self.lanes)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain JSON values, with stable keys."""
        return {
            "ok": self.ok,
            **{key: value for key, value in asdict(self.tally).items() if key != "differences"},
            "tokens_expected": self.tokens_expected,
            "chunks_unique": self.chunks_unique,
            "hit_ratio": self.hit_ratio,
            "put_mib_per_s": self.put_mib_per_s,
            "get_mib_per_s": self.get_mib_per_s,
            "lanes": self.lanes,
            "seconds": self.seconds,
            "failures": self.failures,
            "differences": list(self.tally.differences),
        }


def _rate(size_bytes: int, seconds: float) -> float:
    return size_bytes / MIB / seconds if seconds > 0 else 0.0
