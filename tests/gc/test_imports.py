"""What a collector imports: an embedded store starts one while a program works, on the same cores."""

from __future__ import annotations

import subprocess
import sys

from tests.kit.cases import for_each
from tests.kit.patience import PATIENCE_S


@for_each("package", ["rich", "grpc", "fsspec", "sqlite3", "cryptography", "opentelemetry"])
def test_a_collector_imports_only_where_it_is_used(package: str) -> None:
    program = f"import sys, kvstore_gc.cli; sys.exit({package!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_S, check=False).returncode == 0
