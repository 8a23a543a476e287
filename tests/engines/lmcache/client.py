"""tests/engines/vllm/engine.py with LMCache's client: client.py LMCACHES_PACKAGES SETTINGS DESCRIPTOR.

It runs in vLLM's environment, which has no LMCache. That comes from its own environment, behind vLLM's packages: what
both have is vLLM's.
"""

from __future__ import annotations

import json
import os
import sys

from llvmlite.binding import ffi

from tests.engines.vllm.engine import serve

if __name__ == "__main__":
    # LMCache imports numba. vLLM then asks every object of every module for a __dict__, and llvmlite's library answers
    # any name with a foreign function.
    ffi.lib._fntab["__dict__"] = {}
    sys.path.append(sys.argv[1])
    serve(json.loads(sys.argv[2]), os.fdopen(int(sys.argv[3]), "w"))
