"""LoRA adapters by content: who shares with whom, and when nobody does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.connectors.vllm import adapters
from kvstore.connectors.vllm.adapters import Adapters, AdapterSnapshot, Check
from tests.kit.patience import PATIENCE_S
from tests.kit.vllm_connector import Blocks, Request, cache, halves, matched, step, store


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The clock of the files is this host's, and digests are remembered in a folder of the test."""
    monkeypatch.setattr(adapters, "MARGIN_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    with halves() as found:
        yield found


@pytest.fixture
def engine() -> Iterator[Callable[..., Adapters]]:
    """The adapters of an engine that starts now."""
    made: list[Adapters] = []

    def start(told: str = "") -> Adapters:
        made.append(Adapters(told))
        return made[-1]

    yield start
    for each in made:
        each.close()


def adapter(folder: Path, seed: int, settings: str = "{}") -> str:
    """The files of an adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(bytes([seed]) * 5000)
    (folder / "adapter_config.json").write_text(settings)
    time.sleep(0.01)  # its times are those of a coarse clock
    return str(folder)


def lora(path: str, number: int = 1, **more: Any) -> Any:
    return SimpleNamespace(lora_int_id=number, lora_path=path, lora_name="name", **more)


def looked_at(known: Adapters, asked: Any) -> Check:
    check = known.begin(asked)
    assert check.done.wait(PATIENCE_S)
    return check


def test_the_digest_is_that_of_the_content_wherever_it_lies(engine: Callable[..., Adapters], tmp_path: Path) -> None:
    first = adapter(tmp_path / "a", 1)
    copy, other, scaled = adapter(tmp_path / "b", 1), adapter(tmp_path / "c", 2), adapter(tmp_path / "d", 1, '{"r": 2}')
    known, elsewhere = engine("float32"), engine("bfloat16")
    digests = [
        looked_at(known, lora(path, number)).digest for number, path in enumerate((first, copy, other, scaled), 1)
    ]
    assert len(digests[0]) == 16 and digests[0] == digests[1]
    assert len({*digests}) == 3, "other weights, and other settings, are another adapter"
    assert looked_at(elsewhere, lora(first)).digest not in digests
    assert looked_at(known, lora(first, is_3d_lora_weight=True)).digest not in digests


def test_files_that_changed_after_the_engine_started_share_nothing(
    engine: Callable[..., Adapters], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = adapter(tmp_path / "a", 1)
    known = engine()
    assert looked_at(known, lora(path)).digest
    before = os.stat(Path(path, "adapter_model.safetensors"))
    adapter(tmp_path / "a", 2)
    os.utime(Path(path, "adapter_model.safetensors"), ns=(before.st_atime_ns, before.st_mtime_ns))
    for _ in range(2):
        check = looked_at(known, lora(path))
        assert (check.digest, check.seal) == (b"", None)
    assert caplog.text.count("share nothing") == 1


def test_a_number_that_two_adapters_had_shares_nothing(engine: Callable[..., Adapters], tmp_path: Path) -> None:
    first, second = adapter(tmp_path / "a", 1), adapter(tmp_path / "b", 2)
    known = engine()
    assert looked_at(known, lora(first)).digest
    assert not looked_at(known, lora(second)).digest
    assert not looked_at(known, lora(first)).digest, "vLLM may have either"
    assert not looked_at(known, lora(first, 2, load_inplace=True)).digest


def test_a_seal_breaks_with_any_change(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a", 1)
    seal = AdapterSnapshot.of(path)
    assert seal.holds()
    Path(path, "added").write_bytes(b"")
    assert not seal.holds()
    Path(path, "added").unlink()
    assert seal.holds()
    os.replace(adapter(tmp_path / "b", 1) + "/adapter_model.safetensors", path + "/adapter_model.safetensors")
    assert not seal.holds(), "another file with the same bytes"
    assert not AdapterSnapshot(str(tmp_path / "nowhere"), seal.files).holds()


def test_a_request_whose_adapter_is_not_sure_is_left_alone(make: Callable[..., Any], tmp_path: Path) -> None:
    half, request = make(), Request("a", 22, lora_request=lora(str(tmp_path / "nowhere")))
    store(half, request, 3)
    half.arrived(request)
    assert matched(half, request) == (0, False)
    assert step(half, request, 0, 22).stores == []
    assert half.counts.take()["skipped_lora_requests"] == 1


def test_an_adapter_that_takes_long_to_look_at_is_not_waited_for(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, request = make(lookup_timeout_s=0.05), Request("a", 22, lora_request=lora(adapter(tmp_path / "a", 1)))
    monkeypatch.setattr(half._adapters, "begin", lambda lora: Check())
    half.arrived(request)
    assert half.matched_tokens(request, 0) == (None, False)
    assert step(half, request, 0, 12).stores == [], "nothing is stored before it is known"
    time.sleep(0.06)
    assert half.matched_tokens(request, 0) == (0, False)
    half.allocated(request, Blocks(), 0)
    half.finished(request)


def test_requests_share_with_those_of_the_same_files_only(make: Callable[..., Any], tmp_path: Path) -> None:
    first, copy, other = (adapter(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    half = make()
    asked = Request("a", 22, lora_request=lora(first, 1))
    half.arrived(asked)
    assert matched(half, asked) == (0, False)
    stores = step(half, asked, 0, 12).stores
    assert [run.seal.path for run in stores] == [first]
    plain = {hashed + b"\0" for hashed in asked.block_hashes}
    assert not plain.intersection(stores[0].keys)
    assert cache(half).put(stores[0].keys, [bytes(64)] * 3) == [True] * 3
    for name, given, found in (("same", lora(copy, 2), 12), ("other", lora(other, 3), 0), ("none", None, 0)):
        request = Request(name, 22, lora_request=given)
        half.arrived(request)
        assert matched(half, request) == (found, bool(found)), name
