"""The content of the repository: no trace of the machine it was written on, no package index."""

from __future__ import annotations

import re
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
