"""The limits of object stores, and how the root works around them."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.buffers import Borrowed, Withdrawn
from kvstore.errors import InvalidRequest, Overloaded, PermissionDenied, StoreFull, Unavailable
from kvstore.format.places import Name
from kvstore.root.interface import Entry, Root
from kvstore.root.object_store import RANGE_BYTES_MAX, ObjectRoot, Remote, S3Remote, open_object_root
from tests.kit.roots import (
    BUCKET,
    WAIT_S,
    ConditionalFileSystem,
    content_of,
    names,
    publish,
    s3_options,
    stage,
)

A = Name("chunks/0001/a")


def conditional_root(remote: Remote | None = None, **options: Any) -> ObjectRoot:
    remote = remote or Remote(ConditionalFileSystem(global_store=False, skip_instance_cache=True))
    return ObjectRoot(remote, "/root", "conditional://root", exclusive_publish=True, **options)


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

    def pages(self, folder: str) -> Iterator[list[Entry]]:
        self._may("pages")
        return super().pages(folder)


def test_a_staged_file_is_no_object() -> None:
    root = conditional_root()
    staged = stage(root, b"content")
    assert root.stat(staged) is None
    assert names(root, "") == set()
    root.discard(staged)


def test_bytes_that_wait_to_be_published_are_limited() -> None:
    root = conditional_root(staged_bytes_max=100)
    first = stage(root, b"x" * 60)
    with pytest.raises(Overloaded, match="over the limit of 100"):
        stage(root, b"x" * 41)
    root.discard(first)
    second = stage(root, b"x" * 100)
    assert root.publish(second, A, durable=False)
    third = stage(root, b"y" * 100)
    assert root.publish(third, A, durable=False) is False
    stage(root, b"z" * 100)


def test_closing_forgets_what_was_staged() -> None:
    root = conditional_root(staged_bytes_max=100)
    stage(root, b"x" * 100)
    root.close()
    stage(root, b"x" * 100)


def test_a_refused_condition_is_a_taken_name_however_the_server_puts_it() -> None:
    for refusal in (OSError(22, "PreconditionFailed"), OSError(16, "ConditionalRequestConflict")):
        remote = Failing()
        root = conditional_root(remote)
        publish(root, A, b"first")
        remote.raises["create"] = refusal
        assert publish(root, A, b"other") is False
        assert content_of(root, A) == b"first"


def test_a_failed_put_is_an_error_where_nobody_has_the_name() -> None:
    remote = Failing()
    root = conditional_root(remote)
    remote.raises["create"] = OSError(5, "InternalError")
    staged = stage(root, b"content")
    with pytest.raises(Unavailable):
        root.publish(staged, A, durable=False)
    del remote.raises["create"]
    assert root.publish(staged, A, durable=False) is True, "a failed publish may be tried again"


def test_foreign_errors_are_translated_at_the_rim_with_their_cause() -> None:
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


def test_a_file_that_vanished_between_open_and_read_gives_no_bytes() -> None:
    for cause in (FileNotFoundError("gone"), OSError(116, "stale"), OSError(107, "not connected")):
        remote = Failing()
        root = conditional_root(remote)
        publish(root, A, b"content")
        reader = root.open(A)
        assert reader is not None
        remote.raises["read"] = cause
        memory = bytearray(b"\xee" * 7)
        assert reader.read([memoryview(memory)], 0, Borrowed()) == 0
        assert memory == b"\xee" * 7


def test_a_read_under_way_when_the_caller_left_writes_nothing() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Slow(Remote):
        def read(self, path: str, start: int, end: int) -> bytes:
            entered.set()
            assert leave.wait(WAIT_S)
            return super().read(path, start, end)

    root = conditional_root(Slow(ConditionalFileSystem(global_store=False, skip_instance_cache=True)))
    publish(root, A, b"content")
    memory, borrowed, outcome = bytearray(b"\xee" * 7), Borrowed(), []

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


def test_a_large_read_is_several_requests_of_limited_size() -> None:
    asked = []

    class Counting(Remote):
        def read(self, path: str, start: int, end: int) -> bytes:
            asked.append(end - start)
            return super().read(path, start, end)

    root = conditional_root(Counting(ConditionalFileSystem(global_store=False, skip_instance_cache=True)))
    content = bytes(RANGE_BYTES_MAX) + b"end"
    publish(root, A, content)
    assert content_of(root, A) == content
    assert asked == [RANGE_BYTES_MAX, 3]


def test_a_quarantined_object_is_published_back_unless_the_name_is_taken() -> None:
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


def test_conditional_writes_are_tried_and_never_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_case(kind: str, exclusive: bool) -> None:
        remote = Probed(kind)
        monkeypatch.setattr("kvstore.root.object_store.connect", lambda url, options: (remote, "/bucket"))
        root = open_object_root("probed://bucket")
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


def test_a_store_that_is_down_is_unavailable_and_not_merely_unconditional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.root.object_store.connect", lambda url, options: (Probed("down"), "/bucket"))
    with pytest.raises(Unavailable):
        open_object_root("probed://bucket")


def test_fsspecs_own_memory_looks_before_it_writes_and_so_is_not_exclusive() -> None:
    assert open_object_root("memory://exclusive/root").traits.exclusive_publish is False


@pytest.mark.slow
def test_a_bucket_is_listed_page_by_page(s3_server: str) -> None:
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


@pytest.mark.slow
def test_instances_are_not_shared_so_that_nobodys_cached_listing_is_ours(s3_server: str) -> None:
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    first, second = (open_object_root(url, s3_options(s3_server)) for _ in range(2))
    roots: list[Root] = [first, second]
    assert first._remote.fs is not second._remote.fs
    for root in roots:
        assert names(root, "chunks") == set()
    publish(first, Name("chunks/a"), b"x")
    for root in roots:
        assert names(root, "chunks") == {"a"}
        root.close()
