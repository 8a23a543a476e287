"""What all connectors share: settings, opening the store, fingerprints of weights, sessions, failures of the store."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import xxhash

import kvstore
from kvstore.client import Cache, Store
from kvstore.client.limits import ClientLimits
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.node.settings import AskedBound, Limits, TierSettings
from kvstore.security.tls import ClientTls
from kvstore.sources import SystemClock
from kvstore.text import parse_json

# The last failure of the store, for an engine that goes on without it; logged, but not once per request.


LOG_S = 10.0
"""Minimum time between two lines about the same kind of call."""


class Trouble:
    """Counts and logs failures. Thread-safe. ``log`` gets a line ``event why=...`` for a failure, the first at once."""

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


# A digest of a model's weights: it keeps KV of replaced weights at the same path from being served.
#
# Every byte is hashed, because a fine-tuned model may differ from its base in a few tensors only. That is done once
# per host: the digest is kept in the user's cache directory, by the kernel's facts about the file (inode, size,
# times), and processes that start together wait for the one that is hashing.


SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SETTINGS_FILES = ("config.json", "hf_quant_config.json", "quantize_config.json", "params.json")
"""Files with settings that change KV of the same weights: RoPE, windows, quantisation."""
COMMIT = re.compile(r"[0-9a-f]{40}")
WAIT_S_MAX = 600.0
"""How long to wait for another process that is hashing, before this one hashes by itself."""
FILES_REMEMBERED_MAX = 4096
READ_BYTES = 8 << 20


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
    """Returns a digest of the weights and of the configuration beside them, for engines that do not report the latter.

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
    known_as = blake2b(
        f"{file.resolve()}\0{stat.st_dev}\0{stat.st_ino}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}".encode(),
        digest_size=16,
    ).hexdigest()
    memory = _memory()
    if memory is None:
        return _hash(file)
    with _locked(memory.with_suffix(".lock")) as is_ours:
        if not is_ours:
            return _hash(file)
        remembered = _remembered(memory)
        digest = remembered.pop(known_as, "") or _hash(file)
        remembered[known_as] = digest
        _remember(memory, dict(list(remembered.items())[-FILES_REMEMBERED_MAX:]))
    return digest


def _hash(file: Path) -> str:
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(READ_BYTES))
    with open(file, "rb", buffering=0) as source:
        while count := source.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _memory() -> Path | None:
    """Returns the file of remembered digests; None if there can be none: then each process hashes by itself."""
    # A container's user may have no home at all.
    with suppress(OSError, RuntimeError):
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstore"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder / "weights.json"
    return None


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Yields True with the lock held, False without: a file system may lack locks, or a stopped process hold it."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield False
        return
    try:
        yield _is_locked(fd)
    finally:
        os.close(fd)


def _is_locked(fd: int) -> bool:
    ends_s = time.monotonic() + WAIT_S_MAX
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as cause:
            if cause.errno != errno.EWOULDBLOCK or time.monotonic() >= ends_s:
                return False
            time.sleep(0.05)
        else:
            return True


def _remembered(memory: Path) -> dict[str, str]:
    with suppress(OSError, ValueError):
        found = parse_json(memory.read_text())
        if isinstance(found, dict):
            return {str(key): str(value) for key, value in found.items()}
    return {}


def _remember(memory: Path, digests: dict[str, str]) -> None:
    fresh = memory.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        fresh.write_text(json.dumps(digests))
        fresh.replace(memory)


# Fingerprints of the models that an engine names: taken from its settings, or computed in the background.
#
# Hashing weights takes seconds to minutes, and requests must not wait for it: until it is done, everything is a miss.


log = logging.getLogger(__name__)

PAUSE_S = 5.0
"""Pause before weights that could not be read are tried again."""
REMEMBERED_MAX = 1024
"""Number of models whose digests are remembered; the oldest is forgotten first."""
TOLD_CHARACTERS_MAX = 200
"""Length to which a model's name is cut in the log."""


class _Computation:
    """One model's digest, computed by its own thread: even checking that it is a folder may hang."""

    def __init__(self, model: str, ends_s: float) -> None:
        self.ends_s = ends_s
        self.is_done = threading.Event()
        self.digest = ""
        self.why: InvalidRequest | None = None
        self._model = model
        threading.Thread(target=self._run, name="kvstore-fingerprint", daemon=True).start()

    def _run(self) -> None:
        told = self._model[:TOLD_CHARACTERS_MAX]
        try:
            if self._model and "\0" not in self._model and os.path.isdir(self._model):
                self.digest = model_fingerprint(self._model)
            else:
                log.warning(
                    "connector.no_fingerprint model=%s: its name is not a folder, so KV of other weights under it "
                    "would be served; give a digest of the weights, or their revision, as the setting fingerprint",
                    told,
                )
        except InvalidRequest as error:
            self.why = error
        except Exception as error:
            log.exception("connector.fingerprint_failed")
            self.why = InvalidRequest(f"no digest of the weights at {told}: {error}; give one as fingerprint")
        finally:
            self.is_done.set()


