"""KV shapes of widely used models: the size of one token decides which chunk sizes are worth measuring."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore import Layout


@dataclass(frozen=True)
class Model:
    """Shape of the KV of one token, 16-bit; ``prefill_tokens_per_s`` as published for one GPU, 0 where it is not."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    prefill_tokens_per_s: int = 0

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2

    def layout(self, chunk_tokens: int) -> Layout:
        """Returns the layout with chunks of this many tokens."""
        return Layout(self.layers, self.kv_heads, self.head_dim, "bfloat16", chunk_tokens)

    def layout_of(self, chunk_bytes: int) -> Layout:
        """The layout with chunks of at most ``chunk_bytes``, at least one token."""
        return self.layout(max(1, chunk_bytes // self.bytes_per_token))


# Prefill rates: 8,192 tokens in 0.84, 0.40, 1.08 and 0.89 s, as the authors of remote_kv_cache published them.
QWEN_32B = Model("Qwen2.5-32B", 64, 8, 128, 2_220)
QWEN_7B = Model("Qwen2.5-7B", 28, 4, 128, 9_752)
QWEN_3B = Model("Qwen2.5-3B", 36, 2, 128, 20_480)
GLM_9B = Model("glm-4-9b", 40, 4, 128, 7_585)
LLAMA_8B = Model("Llama-3.1-8B", 32, 8, 128, 9_204)
DENSE = Model("dense without GQA", 80, 128, 128)
"""5 MiB a token, as in Vineyard's own benchmark."""
SMALL = Model("32 KiB a token", 16, 4, 128)

MODELS = {each.name: each for each in (QWEN_32B, QWEN_7B, QWEN_3B, GLM_9B, LLAMA_8B, DENSE, SMALL)}
BLOCK_MODELS = (QWEN_32B, QWEN_7B, QWEN_3B, GLM_9B, LLAMA_8B)
"""The five of the remote_kv_cache table."""
