"""A digest of a model's weights: it keeps KV of replaced weights at the same path from being served.

Every byte is hashed, because a fine-tuned model may differ from its base in a few tensors only. That is done once per
host: the digest is kept in the user's cache directory, by the kernel's facts about the file (inode, size, times), and
processes that start together wait for the one that is hashing.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

import xxhash

from kvstore.errors import InvalidRequest
from kvstore.parsing import parse_json

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SETTINGS_FILES = ("config.json", "hf_quant_config.json", "quantize_config.json", "params.json")
"""Files with settings that change KV of the same weights: RoPE, windows, quantisation."""
COMMIT = re.compile(r"[0-9a-f]{40}")
WAIT_S_MAX = 600.0
"""How long to wait for another process that is hashing, before this one hashes by itself."""
REMEMBERED_MAX = 4096
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
        _remember(memory, dict(list(remembered.items())[-REMEMBERED_MAX:]))
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
