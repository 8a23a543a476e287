"""Settings, stores, fingerprints of weights and failures of the store, for all connectors."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from difflib import get_close_matches
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import msgspec
import xxhash

import kvstore
from kvstore.client import Cache, Store
from kvstore.client.cache import BlockCache
from kvstore.client.limits import ClientLimits
from kvstore.core.clock import SystemClock
from kvstore.core.layout import Layout
from kvstore.core.namespace import Namespace
from kvstore.core.validate import parse_size, size
from kvstore.engine.settings import AskedBound, Limits, TierSettings
from kvstore.errors import InvalidRequest, KVStoreError, Overloaded, Unavailable
from kvstore.host.tables import locked
from kvstore.security.tls import ClientTls
from kvstore.transport.limits import BLOCKS_MAX

log = logging.getLogger(__name__)

K = TypeVar("K")
T = TypeVar("T")
V = TypeVar("V")

LOG_S = 10.0
"""Minimum time between two lines about the same kind of call."""


class RateLimitedLog:
    """Counts and logs failures of the store, for an engine that goes on without it. Thread-safe.

    Logs the first failure immediately as ``event why=...``, and later ones at most every ``LOG_S`` seconds.
    """

    def __init__(self, log: logging.Logger, event: str) -> None:
        self._log = log
        self._event = event
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._unsaid = 0
        self._again_s = 0.0
        self.why = ""
        """The failure of the last call; empty if it succeeded."""

    def failed(self, why: object) -> None:
        """Records that a call failed."""
        with self._lock:
            self.why = str(why)
            now_s = self._clock.monotonic_s()
            if now_s < self._again_s:
                self._unsaid += 1
                return
            unsaid, self._unsaid = self._unsaid, 0
            self._again_s = now_s + LOG_S
        self._log.warning("%s why=%s%s", self._event, why, f" (and {unsaid} more)" if unsaid else "")

    def went_well(self) -> None:
        """Records that a call succeeded."""
        self.why = ""

    def or_miss(self, call: Callable[[], T], miss: T) -> T:
        """Returns the call's result, or ``miss`` if the store failed or did not answer."""
        try:
            result = call()
        except KVStoreError as error:
            self.failed(error)
            return miss
        self.went_well()
        return result


class RecentMap(OrderedDict[K, V]):
    """The entries that were set last, at most ``most`` of them."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._most:
            self.popitem(last=False)


# A digest of a model's weights: it keeps KV of replaced weights at the same path from being served.
#
# Every byte is hashed, because a fine-tuned model may differ from its base in a few tensors only. That is done once
# per host: the user's cache directory has a file for each digest, named by the kernel's facts about the weights (inode,
# size, times), and processes that start together wait for the one that is hashing.


SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SETTINGS_FILES = (
    *("config.json", "hf_quant_config.json", "quantize_config.json", "params.json"),
    "adapter_config.json",
)
"""Files with settings that change KV of the same weights: RoPE, windows, quantisation, an adapter's scale."""
COMMIT = re.compile(r"[0-9a-f]{40}")
WAIT_S_MAX = 600.0
"""How long to wait for another process that is hashing, before this one hashes by itself."""
DIGEST_CHARS = 32


def local_folder(path: str, **where: Any) -> str:
    """Returns ``path``, or for a model of the Hugging Face Hub its folder in the cache, with ``where`` for its library.

    Raises InvalidRequest if there is neither.
    """
    if os.path.exists(path):
        return path
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(path, local_files_only=True, allow_patterns=["*.json"], **where))
    except (OSError, ValueError) as cause:
        raise InvalidRequest(
            f"the weights of {path} are neither a folder nor in the Hugging Face cache: download them first, or for a "
            "model give their digest as the setting fingerprint"
        ) from cause


def weights_fingerprint(path: str | os.PathLike[str]) -> str:
    """Returns a digest of the weight files at ``path``, a folder or one file, in hexadecimal.

    In a folder of the Hugging Face cache it is the commit, which names the content. Raises InvalidRequest if there are
    no weights, or they cannot be read.
    """
    place = Path(path)
    if place.parent.name == "snapshots" and COMMIT.fullmatch(place.name):
        return f"commit-{place.name}"
    if place.is_file():
        files = [place]
    else:
        files = sorted(each for each in place.glob("*") if each.suffix in SUFFIXES and each.is_file())
    if not files:
        raise InvalidRequest(
            f"no weight files ({', '.join(SUFFIXES)}) at {place}: give their digest as the setting fingerprint"
        )
    whole = blake2b(digest_size=16)
    try:
        for each in files:
            whole.update(f"{each.name}\0{_digest(each)}\0".encode())
    except OSError as cause:
        raise InvalidRequest(f"weights at {place} cannot be read: {cause}") from cause
    return whole.hexdigest()


