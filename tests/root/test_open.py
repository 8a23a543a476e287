"""From what a user types to a root."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest, PermissionDenied, RootMismatch, Unavailable
from kvstore.format.places import Name
from kvstore.root.memory import MemoryRoot
from kvstore.root.object_store import ObjectRoot
from kvstore.root.open import open_root
from kvstore.root.posix import PosixRoot
from kvstore.testing.roots import content_of, publish
from tests.kit.roots import BUCKET, s3_options


def test_path_and_its_url_are_one_folder(tmp_path: Path) -> None:
    publish(open_root(str(tmp_path)), Name("a"), b"1")
    for url in (
        f"file://{tmp_path}",
        f"FILE://{tmp_path}",
        f"file://localhost{tmp_path}",
        f"{tmp_path}/",
        f"{tmp_path}/.",
    ):
        root = open_root(url)
        assert isinstance(root, PosixRoot)
        assert root.path == str(tmp_path)
        assert content_of(root, Name("a")) == b"1"


def test_file_url_may_be_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my kv#1").mkdir()
    for url in (f"file://{tmp_path}/my%20kv%231", "my kv#1"):
        root = open_root(url)
        assert isinstance(root, PosixRoot) and root.path == str(tmp_path / "my kv#1")


def test_folder_is_made_if_its_parent_exists(tmp_path: Path) -> None:
    open_root(str(tmp_path / "new"))
    assert (tmp_path / "new").is_dir()
    with pytest.raises(RootMismatch, match="not mounted"):
        open_root(str(tmp_path / "no" / "such"))
    assert not (tmp_path / "no").exists()


def test_file_is_no_root(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in ("file", "file/kv"):
        with pytest.raises(InvalidRequest, match="not a folder"):
            open_root(str(tmp_path / path))
    with pytest.raises(InvalidRequest, match="no folder can be made in /proc"):
        open_root("/proc/kvstore")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_forbidden_folder_is_permission_denied(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IREAD | stat.S_IEXEC)
    with pytest.raises(PermissionDenied):
        open_root(str(tmp_path / "new"))


def test_wrong_url_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for url in (
        "",
        "file://",
        "file://kv/x",
        "file://relative",
        "file:/mnt/kv",
        "file:kv",
        "memory:x",
        "s3:bucket/kv",
        "/mnt/\0kv",
        "nonsense://x",
        "s4://bucket/x",
        "s3://",
        "s3:///",
        "fsspec+nonsense://x",
        "simplecache::s3://bucket/x",
        "memory2://x",
    ):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(InvalidRequest, match="expected"):
            open_root(url)
        assert os.listdir(tmp_path) == []
    with pytest.raises(InvalidRequest):
        open_root(5)  # type: ignore[arg-type]


def test_memory_is_shared_by_name() -> None:
    first, same, other = open_root("memory://shared"), open_root("memory://shared"), open_root("memory://other")
    assert isinstance(first, MemoryRoot)
    publish(first, Name("a"), b"1")
    assert content_of(same, Name("a")) == b"1"
    assert content_of(other, Name("a")) is None
    assert content_of(open_root("memory://"), Name("a")) is None
    first.remove(Name("a"))


def test_fsspec_serves_a_local_folder(tmp_path: Path) -> None:
    # A file system with real folders behind the interface of an object store, as SFTP and HDFS are.
    root = open_root(f"fsspec+file://{tmp_path}/kv")
    assert publish(root, Name("chunks/0001/a"), b"1") is True
    assert publish(root, Name("chunks/0001/a"), b"2") is False
    assert (tmp_path / "kv/chunks/0001/a").read_bytes() == b"1"
    assert root.move(Name("chunks/0001/a"), Name("quarantine/a"))
    assert root.remove_folder(Name("quarantine")) is False
    assert root.remove(Name("quarantine/a"))
    assert root.remove_folder(Name("quarantine")) is True
    assert not (tmp_path / "kv/quarantine").exists()


def test_unknown_options_are_refused() -> None:
    for options in ({"no_such_option": 1}, {"endpoint_url": "no URL"}):
        with pytest.raises(InvalidRequest, match="check its options"):
            open_root(f"s3://{BUCKET}/kv", {"key": "k", "secret": "s", **options})


@pytest.mark.slow
def test_missing_bucket_is_refused(s3_server: str) -> None:
    root = open_root(f"s3://{BUCKET}/opened", s3_options(s3_server))
    assert isinstance(root, ObjectRoot)
    # rclone ignores If-None-Match; only a probe can know.
    assert root.traits.exclusive_publish is False
    assert list(root.list(Name("staging"))) == [], "the probe left its key behind"
    root.close()
    with pytest.raises(RootMismatch, match="no such bucket"):
        open_root("s3://no-such-bucket/kv", s3_options(s3_server))


@pytest.mark.slow
def test_wrong_credentials_are_permission_denied(s3_server: str) -> None:
    with pytest.raises(PermissionDenied, match="credentials"):
        open_root(f"s3://{BUCKET}/kv", {**s3_options(s3_server), "secret": "wrong"})


@pytest.mark.slow
def test_missing_server_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        open_root(f"s3://{BUCKET}/kv", s3_options("http://127.0.0.1:1"))
