"""An engine that hashes its blocks itself, as vLLM does: keys of a chained hash, and descents that say so."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from hashlib import sha256

from kvstore.core.address import Address, block_addresses
from kvstore.core.namespace import Namespace
from kvstore.engine.coordination import ClusterMember
from kvstore.format.header import Ancestry, Descent
from tests.kit.clusters import SPACE
from tests.kit.stores import TINY

SIZE = TINY.chunk_tokens
GROUP = 0


@dataclass(frozen=True)
class Prompt:
    """The blocks of one prompt."""

    keys: list[bytes]
    descents: list[Descent]

    @property
    def addresses(self) -> list[Address]:
        """Where they lie on the root, in the namespace of the tests."""
        return block_addresses(SPACE, self.keys)

    @property
    def hashes(self) -> list[int]:
        """How events name them."""
        return [int.from_bytes(key[24:32], "big") for key in self.keys]

    def saying(self, index: int, **changed: object) -> Prompt:
        """The same blocks, where one has another descent."""
        descents = list(self.descents)
        descents[index] = replace(descents[index], **changed)  # type: ignore[arg-type]
        return Prompt(self.keys, descents)


def prompt_of(seed: int, blocks: int, lora: str | None = None) -> Prompt:
    """Returns the blocks of a prompt that no other number has."""
    tokens = [1_000_000 * seed + at for at in range(blocks * SIZE)]
    hashed, keys, descents = sha256(b"none").digest(), list[bytes](), list[Descent]()
    extra = b"" if lora is None else json.dumps({"lora_name": lora, "extra_keys": [lora]}).encode()
    for index in range(blocks):
        own = tokens[index * SIZE : (index + 1) * SIZE]
        hashed = sha256(hashed + str((own, lora)).encode()).digest()
        descents.append(Descent(own, index, keys[-1] if keys else b"", 32, GROUP, extra=extra))
        keys.append(hashed + bytes([GROUP]))
    return Prompt(keys, descents)


def put_blocks(member: ClusterMember, prompt: Prompt, which: range | None = None, space: Namespace = SPACE) -> None:
    """Stores blocks of a prompt with their descents, all by default."""
    part = which or range(len(prompt.keys))
    ancestry = Ancestry(part.start, [prompt.descents[at].pack() for at in part])
    keys, buffers = [prompt.keys[at] for at in part], [memoryview(bytes([at]) * 100) for at in part]
    assert member.node.put_blocks(space, keys, buffers, ancestry=ancestry).there.all()
