"""The data path in C: reads, verifies and writes runs of chunk files without the GIL, where it was built.

Optional.  It takes the common good case only; everything else, and everything where it was not built, is done in
Python by ``kvstore.node.chunks``, with the same results.  ``KVSTORE_NATIVE=0`` in the environment turns it off.
"""

from __future__ import annotations

from kvstore.native.library import is_available, why_not

__all__ = ["is_available", "why_not"]