def model_fingerprint(folder: str | os.PathLike[str]) -> str:
    """Returns a digest of the weights and of the configuration next to them, for engines that do not report the latter.

    Raises InvalidRequest if there are no weights, or they or the configuration cannot be read.
    """
    digest = blake2b(weights_fingerprint(folder).encode(), digest_size=16)
    for name in SETTINGS_FILES:
        try:
            content = Path(folder, name).read_bytes()
        except FileNotFoundError:
            continue
        except OSError as cause:
            raise InvalidRequest(f"the configuration {name} at {folder} cannot be read: {cause}") from cause
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _digest(file: Path) -> str:
    stat = file.stat()
    facts = f"{file.resolve()}\0{stat.st_dev}\0{stat.st_ino}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}"
    # A container's user may have no home, or one that cannot be written: then each process hashes by itself.
    with suppress(OSError, RuntimeError):
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstore" / "weights"
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / blake2b(facts.encode(), digest_size=16).hexdigest(), "a+") as remembered:
            if locked(remembered.fileno(), wait_s=WAIT_S_MAX):
                remembered.seek(0)
                digest = remembered.read()
                if len(digest) != DIGEST_CHARS:
                    digest = _hash(file)
                    remembered.truncate(0)
                    remembered.write(digest)
                return digest
    return _hash(file)


def _hash(file: Path) -> str:
    with open(file, "rb", buffering=0) as source:
        return hashlib.file_digest(source, xxhash.xxh3_128).hexdigest()


# Fingerprints of the models that an engine names: taken from its settings, or computed in the background.
#
# Hashing weights takes seconds to minutes, and requests must not wait for it: until it is done, everything is a miss.


PAUSE_S = 5.0
"""Pause before what failed is tried again: weights that could not be read, a store that does not answer."""
REMEMBERED_MAX = 1024
"""Number of models whose digests and caches are remembered; the oldest is forgotten first."""
NAME_CHARS_MAX = 200
"""Length to which a model's name is cut in the log."""


class Fingerprints:
    """The fingerprints by model. ``given`` is the setting: one digest, or a digest per model name. Thread-safe.

    The first caller for a model waits for it at most ``wait_s``, as do those that come in that time.
    """

    def __init__(self, given: str | Mapping[str, str], wait_s: float) -> None:
        self._given = given
        self._wait_s = wait_s
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._computed: RecentMap[str, tuple[Future[str], float]] = RecentMap(REMEMBERED_MAX)
        """The digest of each model, and how long callers wait for it."""

    def of(self, model: str) -> str:
        """Returns the digest of a model's weights: given, or computed if the model's name is a folder; else empty.

        Raises Unavailable while it is being computed. Raises InvalidRequest if the weights in a folder cannot be read:
        without their digest, KV of other weights could be served.
        """
        given = self._given.get(model, "") if isinstance(self._given, Mapping) else self._given
        if given:
            return given
        with self._lock:
            now_s = self._clock.monotonic_s()
            digest, ends_s = self._computed.get(model, (None, 0.0))
            if digest is None or (now_s > ends_s + PAUSE_S and digest.done() and digest.exception() is not None):
                digest, ends_s = Future(), now_s + self._wait_s
                self._computed[model] = digest, ends_s
                # A thread for each: even checking that it is a folder may hang.
                threading.Thread(target=_compute, args=(model, digest), name="kvstore-digest", daemon=True).start()
        try:
            error = digest.exception(max(0.0, ends_s - self._clock.monotonic_s()))
        except TimeoutError:
            raise Unavailable(
                f"the weights of {model[:NAME_CHARS_MAX]} are being hashed: everything is a miss until that is done"
            ) from None
        if error is not None:
            raise InvalidRequest(str(error))
        return digest.result()


def _compute(model: str, digest: Future[str]) -> None:
    name = model[:NAME_CHARS_MAX]
    try:
        if model and "\0" not in model and os.path.isdir(model):
            digest.set_result(model_fingerprint(model))
            return
        log.warning(
            "connector.no_fingerprint model=%s: its name is not a folder, so KV of other weights under it would be "
            "served; give a digest of the weights, or their revision, as the setting fingerprint",
            name,
        )
        digest.set_result("")
    except InvalidRequest as error:
        digest.set_exception(error)
    except Exception as error:
        log.exception("connector.fingerprint_failed")
        digest.set_exception(InvalidRequest(f"no digest of the weights at {name}: {error}; give one as fingerprint"))


