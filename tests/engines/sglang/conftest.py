"""Runs these tests only where SGLang is installed: in the environment that .ci/engines.sh makes."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("sglang") and find_spec("torch") else ["test_*.py"]
