"""The identity of a root, and the other small records on it: generations, capacity limit and namespaces.

``FORMAT``, made once and never changed, guards against a file system that is not mounted, one mounted in another's
place, and a version that this code does not know: each would otherwise look like an empty or a damaged cache.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import NewType

from kvstore.core.buffers import BufferLoan
from kvstore.core.clock import Clock, Ids, SystemClock
from kvstore.core.layout import Layout
from kvstore.core.namespace import Namespace, NamespaceDigest
from kvstore.core.recency import NS_PER_S
from kvstore.core.validate import brief, parse_json
from kvstore.errors import InvalidRequest, KVStoreError, LayoutMismatch, Overloaded, RootMismatch, Unavailable
from kvstore.format import places
from kvstore.format.header import RECORD_BYTES_MAX, Generation
from kvstore.format.places import GENERATIONS, Name
from kvstore.root.interface import Root

RootId = NewType("RootId", bytes)

FORMAT_NAME = "kvstore"
VERSION = 1
SHARD_BITS_DEFAULT = 8
"""256 folders, which suit about ten million chunks. Folders are made when needed; each costs the first put."""
FORMAT_BYTES_MAX = 4096
TOP = Name("")
"""The root's own folder, for listings."""

_OURS = places.FOLDERS | {places.RESERVE, places.BOUND}
FILE_SYSTEMS_OWN = frozenset({"lost+found", ".snapshot", ".snapshots", ".zfs", ".glusterfs", ".trashcan"})
"""Names that file systems keep at their top."""
SCRATCH_FOLDER = re.compile(r"\.check-[0-9a-f]+")
"""The folder in which ``check-root`` works; it stays behind if check-root is killed."""


@dataclass(frozen=True, slots=True)
class RootIdentity:
    """The content of ``FORMAT``: the root's id (16 bytes), its generation, and how many address bits name a shard."""

    root: RootId
    generation: int
    shard_bits: int
    version: int = VERSION

    def to_json(self) -> bytes:
        fields = {
            "format": FORMAT_NAME,
            "version": self.version,
            "root": self.root.hex(),
            "generation": self.generation,
            "shard_bits": self.shard_bits,
        }
        return json.dumps(fields).encode() + b"\n"

    @classmethod
    def from_json(cls, content: bytes) -> RootIdentity:
        """Parses what ``to_json`` returned; ignores keys that this version does not know.

        Raises RootMismatch for another version, or a file that is not a ``FORMAT`` file.
        """
        try:
            fields = parse_json(content)
            name, version = fields["format"], fields["version"]
        except (ValueError, KeyError, TypeError) as cause:
            raise _not_a_format(content) from cause
        if name != FORMAT_NAME or type(version) is not int:
            raise _not_a_format(content)
        if version != VERSION:
            raise RootMismatch(
                f"the root has format version {version}, this kvstore reads version {VERSION}: "
                f"use a kvstore that knows version {version}, or another folder"
            )
        try:
            root, generation, shard_bits = bytes.fromhex(fields["root"]), fields["generation"], fields["shard_bits"]
        except (ValueError, KeyError, TypeError) as cause:
            raise _not_a_format(content) from cause
        sound = (
            len(root) == 16
            and type(generation) is int
            and generation >= 1
            and type(shard_bits) is int
            and 0 <= shard_bits <= places.SHARD_BITS_MAX
        )
        if not sound:
            raise _not_a_format(content)
        return cls(RootId(root), generation, shard_bits)


def read_identity(root: Root) -> RootIdentity | None:
    """Returns what ``FORMAT`` says; None if there is none. Raises RootMismatch as RootIdentity.from_json does."""
    content = read_small(root, places.FORMAT, FORMAT_BYTES_MAX)
    return None if content is None else RootIdentity.from_json(content)


