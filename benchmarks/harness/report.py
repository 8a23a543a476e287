"""The results page, its plots, and docs/performance.md, from the figures that ``python -m benchmarks --save`` kept.

    python -m benchmarks.harness.report [FOLDER]

``make results`` and ``make performance`` end with it. Only docs/performance.md and the README show pictures that are
committed: one small SVG for each.

matplotlib is imported where a picture is drawn: most commands draw none, and its import takes as long as they do.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.result import Cell, Plot, Result, Table, markdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


INCHES = (7.6, 3.6)
BARS_SHARE = 0.8
TICKS_MAX = 12
NAMES_CHARACTERS_MAX = 60
"""Names of bars that are longer together are slanted."""


@dataclass(frozen=True)
class Line:
    """One line or one row of bars."""

    name: str
    points: list[tuple[Cell, float]]


def svg(table: Table) -> str:
    """Returns the picture of a table that has a plot."""
    from matplotlib import rc_context

    text = io.StringIO()
    # Text stays text, and ids are the same in every run: a picture changes only with its figures.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvstore", "font.size": 8.0}):
        drawn(table).savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def drawn(table: Table) -> Figure:
    """Draws a table that has a plot."""
    from matplotlib.figure import Figure

    plot = table.plot
    assert plot is not None, table.title
    lines = lines_of(table, plot)
    figure = Figure(figsize=INCHES)
    axes = figure.subplots()
    axes.set_title(table.title, loc="left", fontweight="bold")
    axes.set_xlabel(plot.x)
    axes.set_ylabel(plot.unit)
    axes.grid(axis="y", color="#dddddd")
    axes.set_axisbelow(True)
    xs = list(dict.fromkeys(x for line in lines for x, _ in line.points))
    if len(xs) > 1 and all(isinstance(x, int | float) for x in xs):
        _draw_lines(axes, lines, log=plot.log_x)
    else:
        _draw_bars(axes, lines, xs)
    if plot.log_y and min(y for line in lines for _, y in line.points) > 0:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    return figure


def lines_of(table: Table, plot: Plot) -> list[Line]:
    """Returns the lines of a plot: one for each column, and for each value of the series column."""
    xs = table.column(plot.x)
    kinds = table.column(plot.series) if plot.series else [None] * len(xs)
    lines = []
    for kind in dict.fromkeys(kinds):
        for column in plot.y:
            if column not in table.columns:
                continue
            rows = zip(xs, kinds, table.column(column), strict=True)
            points = [(x, float(y)) for x, of, y in rows if of == kind and isinstance(y, int | float)]
            if points:
                suffix = "" if kind is None else f", {plot.series} {kind:,}" if isinstance(kind, int) else f", {kind}"
                lines.append(Line(column + suffix, points))
    return lines


def _draw_lines(axes: Axes, lines: Sequence[Line], *, log: bool) -> None:
    for line in lines:
        points = [(float(x), y) for x, y in line.points if isinstance(x, int | float)]
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=4, label=line.name)
    numbers = sorted({float(x) for line in lines for x, _ in line.points if isinstance(x, int | float)})
    if log and numbers[0] > 0:
        axes.set_xscale("log")
    shown = numbers[:: 1 + len(numbers) // TICKS_MAX]
    axes.set_xticks(shown, [f"{x:,.10g}" for x in shown])
    axes.set_xticks([], minor=True)


def _draw_bars(axes: Axes, lines: Sequence[Line], names: Sequence[Cell]) -> None:
    width = BARS_SHARE / len(lines)
    for number, line in enumerate(lines):
        offset = (number - (len(lines) - 1) / 2) * width
        axes.bar([names.index(x) + offset for x, _ in line.points], [y for _, y in line.points], width, label=line.name)
    axes.set_xticks(range(len(names)), [str(name) for name in names])
    if sum(len(str(name)) for name in names) > NAMES_CHARACTERS_MAX:
        for label in axes.get_xticklabels():
            label.set(rotation=30, ha="right")


HERE = Path(__file__).parents[1]
RESULTS = HERE / "results"
DOCS = HERE.parent / "docs"
README = HERE.parent / "README.md"
ORDER = ("serving", "throughput", "memcpy", "engine", "match", "steady", "competitors", "gpu", "blending", "segments")
HEAD = """\
# Results

