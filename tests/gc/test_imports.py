"""What a collector imports: an embedded store starts one while a program works, on the same cores."""

from __future__ import annotations

import subprocess
import sys

from tests.kit.patience import PATIENCE_S

UNUSED = ("click", "rich", "prometheus_client", "grpc", "fsspec", "sqlite3", "cryptography", "opentelemetry")


def test_a_collector_imports_only_where_it_is_used() -> None:
    program = (
        f"import sys, kvstore_gc.collector; sys.exit(str([name for name in {UNUSED} if name in sys.modules] or ''))"
    )
    found = subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_S, check=False, capture_output=True)
    assert found.stderr.strip() == b"", found.stderr
