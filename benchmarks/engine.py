"""The cost and the gain of the store for an engine, EMULATED: the engine benchmarks of remote_kv_cache and prefix_vLLM.

No model runs. A prefill step of n tokens holds the one compute resource for as long as it was published to take on a
GPU, and leaves the KV of those tokens in memory of the engine; KV bytes are real, and stored KV is read straight into
that memory. So the figures say what the store adds to an engine or saves it, not how fast an engine is.

    python -m benchmarks engine [--part NAME,...] [--path shared]
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Literal

import numpy as np

from benchmarks.harness import machine
from benchmarks.harness.baselines import touch
from benchmarks.harness.load import (
    QWEN_3B,
    QWEN_7B,
    Model,
    Stamps,
    WrongBytes,
    check_equal,
    poison,
    random_bytes,
    stamp_chunks,
    stamped_right,
)
from benchmarks.harness.machine import GIB, MIB, percentile
from benchmarks.harness.options import Options, names_of, show_progress
from benchmarks.harness.paths import IN_PROCESS, PATHS, reached
from benchmarks.harness.result import Cell, Plot, Result, Table
from kvstore.client.cache import Cache
from kvstore.client.store import Store
from kvstore.core.address import TokenArray
from kvstore.core.buffers import KvArray

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


# Concurrent chatters with whole conversations, some of which use the store: prefix_vLLM's chat benchmark, emulated.
#
# Each message sends the conversation so far; a chatter waits for the answer before writing again. Lengths are drawn
# from log-normal distributions with the medians of public chat logs (tens of tokens asked, about a hundred answered),
# not from a log.


SYSTEM_TOKENS = 512
ASKED_MEDIAN, ASKED_SIGMA, ASKED_MAX = 40, 1.0, 192
ANSWERED_MEDIAN, ANSWERED_SIGMA, ANSWERED_MAX = 60, 0.7, 160
TURNS = 5
WINDOW_TOKENS = SYSTEM_TOKENS + TURNS * (ASKED_MAX + ANSWERED_MAX)
PREFIXED = (0.0, 0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Turn:
    """One message: everything said so far, and the same with the answer."""

    prompt: Prompt
    window: Prompt

    @property
    def output_tokens(self) -> int:
        """Length of the answer."""
        return len(self.window.tokens) - len(self.prompt.tokens)


@dataclass(frozen=True)
class Conversation:
    """One after the other. ``prefixed``: its KV is looked for in the store and kept there."""

    turns: list[Turn]
    prefixed: bool


def chat(options: Options, opener: Callable[[], Store]) -> Table:
    """A row for each number of chatters and share of conversations that use the store."""
    chatters = (8,) if options.quick else (1, 2, 4, 8, 16, 32)
    rows: list[list[Cell]] = []
    for count in chatters:
        for share in PREFIXED:
            talks = conversations(max(4, count if options.quick else 2 * count), share, seed=count)
            with opener() as store:
                cache = store.namespace("chat", QWEN_7B.layout(CHUNK_TOKENS))
                settings = Settings(QWEN_7B, WINDOW_TOKENS, count, "behind")
                rows.append([count, share, *_chat(settings, cache, talks, count)])
                last = [talk.turns[-1].window for talk in talks if talk.prefixed]
                verify(cache, QWEN_7B, last, WINDOW_TOKENS)
                cache.clear()
    return Table(
        "Chat (emulated)",
        (
            "chatters",
            "prefixed",
            "mean latency s",
            "p99 latency s",
            "mean time to first byte s",
            "messages/s",
            "tokens from the store",
        ),
        rows,
        f"{QWEN_7B.name}, {TURNS} messages a conversation, a system prompt of {SYSTEM_TOKENS} tokens that all share; "
        "prefixed: share of conversations that use the store; nothing is kept in the engine between messages",
        Plot(
            "chatters" if len(chatters) > 1 else "prefixed",
            ("mean time to first byte s",),
            "prefixed" if len(chatters) > 1 else None,
            "s",
        ),
    )


def conversations(count: int, share: float, seed: int) -> list[Conversation]:
    """Conversations, equal for every share; those that use the store are spread evenly."""
    random = np.random.default_rng(seed)
    system = random.integers(0, 1 << 32, SYSTEM_TOKENS, np.uint32)
    talks = []
    for number in range(count):
        said, turns = system, []
        for _ in range(TURNS):
            asked = _length(random, ASKED_MEDIAN, ASKED_SIGMA, ASKED_MAX)
            answered = _length(random, ANSWERED_MEDIAN, ANSWERED_SIGMA, ANSWERED_MAX)
            said = np.concatenate([said, random.integers(0, 1 << 32, asked, np.uint32)])
            heard = np.concatenate([said, random.integers(0, 1 << 32, answered, np.uint32)])
            turns.append(Turn(Prompt.of(said), Prompt.of(heard)))
            said = heard
        talks.append(Conversation(turns, int((number + 1) * share) > int(number * share)))
    return talks


def _chat(settings: Settings, cache: Cache, talks: list[Conversation], chatters: int) -> list[Cell]:
    """Latency, time to first byte, rate and hits of all messages."""
    engine = Engine(settings, cache)

    def talk_through(talk: Conversation) -> list[Answer]:
        return [
            engine.serve(turn.prompt, turn.output_tokens, window=turn.window, use_store=talk.prefixed)
            for turn in talk.turns
        ]

    try:
        began_s = time.perf_counter()
        with ThreadPoolExecutor(chatters, "bench-chatter") as pool:
            answers = [answer for each in pool.map(talk_through, talks) for answer in each]
        taken_s = time.perf_counter() - began_s
    finally:
        engine.close()
    latencies = [answer.latency_s for answer in answers]
    hits = sum(answer.from_store for answer in answers)
    return [
        statistics.mean(latencies),
        percentile(latencies, 0.99),
        statistics.mean(answer.first_byte_s for answer in answers),
        len(answers) / taken_s,
        hits / (hits + sum(answer.computed for answer in answers)),
    ]


def _length(random: np.random.Generator, median: int, sigma: float, most: int) -> int:
    return int(min(most, max(4, random.lognormal(np.log(median), sigma))))


# Many short texts behind one instruction that stays in the engine: prefix_vLLM's analytics benchmark, emulated.
#
# The prefix is resident after the first request, so the store has nothing to give; what is measured is that it does
# not get in the way.


TAIL_TOKENS = (30, 60)
OUTPUT_TOKENS = 2
CLIENTS = 4


def analytics(options: Options, opener: Callable[[], Store]) -> Table:
    """A row for each length of the instruction."""
    count = 120 if options.quick else 200
    rows: list[list[Cell]] = []
    for prefix in (512,) if options.quick else (64, 512, 2048, 4096):
        prompts = _analytics_prompts(count, prefix)
        longest = prefix + TAIL_TOKENS[1]
        settings = Settings(QWEN_7B, longest, CLIENTS, "behind", resident_tokens=64 * longest)
        without_s, _ = _serve_analytics(settings, None, prompts)
        with opener() as store:
            cache = store.namespace("analytics", QWEN_7B.layout(CHUNK_TOKENS))
            before = store.stats()
            with_s, answers = _serve_analytics(settings, cache, prompts)
            after = store.stats()
            verify(cache, QWEN_7B, prompts[:1], longest)
            cache.clear()
        written = (after["bytes_written"] - before["bytes_written"]) / MIB
        read = (after["bytes_read"] - before["bytes_read"]) / MIB
        resident = sum(answer.resident for answer in answers) / sum(len(prompt.tokens) for prompt in prompts)
        rows.append([prefix, count / without_s, count / with_s, without_s / with_s, resident, written, read])
    return Table(
        "Analytics behind a shared, resident prefix (emulated)",
        ("prefix tokens", "no store QPS", "QPS", "with / without", "resident tokens", "written MiB", "read MiB"),
        rows,
        f"{QWEN_7B.name}, {count} texts of {TAIL_TOKENS[0]} to {TAIL_TOKENS[1]} tokens, {OUTPUT_TOKENS} output tokens, "
        f"{CLIENTS} at once",
    )


def _serve_analytics(settings: Settings, cache: Cache | None, prompts: list[Prompt]) -> tuple[float, list[Answer]]:
    engine = Engine(settings, cache)
    try:
        first = engine.serve(prompts[0], OUTPUT_TOKENS)
        work = [partial(engine.serve, prompt, OUTPUT_TOKENS) for prompt in prompts[1:]]
        answers, taken_s = closed_loop(work, CLIENTS)
        return first.latency_s + taken_s, [first, *answers]
    finally:
        engine.close()


def _analytics_prompts(count: int, prefix_tokens: int) -> list[Prompt]:
    random = np.random.default_rng(prefix_tokens)
    prefix = random.integers(0, 1 << 32, prefix_tokens, np.uint32)
    tails = (random.integers(0, 1 << 32, random.integers(*TAIL_TOKENS), np.uint32) for _ in range(count))
    return [Prompt.of(np.concatenate([prefix, tail])) for tail in tails]


HYPOTHESIS = (
    "pushing KV to the store costs an engine 5 % or less (published for remote_kv_cache: 0.94 to 1.02); a restarted "
    "engine that pulls serves 2.5 times the requests (20 to 50-60 a second) and long prompts 6 times as fast (0.88 to "
    "5.54); chat gets faster with the share of conversations that use the store; a prefix that is resident anyway "
    "does not get slower"
)
NAMESPACE = "engine"


@dataclass(frozen=True)
class Batch:
    """Tokens in one prefill step, and requests of 8,192 tokens a second that were published for it (Qwen2.5-3B)."""

    tokens: int
    published_qps: float


BATCHES = (
    Batch(1024, 2.45),
    Batch(768, 2.28),
    Batch(512, 2.31),
    Batch(384, 2.03),
    Batch(256, 1.74),
    Batch(128, 1.08),
    Batch(64, 0.56),
    Batch(32, 0.29),
)
PUSHES: tuple[Push, ...] = ("none", "step", "behind")
LONG_PUBLISHED = (0.88, 47.94, 48.69, 5.54, 48.28, 48.80, 0.89, 9.26, 9.26, 5.56, 9.27, 9.28)


@dataclass(frozen=True)
class Scene:
    """The place of a part: a root that is opened anew for each engine that starts."""

    options: Options
    open: Callable[[], Store]

    def cache(self, store: Store, model: Model) -> Cache:
        """The model's cache."""
        return store.namespace(NAMESPACE, model.layout(CHUNK_TOKENS))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The choice of parts, and of the path."""
    parser.add_argument("--part", type=names_of(PARTS), metavar="NAME,...", help=", ".join(PARTS))
    parser.add_argument("--path", default=IN_PROCESS, choices=PATHS, help="how the engine reaches the store")


def run(options: Options, arguments: argparse.Namespace | None = None) -> Result:
    """All parts, or those that the arguments name."""
    names = (arguments and arguments.part) or PARTS
    path = arguments.path if arguments is not None else IN_PROCESS
    about = machine.describe()
    tables = []
    for name in names:
        show_progress(f"engine: {name}")
        with options.folder() as folder, reached(path, folder) as opener:
            touch(folder, (2 if options.quick else 6) * GIB)
            tables.append(PARTS[name](Scene(options, opener)))
    step_ms, kind = DECODE_STEP_S * 1e3, machine.file_system(options.directory)
    conditions = (
        f"EMULATED: compute is slept at published rates, one request's step at a time, {step_ms:.0f} ms a decode step",
        f"KV bytes are real; store {path}, warm page cache on {kind}, no fsync, chunks of {CHUNK_TOKENS} tokens",
        "one run of each row; the stamps of each loaded chunk are checked as it comes, all bytes afterwards",
    )
    return Result("engine", HYPOTHESIS, conditions, about, tables)


def transfer_out(scene: Scene) -> Table:
    """Four new prompts, prefilled in steps: requests a second with and without pushing their KV."""
    count, length = (2, 4096) if scene.options.quick else (4, 8192)
    batches = [BATCHES[0], BATCHES[4]] if scene.options.quick else list(BATCHES)
    rows: list[list[Cell]] = []
    for batch in batches:
        prompts = _prompts(count, length, batch.tokens)
        qps: dict[Push, float] = {}
        for push in PUSHES:
            settings = Settings(
                QWEN_3B,
                length,
                push=push,
                batch_tokens=batch.tokens,
                prefill_tokens_per_s=batch.published_qps * 8192,
                decode_step_s=0.0,
            )
            with scene.open() as store:
                cache = scene.cache(store, QWEN_3B)
                qps[push] = _serve(settings, cache if push != "none" else None, prompts, 1, 1)
                if push != "none":
                    verify(cache, QWEN_3B, prompts, length)
                cache.clear()
        rows.append([batch.tokens, *qps.values(), qps["step"] / qps["none"], qps["behind"] / qps["none"]])
    return Table(
        "Transfer-out overhead (emulated)",
        (
            "tokens a step",
            "no store QPS",
            "pushed each step QPS",
            "pushed behind QPS",
            "each step / none",
            "behind / none",
        ),
        rows,
        f"{QWEN_3B.name}, {count} prompts of {length:,} tokens, one output token, nothing cached",
        Plot("tokens a step", ("each step / none", "behind / none"), unit="of the QPS without a store", log_x=True),
    )


def hit_rate(scene: Scene) -> Table:
    """Prompts that share a prefix; a first run fills the store, the engine restarts, a second run pulls."""
    length, output, clients = 1000, 24, 32
    count = 64 if scene.options.quick else 200
    shares = (0.0, 0.5, 1.0) if scene.options.quick else tuple(number / 10 for number in range(11))
    rows: list[list[Cell]] = []
    for resident in (0,) if scene.options.quick else (0, 64 * length):
        for share in shares:
            prompts = _prompts(count, length, 1, shared=int(share * length))
            settings = Settings(QWEN_3B, length, clients, "behind", resident)
            qps: list[float] = []
            for _ in ("fills", "pulls"):
                with scene.open() as store:
                    qps.append(_serve(settings, scene.cache(store, QWEN_3B), prompts, output, clients))
            with scene.open() as store:
                verify(scene.cache(store, QWEN_3B), QWEN_3B, prompts, length)
                scene.cache(store, QWEN_3B).clear()
            rows.append(["on" if resident else "off", share, *qps, qps[1] / qps[0]])
    return Table(
        "Hit rate and requests a second (emulated)",
        ("engine's own prefix cache", "shared prefix", "first run QPS", "second run QPS", "second / first"),
        rows,
        f"{QWEN_3B.name}, {count} prompts of {length:,} tokens, {output} output tokens, {clients} at once; the engine "
        "restarts between the runs",
        Plot("shared prefix", ("first run QPS", "second run QPS"), "engine's own prefix cache", "requests/s"),
    )


def long_prefill(scene: Scene) -> Table:
    """Different long prompts, again and again; the engine restarts before the fourth round."""
    length, output, clients = 10_240, 2, 2
    count = 3 if scene.options.quick else 10
    rows: list[list[Cell]] = []
    prompts = _prompts(count, length, 2)
    for resident in (count * length, 0):
        settings = Settings(QWEN_7B, length, clients, "behind", resident)
        first = 0.0
        for start in (1, 4):
            with scene.open() as store:
                cache = scene.cache(store, QWEN_7B)
                engine = Engine(settings, cache)
                for number in range(start, start + 3):
                    qps = _on(engine, prompts, output, clients)
                    first = first or qps
                    published = LONG_PUBLISHED[number - 1 + (0 if resident else 6)]
                    rows.append(["on" if resident else "off", number, qps, qps / first, published])
                engine.close()
                verify(cache, QWEN_7B, prompts, length)
        with scene.open() as store:
            scene.cache(store, QWEN_7B).clear()
    return Table(
        "Long prefill in rounds, with a restart before the fourth (emulated)",
        ("engine's own prefix cache", "round", "QPS", "x round 1", "published QPS"),
        rows,
        f"{QWEN_7B.name}, {count} prompts of {length:,} tokens, {output} output tokens, {clients} at once; published: "
        "remote_kv_cache on a GPU, where rounds 2, 3, 5 and 6 without a prefix cache hit the engine's own CPU memory",
        Plot("round", ("QPS", "published QPS"), "engine's own prefix cache", "requests/s", log_y=True),
    )


def _serve(settings: Settings, cache: Cache | None, prompts: list[Prompt], output: int, clients: int) -> float:
    """Requests a second of an engine that has just started; what it pushes behind is part of the time."""
    engine = Engine(settings, cache)
    try:
        return _on(engine, prompts, output, clients)
    finally:
        engine.close()


def _on(engine: Engine, prompts: list[Prompt], output: int, clients: int) -> float:
    work = [partial(engine.serve, prompt, output) for prompt in prompts]
    return len(prompts) / closed_loop(work, clients)[1]


def _prompts(count: int, length: int, seed: int, shared: int = 0) -> list[Prompt]:
    """Prompts that have their first ``shared`` tokens in common and nothing else."""
    random = np.random.default_rng([seed, shared])
    prefix = random.integers(0, 1 << 32, shared, np.uint32)
    tails = (random.integers(0, 1 << 32, length - shared, np.uint32) for _ in range(count))
    return [Prompt.of(np.concatenate([prefix, tail])) for tail in tails]


PARTS: dict[str, Callable[[Scene], Table]] = {
    "transfer-out": transfer_out,
    "hit-rate": hit_rate,
    "long-prefill": long_prefill,
    "chat": lambda scene: chat(scene.options, scene.open),
    "analytics": lambda scene: analytics(scene.options, scene.open),
}
"""The parts by the name that ``--part`` takes."""
