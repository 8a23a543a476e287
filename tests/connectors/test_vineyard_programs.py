"""The two programs of Vineyard's documentation (Apache-2.0), kept as published in programs/, but for one lost comma.

Only their imports are changed, and the two paths under /tmp.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.kit.programs import ended

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]
IMPORTS = {
    "import vineyard\n": "",
    "from vineyard.llm.cache import": "from kvstore.connectors.vineyard import",
    "from vineyard.llm import": "from kvstore.connectors.vineyard import",
}


def run(name: str, tmp_root: Path) -> None:
    program = (HERE / "programs" / name).read_text()
    for old, new in {**IMPORTS, "/tmp/vineyard": f"{tmp_root}/vineyard"}.items():
        assert old in program
        program = program.replace(old, new)
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = ended(sys.executable, "-W", "error", "-c", program, cwd=tmp_root, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_radix_tree_program_runs_with_its_imports_changed(tmp_root: Path) -> None:
    run("radix_tree_blob.txt", tmp_root)
    assert (tmp_root / "vineyard_test.sock.kvstore" / "FORMAT").is_file()


def test_the_file_system_program_runs_with_its_imports_changed(tmp_root: Path) -> None:
    run("chunk_hash_files.txt", tmp_root)
    assert (tmp_root / "vineyard" / "llm_cache" / "FORMAT").is_file()
