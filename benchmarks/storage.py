"""What durability, compression and encryption cost a store on one folder.

``durability`` puts with each durability in turns, on a disk. Hypothesis: ``everysec`` writes 0.9 or more of what
``none`` does, since one ``syncfs`` a second serves all and no put waits for it; with ``fsync`` each put waits for the
device. A turn has a root of its own, and begins when all that was written before is on the device. The last prompt of
each turn is read again and compared.

``encodings`` measures ratio, speed of the codec alone, and what a store pays. Its KV is made, not taken from a model:
each channel is an AR(1) process along the tokens (correlation 0.9 in K, 0.5 in V) around a mean of its own, scaled by a
log-normal factor; one channel in 64 of K is an outlier, 20 times as large, as keys before and after RoPE have them.
Hypothesis: exponents of neighbouring channels are alike and mantissas are noise, so bfloat16 loses about a
quarter; AES costs less than one memcpy.

    python -m benchmarks durability [--rates-mib 100 0] [--seconds 8] [--rounds 5] [--disk FOLDER] [--json]
    python -m benchmarks encodings [--mib N] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

import kvstore
from benchmarks.harness import machine
from benchmarks.harness.load import LLAMA_8B, WrongBytes
from benchmarks.harness.machine import MIB, in_turns, percentile
from kvstore.codec import codec as squeezing
from kvstore.codec.codec import PartCipher
from kvstore.core.layout import DType, Layout
from kvstore.core.write_mode import Durability
from kvstore.format.header import checksum

LAYOUT = LLAMA_8B.layout_of(2 * MIB)
PROMPT_CHUNKS = 8
NONE = Durability.NONE.value


@dataclass(frozen=True)
class DurabilityRow:
    """One durability at one rate: medians of the rounds, and of their ratios to ``none`` in the same round."""

    asked_mib_s: float
    """0: as fast as it goes."""
    durability: str
    mib_s: float
    ratio: float
    ratio_min: float
    ratio_max: float
    put_p50_ms: float
    put_p99_ms: float


def durability_main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table; 0 where every byte was right."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks durability")
    parser.add_argument("--rates-mib", type=float, nargs="+", default=[100, 0], help="0: as fast as it goes")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a turn (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (default: %(default)s)")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="default: %(default)s")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    if given.rounds < 1 or not given.seconds > 0 or not given.disk.is_dir():
        print("benchmarks: give 1 round or more, some seconds, and a folder that exists", file=sys.stderr)
        return 2
    rows = [row for rate in given.rates_mib for row in measured(given.disk, rate * MIB, given.seconds, given.rounds)]
    if given.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return 0
    print(f"{machine.file_system(given.disk)}, puts of {PROMPT_CHUNKS * LAYOUT.chunk_bytes / MIB:g} MiB")
    print("| asked MiB/s | durability | MiB/s | of none | its range | put p50 ms | p99 ms |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        asked = f"{row.asked_mib_s:g}" if row.asked_mib_s else "all it can"
        print(
            f"| {asked} | {row.durability} | {row.mib_s:.0f} | {row.ratio:.3f} | {row.ratio_min:.2f} to "
            f"{row.ratio_max:.2f} | {row.put_p50_ms:.1f} | {row.put_p99_ms:.1f} |"
        )
    return 0


def measured(disk: Path, rate: float, seconds: float, rounds: int) -> list[DurabilityRow]:
    """Runs all durabilities in turns, at ``rate`` bytes a second (0: as fast as it goes). Raises WrongBytes."""
    taken: dict[str, list[float]] = {each.value: [] for each in Durability}
    works = {name: partial(turn, disk, name, rate, seconds, taken[name]) for name in taken}
    found = in_turns(works, rounds)
    rows = []
    for name, puts_s in taken.items():
        ratios = [figures[name] / figures[NONE] for figures in found]
        speed = statistics.median(figures[name] for figures in found) / MIB
        spread = statistics.median(ratios), min(ratios), max(ratios)
        rows.append(
            DurabilityRow(
                rate / MIB, name, speed, *spread, percentile(puts_s, 0.5) * 1e3, percentile(puts_s, 0.99) * 1e3
            )
        )
    return rows


def turn(disk: Path, durability: str, rate: float, seconds: float, puts_s: list[float]) -> float:
    """Puts prompts for ``seconds``; returns the bytes a second that were acknowledged. Raises WrongBytes."""
    tokens = np.arange(PROMPT_CHUNKS * LAYOUT.chunk_tokens, dtype=np.uint32)
    words = np.random.default_rng(1).integers(0, 1 << 16, LAYOUT.shape(len(tokens)), np.uint16)
    kv = words.view(LAYOUT.numpy_dtype)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=disk) as folder:
        os.sync()
        with kvstore.open(folder, durability=Durability.of(durability), max_bytes=None) as store:
            cache = store.namespace("bench", LAYOUT)
            written, began_s = 0, time.monotonic()
            while (now_s := time.monotonic()) < began_s + seconds:
                if rate and written > rate * (now_s - began_s):
                    time.sleep(written / rate - (now_s - began_s))
                    continue
                tokens[0] += 1
                words[0, 0, :, 0, 0] += 1
                before_s = time.monotonic()
                cache.put(tokens, kv)
                puts_s.append(time.monotonic() - before_s)
                written += kv.nbytes
            speed = written / (time.monotonic() - began_s)
            count, read = cache.get(tokens)
            if count != len(tokens) or not np.array_equal(read.view(np.uint16), words):
                raise WrongBytes(f"{durability}: what was put last reads otherwise, or not at all")
    os.sync()
    return speed


# Compression and encryption. Times are CPU seconds, of one thread for the codec, of the process for the store.


CODEC_ROUNDS = 3
DTYPES: tuple[DType, ...] = ("bfloat16", "float16", "float8_e4m3fn", "float32")


def structured_kv(layout: Layout, tokens: int, seed: int = 0) -> npt.NDArray[np.generic]:
    """KV of shape ``layout.shape(tokens)`` with the structure that the module's docstring tells."""
    random = np.random.default_rng(seed)
    kv = random.standard_normal(layout.shape(tokens), dtype=np.float32)
    for plane, correlation in ((0, 0.9), (1, 0.5)):
        noise = kv[:, plane]
        for token in range(1, tokens):
            noise[:, token] = correlation * noise[:, token - 1] + (1 - correlation**2) ** 0.5 * noise[:, token]
    channels = (layout.layers, 2, 1, layout.kv_heads, layout.head_dim)
    scale = np.exp(random.standard_normal(channels, dtype=np.float32) * 0.6)
    mean = random.standard_normal(channels, dtype=np.float32)
    outliers = random.random(channels) < 1 / 64
    scale[:, 0][outliers[:, 0]] *= 20
    mean[:, 0][outliers[:, 0]] *= 20
    made: npt.NDArray[np.generic] = ((kv + mean) * scale * 0.5).astype(layout.numpy_dtype)
    return made


