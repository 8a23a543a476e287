"""The image's recipe, as far as it can be checked without building it: copied files exist, nothing runs as root."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]
RECIPE = (SOURCE / "deploy" / "image" / "Containerfile").read_text().replace("\\\n", " ")
STAGES = re.split(r"^FROM .*$", RECIPE, flags=re.MULTILINE)[1:]


def test_what_it_copies_is_there_and_enough_to_build_the_package() -> None:
    lines = re.findall(r"^COPY (?!--from)(.+)$", STAGES[0], re.MULTILINE)
    copied = [word for line in lines for word in line.split()[:-1]]
    assert all((SOURCE / path).exists() for path in copied)
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = [*wheel["packages"], wheel["hooks"]["custom"]["path"]]
    needed += [project["project"]["readme"], *project["project"]["license-files"]]
    assert all(any(Path(path).is_relative_to(each) for each in copied) for path in needed)


def test_it_installs_extras_that_exist_and_all_that_pods_need() -> None:
    (extras,) = re.findall(r"'\.\[(.*?)\]'", STAGES[0])
    known = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"server", "security", "encryption", "compression"} <= set(extras.split(",")) <= set(known)


def test_the_result_has_no_compiler_and_is_nobody() -> None:
    assert "gcc" not in STAGES[1] and "pip" not in STAGES[1].replace("/pip.conf", "")
    assert re.search(r"^USER 65532:65532$", STAGES[1], re.MULTILINE)
    assert "STOPSIGNAL SIGTERM" in STAGES[1]
