"""The results page and its plots, from the raw figures that ``python -m benchmarks --save`` kept.

python -m benchmarks.report [FOLDER]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.plots import svg
from benchmarks.result import Result, Table, markdown

HERE = Path(__file__).parent
RESULTS = HERE / "results"
ORDER = ("workers", "memcpy", "engine", "match", "peers", "gpu", "blending", "segments")
HEAD = """\
# Results

Made by `make results` from the raw figures in `results/*.json`; do not edit. Times mean little on other machines;
ratios to a memory copy and to fio, measured in the same run, mean more. What was tried: [NOTES.md](NOTES.md).
`gpu`, `blending` and `segments` have commands of their own, as `python -m benchmarks.gpu --save benchmarks/results`;
the first two need torch.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """0: the page is written; 2: there is nothing to write it from."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description="Writes the results page.")
    parser.add_argument("folder", nargs="?", type=Path, default=RESULTS, help="the raw figures (default: results)")
    asked = parser.parse_args(arguments)
    results = load(asked.folder)
    if not results:
        print(f"{asked.folder} has no raw figures: python -m benchmarks all --save {asked.folder}", file=sys.stderr)
        return 2
    write(results, asked.folder)
    return 0


def load(folder: Path) -> list[Result]:
    """All results in a folder, in the order of the page."""
    paths = (folder / f"{name}.json" for name in ORDER)
    return [Result.from_json(json.loads(path.read_text())) for path in paths if path.is_file()]


def write(results: Sequence[Result], folder: Path) -> Path:
    """Writes the plots into the folder and RESULTS.md beside it."""
    for old in folder.glob("*.svg"):
        old.unlink()
    parts = [HEAD]
    for result in results:
        parts.append(_section(result, folder))
    page = folder.parent / "RESULTS.md"
    page.write_text("\n".join(parts))
    return page


def _section(result: Result, folder: Path) -> str:
    machine = result.machine
    said = {True: "quiet before the run", False: "SHARED: others were at work on it"}
    quiet = said.get(machine["quiet"], "nobody looked")
    about = (
        f"{machine['cores']} cores ({machine['cpu']}), {machine['memory_gib']} GiB, Linux {machine['kernel']}, Python "
        f"{machine['python']}, numpy {machine['numpy']}, fio {machine['fio']}, native data path {machine['native']}, "
        f"load {machine['load_before']} ({quiet})"
    )
    lines = [
        f"## {result.benchmark}\n",
        f"**Hypothesis.** {result.hypothesis.rstrip('.')}.\n",
        f"**Machine.** {about}. **Commit** {machine['commit']}. **Took** {result.wall_s:.0f} s.\n",
        *(f"- {line}" for line in result.conditions),
        "",
    ]
    for table in result.tables:
        lines += [f"### {table.title}\n", markdown(table), ""]
        if table.note:
            lines += [f"{table.note.rstrip('.')}.\n"]
        if table.plot is not None and _is_drawable(table):
            name = f"{result.benchmark}-{re.sub('[^a-z0-9]+', '-', table.title.lower()).strip('-')}.svg"
            (folder / name).write_text(svg(table))
            lines += [f"![{table.title}]({folder.name}/{name})\n"]
    lines += [f"- Not measured: {line}" for line in result.skipped]
    return "\n".join(lines) + "\n"


def _is_drawable(table: Table) -> bool:
    """True if there is anything to compare."""
    assert table.plot is not None
    return len(table.rows) > 1 and any(name in table.columns for name in table.plot.y)


if __name__ == "__main__":
    sys.exit(main())
