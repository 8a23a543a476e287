"""Cases of a mounted root only: cold files, hostile names, links, modes, full and read-only mounts."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.core.buffers import BufferLoan
from kvstore.errors import KVStoreError, Overloaded, PermissionDenied, RootMismatch, Unavailable
from kvstore.format.places import FOLDERS, Name
from kvstore.root.posix import BOUNCE_BYTES, PosixRoot
from kvstore.testing.roots import content_of, names, publish, stage
from tests.kit.programs import ended
from tests.kit.stores import TINY, fresh, kv_of, store_on

A = Name("chunks/0001/a")


def publish_cold(path: Path, content: bytes) -> PosixRoot:
    """A published file whose bytes are not in the page cache, as far as the kernel obeys."""
    root = PosixRoot(path)
    staged = Name("staging/cold/0.part")
    root.stage(staged, [memoryview(content)], stamp_ns=0, durable=True)
    root.publish(staged, A, durable=True)
    fd = os.open(path / A, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return root


def test_cold_file_is_read_into_pieces_of_any_size(tmp_path: Path) -> None:
    content = os.urandom(2 * BOUNCE_BYTES + 12_345)
    root = publish_cold(tmp_path, content)
    memory = bytearray(len(content))
    view, pieces, start = memoryview(memory), [], 0
    for size in (0, 1, 4095, 0, 100_000, BOUNCE_BYTES, 0, len(content)):
        pieces.append(view[start : start + size])
        start += size
    reader = root.open(A)
    assert reader is not None
    with reader:
        assert reader.read(pieces, 0, BufferLoan()) == len(content)
    assert memory == content


def test_entry_that_is_no_file_is_missing(tmp_path: Path) -> None:
    for kind in ("folder", "fifo", "dangling link", "link to a folder", "link to a file"):
        place = fresh(tmp_path)
        path = place / A
        path.parent.mkdir(parents=True)
        if kind == "folder":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "dangling link":
            path.symlink_to(place / "nowhere")
        elif kind == "link to a file":
            (place / "another's").write_bytes(b"whole")
            path.symlink_to(place / "another's")
        else:
            path.symlink_to(place)
        root = PosixRoot(place)
        assert root.stat(A) is None
        assert root.open(A) is None
        assert len(list(root.list(Name("chunks/0001")))) == 1


@contextmanager
def mounted(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Mounts a small tmpfs. Needs root, and the right to mount."""
    folder.mkdir()
    done = ended("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder))
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_file_system_is_overloaded_until_space_is_free(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", 1 << 20) as folder:
        root = PosixRoot(folder)
        assert publish(root, A, bytes(700_000)) is True
        staged = Name("staging/full/0.part")
        with pytest.raises(Overloaded, match="free space"):
            root.stage(staged, [memoryview(bytes(700_000))], stamp_ns=0, durable=False)
        root.discard(staged)
        assert names(root, "staging/full") == set(), "a torn file was left on the full file system"
        assert content_of(root, A) == bytes(700_000), "reads go on"
        assert root.touch(A, 1_000_000_000) is True
        space = root.space()
        assert space.total_bytes == 1 << 20 and space.free_bytes is not None and space.free_bytes < 700_000
        root.remove(A)
        assert publish(root, A, bytes(700_000)) is True


def test_read_only_file_system_denies_writes_and_serves_reads(tmp_path: Path) -> None:
    with mounted(tmp_path / "readonly", 1 << 20) as folder:
        root = PosixRoot(folder)
        publish(root, A, b"content")
        staged = stage(root, b"late")
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        for call in (
            lambda: stage(root, b"new"),
            lambda: root.publish(staged, Name("chunks/0001/b"), durable=False),
            lambda: root.move(A, Name("quarantine/a")),
            lambda: root.remove(A),
        ):
            with pytest.raises(PermissionDenied, match="mount options"):
                call()
        assert root.touch(A, 5) is False, "recency is advice: not being able to renew it must not fail a read"
        assert content_of(root, A) == b"content"
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
        assert publish(root, Name("chunks/0001/b"), b"new") is True


def test_lost_mount_never_gives_wrong_bytes(tmp_path: Path) -> None:
    with mounted(tmp_path / "gone", 1 << 20) as folder:
        root = PosixRoot(folder)
        publish(root, A, b"content")
        reader = root.open(A)
        assert reader is not None
        subprocess.run(["umount", "-l", str(folder)], check=True)
        try:
            assert root.stat(A) is None
            assert root.open(A) is None
            assert list(root.list(Name("chunks"))) == []
            memory = bytearray(7)
            with reader, suppress(KVStoreError):
                count = reader.read([memoryview(memory)], 0, BufferLoan())
                assert memory[:count] == b"content"[:count]
        finally:
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], check=True)


