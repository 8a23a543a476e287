"""Runs these tests only where torch and transformers are installed: in the environment that .ci/engines.sh
makes.
"""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") and find_spec("transformers") else ["test_*.py"]
