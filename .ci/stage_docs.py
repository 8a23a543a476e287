"""Copies all documents and the files that they link to into one folder, from which mkdocs builds the site.

Guides are next to the code they are about, and mkdocs reads one folder. The copies keep their places, so that links
between documents mean the same in the repository and on the site.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1]
FOLDERS = ("docs", "kvstore", "gc", "deploy", "benchmarks", "tests")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def documents() -> list[Path]:
    """All documents of the repository."""
    return sorted([*SOURCE.glob("*.md"), *(path for folder in FOLDERS for path in (SOURCE / folder).rglob("*.md"))])


def linked(page: Path) -> list[Path]:
    """The files that a document links to."""
    targets = [(page.parent / target).resolve() for target in LINK.findall(page.read_text()) if "://" not in target]
    return [target for target in targets if target.is_file() and target.is_relative_to(SOURCE)]


def with_docstrings(text: str) -> str:
    """Replaces each entry of docs/api.md by the directive for which mkdocs shows the whole docstring."""
    return re.sub(r"^### (kvstore\.\S+)\n.*?(?=^##|\Z)", r"::: \1\n\n", text, flags=re.MULTILINE | re.DOTALL)


def stage(folder: Path) -> None:
    """Makes the folder anew."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in {file for page in documents() for file in (page, *linked(page))}:
        copy = folder / path.relative_to(SOURCE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    api = folder / "docs" / "api.md"
    api.write_text(with_docstrings(api.read_text()))


if __name__ == "__main__":
    stage(Path(sys.argv[1]))