class Fingerprints:
    """The fingerprints by model. ``given`` is the setting: one digest, or a digest per model name. Thread-safe.

    The first caller for a model waits for it at most ``wait_s``, as do those that come in that time.
    """

    def __init__(self, given: str | Mapping[str, str], wait_s: float) -> None:
        self._given = given
        self._wait_s = wait_s
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._computed: dict[str, _Computation] = {}

    def of(self, model: str) -> str:
        """Returns the digest of a model's weights: given, or computed if the model's name is a folder; else empty.

        Raises Unavailable while it is being computed. Raises InvalidRequest if the weights in a folder cannot be read:
        without their digest, KV of other weights could be served.
        """
        given = self._given.get(model, "") if isinstance(self._given, Mapping) else self._given
        if given:
            return given
        with self._lock:
            computed = self._computed.get(model)
            now_s = self._clock.monotonic_s()
            if computed is None or (computed.why is not None and now_s > computed.ends_s + PAUSE_S):
                while len(self._computed) >= REMEMBERED_MAX:
                    del self._computed[next(iter(self._computed))]
                computed = self._computed[model] = _Computation(model, now_s + self._wait_s)
        if not computed.is_done.wait(max(0.0, computed.ends_s - self._clock.monotonic_s())):
            raise Unavailable(
                f"the weights of {model[:TOLD_CHARACTERS_MAX]} are being hashed: everything is a miss until "
                "that is done"
            )
        if computed.why is not None:
            raise InvalidRequest(str(computed.why))
        return computed.digest


