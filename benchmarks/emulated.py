"""An emulated inference engine: compute is slept at published rates, KV bytes are real and go through the real store.

No model runs.  A prefill step of n tokens holds the one compute resource for as long as it was published to take on a
GPU, and leaves the KV of those tokens in memory of the engine; what the store has is read straight into that memory
instead.  So the figures say what the store adds to an engine or saves it, not how fast an engine is.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Literal

import numpy as np

from benchmarks.contents import Stamps, WrongBytes, check_equal, poison, random_bytes, stamp_chunks, stamped_right
from benchmarks.models import Model
from kvstore.buffers import KvArray
from kvstore.client.cache import Cache
from kvstore.tokens import TokenArray

CHUNK_TOKENS = 64
BATCH_TOKENS = 1024
DECODE_STEP_S = 0.020
"""One token of each running request; derived from the published rates of Qwen2.5-7B with two requests at once."""
Push = Literal["none", "step", "behind"]
"""KV to the store: not at all, at the end of each step before the next one, or by a thread beside the compute."""


@dataclass(frozen=True)
class Prompt:
    """Tokens, and for each full chunk the stamp that its KV carries: a digest of all tokens up to its end."""

    tokens: TokenArray
    stamps: Stamps

    @classmethod
    def of(cls, tokens: TokenArray) -> Prompt:
        """Digests the tokens."""
        chained, stamps = hashlib.blake2b(digest_size=8), []
        for end in range(CHUNK_TOKENS, len(tokens) + 1, CHUNK_TOKENS):
            chained.update(tokens[end - CHUNK_TOKENS : end].tobytes())
            stamps.append(int.from_bytes(chained.digest(), "little"))
        return cls(tokens, np.array(stamps, np.uint64))


@dataclass(frozen=True)
class Answer:
    """The course of one request; tokens by where their KV came from."""

    latency_s: float
    first_byte_s: float
    computed: int
    from_store: int
    resident: int


@dataclass
class Settings:
    """An engine's settings. ``resident_tokens``: KV that stays in its own memory between requests, oldest out first."""

    model: Model
    prompt_tokens_max: int
    concurrency: int = 1
    push: Push = "step"
    resident_tokens: int = 0
    batch_tokens: int = BATCH_TOKENS
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = DECODE_STEP_S

    def __post_init__(self) -> None:
        self.prefill_tokens_per_s = self.prefill_tokens_per_s or float(self.model.prefill_tokens_per_s)
        assert self.prefill_tokens_per_s > 0, f"no published rate for {self.model.name}"


@dataclass
class _Slot:
    """Memory for the KV of one running request, and its pushes that have not ended."""

    kv: KvArray
    pushes: list[Future[None]] = field(default_factory=list)