# The settings of an engine. The keys that say where the store is are the same for every engine; an engine adds its own
# as fields of a subclass. msgspec checks what is given.


TIMEOUT_S_MAX = 300.0
"""Maximum of a time-out: no node keeps a hold for longer, and a hold must outlast its read."""
OPAQUE_LAYOUT = Layout(1, 1, 1, "int8", 1)
"""The layout of namespaces whose keys describe their blocks."""
Seconds = Annotated[float, msgspec.Meta(ge=0)]
TimeoutS = Annotated[float, msgspec.Meta(ge=1e-3, le=TIMEOUT_S_MAX)]
Count = Annotated[int, msgspec.Meta(ge=1)]

SIZES = ("memory", "bytes", "bytes_max")
"""The ends of names of settings that are sizes: bytes, or text such as ``256MiB``."""
WITH_ROOT = ("root", "etcd", "durability", "root_options", "memory", "write", "max_bytes", "ttl")
"""Settings of a store that is opened by its root: workers have their own."""
WITH_CONNECT = ("connect", "tls_ca", "tls_cert", "tls_key", "tls_server_name", "token_file")


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that all engines share. Raises InvalidRequest for invalid values."""

    root: str | None = None
    """URL of the root. The store is opened in the engine's own processes."""
    etcd: str | list[str] | None = None
    """The cluster's etcd; None if the root has one node."""
    durability: str | None = None
    """As ``kvstore.open`` takes it."""
    root_options: dict[str, Any] | None = None
    """As ``kvstore.open`` takes them."""
    memory: int | None = None
    """Bytes of memory for hot chunks. A store needs it to read and write, not to look up."""
    write: str | None = None
    """With ``memory``: the write mode."""
    max_bytes: int | str | None = "auto"
    """Without ``etcd``: bytes that the root's files may take, "auto" for a share of the disk, None for no bound."""
    ttl: float | None = None
    """Without ``etcd``: seconds after which unused chunks go."""
    connect: str | list[str] | None = None
    """Addresses of workers, instead of ``root``."""
    tls_ca: str | None = None
    """Certificates that workers are checked by."""
    tls_cert: str | None = None
    """The engine's own certificate."""
    tls_key: str | None = None
    """The key of that certificate."""
    tls_server_name: str | None = None
    """The name in the workers' certificates, if it is not their host's."""
    token_file: str | None = None
    """A file with the token that the engine shows to workers."""
    lookup_timeout_s: TimeoutS = 2.0
    """A look-up that takes longer is a miss."""
    load_timeout_s: TimeoutS = 10.0
    """A read that takes longer is a miss."""
    store_timeout_s: TimeoutS = 30.0
    """A store that takes longer has failed."""
    fingerprint: str | dict[str, str] = ""
    """Digest of the weights, or one for each model by its name. A model that is a folder has its own computed."""
    tenant: str = ""
    """The owner of the KV: tenants share nothing."""

    def __post_init__(self) -> None:
        if bool(self.root) == bool(self.connect):
            raise InvalidRequest(
                f"{'both' if self.root else 'neither'} of root and connect: give "
                '{"root": URL}, with "etcd" where there is a cluster, or {"connect": "HOST:PORT"}'
            )
        way, others = ("root", WITH_CONNECT) if self.root else ("connect", WITH_ROOT)
        if ignored := [name for name in others if getattr(self, name) not in (None, "auto")]:
            raise InvalidRequest(f"{' and '.join(ignored)} with {way}: they belong to the other of root and connect")
        if self.write and not self.memory:
            raise InvalidRequest("write without memory: it says when memory is enough for a put; give memory")
        TierSettings.of(**self._given("memory", "write"))
        if AskedBound.of(self.max_bytes, self.ttl).is_explicit and self.etcd:
            raise InvalidRequest("max_bytes and ttl with etcd: kvstore-gc limits a cluster's root, so give them to it")
        digests = [self.fingerprint] if isinstance(self.fingerprint, str) else self.fingerprint.values()
        for digest in ("", *digests):
            Namespace.of("checked", OPAQUE_LAYOUT, digest, self.tenant)  # their lengths and characters

    @classmethod
    def of(cls, given: Mapping[Any, Any], where: str = "the settings") -> Self:
        """Makes settings from a mapping with these keys and no others; ``where`` names it in messages.

        An unknown key is an error, because a misspelt one would otherwise be ignored silently.
        """
        sizes = [name for name in given if name in cls.names() and name.endswith(SIZES)]
        try:
            return msgspec.convert({**given, **{name: parse_size(given[name]) for name in sizes}}, cls)
        except msgspec.ValidationError as wrong:
            unknown = [name for name in map(str, given) if name not in cls.names()]
            near = [close for name in unknown for close in get_close_matches(name, cls.names(), 1)]
            hint = f": did you mean {', '.join(near)}?" if near else ""
            raise InvalidRequest(f"{where}: {wrong}{hint}") from wrong

    @classmethod
    def names(cls) -> frozenset[str]:
        """Every key that may be given."""
        return frozenset(cls.__struct_fields__)

    def place(self) -> dict[str, Any]:
        """The settings that say where the store is, as far as they were given."""
        return self._given(*WITH_ROOT, *WITH_CONNECT)

    def open(self) -> Store:
        """Opens the store. Raises what ``kvstore.open`` and ``kvstore.connect`` raise."""
        match_s, read_s, write_s = self.lookup_timeout_s, self.load_timeout_s, self.store_timeout_s
        if self.root:
            limits = Limits(
                match_deadline_s=match_s,
                read_deadline_s=read_s,
                write_deadline_s=write_s,
                meta_deadline_s=min(Limits().meta_deadline_s, write_s),
            )
            options = self._given("durability", "root_options", "memory", "write")
            bound: dict[str, Any] = {"max_bytes": self.max_bytes, "ttl": self.ttl}  # checked at the start
            return kvstore.open(self.root, self.etcd or None, limits=limits, **bound, **options)
        tls = (self.tls_ca, self.tls_cert, self.tls_key, self.tls_server_name)
        return kvstore.connect(
            *([self.connect] if isinstance(self.connect, str) else self.connect or ()),
            limits=ClientLimits(match_s=match_s, read_s=read_s, write_s=write_s),
            tls=ClientTls(*tls) if any(tls) else None,
            token_file=self.token_file,
        )

    def _given(self, *names: str) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}