# The settings of an engine: one table, which checks what is given and opens the store.
#
# Each setting is a field with its kind of value, its default and what it means. The keys that say where the store is
# are the same for every engine. An engine adds its own as fields of a subclass.


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value: the words for it in an error, and the check."""

    expected: str
    holds: Callable[[Any], bool]


def number(default: float, *, least: float = 1e-3, most: float | None = None) -> Any:
    """A setting that is a number within bounds; a whole one if its default is one."""
    types = int if isinstance(default, int) else (int, float)

    def holds(value: Any) -> bool:
        is_number = isinstance(value, types) and not isinstance(value, bool)
        return is_number and least <= value and (most is None or value <= most)

    expected = f"a {'whole ' * isinstance(default, int)}number of at least {least:g}"
    if most is not None:
        expected += f" and at most {most:g}"
    return setting(default, Kind(expected, holds))


def choice(default: str, *others: str) -> Any:
    """A setting that is one of some names."""
    names = (default, *others)
    return setting(default, Kind(f"one of {', '.join(names)}", lambda value: value in names))


def setting(default: Any, kind: Kind | None = None, *, way: str = "") -> Any:
    """A setting of some other kind, or of any: then who uses it checks it.

    One with a ``way``, ``root`` or ``connect``, goes with that key alone.
    """
    return field(default=default, metadata={"kind": kind, "way": way})


def _are_servers(value: Any) -> bool:
    is_list = isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
    return isinstance(value, str) or is_list


_PLAIN = {
    bool: Kind("true or false", lambda value: isinstance(value, bool)),
    str: Kind("text", lambda value: isinstance(value, str)),
}
"""The kinds of settings that are plain fields, by the types of their defaults."""
_SERVERS = Kind("HOST:PORT, or a list of such", _are_servers)
_MAPPING = Kind("a mapping, as fsspec takes it", lambda value: isinstance(value, Mapping))
_FILE = Kind("the name of a file, or of a server", lambda value: isinstance(value, str))
_BOUND = Kind('a number of bytes, "auto" or null', lambda value: value is None or isinstance(value, int))

_BESIDE = {
    "root": "only a store that is opened by root takes them, workers have their own",
    "connect": "only workers ask for them, see connect",
}
"""Why a key that goes with one way makes no sense beside the other."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of an engine's settings. Raises InvalidRequest for values that make no sense."""

    root: str | None = setting(None, way="root")
    """URL of the root. The store is opened in the engine's own processes."""
    etcd: str | Sequence[str] | None = setting(None, _SERVERS, way="root")
    """The cluster's etcd; None if the root has one node."""
    durability: str | None = setting(None, way="root")
    """As ``kvstore.open`` takes it."""
    root_options: Mapping[str, Any] | None = setting(None, _MAPPING, way="root")
    """As ``kvstore.open`` takes them."""
    memory: int | None = setting(None, way="root")
    """Bytes of memory for hot chunks. A store needs it to read and write, not to look up."""
    write: str | None = setting(None, way="root")
    """With ``memory``: the write mode."""
    max_bytes: int | str | None = setting("auto", _BOUND, way="root")
    """Without ``etcd``: bytes that the root's files may take, "auto" for a share of the disk, None for no bound."""
    ttl: float | None = setting(None, way="root")
    """Without ``etcd``: seconds after which unused chunks go."""
    connect: str | Sequence[str] | None = setting(None, _SERVERS, way="connect")
    """Addresses of workers, instead of ``root``."""
    tls_ca: str | None = setting(None, _FILE, way="connect")
    """Certificates that workers are checked by."""
    tls_cert: str | None = setting(None, _FILE, way="connect")
    """The engine's own certificate."""
    tls_key: str | None = setting(None, _FILE, way="connect")
    """The key of that certificate."""
    tls_server_name: str | None = setting(None, _FILE, way="connect")
    """The name in the workers' certificates, if it is not their host's."""
    token_file: str | None = setting(None, _FILE, way="connect")
    """A file with the token that the engine shows to workers."""
    lookup_timeout_s: float = number(2.0)
    """A look-up that takes longer is a miss."""
    load_timeout_s: float = number(10.0)
    """A read that takes longer is a miss."""
    store_timeout_s: float = number(30.0)
    """A store that takes longer has failed."""
    tenant: str = ""
    """The owner of the KV: tenants share nothing."""

    def __post_init__(self) -> None:
        self._check_ways()
        for each in fields(self):
            value, kind = getattr(self, each.name), each.metadata.get("kind") or _PLAIN.get(type(each.default))
            if kind is not None and value is not each.default and not kind.holds(value):
                raise InvalidRequest(f"{each.name}={value!r}: expected {kind.expected}")
        if self.write and not self.memory:
            raise InvalidRequest("write without memory: it says when memory is enough for a put; give memory")
        TierSettings.of(**self.given("memory", "write"))
        if AskedBound.of(self.max_bytes, self.ttl).is_explicit and self.etcd:
            raise InvalidRequest("max_bytes and ttl beside etcd: kvstore-gc bounds a cluster's root, give them to that")

    @classmethod
    def names(cls) -> frozenset[str]:
        """Every key that may be given."""
        return frozenset(each.name for each in fields(cls))

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str = "the settings") -> Self:
        """Makes settings from a mapping with these keys and no others; ``where`` names it in messages.

        A key that nobody reads is an error, because a misspelt one would be ignored in silence.
        """
        unknown = sorted(map(str, set(given) - cls.names()))
        if unknown:
            raise InvalidRequest(
                f"{where} has unknown keys {', '.join(unknown)}: expected {', '.join(sorted(cls.names()))}"
            )
        try:
            return cls(**given)
        except InvalidRequest as wrong:
            raise InvalidRequest(f"{where}: {wrong}") from wrong

    def given(self, *names: str) -> dict[str, Any]:
        """Those of these settings that are not None."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def place(self) -> dict[str, Any]:
        """The settings that say where the store is, as far as they were given."""
        return self.given(*(each.name for each in fields(self) if each.metadata.get("way")))

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
            options = self.given("durability", "root_options", "memory", "write")
            bound: dict[str, Any] = {"max_bytes": self.max_bytes, "ttl": self.ttl}  # checked at the start
            return kvstore.open(self.root, self.etcd or None, limits=limits, **bound, **options)
        tls = (self.tls_ca, self.tls_cert, self.tls_key, self.tls_server_name)
        return kvstore.connect(
            *([self.connect] if isinstance(self.connect, str) else self.connect or ()),
            limits=ClientLimits(match_s=match_s, read_s=read_s, write_s=write_s),
            tls=ClientTls(*tls) if any(tls) else None,
            token_file=self.token_file,
        )

    def _check_ways(self) -> None:
        """Raises InvalidRequest unless one way to the store is named, and only keys that go with it."""
        if bool(self.root) == bool(self.connect):
            raise InvalidRequest(
                f"{'both' if self.root else 'neither'} of root and connect: give "
                '{"root": URL}, with "etcd" where there is a cluster, or {"connect": "HOST:PORT"}'
            )
        way, other = ("root", "connect") if self.root else ("connect", "root")
        ignored = [
            each.name
            for each in fields(self)
            if each.metadata.get("way") == other and getattr(self, each.name) not in (None, each.default)
        ]
        if ignored:
            raise InvalidRequest(f"{' and '.join(ignored)} beside {way}: {_BESIDE[other]}")


# The settings that LMCache and SGLang share, a store that may be down at first, and the keys of their blocks.


T = TypeVar("T")

TIMEOUT_S_MAX = 300.0
"""Maximum of a look-up's and a read's time-out: no node keeps a hold for longer, and a hold must outlast its read."""
"""After the store could not be opened, calls are misses for this long."""
OPAQUE_LAYOUT = Layout(1, 1, 1, "int8", 1)
"""The layout of namespaces whose keys describe their blocks."""
_ENGINE_KEY = blake2b(digest_size=32, person=b"kvstore.engine")  # a copy costs less than a new one


def _marks(given: Any) -> list[Any]:
    return [*given.values()] if isinstance(given, Mapping) else [given]


def _are_marks(given: Any) -> bool:
    return all(isinstance(each, str) for each in _marks(given))


@dataclass(frozen=True)
class StoreSettings(Settings):
    """The settings that LMCache and SGLang share."""

    lookup_timeout_s: float = number(2.0, most=TIMEOUT_S_MAX)
    load_timeout_s: float = number(10.0, most=TIMEOUT_S_MAX)
    store_timeout_s: float = number(30.0, most=TIMEOUT_S_MAX)
    fingerprint: str | Mapping[str, str] = setting("", Kind("text, or a mapping of models to text", _are_marks))
    """Digest of the weights, or one for each model by its name. A model that is a folder has its own computed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for mark in _marks(self.fingerprint):
            Namespace.of("checked", OPAQUE_LAYOUT, mark, self.tenant)  # their lengths and characters


