"""The documents: every link leads to a file and a heading of the repository; pages and figures are current."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.kit.programs import ended, load_program

SOURCE = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "kvstore", "gc", "deploy", "benchmarks", "tests")
PAGES = sorted([*SOURCE.glob("*.md"), *(page for folder in FOLDERS for page in (SOURCE / folder).rglob("*.md"))])


def page_name(page: Path) -> str:
    return page.relative_to(SOURCE).as_posix()


def prose(page: Path) -> str:
    """The text of a page without its code, in which brackets are no links and # is no heading."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", lambda code: re.sub(r"[\[\]()]", "", code[0]), text)


@cache
def anchors(page: Path) -> frozenset[str]:
    """Returns the anchors of a page: its headings, as GitHub and the site turn them into fragments."""
    headings = re.findall(r"^#{1,6} +(.*?) *$", prose(page), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    wrong = []
    for target, fragment in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", prose(page)):
        if "://" in target:
            continue
        place = (page.parent / target).resolve() if target else page
        if not place.is_file() or not place.is_relative_to(SOURCE):
            wrong.append(f"{target}: no such file (link to a file, not to a folder)")
        elif fragment and fragment not in anchors(place):
            wrong.append(f"{target}#{fragment}: no such heading in {page_name(place)}")
    assert not wrong


@pytest.mark.parametrize("name", ["commands", "api"])
def test_generated_page_is_current(name: str) -> None:
    script = load_program(f".ci/{name}.py")
    assert script.PAGE.read_text() == script.page(), f"docs/{name}.md is stale: run .venv/bin/python .ci/{name}.py"


FIGURES_COMMITS_MAX = 300


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_figures_are_of_a_recent_commit(page: str) -> None:
    """Those of a GPU, which is seldom at hand, say their date instead."""
    wrong = []
    for part in re.split(r"\n## |\n- |\n<!-- picture", (SOURCE / page).read_text()):
        for commit, date in re.findall(r"[Cc]ommit ([0-9a-f]{8,40})( of \d{4}-\d\d-\d\d)?", part):
            counting = ["git", "-C", str(SOURCE), "rev-list", "--count", f"{commit}..HEAD"]
            counted = ended(*counting)
            if counted.returncode:
                pytest.skip(f"this clone lacks the commit: {counted.stderr.strip()}")
            if not date or ("H200" not in part and int(counted.stdout) > FIGURES_COMMITS_MAX):
                wrong.append(f"{commit} is {counted.stdout.strip()} commits old, or lacks its date: make performance")
    assert not wrong
