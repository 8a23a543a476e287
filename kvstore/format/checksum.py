"""Checksums of headers and sections: XXH3-64 (seed 0), chosen for its speed, not against an adversary.

The keyed addresses protect against an adversary; a checksum finds the damage that disks, memory and networks do.
"""

from __future__ import annotations

import xxhash

XXH3_64 = 1

checksum = xxhash.xxh3_64_intdigest
"""XXH3-64 of one contiguous buffer, as an unsigned integer."""
