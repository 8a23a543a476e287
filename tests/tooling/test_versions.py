"""Versions that are stated in more than one place agree, and generated code fits the declared ranges; the wheel."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import kvstore
from tests.kit.programs import ended

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
GENERATED = ROOT / "kvstore" / "v1"


def declared(name: str) -> list[Requirement]:
    """Every requirement on ``name``, in the core and in the extras."""
    metadata = PROJECT["project"]
    lines = [
        *metadata["dependencies"],
        *(line for extra in metadata["optional-dependencies"].values() for line in extra),
    ]
    return [requirement for line in lines if (requirement := Requirement(line)).name == name]


def lowest(requirement: Requirement) -> Version:
    """The lower bound of a range."""
    return Version(next(bound.version for bound in requirement.specifier if bound.operator == ">="))


def generator_of_messages() -> Version:
    """Version of the protobuf compiler that wrote kvstore_pb2.py, from the check it makes when imported."""
    for node in ast.walk(ast.parse((GENERATED / "kvstore_pb2.py").read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ValidateProtobufRuntimeVersion"):
            return Version(".".join(ast.unparse(argument) for argument in node.args[1:4]))
    raise AssertionError("kvstore_pb2.py does not check its runtime")


def generator_of_stubs() -> Version:
    """Version of grpcio-tools that wrote kvstore_pb2_grpc.py."""
    found = re.search(
        r"^GRPC_GENERATED_VERSION = '([\d.]+)'", (GENERATED / "kvstore_pb2_grpc.py").read_text(), re.MULTILINE
    )
    assert found, "kvstore_pb2_grpc.py does not check its runtime"
    return Version(found[1])


def test_package_metadata_and_changelog_have_the_declared_version() -> None:
    version = PROJECT["project"]["version"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert kvstore.__version__ == version
    assert importlib.metadata.version(PROJECT["project"]["name"]) == version
    assert newest and newest[1] == version


def test_tools_judge_the_code_by_the_oldest_python_supported() -> None:
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + oldest.replace(".", "")
    assert PROJECT["tool"]["mypy"]["python_version"] == oldest
    assert f'"{oldest.replace(".", ", ")}"' in (ROOT / ".ci" / "python.sh").read_text()
    assert f"Programming Language :: Python :: {oldest}" in PROJECT["project"]["classifiers"]


def test_generated_messages_run_on_every_protobuf_in_the_declared_range() -> None:
    generator, (protobuf,) = generator_of_messages(), declared("protobuf")
    assert lowest(protobuf) >= generator, "a runtime older than the generator is refused"
    # Code of one major version runs on that and on the next, no further.
    assert not protobuf.specifier.contains(f"{generator.major + 2}.0.0")
    assert protobuf.specifier.contains(f"{generator.major + 1}.0.0")


@pytest.mark.parametrize("name", ["grpcio", "grpcio-health-checking", "grpcio-reflection"])
def test_generated_stubs_run_on_every_grpc_in_the_declared_range(name: str) -> None:
    for requirement in declared(name):
        assert lowest(requirement) >= generator_of_stubs()


def test_the_lock_satisfies_every_declared_range() -> None:
    locked = dict(re.findall(r"^([a-z0-9-]+)==([^\s;]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    groups = [PROJECT["project"]["dependencies"], PROJECT["dependency-groups"]["dev"]]
    groups += PROJECT["project"]["optional-dependencies"].values()
    for line in (line for group in groups for line in group):
        requirement = Requirement(line)
        name = requirement.name.lower().replace("_", "-")
        assert name in locked, f"{line} is not in requirements.lock: run make lock"
        assert requirement.specifier.contains(locked[name]), f"{line}, but {locked[name]} is locked: run make lock"


# The wheel: files that users need beside the modules, and nothing foreign.


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
