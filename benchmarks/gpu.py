"""KV into and out of a GPU: the pages of an engine beside a plain copy; a whole prefill with and without a store, and
over documents that were computed alone.

    python -m benchmarks.gpu [--tokens 4096 32768 131072] [--blended 8192 16384] [--root FOLDER] [--small]

Needs torch, transformers and kvstore. Without a GPU, or with ``--small``, everything is tiny, which only shows that it
runs. Hypotheses: pages come and go at nine tenths of the speed of one pinned copy of the same bytes, and a matrix
product beside them loses at most 3 %; a warm prefill takes the time that the bus and the store need; one that stores
in the background takes at most a tenth longer than one without a store; a blended one with 15 % recomputed takes half
of a full one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvstore
from benchmarks.harness.load import WrongBytes
from benchmarks.harness.machine import GIB, describe, file_system, in_turns
from benchmarks.harness.result import Cell, Result, Table, markdown, save
from kvstore.client import Store
from kvstore.connectors.transformers import model_cache, prefill_blended, prefill_with_store, put_segments
from kvstore.connectors.transformers.decoder import Decoder
from kvstore.connectors.vllm.gpu_copy import PART_BYTES, Copy, Pages
from kvstore.core.write_mode import WriteModeName
from kvstore.segments import Bounds, Measured, Rule, Verdict

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
def opened(root: Path, memory_bytes: int, write: WriteModeName = "through") -> Iterator[Store]:
    """A store of this process alone, with that much memory for chunks."""
    with kvstore.open(root, max_bytes=None, memory=memory_bytes, write=write) as store:
        yield store


def loaded_bytes(store: Store) -> int:
    """Returns the bytes read from the root and from memory so far."""
    stats = store.stats()
    return int(stats["bytes_read"] + stats["memory_bytes"])


def wait(device: torch.device) -> None:
    """Waits until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Pages of an engine, beside one plain copy of the same bytes and beside matrix products


BLOCK_TOKENS = 16
LEAVING = 4
"""Parts that are on their way to the host at once."""
QUEUED = 3
"""Matrix products that wait for the device."""


