"""Shows that kvstore's wheel works beside the versions that engines pin:  make compat [ARGS=NAME ...]

Separate from the test suite because each case needs an environment of its own, made under .cache/compat from a wheel
built of this checkout: first with the core dependencies alone, then with the `server` extra. In both,
tests/tooling/compat_smoke.py runs outside the checkout, so that only what the wheel ships can be imported.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".cache" / "compat"
SMOKE = ROOT / "tests" / "tooling" / "compat_smoke.py"
INSTALL_S = 600
SMOKE_S = 180


@dataclass(frozen=True, slots=True)
class Case:
    """One environment: a Python, and the versions that its owner insists on."""

    name: str
    python: str
    constraints: tuple[str, ...]
    required: bool = True


def lower_bounds() -> tuple[str, ...]:
    """The oldest version of everything that pyproject.toml says will do."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["server"]]
    return tuple(re.sub(r">=([\w.]+).*", r"==\1", line) for line in lines)


CASES = (
    Case("oldest", sys.executable, lower_bounds()),
    Case("protobuf6-numpy2.2", sys.executable, ("protobuf==6.33.*", "numpy==2.2.*")),
    Case("protobuf7-numpy-current", sys.executable, ("protobuf==7.36.*", "numpy>=2.4")),
    Case("python3.11", "python3.11", (), required=False),
    Case("python3.12", "python3.12", (), required=False),
    Case("python3.13", "python3.13", (), required=False),
)


def run(command: list[str | Path], timeout_s: float, folder: Path = ROOT) -> str:
    """Standard output of ``command``; ends the program with the command's own words where it fails."""
    # Nothing of the caller's Python settings may reach the environments under test.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=folder, env=environment, timeout=timeout_s, check=False,
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        sys.exit(f"compat: {' '.join(map(str, command))} failed ({done.returncode})\n{done.stdout}{done.stderr}")
    return done.stdout


def find(python: str, wanted: str | None) -> str | None:
    """The interpreter to use for ``python``, started once to see that it runs and is the version its name says."""
    probe = "import ensurepip, venv, sys; print('%d.%d' % sys.version_info[:2], sys.executable)"
    # pyenv's commands on PATH refuse to run for versions that are not its current one; the versions themselves do run.
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    others = [str(path) for path in sorted(versions.glob(f"{wanted}.*/bin/{python}"), reverse=True)]
    for candidate in (python, *others):
        try:
            done = subprocess.run([candidate, "-c", probe], capture_output=True, text=True, timeout=60, check=False)
        except OSError:
            continue
        version, _, path = str(done.stdout).strip().partition(" ")
        if done.returncode == 0 and wanted in (None, version):
            return path
    return None


def build_wheel() -> Path:
    """A wheel of this checkout."""
    folder = FOLDER / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], INSTALL_S)
    (wheel,) = folder.glob("*.whl")
    return wheel


def try_case(case: Case, python: str, wheel: Path) -> None:
    """Makes the environment anew, and runs the smoke program with the core alone and with the server extra."""
    start_s = time.monotonic()
    venv = FOLDER / case.name
    shutil.rmtree(venv, ignore_errors=True)
    run([python, "-m", "venv", venv], INSTALL_S)
    constraints = venv / "constraints.txt"
    constraints.write_text("".join(f"{line}\n" for line in case.constraints))
    inside = venv / "bin" / "python"
    pip: list[str | Path] = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    for extra in ("", "[server]"):
        run([*pip, "--constraint", constraints, f"{wheel}{extra}"], INSTALL_S)
        run([inside, "-m", "pip", "check", "--disable-pip-version-check"], INSTALL_S)
        # -I: no current folder, no user packages; only the wheel is there to import.
        line = run([inside, "-I", SMOKE, "server" if extra else "core"], SMOKE_S, folder=venv).strip().splitlines()[-1]
        print(f"  {line}", flush=True)
    print(f"compat: {case.name}: works ({time.monotonic() - start_s:.0f} s)", flush=True)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Does kvstore work beside the versions that engines pin?")
    parser.add_argument("cases", nargs="*", metavar="NAME", help=", ".join(case.name for case in CASES))
    chosen = parser.parse_args().cases
    unknown = set(chosen) - {case.name for case in CASES}
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(case.name for case in CASES)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one run at a time: the environments are shared
        try_cases(chosen)


def try_cases(chosen: list[str]) -> None:
    """Tries every case, or those named; a Python that is not on this machine is skipped, aloud."""
    wheel = build_wheel()
    running = f"{sys.version_info[0]}.{sys.version_info[1]}"
    for case in CASES:
        if chosen and case.name not in chosen:
            continue
        if not case.required and not chosen and case.python == f"python{running}":
            continue  # the required cases ran on this one
        python = find(case.python, None if case.required else case.python.removeprefix("python"))
        if python is None:
            if case.required or chosen:
                sys.exit(f"compat: {case.python} does not run here, or has no venv and ensurepip modules")
            print(f"compat: {case.name}: skipped, no {case.python} on this machine", flush=True)
            continue
        try_case(case, python, wheel)


if __name__ == "__main__":
    main()