`make results` makes this page from `results/*.json`, and draws plots into `results/plots/`; do not edit it.
Times mean little on other machines; ratios to a memory copy and to fio, measured in the same run, mean more.
[README.md](README.md) lists the benchmarks, [performance notes](../docs/performance-notes.md) what limits a path.
`make results` leaves out `gpu`, `blending` and `segments`.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """0: the page is written; 2: there is nothing to write it from."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harness.report", description="Writes the results page.")
    parser.add_argument("folder", nargs="?", type=Path, default=RESULTS, help="the raw figures (default: results)")
    asked = parser.parse_args(arguments)
    results = load(asked.folder)
    if not results:
        print(f"{asked.folder} has no raw figures: python -m benchmarks all --save {asked.folder}", file=sys.stderr)
        return 2
    write(results, asked.folder)
    draw(results, asked.folder / "plots")
    if asked.folder == RESULTS:
        write_performance(results)
    return 0


def load(folder: Path) -> list[Result]:
    """All results in a folder, in the order of the page."""
    paths = (folder / f"{name}.json" for name in ORDER)
    return [Result.from_json(json.loads(path.read_text())) for path in paths if path.is_file()]


def write(results: Sequence[Result], folder: Path) -> None:
    """Writes RESULTS.md next to the folder."""
    (folder.parent / "RESULTS.md").write_text("\n".join([HEAD, *map(_section, results)]))


def draw(results: Sequence[Result], folder: Path) -> None:
    """Draws the plots of all tables; what an earlier run left is deleted."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    for result in results:
        for table in result.tables:
            if table.plot is not None and _is_drawable(table):
                title = re.sub("[^a-z0-9]+", "-", table.title.lower()).strip("-")
                (folder / f"{result.benchmark}-{title}.svg").write_text(svg(table))


def _section(result: Result) -> str:
    machine = result.machine
    states = {True: "quiet before the run", False: "SHARED with other work"}
    quiet = states.get(machine["quiet"], "unknown")
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
    lines += [f"- Not measured: {line}" for line in result.skipped]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Picture:
    """One picture of docs/performance.md: a table of a benchmark, and the question that it answers."""

    name: str
    question: str
    benchmark: str
    table: str
    """How the title of the table begins."""
    plot: Plot
    about: str


FASTER = Picture(
    "time-to-first-token",
    "How long until the first token?",
    "serving",
    "Time to first token",
    Plot("way", ("new prompt s", "stored prompt s"), unit="s"),
    "Measured with vLLM on a CPU, with the root on tmpfs. `none`: no store;\n"
    "`async`: the engine opens the root itself; `worker`: it asks a worker that has the KV in memory.\n"
    "A stored prompt is read instead of computed.",
)
FASTER_ON_GPU = Picture(
    "time-to-first-token-gpu",
    "How long until the first token, on a GPU?",
    "gpu",
    "Time to first token",
    Plot("tokens", ("no store s", "cold, storing behind s", "warm, root s"), unit="s", log_x=True),
    "transformers on an H200, with the shape of Llama-3.1-8B and the root on tmpfs.\n"
    "`no store` only computes the prompt, `cold` also stores it, `warm` reads it from the root.",
)
PICTURES = (
    FASTER,
    FASTER_ON_GPU,
    Picture(
        "paths",
        "How fast is each path?",
        "throughput",
        "Ways to a worker",
        Plot(
            "path",
            ("aggregate write GiB/s", "fio write GiB/s", "aggregate read GiB/s", "fio read GiB/s"),
            unit="GiB/s",
        ),
        "One client and one worker on one host, 2 MiB chunks in the page cache, with fio in the same minute.\n"
        "`shared` is shared memory and open files, `tcp` goes over loopback, `grpc` is the last resort.",
    ),
    Picture(
        "peers",
        "How fast are other stores?",
        "competitors",
        "Competitors: 2 MiB",
        Plot("contender", ("put GiB/s", "get GiB/s"), unit="GiB/s"),
        "128 chunks of 2 MiB, two threads, tmpfs, all in one run.\n"
        "Of these, as configured, only kvstore verifies what it reads.",
    ),
    Picture(
        "workers",
        "What do more processes gain?",
        "throughput",
        "Workers",
        Plot(
            "workers",
            ("aggregate write GiB/s", "fio write GiB/s", "aggregate read GiB/s", "fio read GiB/s"),
            unit="GiB/s",
            log_x=True,
        ),
        "1 to 32 processes that open one root on two cores, with at least as many fio jobs.\n"
        "Two cores are the limit, so more than eight processes add little.",
    ),
    Picture(
        "full-store",
        "How fast is a full store?",
        "steady",
        "A full store",
        Plot("prompt MiB", ("of unlimited",), series="way", unit="of an unlimited store"),
        "Put rate at capacity, where every put evicts, as a share of an unlimited store's.",
    ),
)
PERFORMANCE = """\
# Performance

`make performance` measures this page and writes it with its pictures; do not edit it.
It takes about an hour on two quiet cores.
It needs fio, vLLM (`.ci/engines.sh --setup vllm`) and the other stores (`python -m benchmarks.competitors --setup`).
Each picture names its machine and commit.
[Results](../benchmarks/RESULTS.md) has the tables; [performance notes](performance-notes.md) explain the limits.
"""
FIRST, LAST = "<!-- picture -->\n", "<!-- end of picture -->\n"


