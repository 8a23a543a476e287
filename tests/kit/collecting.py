"""Collectors that leave little of a root: the command line takes no limit under 1 MiB, which is much for a test.

``python -m tests.kit.collecting`` is ``kvstore-gc`` without that check.
"""

from __future__ import annotations

import sys
from unittest.mock import patch

GC = (sys.executable, "-m", "tests.kit.collecting")


def bounded_to(size_bytes: int) -> tuple[str, ...]:
    """The option of a collector with this capacity."""
    return ("--max-bytes", str(size_bytes))


if __name__ == "__main__":
    from kvstore.cli.options import BOUND
    from kvstore_gc.__main__ import main

    with patch("kvstore_gc.cli.BOUND_BYTES_MIN", 0), patch.object(BOUND, "least", 0):
        main()
