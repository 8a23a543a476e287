"""The suite of roots on NFS, inside a guest: ``python -m tests.hosts.conformance SERVER_PATH OPTIONS``.

The export is mounted a second time with caches of its own, so that the suite's second host is another client.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FIRST, SECOND = Path("/mnt/nfs"), Path("/mnt/nfs2")
SUITE = "tests/root/test_conformance.py"


def main() -> int:
    source, options = sys.argv[1:]
    SECOND.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "nfs", "-o", f"{options},nosharecache", source, str(SECOND)], check=True)
    os.environ["KVSTORE_TEST_ROOTS"] = f"{FIRST}={SECOND}"
    code = pytest.main(["-q", "-p", "no:cacheprovider", "--timeout", "300", "-k", FIRST.name, SUITE])
    subprocess.run(["umount", str(SECOND)], check=True)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
