"""The limits of object stores, and how the root works around them."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.core.buffers import BufferLoan, Withdrawn
from kvstore.errors import InvalidRequest, Overloaded, PermissionDenied, StoreFull, Unavailable
from kvstore.format.places import Name
from kvstore.root.interface import FolderEntry
from kvstore.root.object_store import ObjectRoot, Remote, S3Remote, open_object_root, tried_object_root
from kvstore.testing.roots import WAIT_S, content_of, names, publish, stage
from tests.kit.roots import BUCKET, ConditionalFileSystem, s3_options

A = Name("chunks/0001/a")


def conditional_root(remote: Remote | None = None) -> ObjectRoot:
    remote = remote or Remote(ConditionalFileSystem(global_store=False, skip_instance_cache=True))
    return ObjectRoot(remote, "/root", "conditional://root", exclusive_publish=True)


class Failing(Remote):
    """A store whose calls raise on demand; everything else works."""

    def __init__(self) -> None:
        super().__init__(ConditionalFileSystem(global_store=False, skip_instance_cache=True), conditional=True)
        self.raises: dict[str, Exception] = {}

    def _may(self, what: str) -> None:
        if what in self.raises:
            raise self.raises[what]

    def create(self, path: str, content: bytes) -> None:
        self._may("create")
        super().create(path, content)

    def read(self, path: str, start: int, end: int) -> bytes:
        self._may("read")
        return super().read(path, start, end)

    def stat(self, path: str) -> Any:
        self._may("stat")
        return super().stat(path)

    def pages(self, folder: str) -> Iterator[list[FolderEntry]]:
        self._may("pages")
        return super().pages(folder)


def test_refused_condition_is_a_taken_name() -> None:
    for refusal in (OSError(22, "PreconditionFailed"), OSError(16, "ConditionalRequestConflict")):
        remote = Failing()
        root = conditional_root(remote)
        publish(root, A, b"first")
        remote.raises["create"] = refusal
        assert publish(root, A, b"other") is False
        assert content_of(root, A) == b"first"


def test_failed_put_of_a_free_name_is_an_error() -> None:
    remote = Failing()
    root = conditional_root(remote)
    remote.raises["create"] = OSError(5, "InternalError")
    staged = stage(root, b"content")
    with pytest.raises(Unavailable):
        root.publish(staged, A, durable=False)
    del remote.raises["create"]
    assert root.publish(staged, A, durable=False) is True, "a failed publish may be tried again"


def test_foreign_errors_are_translated_with_their_cause() -> None:
    def run_case(cause: Exception, expected: type[Exception]) -> None:
        remote = Failing()
        root = conditional_root(remote)
        publish(root, A, b"content")
        remote.raises = {"stat": cause, "pages": cause}
        for call in (lambda: root.stat(A), lambda: root.open(A), lambda: list(root.list(Name("chunks")))):
            with pytest.raises(expected) as caught:
                call()
            assert caught.value.__cause__ is cause

    for cause, expected in (
        (OSError(28, "full"), StoreFull),
        (OSError(122, "quota"), StoreFull),
        (OSError(16, "SlowDown"), Overloaded),
        (PermissionError("AccessDenied"), PermissionDenied),
        (OSError(30, "read-only"), PermissionDenied),
        (OSError(5, "I/O"), Unavailable),
        (TimeoutError("timed out"), Unavailable),
        (ConnectionResetError("reset"), Unavailable),
        (RuntimeError("a library's own"), Unavailable),
        (NotImplementedError("read-only file system"), InvalidRequest),
        (type("NoCredentialsError", (Exception,), {})("none"), PermissionDenied),
    ):
        run_case(cause, expected)


def test_vanished_file_gives_no_bytes() -> None:
    for cause in (FileNotFoundError("gone"), OSError(116, "stale"), OSError(107, "not connected")):
        remote = Failing()
        root = conditional_root(remote)
        publish(root, A, b"content")
        reader = root.open(A)
        assert reader is not None
        remote.raises["read"] = cause
        memory = bytearray(b"\xee" * 7)
        assert reader.read([memoryview(memory)], 0, BufferLoan()) == 0
        assert memory == b"\xee" * 7


def test_withdrawn_memory_is_not_written_by_a_slow_read() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Slow(Remote):
        def read(self, path: str, start: int, end: int) -> bytes:
            entered.set()
            assert leave.wait(WAIT_S)
            return super().read(path, start, end)

    root = conditional_root(Slow(ConditionalFileSystem(global_store=False, skip_instance_cache=True)))
    publish(root, A, b"content")
    memory, borrowed, outcome = bytearray(b"\xee" * 7), BufferLoan(), []

    def read() -> None:
        reader = root.open(A)
        assert reader is not None
        try:
            reader.read([memoryview(memory)], 0, borrowed)
        except Withdrawn:
            outcome.append("withdrawn")

    thread = threading.Thread(target=read)
    thread.start()
    assert entered.wait(WAIT_S)
    borrowed.withdraw()  # returns although the network has not answered
    leave.set()
    thread.join(WAIT_S)
    assert outcome == ["withdrawn"]
    assert memory == b"\xee" * 7


def test_quarantined_object_is_published_back() -> None:
    root = conditional_root()
    publish(root, A, b"content")
    assert root.move(A, Name("quarantine/a"))
    assert root.publish(Name("quarantine/a"), A, durable=False) is True
    assert content_of(root, A) == b"content"
    publish(root, Name("quarantine/b"), b"late")
    assert root.publish(Name("quarantine/b"), A, durable=False) is False
    assert content_of(root, A) == b"content"
    assert names(root, "quarantine") == set()


class Probed(Remote):
    """A conditional store of a kind, as the probe at opening finds it."""

    def __init__(self, kind: str) -> None:
        super().__init__(ConditionalFileSystem(global_store=False, skip_instance_cache=True), conditional=True)
        self.kind = kind

    def create(self, path: str, content: bytes) -> None:
        if self.kind == "old library":
            raise TypeError("unexpected keyword argument 'mode'")
        if self.kind == "read-only":
            raise PermissionError("AccessDenied")
        if self.kind == "down":
            raise ConnectionResetError("reset")
        if self.kind == "obeys":
            super().create(path, content)
        elif self.kind == "ignores":
            super().write(path, content)
        elif self.kind == "refuses, and writes all the same":
            refuse = self.stat(path) is not None
            super().write(path, content)
            if refuse:
                raise FileExistsError(path)


def test_conditional_writes_are_tried_at_opening() -> None:
    def run_case(kind: str, exclusive: bool) -> None:
        remote = Probed(kind)
        root = tried_object_root("probed://bucket", remote, "/bucket")
        assert root.traits.exclusive_publish is exclusive
        assert names(root, "staging") == set()

    for kind, exclusive in (
        ("obeys", True),
        ("ignores", False),
        ("refuses, and writes all the same", False),
        ("old library", False),
        ("read-only", False),
    ):
        run_case(kind, exclusive)
    with pytest.raises(Unavailable):  # and not merely unconditional
        run_case("down", False)


@pytest.mark.slow
def test_bucket_is_listed_page_by_page(s3_server: str) -> None:
    root = open_object_root(f"s3://{BUCKET}/{uuid.uuid4().hex}", s3_options(s3_server))
    for number in range(7):
        publish(root, Name(f"chunks/0001/{number}"), b"x")
    publish(root, Name("chunks/0001/folder/file"), b"x")
    remote = root._remote
    assert isinstance(remote, S3Remote)
    pages = []
    call = remote.fs.call_s3

    def three_at_a_time(method: str, **parameters: Any) -> Any:
        page = call(method, MaxKeys=3, **parameters)
        pages.append(len(page.get("Contents", ())) + len(page.get("CommonPrefixes", ())))
        return page

    remote.fs.call_s3 = three_at_a_time
    found = {entry.name: entry.stat is None for entry in root.list(Name("chunks/0001"))}
    assert found == {**{str(number): False for number in range(7)}, "folder": True}
    assert len(pages) > 2 and max(pages) <= 3
    root.close()