def create_or_open(
    root: Root,
    ids: Ids,
    *,
    shard_bits: int = SHARD_BITS_DEFAULT,
    create: bool = True,
    expect: RootId | None = None,
) -> RootIdentity:
    """Returns the identity of a root; makes the root first if the folder is empty and ``create`` allows it.

    If several hosts make one at the same moment, all get the winner's. ``shard_bits`` counts only for a new root.
    ``expect`` is the id that the root must have.

    Raises RootMismatch for another id, an unknown version, a folder that holds something else, or, without ``create``,
    a folder that is not a root; InvalidRequest for shard_bits outside 0 to 16.
    """
    if type(shard_bits) is not int or not 0 <= shard_bits <= places.SHARD_BITS_MAX:
        raise InvalidRequest(f"shard_bits={brief(shard_bits)}: expected 0 to {places.SHARD_BITS_MAX}")
    found = read_identity(root)
    if found is None and not create:
        raise RootMismatch(f"{root.url} is not a kvstore root: it has no FORMAT file. Is the file system mounted?")
    if found is None and expect is not None:
        # A caller that expects an id has seen the root before: this is its empty mount point, not a place for a new
        # root.
        raise RootMismatch(f"{root.url} has no FORMAT file, expected root {expect.hex()}: is the file system mounted?")
    if found is None:
        found = _create(root, ids, shard_bits)
    if expect is not None and found.root != expect:
        raise RootMismatch(
            f"{root.url} is root {found.root.hex()}, expected {expect.hex()}: is another file system mounted there?"
        )
    return found


def read_small(root: Root, name: Name, bytes_max: int) -> bytes | None:
    """Returns a small file; None if there is none. Reads up to ``bytes_max`` + 1 bytes, so that excess shows."""
    reader = root.open(name)
    if reader is None:
        return None
    with reader:
        content = bytearray(min(reader.stat.size_bytes, bytes_max + 1))
        count = reader.read([memoryview(content)], 0, BufferLoan()) if content else 0
    if count < max(1, len(content)) and root.stat(name) is None:
        return None  # removed while it was read, which GlusterFS shows as an empty file
    return bytes(content[:count])


def publish_small(root: Root, name: Name, content: bytes, *, ids: Ids, clock: Clock) -> bool:
    """Publishes a small file, synced, and leaves no staging folder behind; False if the name is taken.

    Raises the root's errors.
    """
    session = ids.fresh()
    staged = places.staged(session, 0)
    try:
        root.stage(staged, [memoryview(content)], stamp_ns=int(clock.now_s()) * NS_PER_S, durable=True)
        return root.publish(staged, name, durable=True)
    finally:
        root.discard(staged)
        root.remove_folder(places.staging_folder(session))


def _create(root: Root, ids: Ids, shard_bits: int) -> RootIdentity:
    foreign = _foreign_entry(root)
    if foreign is not None:
        # Look again: another host may have made the root, and published chunks, since FORMAT was found missing.
        found = read_identity(root)
        if found is None:
            raise RootMismatch(
                f"{root.url} holds {foreign!r} but no FORMAT file: give an empty folder, or restore FORMAT from a "
                "backup"
            )
        return found
    # Synced: a torn FORMAT after a host crash would cost the whole root, not one chunk.
    mine = RootIdentity(RootId(ids.fresh()), 1, shard_bits)
    publish_small(root, places.FORMAT, mine.to_json(), ids=ids, clock=SystemClock())
    # Without an exclusive publish, a rival may still replace the file. Its etcd then has another root at this URL than
    # the file says, and nodes refuse it.
    found = read_identity(root)
    if found is None:
        raise Unavailable(f"{root.url}: FORMAT was written and is not there; check the mount (kvstore check-root)")
    return found


def _foreign_entry(root: Root) -> str | None:
    """Returns an entry that keeps this folder from becoming a root: a foreign one, or chunks without FORMAT."""
    for entry in root.list(TOP):
        if entry.name in FILE_SYSTEMS_OWN or SCRATCH_FOLDER.fullmatch(entry.name):
            continue
        if entry.name not in _OURS:
            return entry.name
        if entry.name == places.CHUNKS and next(iter(root.list(places.CHUNKS)), None) is not None:
            return entry.name
    return None


def _not_a_format(content: bytes) -> RootMismatch:
    return RootMismatch(
        f"the FORMAT file is not one of kvstore's: it begins with {content[:60]!r}, expected "
        f'{{"format": "kvstore", "version": {VERSION}, ...}}; restore it from a backup, or give an empty folder'
    )


