"""The FORMAT file: made once, equal for everybody, and a wrong mount is noticed."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.clock import RandomIds
from kvstore.errors import InvalidRequest, RootMismatch, Unavailable
from kvstore.format import places
from kvstore.format.places import Name
from kvstore.root import posix
from kvstore.root.identity import RootId, RootIdentity, create_or_open, read_identity, read_small
from kvstore.root.interface import Root
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.root.posix import PosixRoot
from kvstore.testing.roots import Hosts, content_of, names, publish
from tests.kit.faulty_root import ENOSPC, FaultyRoot, Lost, Missing, Rule

GOOD = {"format": "kvstore", "version": 1, "root": "ab" * 16, "generation": 3, "shard_bits": 7}


def with_format(content: bytes) -> MemoryRoot:
    root = MemoryRoot()
    publish(root, places.FORMAT, content)
    return root


def test_new_root_gets_an_identity_every_host_reads(hosts: Hosts) -> None:
    made = create_or_open(hosts.first, RandomIds(), shard_bits=5)
    assert (made.generation, made.shard_bits, made.version, len(made.root)) == (1, 5, 1, 16)
    assert create_or_open(hosts.second, RandomIds(), shard_bits=9) == made
    assert read_identity(hosts.second) == made
    assert names(hosts.first, "") <= {"FORMAT", "staging"}, "creating left something behind"
    assert names(hosts.first, "staging") == set()
    content = content_of(hosts.first, places.FORMAT)
    assert content is not None
    root = made.root.hex()
    assert json.loads(content) == {**GOOD, "root": root, "generation": 1, "shard_bits": 5}
    for bits in (-1, 17):
        with pytest.raises(InvalidRequest):
            create_or_open(hosts.first, RandomIds(), shard_bits=bits)


def test_hosts_racing_to_make_one_root_agree(hosts: Hosts) -> None:
    if not hosts.first.traits.exclusive_publish:
        pytest.skip("this store cannot create conditionally")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: create_or_open(hosts.both[n % 2], RandomIds()), range(8)))
    assert len(set(found)) == 1


def test_root_other_than_expected_is_refused() -> None:
    root = MemoryRoot()
    made = create_or_open(root, RandomIds())
    assert create_or_open(root, RandomIds(), expect=made.root) == made
    with pytest.raises(RootMismatch, match="is another file system mounted"):
        create_or_open(root, RandomIds(), expect=RootId(bytes(16)))


def test_empty_mount_point_is_refused() -> None:
    root = MemoryRoot()
    with pytest.raises(RootMismatch, match="is the file system mounted"):
        create_or_open(root, RandomIds(), expect=RootId(bytes(16)))
    with pytest.raises(RootMismatch, match="Is the file system mounted"):
        create_or_open(root, RandomIds(), create=False)
    assert names(root, "") == set()


def test_folder_with_foreign_files_is_refused() -> None:
    for foreign in ("holiday.jpg", "Documents/letter.txt", "formats", ".bashrc", "chunks/0001/x"):
        root = MemoryRoot()
        publish(root, Name(foreign), b"mine")
        with pytest.raises(RootMismatch, match="give an empty folder, or restore FORMAT"):
            create_or_open(root, RandomIds())
        assert root.stat(places.FORMAT) is None


def test_files_of_file_systems_do_not_matter() -> None:
    for ours in (
        "lost+found/x",
        ".snapshot/x",
        ".check-0123abcd/x",
        "staging/ab/0.part",
        "quarantine/x",
        "namespaces/x.json",
    ):
        root = MemoryRoot()
        publish(root, Name(ours), b"")
        create_or_open(root, RandomIds())
        assert read_identity(root) is not None


def test_root_made_by_another_host_meanwhile_is_opened() -> None:
    files = MemoryFiles()
    made = create_or_open(MemoryRoot(files), RandomIds())
    publish(MemoryRoot(files), Name("chunks/0001/x"), b"its first chunk")
    # The first look at FORMAT happened before it was there.
    late = FaultyRoot(MemoryRoot(files), [Rule("open", Missing(), lambda name: name == places.FORMAT, times=1)])
    assert create_or_open(late, RandomIds()) == made


def test_wrong_field_is_refused() -> None:
    for changed in (
        {"format": "other"},
        {"version": "1"},
        {"version": True},
        {"root": "ab"},
        {"root": "zz" * 16},
        {"root": 5},
        {"generation": 0},
        {"generation": "1"},
        {"shard_bits": -1},
        {"shard_bits": 17},
        {"shard_bits": 1.5},
    ):
        with pytest.raises(RootMismatch, match="not one of kvstore's"):
            RootIdentity.from_json(json.dumps({**GOOD, **changed}).encode())
    for version in (0, 2, 1000):
        with pytest.raises(RootMismatch, match=f"version {version}.*reads version 1"):
            read_identity(with_format(json.dumps({**GOOD, "version": version}).encode()))
    for content in (b"", b" " * 100_000):
        with pytest.raises(RootMismatch):
            read_identity(with_format(content))
    assert RootIdentity.from_json(json.dumps({**GOOD, "more": [1]}).encode()).generation == 3, "of a later version"


@given(
    st.binary(max_size=300) | st.recursive(st.none() | st.integers(), st.lists).map(lambda j: json.dumps(j).encode())
)
def test_garbage_is_refused(content: bytes) -> None:
    with pytest.raises(RootMismatch):
        RootIdentity.from_json(content)


@pytest.mark.parametrize("operation", ["stage", "publish"])
def test_failed_creation_leaves_nothing(operation: str) -> None:
    inner = MemoryRoot()
    root: Root = FaultyRoot(inner, [Rule(operation, ENOSPC)])
    with pytest.raises(Exception, match="ENOSPC"):
        create_or_open(root, RandomIds())
    assert names(inner, "staging") == set()
    assert inner.stat(places.FORMAT) is None


def test_small_file_removed_while_read_is_missing() -> None:
    root = FaultyRoot(with_format(b"all of it"), [Rule("read", Missing())])
    assert read_small(root, places.FORMAT, 100) == b"", "it is there, and damaged"
    root.set_rules([Rule("read", Missing()), Rule("stat", Lost())])
    assert read_small(root, places.FORMAT, 100) is None


def test_root_made_by_another_thread_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FORMAT is published between the look for it and the comparison with what was known before."""
    root = PosixRoot(tmp_path)
    look = posix._content

    def look_too_early(path: str) -> bytes | None:
        monkeypatch.setattr(posix, "_content", look)
        found = look(path)
        publish(root, places.FORMAT, RootIdentity(RootId(bytes(16)), 1, 8).to_json())
        return found

    monkeypatch.setattr(posix, "_content", look_too_early)
    publish(root, Name("chunks/0001/a"), b"a")
    os.remove(tmp_path / places.FORMAT)
    with pytest.raises(Unavailable, match="still mounted"):
        publish(root, Name("chunks/0002/a"), b"a")
