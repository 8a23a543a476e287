"""A model with random weights on a device, and the stores that its KV goes to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvstore
from kvstore.client import Store

CHUNK_TOKENS = 256
BOS = 1


@dataclass(frozen=True)
class Shape:
    """A Llama with random weights."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """KV of one token."""
        return int(2 * self.layers * self.kv_heads * self.head * self.dtype.itemsize)

    def model(self, device: torch.device, tokens: int) -> Any:
        """The model for prompts of up to ``tokens``."""
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head,
            max_position_embeddings=tokens + CHUNK_TOKENS,
            pad_token_id=None,
            bos_token_id=BOS,
            eos_token_id=None,
        )
        torch.manual_seed(7)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with device:
                return LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)


LLAMA_8B = Shape(4096, 14_336, 32, 32, 8, 128, 128_256, torch.bfloat16)
SMALL = Shape(64, 128, 4, 4, 2, 16, 512, torch.float32)


@contextmanager
def opened(root: Path, memory_bytes: int) -> Iterator[Store]:
    """A store of this process alone, with that much memory for chunks."""
    with kvstore.open(root, max_bytes=None, memory=memory_bytes) as store:
        yield store


def loaded_bytes(store: Store) -> int:
    """Returns the bytes read from the root and from memory so far."""
    stats = store.stats()
    return int(stats["bytes_read"] + stats["memory_bytes"])


def wait(device: torch.device) -> None:
    """Waits until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
