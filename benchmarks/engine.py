"""The cost and the gain of the store for an engine: the engine benchmarks of remote_kv_cache and prefix_vLLM, EMULATED.

No GPU and no model: compute is slept at published prefill rates, KV bytes are real (``benchmarks.emulated``).

    python -m benchmarks engine [--part NAME,...] [--path shared]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks import analytics, chat, machine
from benchmarks.caching import touch
from benchmarks.emulated import CHUNK_TOKENS, DECODE_STEP_S, Engine, Prompt, Push, Settings, closed_loop, verify
from benchmarks.models import QWEN_3B, QWEN_7B, Model
from benchmarks.options import Options, names_of, told
from benchmarks.paths import IN_PROCESS, PATHS, reached
from benchmarks.result import Cell, Plot, Result, Table
from benchmarks.rounds import GIB
from kvstore.client.cache import Cache
from kvstore.client.store import Store

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
        told(f"engine: {name}")
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
    """Four prompts that nobody has seen, prefilled in steps: requests a second with and without pushing their KV."""
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
    "chat": lambda scene: chat.run(scene.options, scene.open),
    "analytics": lambda scene: analytics.run(scene.options, scene.open),
}
"""The parts by the name that ``--part`` takes."""