# The root's side of generations: one small file each, first writer wins, the highest number is the current one.
#
# These are files, not a field of ``FORMAT``, which never changes, so that no process rewrites a file that others are
# reading.


def newest_number(root: Root) -> int:
    """Returns the number of the newest generation, whether or not its file can be read; 0 if there is none."""
    numbers = (places.parse_generation(entry.name) for entry in root.list(GENERATIONS) if entry.stat)
    return max((number for number in numbers if number is not None), default=0)


def read_newest(root: Root) -> Generation | None:
    """Returns the newest generation; None if there is none. Raises RootMismatch if its file cannot be read."""
    number = newest_number(root)
    if not number:
        return None
    name = places.generation(number)
    content = read_small(root, name, RECORD_BYTES_MAX)
    found = Generation.from_json(b"" if content is None else content, f"{name} on the root")
    if found.number != number:
        raise RootMismatch(f"{name} on the root is the record of generation {found.number}: its file was renamed")
    return found


def publish(root: Root, generation: Generation, *, ids: Ids, clock: Clock) -> Generation:
    """Publishes a generation unless its number is taken, synced; returns the newest one, which may be another writer's.

    Raises RootMismatch if that cannot be read, and the root's errors.
    """
    publish_small(root, places.generation(generation.number), generation.to_json(), ids=ids, clock=clock)
    newest = read_newest(root)
    if newest is None:
        raise Unavailable(f"{root.url} does not list what was just written: try again in a moment")
    return newest


# The default bound of an embedded root, in the file ``bound`` next to ``FORMAT``: made once, for all processes.
#
# On the root and not in the metadata, because it must outlive these: a root whose metadata were lost and adopted
# again is not to be bounded by another free space. An operator may write another number into the file, or remove it.


FREE_SHARE = 0.5
"""The share of the space that was free. Half leaves other programs as much as the cache, and several roots on one disk
never fill it: each takes half of what the others left."""
BOUND_BYTES_MIN = 64 << 20
"""A disk that was full at that moment would else refuse every put, also once it has room."""
BOUND_FILE_BYTES_MAX = 4096


def default_bound(root: Root, *, ids: Ids, clock: Clock) -> int | None:
    """Returns the bytes that the root's files may take by default; chosen and kept at the first call for a root.

    None if the root does not know its free space. Raises RootMismatch for a file that cannot be read, and the root's
    errors.
    """
    found = _read_bound(root)
    if found is not None:
        return found
    free_bytes = root.space().free_bytes
    if free_bytes is None:
        return None
    chosen = max(BOUND_BYTES_MIN, int(FREE_SHARE * free_bytes))
    try:
        publish_small(root, places.BOUND, json.dumps({"max_bytes": chosen}).encode() + b"\n", ids=ids, clock=clock)
    except Overloaded:
        return chosen  # the disk is full, and what is stored can still be read
    found = _read_bound(root)  # perhaps another process's, which was first
    if found is None:
        raise Unavailable(f"{root.url}: {places.BOUND} was written and is not there: check the mount")
    return found


def _read_bound(root: Root) -> int | None:
    content = read_small(root, places.BOUND, BOUND_FILE_BYTES_MAX)
    if content is None:
        return None
    try:
        max_bytes = parse_json(content)["max_bytes"]
    except (ValueError, KeyError, TypeError):
        max_bytes = None
    if type(max_bytes) is not int or max_bytes < 1:
        raise RootMismatch(
            f'{root.url}: the file {places.BOUND} begins with {content[:60]!r}, expected {{"max_bytes": BYTES}}: '
            "correct it, or remove it for a new default"
        )
    return max_bytes


# The namespaces: which layout each name has, and what each digest in a chunk file means.
#
# The records make chunk files understandable without etcd. Without etcd they are also the claims on names.


NAMESPACE_BYTES_MAX = 1 << 20