# Folders of a root that are symbolic links: what would be written there goes to somebody else, so it is refused.


LAYOUT = kvstore.Layout(layers=1, kv_heads=1, head_dim=4, dtype="int8", chunk_tokens=4)


def test_a_root_with_a_folder_that_is_a_link_is_refused(tmp_root: Path) -> None:
    for exists in (True, False):
        for link in sorted(FOLDERS):
            folder = fresh(tmp_root)
            root, elsewhere = folder / "root", folder / "elsewhere"
            kvstore.open(root, max_bytes=None).close()
            if (root / link).exists():
                (root / link).rename(folder / "before")
            if exists:
                elsewhere.mkdir()
            (root / link).symlink_to(elsewhere)
            with pytest.raises(RootMismatch, match=rf"{link} is a symbolic link: .* remove the link"):
                kvstore.open(root)
            (root / link).unlink()
            if (folder / "before").exists():
                (folder / "before").rename(root / link)
            with kvstore.open(root) as store:
                assert (
                    store.namespace("m", LAYOUT).put(range(4), np.zeros(LAYOUT.shape(4), np.int8)).chunks_written == 1
                )


@pytest.mark.parametrize("link", ["staging", "chunks"])
def test_nothing_is_written_through_a_link_that_comes_later(tmp_root: Path, link: str) -> None:
    root, elsewhere = PosixRoot(tmp_root / "root"), tmp_root / "elsewhere"
    (tmp_root / "root").mkdir()
    elsewhere.mkdir()
    (tmp_root / "root" / link).symlink_to(elsewhere)
    with pytest.raises(Unavailable, match="is a symbolic link"):
        root.stage(Name(f"{link}/ab/1.part"), [memoryview(b"x")], stamp_ns=0, durable=False)
    assert list(elsewhere.iterdir()) == []


# Modes of what a root gets: nothing is for others, and a group gets what the umask leaves it.


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


class NotNative(PosixRoot):
    """A root whose files only Python writes."""


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_a_root_is_for_its_owner_and_group(tmp_path: Path, native: bool) -> None:
    for mask, file, folder in ((0o022, 0o640, 0o750), (0o002, 0o660, 0o770), (0, 0o660, 0o770)):
        place = fresh(tmp_path)
        root, tokens = place / "root", np.arange(4 * TINY.chunk_tokens)
        with umask(mask):
            if native:
                store = kvstore.open(str(root))
            else:
                root.mkdir(folder)
                store = store_on(NotNative(root))
            with store:
                cache = store.namespace("m", TINY)
                assert cache.put(tokens, kv_of(TINY, tokens)).chunks_written == 4
                assert cache.blocks.put([b"k" * 16], [bytes(100)]) == [True]
        found = [root, *root.rglob("*")]
        assert sum(each.is_file() and "chunks" in each.parts for each in found) == 5
        assert {stat.S_IMODE(each.stat().st_mode) for each in found if each.is_file()} == {file}
        assert {stat.S_IMODE(each.stat().st_mode) for each in found if each.is_dir()} == {folder}
