"""Time to first token of a prompt on a device, without a store, cold and warm."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.contents import WrongBytes
from benchmarks.gpu_model import CHUNK_TOKENS, Shape, loaded_bytes, opened, wait
from benchmarks.result import Cell
from benchmarks.rounds import GIB, in_turns
from kvstore.client import Store
from kvstore.connectors.transformers import Storing, prefill_with_store

COLUMNS = (
    "tokens",
    "MB of KV",
    "no store s",
    "cold, storing s",
    "cold, storing behind s",
    "warm, root s",
    "warm, memory s",
    "of no store",
    "GiB/s",
)
LONG_BYTES = 8 << 30
"""KV from which on one prompt is stored in each way, instead of one a round."""
ROUNDING = 2**-6
"""By which share two logits in bfloat16 may differ for one KV: two bits."""


class Prefill:
    """One model with its prompts and a store."""

    def __init__(self, shape: Shape, device: torch.device, tokens: int) -> None:
        self.shape, self._device = shape, device
        self.model = shape.model(device, tokens)
        self._likely: dict[int, set[int]] = {}
        """The first tokens that a prompt may have, by its hash."""
        self._computed: list[tuple[torch.Tensor, torch.Tensor]] = []
        """K and V of each layer as the model computed them for the prompt that was stored last."""

    def prompt(self, tokens: int, seed: int) -> torch.Tensor:
        """Random tokens, one more than ``tokens``."""
        source = torch.Generator("cpu").manual_seed(1000 * tokens + seed)
        made = torch.randint(3, self.shape.vocabulary, (1, tokens + 1), generator=source, device="cpu")
        return made.to(self._device)

    def first_token_s(self, prompt: torch.Tensor, store: Store | Storing | None, *, is_warm: bool = False) -> float:
        """Time to first token.

        Raises WrongBytes for KV that is not the computed one to the last bit, and for another token than without a
        store. Where rounding decides between two tokens, as random weights have it for long prompts, both are right.
        """
        wait(self._device)
        before = loaded_bytes(store) if isinstance(store, Store) else 0
        began_s = time.perf_counter()
        past = None
        if store is not None:
            past = prefill_with_store(self.model, prompt, store, chunk_tokens=CHUNK_TOKENS, fingerprint="random")
        with torch.no_grad():
            told = self.model.generate(
                prompt,
                past_key_values=past,
                max_new_tokens=1,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        token = int(told.sequences[0, -1])
        took_s = time.perf_counter() - began_s
        if is_warm and isinstance(store, Store):
            read = loaded_bytes(store) - before
            if read < (prompt.shape[1] - 1) * self.shape.token_bytes:
                raise WrongBytes(f"{read} bytes were loaded")
        self._check_token(prompt, token, told.logits[0][0].float())
        if past is not None:
            self._check_kv(past, prompt.shape[1] - 1, is_warm=is_warm)
        return took_s

    def _check_token(self, prompt: torch.Tensor, token: int, logits: torch.Tensor) -> None:
        near = logits >= logits.max() - ROUNDING * logits.max().abs()
        likely = self._likely.setdefault(hash(tuple(prompt[0, :8].tolist())), set(near.nonzero()[:, 0].tolist()))
        if token not in likely:
            raise WrongBytes(f"token {token}, without a store one of {likely}")

    def _check_kv(self, past: Any, tokens: int, *, is_warm: bool) -> None:
        kv = [(each.keys[:, :, :tokens], each.values[:, :, :tokens]) for each in past.layers]
        if not is_warm:
            self._computed = []  # first: there may be no room for both
            self._computed = [(k.clone(), v.clone()) for k, v in kv]
        for (k, v), (computed_k, computed_v) in zip(kv, self._computed, strict=True):
            if not (torch.equal(k, computed_k) and torch.equal(v, computed_v)):
                raise WrongBytes("KV was loaded that the model had not computed")

    def row(self, root: Path, tokens: int, rounds: int) -> list[Cell]:
        """Medians for prompts of one length. The prompt that is asked again and again is stored in the background."""
        size_bytes = tokens * self.shape.token_bytes
        with opened(root, 0) as plain, opened(root, max(2 * size_bytes, 64 << 20)) as memory:
            asked = self.prompt(tokens, 0)
            self.first_token_s(asked, None)
            if size_bytes < LONG_BYTES:
                self.first_token_s(self.prompt(tokens, 1), plain)  # what only the first one of a length costs
            count = rounds if size_bytes < LONG_BYTES else 1
            cold = [self.first_token_s(self.prompt(tokens, 2 + at), plain) for at in range(count)]
            behind = [
                self._stored_behind_s(prompt, plain, size_bytes)
                for prompt in (*(self.prompt(tokens, -1 - at) for at in range(count - 1)), asked)
            ]
            for store in (plain, memory, memory):
                self.first_token_s(asked, store, is_warm=True)
            found = in_turns(
                {
                    "none": lambda: self.first_token_s(asked, None),
                    "root": lambda: self.first_token_s(asked, plain, is_warm=True),
                    "memory": lambda: self.first_token_s(asked, memory, is_warm=True),
                },
                rounds,
                warm_up=0,
            )
        none, on_root, in_memory = (median(each[way] for each in found) for way in ("none", "root", "memory"))
        return [
            tokens,
            size_bytes / 1e6,
            none,
            median(cold),
            median(behind),
            on_root,
            in_memory,
            in_memory / none,
            size_bytes / GIB / in_memory,
        ]

    def _stored_behind_s(self, prompt: torch.Tensor, store: Store, size_bytes: int) -> float:
        with Storing(store, size_bytes) as storing:
            return self.first_token_s(prompt, storing)