def cpu_s(work: Callable[[], object]) -> float:
    """The smallest CPU time of this thread in some rounds."""
    times = []
    for _ in range(CODEC_ROUNDS):
        began_s = time.thread_time()
        work()
        times.append(time.thread_time() - began_s)
    return min(times)


def codec(mib: int) -> None:
    """Prints ratio and speed of each step, in GiB/s of plain bytes and in memcpys."""
    source = np.random.default_rng(1).integers(0, 256, mib * MIB, dtype=np.uint8)
    target = np.empty_like(source)
    copy_s = cpu_s(lambda: np.copyto(target, source))
    print(f"memcpy of {mib} MiB: {mib / 1024 / copy_s:.1f} GiB/s")
    sections: list[memoryview] = []
    print("| dtype | how | ratio | put GiB/s | memcpys | get GiB/s | memcpys |")
    print("|---|---|---|---|---|---|---|")
    for dtype in DTYPES:
        layout = Layout(layers=4, kv_heads=8, head_dim=128, dtype=dtype, chunk_tokens=256)
        kv = structured_kv(layout, layout.chunk_tokens)
        payload = memoryview(kv.tobytes())
        size = layout.section_bytes
        sections = [payload[at : at + size] for at in range(0, len(payload), size)]
        itemsize = layout.itemsize

        def stretch(stored: bytes, memory: memoryview, itemsize: int = itemsize) -> None:
            squeezing.stretch(stored, memory, itemsize)

        def squeeze(section: memoryview, itemsize: int = itemsize) -> bytes | memoryview:
            return squeezing.squeeze(section, itemsize)

        row(dtype, "as stored (level 1)", sections, copy_s / mib, squeeze, stretch)
    seal = PartCipher(bytes(32), bytes(16), bytes(128))

    def opened(stored: bytes, memory: memoryview) -> None:
        checksum(stored)
        memory[:] = seal.open(0, stored)

    row("any", "AES-256-GCM", sections, copy_s / mib, lambda section: seal.close(0, section), opened)


