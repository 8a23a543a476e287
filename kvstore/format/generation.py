"""Generations: which life of the metadata a root belongs to. Each lasts as long as its etcd; its loss begins the next.

Here because both sides keep one record of it and do not know each other: the root as ``generations/<number>``, etcd
under the key ``generation``. If they differ, etcd was wiped, or is another cluster's (rule C6).
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from kvstore.errors import RootMismatch
from kvstore.parsing import parse_json

CLUSTER_BYTES = 16
RECORD_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class Generation:
    """``number`` counts from 1; ``cluster`` is 16 random bytes, which tell two lives of one number apart."""

    number: int
    cluster: bytes

    def to_json(self) -> bytes:
        """Returns the content that both sides store."""
        return json.dumps({"generation": self.number, "cluster": self.cluster.hex()}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, content: bytes, where: str) -> Generation:
        """Parses what ``to_json`` returned; ignores fields of newer versions. Raises RootMismatch, naming ``where``."""
        try:
            fields = parse_json(content)
            found = cls(fields["generation"], bytes.fromhex(fields["cluster"]))
        except (ValueError, KeyError, TypeError) as cause:
            raise RootMismatch(f"{where} is not the record of a generation: {cause}") from cause
        if type(found.number) is not int or found.number < 1 or len(found.cluster) != CLUSTER_BYTES:
            raise RootMismatch(
                f"{where} is not the record of a generation: expected a number from 1 on and {CLUSTER_BYTES} bytes"
            )
        return found

    def __str__(self) -> str:
        return f"{self.number} ({self.cluster.hex()[:8]})"
