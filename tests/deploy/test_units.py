"""The systemd units: systemd finds nothing wrong, they are hardened, and kvstore understands their commands."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.commands import understood
from tests.kit.programs import ended

SYSTEMD = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
UNITS = sorted([*SYSTEMD.glob("*.service"), *SYSTEMD.glob("*.timer")])
SERVICES = [unit for unit in UNITS if unit.suffix == ".service"]
EXPOSURE_MAX = 1.5
"""By `systemd-analyze security`, from 0 to 10; what is left is network, sockets and a worker's limit of open files."""

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


def unit_names(units: list[Path]) -> list[str]:
    return [unit.name for unit in units]


def settings(unit: Path) -> list[tuple[str, str]]:
    joined = unit.read_text().replace("\\\n", " ")
    return [(name, value.strip()) for name, value in re.findall(r"^(\w+)=(.*)$", joined, re.MULTILINE)]


def variables() -> dict[str, str]:
    """Returns the variables that the example environment files set."""
    lines = [line for file in SYSTEMD.glob("*.env") for line in file.read_text().splitlines()]
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The units with programs that are there: systemd looks for them."""
    folder = tmp_path_factory.mktemp("units")
    for unit in UNITS:
        text = unit.read_text()
        for program in set(re.findall(r"^ExecStart=(\S+)", text, re.MULTILINE)):
            stub = folder / Path(program).name
            stub.write_text("#!/bin/sh\n")
            stub.chmod(0o755)
            text = text.replace(f"ExecStart={program}", f"ExecStart={stub}")
        (folder / unit.name).write_text(text)
    return folder


@needs_systemd
def test_systemd_finds_nothing_wrong(installed: Path) -> None:
    command = ["systemd-analyze", "verify", "--man=no", *(str(installed / unit.name) for unit in UNITS)]
    ran = ended(*command)
    assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")


@needs_systemd
@pytest.mark.parametrize("unit", SERVICES, ids=unit_names(SERVICES))
def test_a_service_is_hardened(unit: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)]
    ran = ended(*command)
    exposure = re.search(r"Overall exposure level for \S+: ([0-9.]+)", ran.stdout)
    assert exposure is not None, ran.stderr
    assert float(exposure[1]) <= EXPOSURE_MAX, ran.stdout


@pytest.mark.parametrize("unit", SERVICES, ids=unit_names(SERVICES))
def test_kvstore_understands_the_commands(unit: Path) -> None:
    (line,) = [value for name, value in settings(unit) if name == "ExecStart"]
    if "kvstore" not in Path(line.split()[0]).name:
        return  # etcd, etcd-snapshot
    known = variables()
    words: list[str] = []
    for word in shlex.split(re.sub(r"\$\{(\w+)\}", lambda found: known[found[1]], line)):
        words += shlex.split(known[word[1:]]) if word.startswith("$") else [word]
    understood(words, unit.name)


def test_snapshots_are_kept_whole_and_in_number(tmp_path: Path) -> None:
    """etcd-snapshot against a stand-in for etcdctl: the COUNT youngest stay, one cut short is never counted."""
    programs = tmp_path / "bin"
    programs.mkdir()
    etcdctl = programs / "etcdctl"
    etcdctl.write_text('#!/bin/sh\n[ "$2" = save ] || exit 0\n[ -z "$FAIL" ] || exit 1\necho snapshot >"$3"\n')
    etcdctl.chmod(0o755)
    kept = tmp_path / "kept"
    kept.mkdir()
    for day in range(1, 5):
        (kept / f"etcd-2020010{day}T000000Z.db").write_text("old")
    environment = {"PATH": f"{programs}:/usr/bin:/bin"}
    command = [str(SYSTEMD / "etcd-snapshot"), str(kept), "3"]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=30)
    names = sorted(path.name for path in kept.iterdir())
    assert len(names) == 3 and names[:2] == ["etcd-20200103T000000Z.db", "etcd-20200104T000000Z.db"]
    failed = subprocess.run(command, env={**environment, "FAIL": "1"}, check=False, capture_output=True, timeout=30)
    assert failed.returncode != 0
    assert sorted(path.name for path in kept.iterdir()) == names
