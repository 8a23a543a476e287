"""LMCache's own client in a real vLLM, and the real ``lmcache server`` over our adapter: what vLLM users of it run."""

from __future__ import annotations

import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engines.lmcache.server import CHUNK_TOKENS, LMCacheServer
from tests.engines.vllm.engines import (
    PYTHON,
    Answer,
    Engine,
    check_clean,
    make_model,
    prompt,
    stored_files,
    wait_stored,
)

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: .ci/engines.sh --setup vllm")

CHUNKS = 9
LONG = prompt(11, CHUNKS * CHUNK_TOKENS + 24)
"""Nine full chunks and a part of one."""
DAMAGED = 5
"""The chunk of the prompt that is damaged, from 0."""
TOKENS = 16
CLIENT = [str(Path(__file__).with_name("client.py")), sysconfig.get_path("purelib")]


@dataclass(frozen=True)
class Stored:
    """What one vLLM and one LMCache, both ended since, left on a root."""

    folder: Path
    model: Path
    root: Path
    damaged: Path
    """The file of chunk ``DAMAGED``. Nothing is wrong with it yet."""
    answer: Answer
    """What vLLM answers to ``LONG`` without a connector."""


def transfer(server: LMCacheServer) -> dict[str, Any]:
    """``kv_transfer_config`` for LMCache's connector."""
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": server.port,
            "lmcache.mp.heartbeat_interval": 30.0,
        },
    }


@contextmanager
def running_pair(folder: Path, model: Path, root: Path) -> Iterator[tuple[LMCacheServer, Engine]]:
    """A new LMCache and a new vLLM that uses it; both end."""
    server = LMCacheServer(folder, root)
    try:
        engine = Engine(folder, {"model": str(model), "kv_transfer_config": transfer(server)}, program=CLIENT)
        try:
            yield server.wait_ready(), engine.wait_ready()
        finally:
            engine.kill()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def stored(module_root: Path) -> Iterator[Stored]:
    root = module_root / "root"
    with tempfile.TemporaryDirectory(prefix="kvstore-lmcache-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        model = make_model(folder, "tiny", 7)
        alone = Engine(folder, {"model": str(model), "enable_prefix_caching": False})
        try:
            with running_pair(folder, model, root) as (server, engine):
                answer = alone.wait_ready().generate(LONG, tokens=TOKENS)
                engine.generate(LONG[: DAMAGED * CHUNK_TOKENS + 1])
                before = wait_stored(root, DAMAGED)
                engine.generate(LONG[: (DAMAGED + 1) * CHUNK_TOKENS + 1])
                [damaged] = wait_stored(root, DAMAGED + 1) - before
                first = engine.generate(LONG, tokens=TOKENS)
                wait_stored(root, CHUNKS)
                server.wait_counter("lmcache_mp_l2_store_completed_objects_chunks_total", CHUNKS)
                assert server.counter("lmcache_mp_lookup_hit_l2_tokens_total") == 0
        finally:
            alone.kill()
        first.check_same(answer)
        yield Stored(folder, model, root, damaged, answer)


def test_a_new_vllm_and_a_new_lmcache_take_the_prompt_from_our_store(stored: Stored) -> None:
    files = {path: path.stat().st_ino for path in stored_files(stored.root)}
    assert len(files) == CHUNKS
    with running_pair(stored.folder, stored.model, stored.root) as (server, engine):
        answer = engine.generate(LONG, tokens=TOKENS)
        answer.check_same(stored.answer)
        assert answer.cached == [CHUNKS * CHUNK_TOKENS]
        server.wait_counter("lmcache_mp_lookup_hit_l2_tokens_total", CHUNKS * CHUNK_TOKENS)
        assert server.counter("lmcache_mp_lookup_hit_l1_tokens_total") == 0
    assert {path: path.stat().st_ino for path in stored_files(stored.root)} == files  # nothing was stored again
    check_clean(stored.root)


def damage(path: Path) -> None:
    """Flips one bit in the middle of a file: of the exponent of a float32, so that nobody overlooks it."""
    content = bytearray(path.read_bytes())
    content[len(content) // 8 * 4 + 3] ^= 0x40
    path.write_bytes(content)


def test_a_damaged_chunk_and_what_follows_are_computed_and_it_is_stored_again(stored: Stored) -> None:
    damage(stored.damaged)
    with running_pair(stored.folder, stored.model, stored.root) as (_, engine):
        answer = engine.generate(LONG, tokens=TOKENS)
        answer.check_same(stored.answer)
        assert answer.cached == [DAMAGED * CHUNK_TOKENS]
        assert stored.damaged in wait_stored(stored.root, CHUNKS)
    assert len(list((stored.root / "quarantine").iterdir())) == 1
    check_clean(stored.root)