class Engine:
    """Serves prompts. ``cache`` None: no store. Close it to wait for background puts. Thread-safe."""

    def __init__(self, settings: Settings, cache: Cache | None) -> None:
        self.settings = settings
        self._cache = cache
        self._layout = settings.model.layout(CHUNK_TOKENS)
        self._compute = threading.Lock()
        self._resident: OrderedDict[int, None] = OrderedDict()
        self._resident_lock = threading.Lock()
        self._behind = ThreadPoolExecutor(1, "bench-push")  # one: a chunk follows the one it builds on
        self._slots: SimpleQueue[_Slot] = SimpleQueue()
        base = base_kv(settings.model, settings.prompt_tokens_max)
        for number in range(settings.concurrency):
            self._slots.put(_Slot(base if number == 0 else base.copy()))

    def serve(
        self, prompt: Prompt, output_tokens: int, *, window: Prompt | None = None, use_store: bool = True
    ) -> Answer:
        """One request: load, prefill in steps, decode. Raises WrongBytes where the store gave something else.

        ``window`` is the prompt with its answer, where the answer's KV is to be kept as well.
        """
        began_s = time.perf_counter()
        slot = self._slots.get()
        cache = self._cache if use_store else None
        try:
            resident, loaded = self._load(prompt, slot, cache)
            have = max(resident, loaded)
            pushed = self._prefill(prompt, slot, have, cache)
            first_byte_s = time.perf_counter() - began_s + self.settings.decode_step_s
            time.sleep(output_tokens * self.settings.decode_step_s)
            window = window or prompt
            self._computed(window, slot, pushed, len(window.tokens), cache)
            self._keep(window)
            latency_s = time.perf_counter() - began_s
        finally:
            for push in slot.pushes:
                push.result()
            slot.pushes.clear()
            self._slots.put(slot)
        return Answer(latency_s, first_byte_s, len(prompt.tokens) - have, max(0, loaded - resident), resident)

    def close(self) -> None:
        """Waits for what is being pushed."""
        self._behind.shutdown()

    def _load(self, prompt: Prompt, slot: _Slot, cache: Cache | None) -> tuple[int, int]:
        """Tokens whose KV is here already, and tokens that the store had; at least one is left to compute."""
        most = (len(prompt.tokens) - 1) // CHUNK_TOKENS * CHUNK_TOKENS
        with self._resident_lock:
            here = 0
            for stamp in prompt.stamps[: most // CHUNK_TOKENS].tolist():
                if stamp not in self._resident:
                    break
                here += CHUNK_TOKENS
        stamp_chunks(slot.kv[:, :, :here], self._layout, prompt.stamps[: here // CHUNK_TOKENS])
        loaded = 0
        if cache is not None and here < most:
            loaded = cache.get(prompt.tokens[:most], slot.kv)
            if not stamped_right(slot.kv[:, :, :loaded], self._layout, prompt.stamps[: loaded // CHUNK_TOKENS]):
                raise WrongBytes("the store gave another chunk's bytes")
        return here, loaded

    def _prefill(self, prompt: Prompt, slot: _Slot, have: int, cache: Cache | None) -> int:
        """Computes what is missing, a step at a time; returns up to where full chunks were handed on."""
        pushed = have // CHUNK_TOKENS * CHUNK_TOKENS
        for start in range(have, len(prompt.tokens), self.settings.batch_tokens):
            end = min(start + self.settings.batch_tokens, len(prompt.tokens))
            with self._compute:
                step_ends_s = time.perf_counter() + (end - start) / self.settings.prefill_tokens_per_s
                time.sleep(max(0.0, step_ends_s - time.perf_counter()))
                pushed = self._computed(prompt, slot, pushed, end, cache)
        return pushed

    def _computed(self, prompt: Prompt, slot: _Slot, start: int, end: int, cache: Cache | None) -> int:
        """The KV of these tokens is there: hands its full chunks to the store; returns up to where."""
        full = end // CHUNK_TOKENS * CHUNK_TOKENS
        if full <= start:
            return start
        stamps = prompt.stamps[start // CHUNK_TOKENS : full // CHUNK_TOKENS]
        stamp_chunks(slot.kv[:, :, start:full], self._layout, stamps)

        def push() -> None:
            assert cache is not None
            cache.put(prompt.tokens[:full], slot.kv[:, :, start:full], prefix=start)

        if cache is not None and self.settings.push == "step":
            push()
        elif cache is not None and self.settings.push == "behind":
            slot.pushes.append(self._behind.submit(push))
        return full

    def _keep(self, prompt: Prompt) -> None:
        room = self.settings.resident_tokens // CHUNK_TOKENS
        if not room:
            return
        with self._resident_lock:
            for stamp in prompt.stamps.tolist():
                self._resident[stamp] = None
                self._resident.move_to_end(stamp)
            while len(self._resident) > room:
                self._resident.popitem(last=False)


def base_kv(model: Model, tokens: int) -> KvArray:
    """KV before its chunks are stamped: the same bytes for a position in every engine."""
    layout = model.layout(CHUNK_TOKENS)
    raw = random_bytes(tokens * layout.kv_bytes_per_token, 3)
    return raw.view(layout.numpy_dtype).reshape(layout.shape(tokens))


def verify(cache: Cache, model: Model, prompts: Sequence[Prompt], tokens_max: int, *, stored: bool = True) -> None:
    """Compares every byte that the store has of these prompts; all full chunks of them, where ``stored``."""
    layout = model.layout(CHUNK_TOKENS)
    expected = base_kv(model, tokens_max)
    out = np.empty_like(expected)
    for prompt in prompts:
        poison(out)
        full = len(prompt.stamps) * CHUNK_TOKENS
        found = cache.get(prompt.tokens, out)
        if stored and found != full:
            raise WrongBytes(f"{found} of {full} tokens of a prompt are in the store")
        stamp_chunks(expected[:, :, :found], layout, prompt.stamps[: found // CHUNK_TOKENS])
        for layer in range(layout.layers):
            check_equal(out[layer, :, :found], expected[layer, :, :found], "a stored prompt")


def closed_loop(work: Sequence[Callable[[], Answer]], clients: int) -> tuple[list[Answer], float]:
    """Does all the work with a fixed number of clients, one request each at a time; returns answers and seconds."""
    began_s = time.perf_counter()
    with ThreadPoolExecutor(clients, "bench-client") as pool:
        answers = list(pool.map(lambda one: one(), work))
    return answers, time.perf_counter() - began_s