class LateStore:
    """A store that may be down when the engine starts: it is opened when it is needed and answers.

    Thread-safe. Raises what ``kvstore.open`` raises, except Unavailable.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._fingerprints = Fingerprints(settings.fingerprint, settings.lookup_timeout_s)
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._again_s = 0.0
        self._closed = False
        with suppress(Unavailable):
            self._try(self._opened)

    def open(self) -> Store:
        """Returns the store. Raises Unavailable while it is down."""
        return self._store or self._try(self._opened)

    def model(self, engine: str, model: str, attributes: Mapping[str, str], path: str | None = None) -> Cache:
        """Returns the cache of a model's blocks; ``path`` is the folder of its weights, if that is not its name.

        Raises what opening it raises; after that, and while weights are hashed, Unavailable at once for a while.
        """
        # The name is for people, and a model's may be a path of any length: the attributes have all of it.
        readable = os.path.basename(model.rstrip("/"))[-100:].encode("ascii", "replace").decode()
        name = f"{engine}-{readable or 'model'}"
        told = {**attributes, "model": blake2b(text(model), digest_size=16).hexdigest()}
        fingerprint = self._fingerprints.of(path or model)

        def opened() -> Cache:
            return self._opened().namespace(name, OPAQUE_LAYOUT, fingerprint, self._settings.tenant, told)

        return self._try(opened)

    def close(self) -> None:
        """Ends threads and connections. Idempotent."""
        with self._lock:
            self._closed = True
            store, self._store = self._store, None
        if store is not None:
            store.close()

    def _opened(self) -> Store:
        if self._closed:
            raise Unavailable("the store is closed: open it again")
        if self._store is None:
            self._store = self._settings.open()
        return self._store

    def _try(self, call: Callable[[], T]) -> T:
        # One at a time: a thread that comes while another waits for a dead store need not wait as long again.
        with self._lock:
            if self._clock.monotonic_s() < self._again_s:
                raise Unavailable("the store could not be opened a moment ago")
            try:
                return call()
            except Unavailable as error:
                log.warning("connector.store_unavailable why=%s", error)
                self._again_s = self._clock.monotonic_s() + PAUSE_S
                raise


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


def text(value: str) -> bytes:
    """Returns the bytes of a foreign text, whatever is in it."""
    return value.encode(errors="surrogatepass")


# Sessions of an engine: which branches of theirs were abandoned, told by the order of their requests.
#
# A name stands for its block and all before it, as a chained hash does, so the common part of two chains ends where
# their names first differ.
#
# A session that returns to a branch has abandoned what it did in between: a fork that was dropped, or an answer that
# was written anew. A session that merely begins another branch has abandoned nothing, as far as anybody can tell:
# agents fork, and go on with what they left (docs/performance-notes.md has the figures). So that needs a
# word of the request, and a session that uses again what it seemed to have abandoned is not guessed about any more.


BRANCHES_MAX = 8
"""Branches that are remembered of one session."""
SESSIONS_MAX = 4_096
BLOCKS_MAX = 262_144
"""Blocks of all branches together: some 25 MB of hashes."""


class Names(Protocol):
    """The blocks of a prompt and of what was generated behind it, from the first on."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: int, /) -> Hashable: ...


