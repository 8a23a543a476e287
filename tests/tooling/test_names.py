"""Names say what a thing is: each class name stands once in the project, and a module is named by a noun."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

TOP = Path(__file__).parents[2]
NOUNS = {"encoding", "hashing", "planning", "routing", "serving", "settings", "shared", "string", "testing", "tracing"}
"""Words that end like a verb and are nouns of the field."""


def sources() -> list[Path]:
    generated = TOP / "kvstore" / "v1"
    found = [*TOP.glob("kvstore/**/*.py"), *TOP.glob("gc/kvstore_gc/**/*.py")]
    return [path for path in found if generated not in path.parents]


def test_each_class_name_stands_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sources():
        if path.stem == "aio":  # has the names of the calls that it awaits
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(TOP)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_modules_are_named_by_nouns() -> None:
    verbs = [path for path in sources() if re.fullmatch(r".+(ing|ed)", path.stem) and path.stem not in NOUNS]
    assert [str(path.relative_to(TOP)) for path in verbs] == []
