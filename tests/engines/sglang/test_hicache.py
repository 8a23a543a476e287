"""SGLang's base class and factory with our backend, on host pools of every documented layout."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.arg_groups.arg_utils import namespace_of
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.server_args import ServerArgs

from kvstore.errors import InvalidRequest
from tests.engines.sglang.pools import HostPool, OddPool, backend, config, indices, same


def hashes(count: int, seed: str = "") -> list[str]:
    """Page keys as SGLang makes them: chained SHA-256 in hexadecimal."""
    keys, last = [], seed
    for number in range(count):
        last = hashlib.sha256(f"{last}{number}".encode()).hexdigest()
        keys.append(last)
    return keys


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


def test_the_weights_and_scales_of_a_served_name_are_those_that_were_launched(
    tmp_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    scales_path = tmp_path / "scales.json"
    told = {"model_path": str(tmp_path), "quantization_param_path": str(scales_path)}
    launched = SimpleNamespace(**{**LAUNCHED, **told})
    monkeypatch.setattr(runtime_context.get_context(), "_server_args", launched)
    found = []
    for weights, scales in ((b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"a", b"1")):
        (tmp_path / "model.safetensors").write_bytes(weights)
        scales_path.write_bytes(scales)
        with backend(HostPool("page_first"), {"root": str(tmp_root)}, model_name="served") as hicache:
            found.append(hicache.batch_exists(hashes(1)))
            assert hicache.batch_set_v1(hashes(1), indices([0])) == [True]
    assert found == [0, 0, 0, 1]


def test_an_adapter_with_other_weights_or_another_scale_shares_nothing(
    tmp_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = {"root": str(tmp_root), "fingerprint": "x"}
    assert namespace_of(ServerArgs)["lora_paths"] == "lora", "SGLang resolves what it was launched with to this"
    adapter = LoRARef(lora_name="a", lora_path=str(tmp_path))
    monkeypatch.setattr(runtime_context.get_context(), "_server_args", SimpleNamespace(**LAUNCHED))
    monkeypatch.setattr(runtime_context, "get_lora", lambda: SimpleNamespace(lora_paths=[adapter]))
    with pytest.raises(InvalidRequest, match="no weight files"), backend(HostPool("page_first"), settings):
        pass
    found = []
    for weights, scale in ((b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"a", b"1")):
        (tmp_path / "adapter_model.safetensors").write_bytes(weights)
        (tmp_path / "adapter_config.json").write_bytes(scale)
        with backend(HostPool("page_first"), settings) as hicache:
            found.append(hicache.batch_exists(hashes(1)))
            assert hicache.batch_set_v1(hashes(1), indices([0])) == [True]
    assert found == [0, 0, 0, 1]