@dataclass(slots=True, eq=False)
class Branch:
    """The last request of a session on one branch."""

    names: Names
    prompt: int
    """How many of the names are of full blocks of its prompt."""
    used_s: float
    """When the request ended."""
    stays: bool = False
    """True if the request said so: only another one's word ends it."""
    is_abandoned: bool = False


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The end of a branch that nobody needs as far as this engine knows: the names from ``first`` on."""

    names: Names
    first: int
    used_s: float


@dataclass(slots=True)
class _Session:
    branches: list[Branch] = field(default_factory=list)
    """In the order of their last use."""
    goes_on_apart: bool = False
    """True once it used a branch again that it seemed to have abandoned."""


class Sessions:
    """Remembers the branches of the sessions used last. Not thread-safe."""

    def __init__(self, blocks_max: int = BLOCKS_MAX) -> None:
        self._blocks_max = blocks_max
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._blocks = 0

    def ended(
        self, name: str, branch: Branch, supersede: bool | None = None, running: Iterable[Names] = ()
    ) -> list[Abandoned]:
        """Notes that a request of a session ended; returns what the session has abandoned with it.

        ``supersede`` is the request's own word: True if the session has left all its other branches, False if they and
        this one stay, None to go by the order of requests. ``running`` are the names of unfinished requests. What they
        or other sessions share is not abandoned.
        """
        session = self._sessions.pop(name, None) or _Session()
        self._sessions[name] = session
        branch.stays = supersede is False
        lost = self._took(session, branch, supersede)
        others = list(running) if lost else []
        found = [Abandoned(each.names, self._kept(each, others), each.used_s) for each in lost]
        self._bound()
        return [each for each in found if each.first < len(each.names)]

    def _took(self, session: _Session, branch: Branch, supersede: bool | None) -> list[Branch]:
        """Adds a branch in place of the one that it goes on with; returns those that are abandoned with that."""
        branches = session.branches
        at = next((at for at in reversed(range(len(branches))) if _goes_on(branches[at], branch)), len(branches))
        left = branches[at:]
        if left:  # the branch that it goes on with, and those that the session used since
            session.goes_on_apart |= left[0].is_abandoned
            self._blocks -= len(branches.pop(at).names)
        if supersede:
            lost = branches[:at] + left
        elif supersede is False or session.goes_on_apart:
            lost = []
        else:
            lost = [each for each in left if not each.stays]
        lost = [each for each in lost if not each.is_abandoned]
        for each in lost:
            each.is_abandoned = True
        branches.append(branch)
        self._blocks += len(branch.names)
        while len(branches) > BRANCHES_MAX:
            self._blocks -= len(branches.pop(0).names)
        return lost

    def _kept(self, lost: Branch, running: Sequence[Names]) -> int:
        """Returns how many leading blocks of a branch others have as well."""
        most = max((shared(lost.names, names) for names in running), default=0)
        for session in self._sessions.values():
            for each in session.branches:
                # One comparison for most of the thousands of branches: only those that share more are searched.
                if not each.is_abandoned and _shares(lost.names, each.names, most):
                    most = shared(lost.names, each.names)
        return most

    def _bound(self) -> None:
        """Forgets the sessions used longest ago; the last one stays, whatever its size."""
        while len(self._sessions) > 1 and (len(self._sessions) > SESSIONS_MAX or self._blocks > self._blocks_max):
            _, session = self._sessions.popitem(last=False)
            self._blocks -= sum(len(each.names) for each in session.branches)


def shared(one: Names, other: Names) -> int:
    """Returns how many leading names two chains share."""
    most = min(len(one), len(other))
    if not most or one[0] != other[0]:
        return 0
    return bisect_left(range(1, most), True, key=lambda at: one[at] != other[at]) + 1


def _shares(one: Names, other: Names, at: int) -> bool:
    """True if two chains share the block at this index, and with it all before."""
    return at < min(len(one), len(other)) and one[at] == other[at]


def _goes_on(old: Branch, new: Branch) -> bool:
    """True if a request goes on with a branch: it has all of its prompt. What was generated may be written anew."""
    return shared(old.names, new.names) >= old.prompt