# A store that may be down when the engine starts, and the keys of its blocks.


class LazyStore:
    """The engine's store. If it does not answer at the start, a thread opens it later, and everything is a miss so far.

    Thread-safe. Raises what ``kvstore.open`` raises, except Unavailable and Overloaded.
    """

    def __init__(
        self, settings: EngineSettings, namespaces: Iterable[Namespace] = (), *, pause_s: float = PAUSE_S
    ) -> None:
        """``namespaces`` are those of ``caches``; ``pause_s`` is the time before a store that failed is tried again."""
        self._settings = settings
        self._pause_s = pause_s
        self._namespaces = list(namespaces)
        self._fingerprints = Fingerprints(settings.fingerprint, settings.lookup_timeout_s)
        self._trouble = RateLimitedLog(log, "connector.store_unavailable")
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._store: Store | None = None
        self._caches: list[BlockCache] | None = None
        self._models: RecentMap[tuple[Any, ...], Cache] = RecentMap(REMEMBERED_MAX)
        self._again_s = 0.0
        self._closing = threading.Event()
        self._opener: threading.Thread | None = None
        try:
            self._open()
        except (Unavailable, Overloaded) as error:
            self._trouble.failed(error)
            self._open_later(pause_s)
        except KVStoreError:
            self.close()
            raise

    def store(self) -> Store:
        """Returns the store. Raises Unavailable until it has answered once."""
        store = self._store
        if store is None:
            raise Unavailable(self._trouble.why or "the store is closed: open it again")
        return store

    def caches(self) -> list[BlockCache] | None:
        """Returns the caches of the namespaces given, in their order; None until the store has answered once."""
        return self._caches

    def rename(self, namespaces: Iterable[Namespace]) -> None:
        """Opens the caches of other namespaces in the background; ``caches`` returns the former until then."""
        self._namespaces = list(namespaces)
        self._open_later(0.0)

    def model(self, engine: str, model: str, attributes: Mapping[str, str], path: str | None = None) -> Cache:
        """Returns the cache of a model's blocks; ``path`` is the folder of its weights, if that is not its name.

        Raises what opening the cache raises. Right after an Unavailable, and while weights are hashed, further calls
        raise Unavailable immediately.
        """
        key = (engine, model, path, *sorted(attributes.items()))
        if (cache := self._models.get(key)) is not None:
            return cache
        # The name is for people, and a model's may be a path of any length: the attributes have all of it.
        readable = os.path.basename(model.rstrip("/"))[-100:].encode("ascii", "replace").decode()
        name = f"{engine}-{readable or 'model'}"
        described = {**attributes, "model": blake2b(text(model), digest_size=16).hexdigest()}
        fingerprint = self._fingerprints.of(path or model)
        # One at a time: a thread that comes while another waits for a dead store need not wait as long again.
        with self._lock:
            if self._clock.monotonic_s() < self._again_s:
                raise Unavailable("the store did not answer a moment ago")
            try:
                cache = self.store().namespace(name, OPAQUE_LAYOUT, fingerprint, self._settings.tenant, described)
            except Unavailable as error:
                self._trouble.failed(error)
                self._again_s = self._clock.monotonic_s() + self._pause_s
                raise
            self._models[key] = cache
            return cache

    def close(self) -> None:
        """Ends threads and connections. Idempotent."""
        self._closing.set()
        if self._opener is not None and self._opener is not threading.current_thread():
            self._opener.join(PAUSE_S)
        self._caches = None
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def _open(self) -> None:
        with self._opening:
            store = self._store = self._store or self._settings.open()
            self._caches = [
                store.namespace(each.name, each.layout, each.fingerprint, each.tenant, dict(each.attributes)).blocks
                for each in self._namespaces
            ]
        with suppress(KVStoreError):
            # A warning, because engines show only those of other packages' loggers.
            log.warning("connector.opened %r %s", self._store, _described(self._store, self._namespaces))

    def _open_later(self, pause_s: float) -> None:
        self._opener = threading.Thread(target=self._retry, args=(pause_s,), name="kvstore-opener", daemon=True)
        self._opener.start()

    def _retry(self, pause_s: float) -> None:
        while not self._closing.wait(pause_s):
            pause_s = self._pause_s
            try:
                self._open()
            except KVStoreError as error:
                self._trouble.failed(error)
                continue
            if self._closing.is_set():  # while it was opened
                self.close()
            return


