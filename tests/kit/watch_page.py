"""docs/metrics.md as data: each metric with its type and labels."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "docs/metrics.md"
_ROW = re.compile(r"\| `(kvstore_\w+)` \| (counter|gauge|histogram) \|([^|]*)\| [^|]+ \|")


class Documented(NamedTuple):
    """One row of the page."""

    kind: str
    labels: tuple[str, ...]


def documented() -> dict[str, Documented]:
    """All rows, by the name as it is scraped."""
    found: dict[str, Documented] = {}
    for line in PAGE.read_text().splitlines():
        if row := _ROW.fullmatch(line):
            assert row[1] not in found, f"{row[1]} has two rows"
            found[row[1]] = Documented(row[2], tuple(re.findall(r"`(\w+)`", row[3])))
    return found


def series_names() -> set[str]:
    """The names that a query may use."""
    parts = ("_bucket", "_sum", "_count")
    return {name + part for name, row in documented().items() for part in (parts if row.kind == "histogram" else ("",))}
