"""The wheel: files that users need beside the modules, and nothing foreign."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from tests.kit.programs import ended

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from this checkout by the declared backend."""
    folder = tmp_path_factory.mktemp("wheel")
    ended(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, check=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.parametrize(
    "name",
    [
        "kvstore/py.typed",
        "kvstore/format/FORMAT.md",
        "kvstore/v1/__init__.py",
        "kvstore/v1/kvstore_pb2.py",
        "kvstore/v1/kvstore_pb2.pyi",
        "kvstore/v1/kvstore_pb2_grpc.py",
    ],
)
def test_the_wheel_ships(wheel: zipfile.ZipFile, name: str) -> None:
    assert wheel.read(name) == (ROOT / name).read_bytes()


def test_the_wheel_holds_every_module_and_no_test(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "kvstore").rglob("*.py")} <= names
    assert {name.split("/")[0] for name in names} <= {"kvstore", "kvstore_gc"}