def _described(store: Store, namespaces: Sequence[Namespace]) -> str:
    """Namespaces, capacity and fill of a store, for the log."""
    names, stats = ",".join(dict.fromkeys(each.name for each in namespaces)), store.stats()
    capacity, used = stats.get("bound_bytes", 0), stats.get("bound_used_bytes", 0)
    if not capacity:  # a cluster's: the file system of the root
        capacity = stats.get("root_total_bytes", 0)
        used = capacity - stats.get("root_free_bytes", 0)
    return f"namespace={names or 'by model'} capacity={size(capacity)} used={size(used)}"


_ENGINE_KEY = blake2b(digest_size=32, person=b"kvstore.engine")  # a copy costs less than a new one


def block_key(*parts: bytes) -> bytes:
    """Returns the 32-byte key of a block that all ``parts`` identify together."""
    return key_of(packed(*parts))


def packed(*parts: bytes) -> bytes:
    """Returns ``parts`` one after the other, each behind its length."""
    return b"".join([each for part in parts for each in (len(part).to_bytes(8, "little"), part)])


def key_of(identity: bytes) -> bytes:
    """Returns the key of a block that ``packed`` parts identify: for many keys that share parts."""
    state = _ENGINE_KEY.copy()
    state.update(identity)
    return state.digest()


def match(cache: BlockCache, keys: Sequence[bytes]) -> int:
    """Returns the number of leading keys in the store, in as many calls as it takes."""
    for start in range(0, len(keys), BLOCKS_MAX):
        part = keys[start : start + BLOCKS_MAX]
        if (found := cache.match(part)) < len(part):
            return start + found
    return len(keys)


def present(cache: BlockCache, keys: Sequence[bytes]) -> list[bool]:
    """Returns, for each key, whether it is in the store, in as many calls as it takes."""
    starts = range(0, len(keys), BLOCKS_MAX)
    return [hit for start in starts for hit in cache.present(keys[start : start + BLOCKS_MAX])]


def leading(good: Sequence[object]) -> int:
    """Returns how many leading items are true."""
    return next((at for at, each in enumerate(good) if not each), len(good))


def text(value: str) -> bytes:
    """Returns the bytes of a foreign text, whatever is in it."""
    return value.encode(errors="surrogatepass")
