"""The content of the repository: no trace of its machine, no package index, names that say what a thing is."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.kit.programs import ended

ROOT = Path(__file__).resolve().parents[2]
# Hosts of package indexes and their mirrors, spelled so that this file does not name one.
REGISTRY = re.compile(
    r"\b(?:test\.)?py" + r"pi\.(?:org|python\.org|tuna\S*)"
    r"|python" + r"hosted\.org"
    r"|\w+://[^\s/\"']*(?:artifactory|nexus|jfrog|devpi|registry|mirror)[^\s\"']*"
    r"|--(?:extra-)?index-" + r"url|--find-" + r"links"
)
COMMON_FOLDERS = {
    "/",
    "/tmp",
    "/home",
    "/srv",
    "/opt",
    "/usr",
    "/var",
    "/mnt",
    "/data",
    "/var/tmp",
    "/usr/src",
    "/dev/shm",
}


def repository_files() -> list[Path]:
    """Every file that is, or is about to be, in the repository; relative paths."""
    listed = ended("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    names = [name for name in listed.stdout.split("\0") if name]
    return [Path(name) for name in names if (ROOT / name).is_file()]


def workplace_paths(checkout: Path, home: Path) -> re.Pattern[str]:
    """Matches the checkout, and paths below its parent or below the user's home directory."""
    below = {str(checkout.parent), str(home)} - COMMON_FOLDERS
    places = [re.escape(str(checkout)) + r"(?![\w.-])", *(re.escape(place) + r"/\S" for place in sorted(below))]
    return re.compile(r"(?<![\w.~$}*-])(?:" + "|".join(places) + ")")


def test_gc_is_a_source_root_and_not_a_package() -> None:
    assert not (ROOT / "gc" / "__init__.py").exists(), "the built-in gc module wins every import: use gc/kvstore_gc/"


def test_no_file_names_this_machine_or_a_package_index() -> None:
    here = workplace_paths(ROOT, Path.home())
    found = []
    for path in repository_files():
        try:
            text = (ROOT / path).read_text()
        except UnicodeDecodeError:
            continue  # a golden file
        for number, line in enumerate(text.splitlines(), 1):
            if here.search(line) or REGISTRY.search(line):
                found.append(f"{path}:{number}: {line.strip()[:160]}")
    assert found == []


def test_every_locked_version_has_a_hash() -> None:
    for path in [ROOT / "requirements.lock", *(ROOT / ".ci").glob("*.lock")]:
        lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        pinned = [number for number, line in enumerate(lines) if re.match(r"[a-z0-9.-]+==\S+", line)]
        assert pinned, path
        assert all(lines[number + 1].startswith("    --hash=sha256:") for number in pinned), path
        assert all(re.match(r"[a-z0-9.-]+==\S+|    --hash=sha256:[0-9a-f]{64}( \\)?$", line) for line in lines), path


# Names say what a thing is: each class name stands once in the project, and a module is named by a noun.


NOUNS = {"encoding", "hashing", "planning", "routing", "serving", "settings", "shared", "string", "testing", "tracing"}
"""Words that end like a verb and are nouns of the field."""


def sources() -> list[Path]:
    generated = ROOT / "kvstore" / "v1"
    found = [*ROOT.glob("kvstore/**/*.py"), *ROOT.glob("gc/kvstore_gc/**/*.py")]
    return [path for path in found if generated not in path.parents]


def test_each_class_name_stands_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sources():
        if path.stem == "aio":  # has the names of the calls that it awaits
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_modules_are_named_by_nouns() -> None:
    verbs = [path for path in sources() if re.fullmatch(r".+(ing|ed)", path.stem) and path.stem not in NOUNS]
    assert [str(path.relative_to(ROOT)) for path in verbs] == []


# Tests patch kvstore in tests/kit and the simulation alone; limits are passed in. The list of what is left shrinks.


BY_PATH = re.compile(r"setattr\(\s*f?\"kvstore|patch\(\s*f?\"kvstore")
CONSTANT = re.compile(r"setattr\(\s*[\w.]+(?:\[[^\]]*\])?, \"[A-Z_]{3,}\"")
CONSTANTS_LEFT = {
    "benchmarks": 8, "client": 5, "connectors": 5, "engines": 4, "memory": 3, "batch": 2, "native": 1,
}  # fmt: skip


def _found(patch: re.Pattern[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for path in (ROOT / "tests").rglob("*.py"):
        folder = path.relative_to(ROOT / "tests").parts[0]
        if folder not in ("kit", "mutants", "tooling", "sim"):
            found[folder] += len(patch.findall(path.read_text()))
    return +found


def test_no_test_patches_kvstore_by_a_path() -> None:
    assert not _found(BY_PATH), "pass a limit, a clock or a fault of tests/kit instead"


def test_patches_of_constants_are_not_added() -> None:
    grown = {folder: count for folder, count in _found(CONSTANT).items() if count > CONSTANTS_LEFT.get(folder, 0)}
    assert not grown, f"make it a field of the limits that are passed in: {grown}"
