"""The table of hops, which lies beside this file: files and functions by way and call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_name("table.json")


class Hops(NamedTuple):
    """The number of files and functions that a call enters."""

    files: int
    functions: int

    def __str__(self) -> str:
        return f"{self.files} files, {self.functions} functions"


def read_table() -> dict[str, dict[str, Hops]]:
    """The table as it stands."""
    rows = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    return {way: {call: Hops(*numbers) for call, numbers in calls.items()} for way, calls in rows.items()}


def write_table(table: dict[str, dict[str, Hops]]) -> None:
    """One line for each call, so that a difference shows which one changed."""
    ways = []
    for way, calls in table.items():
        lines = [f"    {json.dumps(call)}: {json.dumps(hops)}" for call, hops in calls.items()]
        ways.append(f"  {json.dumps(way)}: {{\n" + ",\n".join(lines) + "\n  }")
    TABLE.write_text("{\n" + ",\n".join(ways) + "\n}\n")
