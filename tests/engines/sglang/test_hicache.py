"""SGLang's base class and factory with our backend, on host pools of every documented layout."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorage, PoolHitPolicy, PoolName, PoolTransfer

from kvstore.errors import InvalidRequest
from tests.engines.sglang.pools import (
    MHA,
    MLA,
    FlatPool,
    HostPool,
    OddPool,
    SplitPool,
    backend,
    config,
    fill,
    indices,
    same,
)
from tests.kit.workers import serving

POOLS: dict[str, Callable[[], HostPool]] = {
    **{f"mha-{layout}": lambda layout=layout: HostPool(layout) for layout in MHA},  # type: ignore[misc]
    **{f"mla-{layout}": lambda layout=layout: HostPool(layout, is_mla=True) for layout in MLA},  # type: ignore[misc]
    **{
        f"mha-layer_first-{layers}": lambda layers=layers: HostPool("layer_first", layers=layers)  # type: ignore[misc]
        for layers in (1, 2)
    },
    "mla-page_first_kv_split": SplitPool,
    "flat-layer_first": lambda: FlatPool("layer_first"),
    "flat-page_first": lambda: FlatPool("page_first"),
}
HAS_FLAT = [name for name in POOLS if "split" not in name]
DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8)


def hashes(count: int, seed: str = "") -> list[str]:
    """Page keys as SGLang makes them: chained SHA-256 in hexadecimal."""
    keys, last = [], seed
    for number in range(count):
        last = hashlib.sha256(f"{last}{number}".encode()).hexdigest()
        keys.append(last)
    return keys


@pytest.mark.smoke
@pytest.mark.parametrize("way", ["root", "worker"])
@pytest.mark.parametrize("name", POOLS)
def test_pages_written_in_place_are_read_in_place_by_the_next_engine(tmp_root: Path, name: str, way: str) -> None:
    keys, written, read = hashes(5), [3, 0, 7, 12, 9], [10, 11, 1, 2, 23]

    def run(extra: dict[str, Any]) -> None:
        first = POOLS[name]()
        for number, page in enumerate(written):
            fill(first, page, number)
        with backend(first, extra, is_mla_model=first.is_mla) as hicache:
            assert isinstance(hicache, HiCacheStorage)
            assert hicache.batch_exists(keys) == 0
            assert hicache.batch_get_v1(keys, indices(written)) == [False] * 5
            assert hicache.batch_set_v1(keys, indices(written)) == [True] * 5
            assert hicache.batch_exists(keys) == 5
        second = POOLS[name]()
        with backend(second, extra, is_mla_model=first.is_mla) as hicache:
            assert hicache.batch_exists([*keys, "0" * 64]) == 5
            assert hicache.batch_get_v1([*keys[:4], "0" * 64], indices(read)) == [True] * 4 + [False]
            assert hicache.batch_get_v1(keys[4:], indices(read[4:])) == [True]
            assert all(same(first, a, second, b) for a, b in zip(written, read, strict=True))

    if way == "root":
        run({"root": str(tmp_root)})
    else:
        with serving(tmp_root) as served:
            run({"connect": served.address})


@pytest.mark.parametrize("name", HAS_FLAT)
def test_the_generic_calls_and_those_in_place_find_each_others_pages(tmp_root: Path, name: str) -> None:
    keys = hashes(4)
    pool, other = POOLS[name](), POOLS[name]()
    for page in range(4):
        fill(pool, page, page)
    with backend(pool, {"root": str(tmp_root)}, is_mla_model=pool.is_mla) as hicache:
        pages = [pool.get_data_page(page * pool.page_size) for page in range(2)]
        assert hicache.batch_set(keys[:2], pages)
        assert hicache.batch_set_v1(keys[2:], indices([2, 3])) == [True, True]
        assert hicache.exists(keys[1])
        assert not hicache.exists("f" * 64)
    with backend(other, {"root": str(tmp_root)}, is_mla_model=pool.is_mla) as hicache:
        assert hicache.batch_get_v1(keys[:2], indices([8, 9])) == [True, True]
        targets = [other.get_dummy_flat_data_page() for _ in range(3)]
        got = hicache.batch_get([keys[2], "f" * 64, keys[3]], targets)
        assert got[1] is None
        other.set_from_flat_data_page(10 * other.page_size, got[0])
        other.set_from_flat_data_page(11 * other.page_size, got[2])
        assert all(same(pool, page, other, 8 + page) for page in range(4))
        assert torch.equal(hicache.get(keys[0]).view(torch.uint8), pages[0].view(torch.uint8)), "without a target"
        assert hicache.get("f" * 64, targets[0]) is None
        assert hicache.set(hashes(1, "x")[0], pages[0])


@pytest.mark.parametrize("in_place", [True, False])
def test_pages_of_an_unknown_layout_are_never_mixed_up(tmp_root: Path, in_place: bool) -> None:
    """Nobody knows what its flat pages hold, so they are used alone, or not at all."""
    pool, keys = OddPool(), hashes(2)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    other = OddPool()
    extra = {"root": str(tmp_root), "interface_v1": int(in_place)}
    with backend(pool, extra) as hicache:
        assert hicache.set(keys[0], pool.get_data_page(0)) is not in_place
        assert hicache.batch_set_v1(keys[1:], indices([1])) == [True]
    with backend(other, extra) as hicache:
        assert hicache.batch_get_v1(keys, indices([4, 5])) == [not in_place, True]
        assert same(pool, 1, other, 5)
        assert in_place or same(pool, 0, other, 4)
        target = hicache.get(keys[1], other.get_dummy_flat_data_page())
        assert (target is None) is in_place
        assert in_place or torch.equal(target, pool.get_data_page(pool.page_size))
    with backend(OddPool(), {"root": str(tmp_root), "interface_v1": int(not in_place)}) as hicache:
        assert hicache.batch_exists(keys[1:]) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_goes_through_bit_for_bit(tmp_root: Path, dtype: torch.dtype) -> None:
    pool, other = HostPool("page_first", dtype), HostPool("page_first", dtype)
    raw = pool.kv_buffer.view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
    with backend(pool, {"root": str(tmp_root)}) as hicache:
        assert hicache.batch_set_v1(hashes(2), indices([0, 1])) == [True, True]
    with backend(other, {"root": str(tmp_root)}) as hicache:
        assert hicache.batch_get_v1(hashes(2), indices([4, 5])) == [True, True]
    assert same(pool, 0, other, 4)
    assert same(pool, 1, other, 5)


@contextmanager
def holding(root: Path, pool: Any, extra: dict[str, Any] | None = None, **told: Any) -> Any:
    """A backend on a root that holds one page, written by the plainest engine."""
    with backend(HostPool("page_first"), {"root": str(root)}) as hicache:
        assert hicache.batch_set_v1(hashes(1), indices([0])) == [True]
    with backend(pool, {"root": str(root), **(extra or {})}, **told) as hicache:
        yield hicache


OTHERS: dict[str, dict[str, Any]] = {
    "model": {"model_name": "org/other"},
    "tp rank": {"tp_rank": 1, "tp_size": 2},
    "tp size": {"tp_size": 2},
    "pp rank": {"pp_rank": 1, "pp_size": 2},
    "cp rank": {"attn_cp_rank": 1, "attn_cp_size": 2},
    "mla": {"is_mla_model": True},
    "fingerprint": {"extra": {"fingerprint": "sha256:2"}},
    "tenant": {"extra": {"tenant": "t"}},
    "dtype": {"pool": HostPool("page_first", torch.float16)},
    "layout": {"pool": HostPool("page_first_direct")},
}


@pytest.mark.parametrize("told", OTHERS.values(), ids=OTHERS)
def test_another_model_rank_type_or_layout_is_a_miss(tmp_root: Path, told: dict[str, Any]) -> None:
    told = dict(told)
    pool, extra = told.pop("pool", HostPool("page_first")), told.pop("extra", {})
    with holding(tmp_root, pool, extra, **told) as hicache:
        assert hicache.batch_exists(hashes(1)) == 0
        assert hicache.batch_get_v1(hashes(1), indices([3])) == [False]
        assert not pool.kv_buffer.view(torch.uint8).any(), "nothing was written"


# Several pools (hybrid models)


def transfer(name: PoolName, keys: list[str], pages: list[int]) -> Any:
    return PoolTransfer(name=name, keys=keys, host_indices=indices(pages))


@pytest.mark.parametrize("policy", [PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES])
@pytest.mark.parametrize("tail", [1, 2, 3])
def test_hybrid_look_ups_answer_as_sglangs_own_file_storage(tmp_root: Path, policy: PoolHitPolicy, tail: int) -> None:
    keys, pool = hashes(6), HostPool("page_first")
    theirs = HiCacheFile(config(), str(tmp_root / "theirs"))
    asked = [PoolTransfer(name=PoolName.SWA, keys=keys[:tail], hit_policy=policy)]
    with backend(pool, {"root": str(tmp_root / "ours")}) as ours:
        for each in (ours, theirs):
            each.register_mem_pool_host(pool)
            each.register_mem_host_pool_v2(pool, PoolName.KV)
            each.register_mem_host_pool_v2(HostPool("page_first"), PoolName.SWA)
        for step in ([], [2], [0, 3], [1], [4]):
            for each in (ours, theirs):
                if step:
                    each.batch_set_v2([transfer(PoolName.SWA, [keys[at] for at in step], step)])
                each.batch_set_v2([transfer(PoolName.KV, keys[:5], [0, 1, 2, 3, 4])])
            assert ours.batch_exists_v2(keys, asked) == theirs.batch_exists_v2(keys, asked)


def test_clear_deletes_the_pages_of_this_model_only(tmp_root: Path) -> None:
    pool = HostPool("page_first")
    with backend(pool, {"root": str(tmp_root)}, model_name="org/other") as other:
        other.batch_set_v1(hashes(1), indices([0]))
        with holding(tmp_root, pool) as hicache:
            assert hicache.clear()
            assert hicache.batch_exists(hashes(1)) == 0
        assert other.batch_exists(hashes(1)) == 1


def test_pages_and_indices_that_do_not_fit_are_not_stored(tmp_root: Path) -> None:
    pool = HostPool("page_first")
    with backend(pool, {"root": str(tmp_root)}) as hicache:
        assert hicache.batch_set_v1(hashes(2), indices([0])) == [False, False]
        assert hicache.batch_get_v1(hashes(2), indices([0])) == [False, False]
        assert not hicache.batch_set(hashes(1), [torch.zeros(7)])
        assert hicache.get(hashes(1)[0], torch.zeros(7)) is None
        assert not hicache.set(hashes(1)[0])
        assert hicache.batch_exists([]) == 0
        assert hicache.batch_get_v1([], indices([0])[:0]) == []


def test_what_cannot_be_served_is_refused_when_it_starts(tmp_root: Path) -> None:
    pool = HostPool("page_head")
    for extra, told in (({}, {}), ({"root": "/x", "connect": "h:1"}, {}), ({"root": "/x", "load_timeout_s": -1}, {})):
        with pytest.raises(InvalidRequest), backend(pool, extra, **told):
            pass
    split = {"should_split_heads": True, "tp_lcm_size": 2}
    copied = {"root": str(tmp_root), "interface_v1": 0}
    with pytest.raises(InvalidRequest, match="set interface_v1"), backend(pool, copied, **split):
        pass
    assert config().extra_config["interface_v1"]


SCATTERED = {
    "not in one run": [0, 9, 17, 33, 40, 50, 60, 70],
    "backwards": [*range(7, -1, -1)],
    "negative": [*range(-8, 0)],
    "too few": [*range(7)],
}


@pytest.mark.parametrize("at", SCATTERED.values(), ids=SCATTERED)
def test_indices_that_are_no_page_are_not_taken_for_one(tmp_root: Path, at: list[int]) -> None:
    pool = HostPool("page_first")
    with backend(pool, {"root": str(tmp_root)}) as hicache:
        assert hicache.batch_set_v1(hashes(1), torch.tensor(at)) == [False]
        assert hicache.batch_exists(hashes(1)) == 0
        assert hicache.batch_set_v1(hashes(1), indices([0])) == [True]
        assert hicache.batch_get_v1(hashes(1), torch.tensor(at)) == [False]


def test_keys_may_hold_any_character_and_have_any_length(tmp_root: Path) -> None:
    with backend(HostPool("page_first"), {"root": str(tmp_root)}) as hicache:
        for key in ("", "\ud800", "k" * (1 << 20)):
            assert not hicache.exists(key)
            assert hicache.batch_set_v1([key], indices([0])) == [True]
            assert hicache.exists(key)


LAUNCHED = {"model_path": "org/model", "revision": "main", "quantization": None, "json_model_override_args": "{}"}
OTHERWISE = {
    "model_path": "org/finetuned",
    "revision": "v2",
    "quantization": "fp8",
    "json_model_override_args": '{"rope_theta": 5}',
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_sglang_was_launched_with_keeps_engines_apart_under_one_served_name(
    tmp_root: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(**told: Any) -> None:
        monkeypatch.setattr(runtime_context.get_context(), "_server_args", SimpleNamespace(**{**LAUNCHED, **told}))

    def found() -> int:
        with backend(HostPool("page_first"), {"root": str(tmp_root), "fingerprint": "x"}) as hicache:
            return int(hicache.batch_exists(hashes(1)))

    launch()
    with backend(HostPool("page_first"), {"root": str(tmp_root), "fingerprint": "x"}) as hicache:
        assert hicache.batch_set_v1(hashes(1), indices([0])) == [True]
    assert found() == 1
    launch(**{name: OTHERWISE[name]})
    assert found() == 0


@pytest.mark.parametrize("name", ["SGLANG_DSV4_KV_LAYOUT", "SGLANG_USE_HND_KVCACHE", "SGLANG_AITER_KV_CACHE_LAYOUT"])
def test_engines_whose_environment_chooses_the_order_of_bytes_share_nothing(
    tmp_root: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of the same size in another order: SGLang's pools tell of it nowhere."""
    settings = {"root": str(tmp_root), "fingerprint": "x"}
    for choice, found in (("one", 0), ("another", 0), ("one", 1)):
        monkeypatch.setenv(name, choice)
        with backend(HostPool("page_first"), settings) as hicache:
            assert hicache.batch_exists(hashes(1)) == found
            assert hicache.batch_set_v1(hashes(1), indices([0])) == [True]


def test_the_weights_of_a_served_name_are_those_that_were_launched(
    tmp_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    launched = SimpleNamespace(**{**LAUNCHED, "model_path": str(tmp_path)})
    monkeypatch.setattr(runtime_context.get_context(), "_server_args", launched)
    found = []
    for weights in (b"a", b"b", b"a"):
        (tmp_path / "model.safetensors").write_bytes(weights)
        with backend(HostPool("page_first"), {"root": str(tmp_root)}, model_name="served") as hicache:
            found.append(hicache.batch_exists(hashes(1)))
            assert hicache.batch_set_v1(hashes(1), indices([0])) == [True]
    assert found == [0, 0, 1]
