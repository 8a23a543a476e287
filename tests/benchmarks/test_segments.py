"""The benchmark of segments finds all that is stored, embedded and through a worker, and says so if it does not."""

from __future__ import annotations

import pytest

from benchmarks import segments
from benchmarks.contents import WrongBytes
from kvstore.segments import Segments

pytestmark = pytest.mark.bench
FEW = ["--tokens", "2000", "--rounds", "1"]


def test_it_finds_segments_everywhere_and_rotates_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(segments, "DOCUMENTS", 4)
    monkeypatch.setattr(segments, "KEYS_SHAPE", (2, 64, 2, 128))
    assert segments.main(FEW) == 0
    printed = capsys.readouterr().out
    assert printed.count("any offset") == 3 and "through a worker" in printed and printed.count("interleaved") == 3


def test_a_segment_that_is_not_found_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "DOCUMENTS", 4)
    monkeypatch.setattr(Segments, "find", lambda *_, **__: [])
    with pytest.raises(WrongBytes, match="0 tokens of 1280"):
        segments.main(FEW)
