"""Runs these tests only where LMCache is installed: in the environment that .ci/engines.sh makes."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("lmcache") and find_spec("torch") else ["test_*.py"]

if not collect_ignore_glob:
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
    # LMCache makes this folder and leaves it.
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp(prefix="kvstore-test-lmcache-")
    atexit.register(shutil.rmtree, os.environ["PROMETHEUS_MULTIPROC_DIR"], ignore_errors=True)
