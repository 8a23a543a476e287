"""Prefill over documents that were computed alone, beside full prefill, on a device."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.contents import WrongBytes
from benchmarks.gpu_model import BOS, CHUNK_TOKENS, opened, wait
from benchmarks.result import Cell
from benchmarks.rounds import in_turns
from kvstore.connectors.transformers import model_cache, prefill_blended, put_segments
from kvstore.connectors.transformers.decoder import Decoder
from kvstore.segments import Bounds, Measured, Rule, Verdict

COLUMNS = (
    "tokens",
    "of documents",
    "MB of KV",
    "work",
    "full prefill s",
    "blended, root s",
    "blended, memory s",
    "times less",
)
DOCUMENTS = 8
QUESTION = 64
RATIO = 0.15
SEGMENT_TOKENS = 64


def row(model: Any, token_bytes: int, root: Path, tokens: int, rounds: int) -> list[Cell]:
    """Medians for prompts of one length: documents in another order than any that was seen, and a question.

    With random weights a blended prefill has the cost of a real one, and no meaning: nothing is said about quality.
    """
    device = model.get_input_embeddings().weight.device
    source = torch.Generator(device="cpu").manual_seed(tokens)

    def some(count: int) -> torch.Tensor:
        return torch.randint(3, model.config.vocab_size, (1, count), generator=source, device="cpu").to(device)

    each = (tokens - QUESTION) // DOCUMENTS // SEGMENT_TOKENS * SEGMENT_TOKENS
    documents = [some(each) for _ in range(DOCUMENTS)]
    order = (3, 0, 6, 1, 7, 5, 2, 4)
    prompt = torch.cat((some(1) * 0 + BOS, *(documents[at] for at in order), some(QUESTION)), 1)
    starts = [1 + at * each for at in range(DOCUMENTS + 1)]
    work = 0.0
    with opened(root, 0) as plain, opened(root, max(4 * tokens * token_bytes, 64 << 20)) as memory:
        caches = [
            model_cache(model, store, chunk_tokens=CHUNK_TOKENS, fingerprint="random") for store in (plain, memory)
        ]
        put_segments(model, documents, caches[0], segment_tokens=SEGMENT_TOKENS)
        rope = Decoder(model).rope()
        segments = caches[0].segments(rope, chunk_tokens=SEGMENT_TOKENS)
        told = Measured(1, 1, agreement=1.0, kl=0.0, answers_lost=0.0, work=1.0)
        verdict = Verdict(segments.fingerprint, rope.digest, Rule.V, (1,), (RATIO,), Bounds(), told)

        def full() -> float:
            wait(device)
            began_s = time.perf_counter()
            with torch.no_grad():
                model.generate(prompt, max_new_tokens=1, do_sample=False)
            wait(device)
            return time.perf_counter() - began_s

        def blended(cache: Any) -> float:
            nonlocal work
            wait(device)
            began_s = time.perf_counter()
            made = prefill_blended(model, prompt, starts, cache, verdict, segment_tokens=SEGMENT_TOKENS)
            with torch.no_grad():
                model.generate(prompt, past_key_values=made.past, max_new_tokens=1, do_sample=False)
            wait(device)
            took_s = time.perf_counter() - began_s
            if made.found != DOCUMENTS * each:
                raise WrongBytes(f"{made.found} tokens were found, not {DOCUMENTS * each}")
            work = made.work
            return took_s

        blended(caches[1])  # it comes into memory
        ways = {"full": full, "root": lambda: blended(caches[0]), "memory": lambda: blended(caches[1])}
        found = in_turns(ways, rounds)
    whole, on_root, in_memory = (median(one[way] for one in found) for way in ways)
    size_mb = DOCUMENTS * each * token_bytes / 1e6
    return [tokens, DOCUMENTS * each, size_mb, work, whole, on_root, in_memory, whole / in_memory]
