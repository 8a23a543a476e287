"""Two engines on one folder with ``root`` and ``max_bytes`` alone: they write four times the bound, and hits go on."""

from __future__ import annotations

from pathlib import Path

from tests.engines.vllm.engines import Answer, full_blocks, prompt, running_engine, stored_files, transfer

PROMPTS, PROMPT_TOKENS, ROUND = 120, 300, 6
POPULAR = prompt(3000, PROMPT_TOKENS)
BOUND_BYTES = 16 << 20
BLOCK_BYTES = 4 * 2 * 2 * 32 * 4 * 32
"""Layers, K and V, heads, their dimension, float32, tokens."""


def test_two_engines_on_one_folder_keep_its_bound_and_their_hits(workplace: Path, tmp_root: Path, model: Path) -> None:
    prompts = [prompt(4000 + number, PROMPT_TOKENS) for number in range(PROMPTS)]
    with running_engine(workplace, {"model": str(model), "enable_prefix_caching": False}) as engine:
        truth = engine.generate(POPULAR, *prompts)
    rounds = range(0, PROMPTS, ROUND)
    written = PROMPTS * full_blocks(prompts[0]) // 32 * BLOCK_BYTES
    assert written > 4 * BOUND_BYTES
    place = {"root": str(tmp_root), "max_bytes": BOUND_BYTES}
    settings = {"model": str(model), "num_gpu_blocks_override": 64, "kv_transfer_config": transfer(place)}
    hits, most = list[int](), 0
    with running_engine(workplace, settings) as first, running_engine(workplace, settings) as second:
        for number, start in enumerate(rounds):
            engine, other = (first, second) if number % 2 else (second, first)
            engine.begin(*prompts[start : start + ROUND])
            other.forget()
            popular = other.generate(POPULAR)
            popular.check_same(part(truth, 0, 1))
            hits += popular.cached
            engine.end().check_same(part(truth, 1 + start, 1 + start + ROUND))
            most = max(most, stored_bytes(tmp_root))
        stored = stored_files(tmp_root)
    print(f"bound {BOUND_BYTES:,}, written {written:,}, at most {most:,}; cached {hits}")
    assert len(stored) * BLOCK_BYTES > BOUND_BYTES // 4, "it does not only delete"
    assert most <= BOUND_BYTES + 2 * full_blocks(POPULAR) // 32 * 2 * BLOCK_BYTES
    assert hits[0] == 0
    assert sum(1 for each in hits[1:] if each == full_blocks(POPULAR)) >= len(hits) - 3


def part(answer: Answer, start: int, stop: int) -> Answer:
    """The answers to some of the prompts."""
    return Answer(
        answer.tokens[start:stop],
        answer.logprobs[start:stop],
        answer.cached[start:stop],
        answer.reasons[start:stop],
        answer.seconds,
    )


def stored_bytes(root: Path) -> int:
    """Bytes of the files of a root, without those that its processes share."""
    found = 0
    for path in root.rglob("*"):
        try:
            found += path.stat().st_blocks * 512 * (path.is_file() and path.relative_to(root).parts[0] != "host")
        except FileNotFoundError:
            continue  # collected meanwhile
    return found