class Moves:
    """The pages of one prompt in an engine's KV tensors, and one contiguous copy of as many bytes."""

    def __init__(self, shape: Shape, device: torch.device, tokens: int) -> None:
        count = tokens // BLOCK_TOKENS
        page = (count, 2, BLOCK_TOKENS, shape.kv_heads, shape.head)
        self._device = device
        self._tensors = [torch.randn(page, device=device).to(shape.dtype) for _ in range(shape.layers)]
        self.pages = Pages([{f"layer {at}": each for at, each in enumerate(self._tensors)}], count)
        order = torch.randperm(count, generator=torch.Generator("cpu").manual_seed(1), device="cpu").tolist()
        self.blocks = [(block,) for block in order]
        self.size_bytes = count * self.pages.block_bytes
        self.host = self.pages.host(count)
        self._plain = torch.empty_like(self.host, device=device)
        self._start = self.pages.now()

    def plain_out(self) -> float:
        """Seconds of one copy to pinned memory."""
        return self._timed(lambda: self.host.copy_(self._plain, non_blocking=True))

    def plain_in(self) -> float:
        """Seconds of one copy from pinned memory."""
        return self._timed(lambda: self._plain.copy_(self.host, non_blocking=True))

    def pages_out(self) -> float:
        """Seconds until all pages are on the host."""
        return self._timed(self.move_out)

    def pages_in(self) -> float:
        """Seconds until all pages are where the engine reads them."""
        return self._timed(self.move_in)

    def check(self) -> None:
        """Raises WrongBytes if pages do not come back as they went."""
        before = [each.clone() for each in self._tensors]
        rows = torch.from_numpy(self.pages.copy_out(self.blocks).rows()).clone()
        for each in self._tensors:
            each.zero_()
        self.pages.write(rows, self.blocks, self.pages.now())
        if not all(torch.equal(each, was) for each, was in zip(self._tensors, before, strict=True)):
            raise WrongBytes("pages came back otherwise than they went")

    def beside(self, work: Callable[[], object] | None) -> tuple[float, float]:
        """Matrix products a second on the device while ``work`` goes on in another thread, and times of ``work``.

        As in an engine, some are queued ahead, and nothing waits for the device but for their own stream.
        """
        size = 8192 if self._device.type == "cuda" else 128
        left = torch.randn(size, size, device=self._device, dtype=self._tensors[0].dtype)
        ends, done, moved, queued = threading.Event(), 0, 0, deque[Any]()

        def repeat() -> None:
            nonlocal moved
            while work is not None and not ends.is_set():
                work()
                moved += 1

        thread = threading.Thread(target=repeat)
        thread.start()
        began_s = time.perf_counter()
        while time.perf_counter() - began_s < (2.0 if self._device.type == "cuda" else 0.2):
            left @ left
            done += 1
            if self._device.type == "cuda":
                queued.append(torch.cuda.current_stream(self._device).record_event())
                if len(queued) > QUEUED:
                    queued.popleft().synchronize()
        while queued:
            queued.popleft().synchronize()
        took_s = time.perf_counter() - began_s
        ends.set()
        rates = done / took_s, moved / took_s
        thread.join()
        return rates

    def move_out(self) -> None:
        """Moves all pages to the host, some at once, as the steps of an engine do."""
        size, leaving = max(1, PART_BYTES // self.pages.block_bytes), deque[Copy]()
        for start in range(0, len(self.blocks), size):
            leaving.append(self.pages.copy_out(self.blocks[start : start + size]))
            if len(leaving) > LEAVING:
                leaving.popleft().rows()
        while leaving:
            leaving.popleft().rows()

    def move_in(self) -> None:
        """Moves all pages to where the engine reads them."""
        self.pages.write(self.host, self.blocks, self._start)

    def _timed(self, work: Callable[[], object]) -> float:
        wait(self._device)
        began_s = time.perf_counter()
        work()
        wait(self._device)
        return time.perf_counter() - began_s


def moves(shape: Shape, device: torch.device, tokens: int, rounds: int) -> Table:
    """Pages beside plain copies, and what a matrix product loses."""
    made = Moves(shape, device, tokens)
    made.check()
    ways = {
        "pinned copy out": made.plain_out,
        "pages out": made.pages_out,
        "pinned copy in": made.plain_in,
        "pages in": made.pages_in,
    }
    found = in_turns(ways, rounds)
    rows: list[list[Cell]] = []
    for way in ways:
        plain = f"pinned copy {way.split()[-1]}"
        rate = median(made.size_bytes / GIB / each[way] for each in found)
        rows.append([way, rate, median(each[plain] / each[way] for each in found), None, None])
    products = {
        "none": lambda: made.beside(None),
        "pages out": lambda: made.beside(made.move_out),
        "pages in": lambda: made.beside(made.move_in),
    }
    beside = in_turns(products, rounds)
    for row in rows:
        if row[0] in products:
            row[3] = median(each[str(row[0])][1] for each in beside) * made.size_bytes / GIB
            row[4] = 100 * (1 - median(each[str(row[0])][0] / each["none"][0] for each in beside))
    title = f"{made.size_bytes / 1e6:,.0f} MB in {len(made.blocks):,} blocks of {shape.layers} layers"
    columns = ("", "GiB/s", "of a pinned copy", "beside products GiB/s", "which lose %")
    return Table(title, columns, rows)


# Time to first token of a prompt: without a store, cold and warm


PREFILL_COLUMNS = (
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

    def first_token_s(self, prompt: torch.Tensor, store: Store | None, *, is_warm: bool = False) -> float:
        """Time to first token.

        Raises WrongBytes for KV that is not the computed one to the last bit, and for another token than without a
        store. Where rounding decides between two tokens, as random weights have it for long prompts, both are right.
        """
        wait(self._device)
        before = loaded_bytes(store) if store is not None else 0
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
        if is_warm and store is not None:
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
            with opened(root, max(2 * count * size_bytes, 64 << 20), "behind") as copied:
                behind = [
                    self.first_token_s(prompt, copied)
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


# Prefill over documents that were computed alone, beside full prefill


BLENDED_COLUMNS = (
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


def blended_row(model: Any, token_bytes: int, root: Path, tokens: int, rounds: int) -> list[Cell]:
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", help="lengths of prompts (default: 4096 32768 131072)")
    parser.add_argument("--blended", type=int, nargs="+", help="lengths of blended prompts (default: 8192 16384)")
    parser.add_argument("--root", type=Path, metavar="FOLDER", help="where to make the root (default: temporary files)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="keep the raw figures there, as JSON")
    asked = parser.parse_args(arguments)
    began_s, machine = time.monotonic(), describe()
    is_small = asked.small or not torch.cuda.is_available()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = SMALL if is_small else LLAMA_8B
    lengths = asked.tokens or ([512] if is_small else [4096, 32_768, 131_072])
    blended = asked.blended or ([1024] if is_small else [8192, 16_384])
    about = f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}, torch {torch.__version__}"
    print(f"{about}{', a tiny model' if is_small else ''}, {asked.rounds} rounds", flush=True)
    tables = [moves(shape, device, 512 if is_small else 8192, asked.rounds)]
    show(tables[0])
    prefill = Prefill(shape, device, max(*lengths, *blended))
    with tempfile.TemporaryDirectory(dir=asked.root, prefix="kvstore-gpu-") as folder:
        conditions = (
            about,
            f"medians of {asked.rounds} rounds, in turns; the root on {file_system(Path(folder))}",
            f"random weights, {'tiny' if is_small else 'the shape of Llama-3.1-8B in bfloat16'}",
            "KV that was loaded equals what was computed to the last bit; so does the first token, but for rounding",
        )
        rows = list[list[Cell]]()
        for tokens in lengths:
            with tempfile.TemporaryDirectory(dir=folder) as root:
                rows.append(prefill.row(Path(root), tokens, asked.rounds))
        tables.append(Table("Time to first token", PREFILL_COLUMNS, rows))
        show(tables[1])
        rows = []
        for tokens in blended:
            with tempfile.TemporaryDirectory(dir=folder) as root:
                rows.append(blended_row(prefill.model, shape.token_bytes, Path(root), tokens, asked.rounds))
        title = f"Time to first token over {DOCUMENTS} documents, {100 * RATIO:g} % recomputed"
        tables.append(Table(title, BLENDED_COLUMNS, rows))
        show(tables[2])
    if asked.save:
        hypothesis = " ".join((__doc__ or "").split("Hypotheses: ")[1].split())
        name, took_s = "gpu-small" if is_small else "gpu", time.monotonic() - began_s
        save(Result(name, hypothesis, conditions, machine, tables, [], took_s), asked.save)
    return 0


def show(table: Table) -> None:
    """Prints a table."""
    print(f"\n{table.title}\n\n{markdown(table)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
