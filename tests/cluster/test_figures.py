from __future__ import annotations

from pathlib import Path

from tests.chaos.journal import Journal
from tests.cluster.engine import SERVED
from tests.cluster.figures import STREAK, Diary


def served(journal: Journal, count: int, error: str | None = None) -> None:
    for _ in range(count):
        journal.note(SERVED, took_s=0.0, blocks=2, got=512, wrong=0, shed=0, short=0, error=error)


def test_an_engine_is_well_since_the_first_request_after_its_last_trouble(tmp_path: Path) -> None:
    journal, diary = Journal(tmp_path / "host1.journal"), Diary(tmp_path)
    served(journal, STREAK - 1)
    assert diary.well_since_s("host1", 0.0) is None, "that is too short to tell"
    served(journal, 1, "put: Unavailable: no")
    served(journal, STREAK - 1)
    assert diary.well_since_s("host1", 0.0) is None
    served(journal, 1)
    well_s = diary.well_since_s("host1", 0.0)
    assert well_s is not None
    assert diary.between(well_s, well_s + 60.0).requests == STREAK
    assert diary.well_since_s("host1", well_s + 60.0) is None, "nothing was asked for since"


def test_figures_count_hits_by_tokens_and_errors_by_what_was_asked_for(tmp_path: Path) -> None:
    journal, diary = Journal(tmp_path / "host1.journal"), Diary(tmp_path)
    served(journal, 3)
    served(journal, 1, "put: Unavailable: no")
    figures = diary.between(0.0, float("inf"))
    assert (figures.requests, figures.hit_ratio, dict(figures.errors), figures.trouble) == (4, 0.5, {"put": 1}, 1)