def row(
    dtype: str,
    how: str,
    sections: list[memoryview],
    copy_s: float,
    put: Callable[[memoryview], bytes | memoryview],
    get: Callable[[bytes, memoryview], None],
) -> None:
    """One line; ``copy_s`` is memcpy's of a MiB."""
    stored = [bytes(put(section)) for section in sections]
    plain = sum(map(len, sections)) / MIB
    put_s = cpu_s(lambda: [put(section) for section in sections])
    cells = [f"{sum(map(len, sections)) / sum(map(len, stored)):.2f}"]
    cells += [f"{plain / 1024 / put_s:.2f}", f"{put_s / plain / copy_s:.1f}"]
    memory = memoryview(bytearray(len(sections[0])))

    def get_all() -> None:
        for each in stored:
            get(each, memory)

    get_s = cpu_s(get_all)
    cells += [f"{plain / 1024 / get_s:.2f}", f"{get_s / plain / copy_s:.1f}"]
    print(f"| {dtype} | {how} | " + " | ".join(cells) + " |", flush=True)


def store(folder: Path, mib: int) -> None:
    """Prints what puts and gets of a store on ``folder`` cost, plain, encrypted and compressed; warm."""
    layout = Layout(layers=8, kv_heads=8, head_dim=128, dtype="bfloat16", chunk_tokens=256)
    count = max(1, mib * MIB // layout.chunk_bytes)
    tokens = np.arange(count * layout.chunk_tokens)
    kv = np.concatenate([structured_kv(layout, 256, seed) for seed in range(count)], axis=2)
    size_gib = kv.nbytes / (1 << 30)
    keys = folder / "keys.json"
    keys.touch(mode=0o600)
    keys.write_text('{"tenants": {"secret": {"current": "k", "keys": {"k": "' + "A" * 43 + '="}}}}')
    into = np.empty_like(kv)
    print(f"\n{count} chunks of {layout.chunk_bytes / MIB:.0f} MiB, bfloat16; CPU seconds, least of {CODEC_ROUNDS}")
    print("| | put s/GiB | get s/GiB | bytes on the root |")
    print("|---|---|---|---|")
    for how, tenant in (("plain", "open"), ("encrypted", "secret"), ("compressed", "open"), ("both", "secret")):
        compress = how in ("compressed", "both")
        with kvstore.open(str(folder / "root"), keys=keys, compress=compress) as opened:
            puts, gets, stored = [], [], 0
            for number in range(CODEC_ROUNDS):
                cache = opened.namespace(f"{how}-{number}", layout, tenant=tenant)
                began_s = time.process_time()
                cache.put(tokens, kv)
                puts.append(time.process_time() - began_s)
                files = [path for path in (folder / "root" / "chunks").rglob("*") if path.is_file()]
                stored = sum(path.stat().st_size for path in files)
                cache.get(tokens, out=into)
                began_s = time.process_time()
                assert cache.get(tokens, out=into) == len(tokens)
                gets.append(time.process_time() - began_s)
                assert np.array_equal(into.view(np.uint8), kv.view(np.uint8))
                cache.clear()
            put, get = min(puts) / size_gib, min(gets) / size_gib
            print(f"| {how} | {put:.2f} | {get:.2f} | {stored / kv.nbytes:.2f} |", flush=True)


def encodings_main(given: Sequence[str] | None = None) -> int:
    """Prints the tables; 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks encodings")
    parser.add_argument("--mib", type=int, default=64, help="of KV for the store")
    parser.add_argument("--folder", type=Path, default=None, help="where the store is; by default in memory")
    arguments = parser.parse_args(given)
    codec(64)
    base = arguments.folder or (Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=base) as folder:
        store(Path(folder), arguments.mib)
    return 0
