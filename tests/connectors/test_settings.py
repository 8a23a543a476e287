"""Settings of LMCache and SGLang, and the fingerprint of the model that they name."""

from __future__ import annotations

import re
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvstore
from kvstore.client import Store
from kvstore.connectors import common
from kvstore.connectors.common import OPAQUE_LAYOUT, EngineSettings, LazyStore
from kvstore.connectors.lmcache_keys import LMCacheSettings
from kvstore.connectors.vllm.settings import ConnectorSettings as VllmSettings
from kvstore.core.namespace import Namespace
from kvstore.errors import InvalidRequest, Unavailable
from tests.kit.cases import for_each
from tests.kit.patience import NEVER_S, PATIENCE_S, eventually

WRONG: tuple[tuple[dict[Any, Any], str], ...] = (
    ({"connect": 7}, "connect"),
    ({"connect": ["h:1", 2]}, "connect"),
    ({"root": "/x", "etcd": 5}, "etcd"),
    ({"root": "/x", "connect": "h:1"}, "both of root and connect"),
    ({}, "neither of root and connect"),
    ({"connect": "h:1", "durability": "fsync", "root_options": {"a": 1}}, "durability and root_options with connect"),
    ({"connect": "h:1", "max_bytes": 1 << 30, "ttl": 60}, "max_bytes and ttl with connect"),
    ({"root": "/x", "token_file": "t"}, "token_file with root"),
    ({"root": "/x", "memory": "8 gigs"}, "test: .*memory"),
    ({"root": "/x", "memory": 1024}, "test: memory"),
    ({"root": "/x", "memory": 1 << 30, "write": "sometimes"}, "write='sometimes'"),
    ({"root": "/x", "write": "behind"}, "write without memory"),
    ({"root": "/x", "max_bytes": "8 gigs"}, "max_bytes"),
    ({"root": "/x", "ttl": -1}, "ttl"),
    ({"root": "/x", "etcd": "e:1", "max_bytes": 1 << 30}, "max_bytes and ttl with etcd: kvstore-gc"),
    ({"root": "/x", "load_timeout_s": 301}, "load_timeout_s"),
    ({"root": "/x", "load_timeout_s": True}, "load_timeout_s"),
    ({"root": "/x", "tenant": "\ud800"}, "tenant"),
    ({"root": "/x", "fingerprint": {"m": "x" * 5000}}, "fingerprint"),
    ({"root": "/x", "rooot": "/y"}, "rooot.*: did you mean root\\?"),
)


