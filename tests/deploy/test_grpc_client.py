"""The example client, beside the generated messages alone."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.kit.programs import ended
from tests.kit.workers import serving

SOURCE = Path(__file__).resolve().parents[2]


def test_example_client_without_kvstore_reads_its_put(tmp_path: Path) -> None:
    generated = tmp_path / "kvstore" / "v1"
    generated.mkdir(parents=True)
    for name in ("kvstore_pb2.py", "kvstore_pb2_grpc.py"):
        shutil.copy(SOURCE / "kvstore" / "v1" / name, generated)
    for package in (generated, generated.parent):
        (package / "__init__.py").touch()  # a namespace package would lose against the installed one
    client = shutil.copy(SOURCE / "deploy" / "examples" / "grpc_client.py", tmp_path)
    with serving() as served:
        ran = ended(sys.executable, client, served.address)
        assert served.worker.service.counters()["chunks_written"] == 4, ran.stderr
    assert ran.returncode == 0, ran.stderr
