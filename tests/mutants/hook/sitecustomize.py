"""Plants a mutant in every Python process with this folder on its PYTHONPATH and KVSTORE_MUTANT in its environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if os.environ.get("KVSTORE_MUTANT"):
    _root = str(Path(__file__).resolve().parents[3])
    sys.path.insert(0, _root)
    try:
        from tests.mutants.planting import install
    finally:
        sys.path.remove(_root)
    install()
