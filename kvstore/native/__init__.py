"""The data path in C: reads, verifies and writes runs of chunk files without the GIL, if it was built.

Optional. It does only the common good case. ``kvstore.engine.chunk_store`` does everything else in Python, and
everything if the library was not built, with the same results. ``KVSTORE_NATIVE=0`` in the environment turns it off.
"""

from __future__ import annotations

from kvstore.native.library import is_available, why_not

__all__ = ["is_available", "why_not"]