class NamespaceRecords:
    """The records of one root; called on threads only."""

    def __init__(self, root: Root, ids: Ids, clock: Clock) -> None:
        self._root = root
        self._ids = ids
        self._clock = clock

    def claim(self, namespace: Namespace) -> None:
        """Claims (tenant, name) for this layout, or confirms the claim, and records the namespace.

        First writer wins, as for chunks. Raises LayoutMismatch if the name has another layout already.
        """
        claim = json.dumps(
            {"name": namespace.name, "tenant": namespace.tenant, "layout": namespace.layout.to_dict()}, sort_keys=True
        ).encode()
        name = places.namespace_claim(claim_key(namespace.tenant, namespace.name))
        _check_layout(namespace, claimed_layout(self._write_once(name, claim), name))
        self._write_once(places.namespace_record(namespace.digest), namespace.to_json())

    def check(self, namespace: Namespace) -> None:
        """Raises LayoutMismatch if the name is claimed for another layout; claims nothing."""
        _check_layout(namespace, read_claim(self._root, namespace))

    def find(self, digest: NamespaceDigest) -> Namespace | None:
        """Returns the namespace with this digest; None if this root has no readable record of it."""
        namespace = _read_namespace(self._root, places.namespace_record(digest))
        return namespace if namespace is not None and namespace.digest == digest else None

    def _write_once(self, name: Name, record: bytes) -> bytes:
        """Writes ``record`` under ``name`` if there is none; returns the record that is there."""
        found = read_small(self._root, name, NAMESPACE_BYTES_MAX)
        if found is None:
            publish_small(self._root, name, record, ids=self._ids, clock=self._clock)
            found = read_small(self._root, name, NAMESPACE_BYTES_MAX)
        return record if found is None else found


def read_namespaces(root: Root, failed: list[KVStoreError] | None = None) -> list[Namespace]:
    """Returns all namespaces recorded on a root, except damaged records. Raises the root's errors.

    Those of single records are added to ``failed``, if it is given, and the others are returned.
    """
    found = []
    for entry in root.list(places.NAMESPACES):
        if entry.stat is not None and entry.name.endswith(".json"):
            try:
                namespace = _read_namespace(root, Name(f"{places.NAMESPACES}/{entry.name}"))
            except KVStoreError as error:
                if failed is None:
                    raise
                failed.append(error)
                continue
            if namespace is not None:
                found.append(namespace)
    return sorted(found, key=lambda each: (each.tenant, each.name, each.fingerprint, each.attributes))


def claim_key(tenant: str, name: str) -> bytes:
    """Digests tenant and name, for file names and keys, whatever their alphabet and length."""
    packed = json.dumps([tenant, name]).encode()
    return hashlib.blake2b(packed, digest_size=16, person=b"kvstore.claim.1").digest()


def read_claim(root: Root, namespace: Namespace) -> Layout | None:
    """Returns the layout for which a namespace's name is claimed; None if it is free. Raises RootMismatch."""
    name = places.namespace_claim(claim_key(namespace.tenant, namespace.name))
    claim = read_small(root, name, NAMESPACE_BYTES_MAX)
    return None if claim is None else claimed_layout(claim, name)


def claimed_layout(claim: bytes, name: Name) -> Layout:
    """Returns the layout that a claim names. Raises RootMismatch if it cannot be read."""
    try:
        return Layout.from_dict(parse_json(claim)["layout"])
    except (ValueError, KeyError, TypeError) as cause:
        raise RootMismatch(f"{name} on the root is damaged: run kvstore fsck --repair ({cause})") from cause


def _read_namespace(root: Root, name: Name) -> Namespace | None:
    """Returns a namespace's record; None if it is missing or unreadable: ``fsck`` names damaged ones."""
    raw = read_small(root, name, NAMESPACE_BYTES_MAX)
    try:
        return None if raw is None else Namespace.from_json(raw)
    except InvalidRequest:
        return None


def _check_layout(namespace: Namespace, existing: Layout | None) -> None:
    if existing not in (None, namespace.layout):
        raise LayoutMismatch(
            f"namespace {namespace.name!r} (tenant {namespace.tenant!r}) exists with {existing}, "
            f"but {namespace.layout} was asked for: use the same layout, or another name"
        )
