"""The virtual environments of the competitors, under ``.cache/competitors``: made once, checked before each run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.competitors.contender import OWN

SOURCE = Path(__file__).resolve().parents[2]
FOLDER = SOURCE / ".cache" / "competitors"
PYTHON = "python3.11"
"""The one that all peers have wheels for."""
INSTALL_S = 1800.0
READY = ".ready"


@dataclass(frozen=True)
class Environment:
    """The packages of one environment, with dependencies and without."""

    name: str
    packages: tuple[str, ...]
    alone: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def contents(self) -> str:
        return "\n".join((*self.packages, "without dependencies:", *self.alone))

    def is_ready(self) -> bool:
        """True if it was made with the packages as they are listed now."""
        try:
            return (self.folder / READY).read_text() == self.contents
        except FileNotFoundError:
            return False


ENVIRONMENTS = {
    each.name: each
    for each in (
        Environment("vineyard", ("vineyard==0.24.2", "vineyard-llm==0.24.2", "numpy<3")),
        Environment(
            "lmcache",
            # LMCache demands CUDA packages; these are what its storage needs.
            (
                "torch==2.13.0",
                "numpy<=2.2.6",
                "transformers>=5.4",
                "aiofile",
                "aiofiles",
                "aiohttp",
                "blake3",
                "cachetools",
                "cryptography",
                "fastapi",
                "httpx",
                "msgspec",
                "numba",
                "nvtx",
                "opentelemetry-api<=1.40.0",
                "opentelemetry-sdk<=1.40.0",
                "prometheus_client<=0.24.1",
                "psutil",
                "py-cpuinfo",
                "pyyaml",
                "pyzmq",
                "redis",
                "requests",
                "safetensors",
                "sortedcontainers",
            ),
            alone=("lmcache==0.5.6",),
            environ={"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"},
        ),
        Environment("mooncake", ("mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy<3")),
        Environment("redis", ("redis[hiredis]==8.1.0", "numpy<3")),
    )
}


class NotReady(Exception):
    """An environment cannot be used; the text gives the reason and the remedy."""


def python_of(name: str) -> tuple[Path, Mapping[str, str]]:
    """The interpreter of an environment, and what to set for it. Raises NotReady."""
    if name == OWN:
        return Path(sys.executable), {}
    environment = ENVIRONMENTS[name]
    if not environment.is_ready():
        raise NotReady(f"not set up: python -m benchmarks.competitors --setup {name}")
    return environment.python, environment.environ


def set_up(name: str) -> None:
    """Makes an environment, unless it exists already. Raises NotReady."""
    environment = ENVIRONMENTS[name]
    if environment.is_ready():
        return
    python = shutil.which(PYTHON)
    if python is None:
        raise NotReady(f"{PYTHON} is not on PATH, and it is the version that the peers have wheels for")
    shutil.rmtree(environment.folder, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    _run(python, "-m", "venv", str(environment.folder))
    pip = (str(environment.python), "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check")
    _run(*pip, *environment.packages)
    if environment.alone:
        _run(*pip, "--no-deps", *environment.alone)
    (environment.folder / READY).write_text(environment.contents)


def _run(*command: str) -> None:
    try:
        subprocess.run(
            command,
            check=True,
            timeout=INSTALL_S,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        )
    except subprocess.CalledProcessError as error:
        said = [line for line in error.stderr.splitlines() if line.startswith("ERROR")] or error.stderr.splitlines()
        raise NotReady(f"{' '.join(command[:5])} failed: {said[-1] if said else error}") from error
    except subprocess.TimeoutExpired as error:
        raise NotReady(f"{' '.join(command[:5])} took more than {INSTALL_S:g} s") from error