@for_each("given, said", WRONG)
def test_settings_that_make_no_sense_are_refused_with_the_key(given: dict[Any, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        EngineSettings.of(given, "test")


def test_sizes_as_text_are_bytes() -> None:
    given = {"root": "/x", "memory": "1GiB", "max_bytes": "256MiB", "store_bytes_max": "64 MB"}
    found = VllmSettings.of(given)
    assert (found.memory, found.max_bytes, found.store_bytes_max) == (1 << 30, 256 << 20, 64_000_000)


def test_opened_store_is_described_in_the_log(tmp_root: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = EngineSettings(root=str(tmp_root), max_bytes=64 << 20)
    LazyStore(settings, [Namespace.of("m", OPAQUE_LAYOUT)]).close()
    (line,) = (each for each in caplog.messages if "connector.opened" in each)
    assert f"root file://{tmp_root}" in line and "namespace=m capacity=64.00 MiB used=" in line


TABLES: tuple[tuple[str, type[EngineSettings]], ...] = (
    ("vllm", VllmSettings),
    ("lmcache", LMCacheSettings),
    ("sglang", EngineSettings),
)


@for_each("engine, settings", TABLES)
def test_the_page_has_every_setting_and_the_default_of_each_number(engine: str, settings: type[EngineSettings]) -> None:
    page = (Path(__file__).parents[2] / "docs" / f"{engine}.md").read_text()
    section = page.partition("\n## Settings\n")[2].partition("\n## ")[0]
    told: dict[str, str] = {}
    for names, defaults in re.findall(r"^\| (`.+?`) \| (.*?) ?\|", section, re.MULTILINE):
        keys = re.findall(r"`(\w+)`", names)
        told.update(dict.fromkeys(keys) if not defaults else zip(keys, defaults.split(", "), strict=False))
    assert settings.names() == told.keys()
    units = {"": 1, "MiB": 1 << 20, "GiB": 1 << 30}
    for each in msgspec.structs.fields(settings):
        if isinstance(each.default, int | float) and not isinstance(each.default, bool):
            number, _, unit = told[each.name].partition(" ")
            assert float(number) * units[unit] == each.default, each.name


@pytest.fixture(autouse=True)
def no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text("{}")
    return folder


def namespace(root: Path, model: object, **settings: Any) -> Namespace:
    store = LazyStore(EngineSettings(root=str(root), **settings))
    try:
        return store.model("test", str(model), {}).namespace
    finally:
        store.close()


@pytest.mark.parametrize("file", ["a.safetensors", "config.json"])
def test_weights_or_a_configuration_that_changed_are_another_namespace(tmp_root: Path, model: Path, file: str) -> None:
    before = namespace(tmp_root, model)
    assert namespace(tmp_root, model) == before
    (model / file).write_text('{"rope_theta": 5}')
    assert namespace(tmp_root, model) != before


def test_a_folder_whose_weights_cannot_be_read_is_refused_and_not_served_without_a_digest(
    tmp_root: Path, model: Path
) -> None:
    (model / "a.safetensors").unlink()
    with pytest.raises(InvalidRequest, match="no weight files"):
        namespace(tmp_root, model)
    assert namespace(tmp_root, model, fingerprint="given").fingerprint == "given"


def test_calls_are_misses_while_weights_are_hashed_and_other_models_do_not_wait(
    tmp_root: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def hashing(_: object) -> str:
        go_on.wait(NEVER_S)
        return "digest"

    monkeypatch.setattr(common, "model_fingerprint", hashing)
    store = LazyStore(EngineSettings(root=str(tmp_root), lookup_timeout_s=0.2))
    began_s = time.monotonic()
    for _ in range(300):
        with pytest.raises(Unavailable, match="hashed"):
            store.model("test", str(model), {})
    store.model("test", "org/other", {})
    assert time.monotonic() - began_s < 300 * 0.2, "only the first one waits"
    go_on.set()
    ends_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            assert store.model("test", str(model), {}).namespace.fingerprint == "digest"
            break
        except Unavailable:
            assert time.monotonic() < ends_s
    store.close()


def test_memory_of_a_store_that_is_opened_by_root_is_used(tmp_root: Path) -> None:
    place = {"root": str(tmp_root), "memory": 16 << 20, "write": "through"}
    with EngineSettings.of(place, "test").open() as store:
        blocks = store.namespace("m", OPAQUE_LAYOUT).blocks
        assert blocks.put([b"k" * 16], [b"block"]) == [True]
        out = bytearray(5)
        assert blocks.get([b"k" * 16], [out]) == [True] and out == b"block"
        assert (store.stats()["memory_hits"], store.stats()["memory_size_bytes"]) == (1, 16 << 20)


class Late:
    """Settings of a store that does not answer ``fails`` times."""

    fingerprint, lookup_timeout_s, tenant = "", 1.0, ""

    def __init__(self, fails: int) -> None:
        self._fails = fails

    def open(self) -> Store:
        self._fails -= 1
        if self._fails >= 0:
            raise Unavailable("down")
        return kvstore.open("memory://")


def test_a_store_that_is_down_at_first_is_used_later() -> None:
    store = LazyStore(Late(3), [Namespace.of("m", OPAQUE_LAYOUT)], pause_s=0.05)  # type: ignore[arg-type]
    assert store.caches() is None
    with pytest.raises(Unavailable, match="down"):
        store.model("test", "org/model", {})
    eventually(lambda: store.caches() is not None)
    eventually(lambda: is_there(store))
    store.close()
    assert store.caches() is None


def is_there(store: LazyStore) -> bool:
    with suppress(Unavailable):
        return store.model("test", "org/model", {}).blocks.match([b"k" * 16]) == 0
    return False