def write_performance(results: Sequence[Result]) -> None:
    """Writes docs/performance.md, its pictures, and the picture of the README."""
    folder = DOCS / "images"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    page, shown = [PERFORMANCE], dict[Picture, Result]()
    for picture in PICTURES:
        page.append(f"\n## {picture.question}\n\n{picture.about}\n")
        for result, table in _tables_of(results, picture):
            (folder / f"{picture.name}.svg").write_text(svg(replace(table, plot=picture.plot)))
            page.append(f"\n![{picture.question}](images/{picture.name}.svg)\n\n{_origin(result)}\n")
            shown[picture] = result
            break
        else:
            page.append(f"\nNot measured yet: `python -m benchmarks {picture.benchmark}`.\n")
    (DOCS / "performance.md").write_text("".join(page))
    text = README.read_text()
    if FIRST in text:
        first = next((each for each in (FASTER, FASTER_ON_GPU) if each in shown), None)
        before, after = text.partition(FIRST)[0], text.partition(LAST)[2]
        image = f"![{first.question}](docs/images/{first.name}.svg)\n" if first else ""
        caption = f"\n{' '.join(first.about.split())} {_origin(shown[first])}\n" if first else ""
        README.write_text(before + FIRST + image + caption + LAST + after)


def _tables_of(results: Sequence[Result], picture: Picture) -> Iterator[tuple[Result, Table]]:
    for result in results:
        for table in result.tables if result.benchmark == picture.benchmark else ():
            if table.title.startswith(picture.table) and len(table.rows) > 1:
                yield result, table


def _origin(result: Result) -> str:
    """The date, machine and commit of a picture."""
    machine = result.machine
    state = "quiet" if machine["quiet"] else "shared with other workloads"
    return f"On {machine['cores']} cores, {machine['cpu']}, {state}. Commit {machine['commit']}{_date(machine)}."


def _date(machine: dict[str, Any]) -> str:
    """The day of a run; for runs that did not record one the day of the commit, if it is known here."""
    if "date" in machine:
        return f" of {machine['date']}"
    asked = ("git", "-C", str(HERE), "log", "-1", "--format=%cs", str(machine["commit"]))
    found = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    return f" of {found.stdout.strip()}" if found.returncode == 0 else ""


def _is_drawable(table: Table) -> bool:
    """True if there is anything to compare."""
    assert table.plot is not None
    return len(table.rows) > 1 and any(name in table.columns for name in table.plot.y)


if __name__ == "__main__":
    sys.exit(main())
