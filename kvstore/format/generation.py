"""Which life of the metadata a root belongs to: one generation for as long as etcd lives, the next after it was lost.

Here because both sides keep one record of it, and neither knows the other: the root as ``generations/<number>``, etcd
under the key ``generation``.  Where they differ, etcd was wiped, or is another cluster's (rule C6).
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from kvstore.errors import RootMismatch

CLUSTER_BYTES = 16
RECORD_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class Generation:
    """``number`` counts from 1; ``cluster`` is 16 random bytes, so that two lives of one number can be told apart."""

    number: int
    cluster: bytes

    def to_json(self) -> bytes:
        """As stored on both sides."""
        return json.dumps({"generation": self.number, "cluster": self.cluster.hex()}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, content: bytes, where: str) -> Generation:
        """The inverse of to_json; fields of newer versions are ignored. Raises RootMismatch, naming ``where``."""
        try:
            fields = json.loads(content)
            found = cls(fields["generation"], bytes.fromhex(fields["cluster"]))
        except (ValueError, KeyError, TypeError, RecursionError) as cause:
            raise RootMismatch(f"{where} is not the record of a generation: {cause}") from cause
        if type(found.number) is not int or found.number < 1 or len(found.cluster) != CLUSTER_BYTES:
            raise RootMismatch(
                f"{where} is not the record of a generation: expected a number from 1 on and {CLUSTER_BYTES} bytes"
            )
        return found

    def __str__(self) -> str:
        return f"{self.number} ({self.cluster.hex()[:8]})"
