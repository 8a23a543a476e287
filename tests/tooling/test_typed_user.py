"""A user's type checker sees what kvstore exports: it accepts a program that is right, and names each typo."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvstore
from tests.kit.patience import PATIENCE_S
from tests.kit.programs import ended

ROOT = Path(__file__).resolve().parents[2]
RIGHT = Path(__file__).with_name("typed_user.py").read_text()
WRONG = '''"""Each line that ends in ``# wrong`` has a mistake."""

import kvstore
from kvstore import Layout
from kvstore import Stor  # wrong

layout = Layout(layers=2, kv_heads=1, head_dim=8, chunk_token=4)  # wrong
other = Layout(layers="2", kv_heads=1, head_dim=8)  # wrong


def misspelt(store: kvstore.Store) -> None:
    cache: kvstore.Cahce = store.namespace("model", Layout(1, 1, 8))  # wrong
    store.namespace("model")  # wrong
    store.close_all()  # wrong


def mixed(cache: kvstore.Cache) -> int:
    cache.put([1], kv=None)  # wrong
    cache.blocks.get(["key"], [bytearray(3)])  # wrong
    cache.pin([1], tll=3.0)  # wrong
    cache.prefetch([1], tier="memry")  # wrong
    cache.prefetch([1], "root")  # wrong
    cache.evict_first("text", 1)  # wrong
    cache.blocks.put(["key"], [b"x"], write="throuhg")  # wrong
    cache.blocks.put(["key"], [b"x"], preset="chatt")  # wrong
    return cache.get([1])  # wrong


kvstore.Stroe  # wrong
kvstore.conect("127.0.0.1:7070")  # wrong
kvstore.connect("127.0.0.1:7070", token="abc")  # wrong
kvstore.connect("127.0.0.1:7070", bulk="sharde")  # wrong
kvstore.Layout(1, 1, 8, dtype="bfloat61")  # wrong
kvstore.open("kv", durability="fsnyc")  # wrong
kvstore.open("kv", write="behnid")  # wrong
kvstore.open("kv", memry=1)  # wrong
kvstore.open("kv", max_bytes=[64])  # wrong
kvstore.open("kv", ttl="7d")  # wrong
kvstore.errors.Unavailble("later")  # wrong
'''
CHECKERS = {
    "mypy": ("--strict", "--no-error-summary", "--config-file=", f"--cache-dir={ROOT / '.cache' / 'typed-user'}"),
    # Pyright as a package of the registry. The tests run it where it is installed and do not require it, because it
    # brings 300 MB of Node.
    "basedpyright": ("--level", "error", f"--pythonpath={sys.executable}"),
}


def complaints(checker: str, program: str, folder: Path) -> dict[int, str]:
    """What a type checker says of a program, by line."""
    file = folder / "program.py"
    file.write_text(program)
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    environment = {**os.environ, "MYPYPATH": ""}
    done = ended(sys.executable, "-m", checker, *CHECKERS[checker], file, cwd=folder, env=environment)
    assert done.returncode in (0, 1) and not done.stderr, done.stderr
    found = re.findall(r"program\.py:(\d+):(?:\d+)?.*?error: (.*)", done.stdout)
    assert bool(found) == bool(done.returncode), done.stdout
    return {int(line): said for line, said in found}


@pytest.fixture(params=CHECKERS)
def checker(request: pytest.FixtureRequest) -> str:
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return str(request.param)


@pytest.mark.slow
def test_a_program_that_is_right_is_accepted(checker: str, tmp_path: Path) -> None:
    assert complaints(checker, RIGHT, tmp_path) == {}


@pytest.mark.slow
def test_every_typo_is_found(checker: str, tmp_path: Path) -> None:
    wrong = {number for number, line in enumerate(WRONG.splitlines(), 1) if line.endswith("# wrong")}
    found = complaints(checker, WRONG, tmp_path)
    assert found.keys() == wrong, found


def test_type_checkers_and_programs_see_the_same_names() -> None:
    (seen,) = (
        node
        for node in ast.parse(Path(kvstore.__file__).read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    places = {alias.name: each.module for each in seen.body if isinstance(each, ast.ImportFrom) for alias in each.names}
    assert {*places, "errors", "__version__"} == set(kvstore.__all__)
    for name, place in places.items():
        assert getattr(kvstore, name) is getattr(importlib.import_module(str(place)), name)
    with pytest.raises(AttributeError, match="'kvstore' has no attribute 'Stroe'"):
        kvstore.Stroe  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("program", "absent"),
    [("kvstore.Layout(1, 1, 8)", {"grpc", "fsspec"}), ("import kvstore.cli.main", {"numpy", "click", "socket"})],
)
def test_importing_the_package_imports_little(program: str, absent: set[str]) -> None:
    program = f"import sys, kvstore; {program}; assert not {absent} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_S, check=True)
