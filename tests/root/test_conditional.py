"""Rule O1 on an object store: an object is deleted only if it is the one looked at, or the root says it cannot.

Against an S3 endpoint over HTTP, so that the client library's conditions are tested as well. Tests for every root are
in ``test_conformance.py``.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from kvstore.core.buffers import BufferLoan
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.format.places import Name
from kvstore.root.check import Probe, check_root
from kvstore.root.interface import Root, Seen
from kvstore.root.object_store import ObjectRoot, open_object_root
from kvstore.testing.roots import content_of, names, publish
from tests.kit.object_root import MemoryObjectRoot
from tests.kit.roots import BUCKET, s3_options
from tests.kit.s3_endpoint import Object, Server, serve

pytestmark = pytest.mark.slow

A = Name("chunks/0001/a")
CONDITIONAL_DELETE = "a file is deleted only if it is still the one looked at"


@pytest.fixture
def server() -> Iterator[Server]:
    with serve(Server()) as serving:
        yield serving


def open_at(server: Server) -> ObjectRoot:
    return open_object_root(f"s3://{BUCKET}/{uuid.uuid4().hex}", s3_options(server.endpoint))


def looked(root: Root, name: Name) -> Seen:
    seen = root.look(name, 4)
    assert seen is not None
    return seen


def probed(root: Root) -> Probe | None:
    return next((probe for probe in check_root(root) if probe.name == CONDITIONAL_DELETE), None)


def test_conditional_store_is_recognised_and_left_clean(server: Server) -> None:
    root = open_at(server)
    assert root.traits.conditional_remove and root.traits.exclusive_publish and not root.traits.fenced
    assert server.objects == {}
    root.close()


@pytest.mark.parametrize(
    "server_kind",
    [Server(deletes=False), Server(broken_status=501), Server(broken_status=403), Server(creates=False, deletes=False)],
    ids=["ignores it", "does not implement it", "does not allow it", "knows no conditions"],
)
def test_unconditional_store_is_recognised(server_kind: Server) -> None:
    with serve(server_kind) as server:
        root = open_at(server)
        assert root.traits.conditional_remove is False
        assert root.traits.exclusive_publish is server.creates
        assert server.objects == {}
        publish(root, A, b"first")
        with pytest.raises(InvalidRequest, match="check-root"):
            root.remove_if(A, looked(root, A))
        assert content_of(root, A) == b"first"
        root.close()


def test_library_that_drops_the_condition_is_recognised(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("s3fs.utils")
    known = utils.ParamKwargsHelper._get_valid_keys
    # As botocore before 1.35.67: s3fs leaves out what the library has no name for, and says nothing.
    monkeypatch.setattr(utils.ParamKwargsHelper, "_get_valid_keys", lambda self, name: known(self, name) - {"IfMatch"})
    root = open_at(server)
    assert root.traits.conditional_remove is False
    root.close()


def test_look_is_one_request(server: Server) -> None:
    root = open_at(server)
    publish(root, A, b"first version")
    server.requests.clear()
    seen = looked(root, A)
    assert [method for method, _ in server.requests] == ["GET"]
    assert (seen.prefix, seen.stat.size_bytes) == (b"firs", 13)
    assert seen.tag == next(iter(server.objects.values())).etag
    root.close()


def test_rule_O1_newer_file_is_not_deleted(server: Server) -> None:
    root = open_at(server)
    publish(root, A, b"first")
    seen = looked(root, A)

    def replaced(method: str, path: str) -> None:
        # Another collector deletes it, and a node publishes it again, while our request is in flight.
        if method == "DELETE":
            with server.lock:
                server.objects[path] = Object(b"second")

    server.before = replaced
    assert root.remove_if(A, seen) is False
    assert content_of(root, A) == b"second"
    root.close()


@pytest.mark.parametrize("status", [404, 204, 412])
def test_missing_file_counts_as_deleted(server: Server, status: int) -> None:
    server.gone_status = status
    root = open_at(server)
    publish(root, A, b"first")
    seen = looked(root, A)
    assert root.remove(A)
    assert root.remove_if(A, seen) is True
    root.close()


@pytest.mark.parametrize("status", [409, 500, 501])
def test_failed_delete_is_an_error(server: Server, status: int) -> None:
    root = open_at(server)
    publish(root, A, b"first")
    seen = looked(root, A)
    server.broken_status = status
    with pytest.raises(KVStoreError):
        root.remove_if(A, seen)
    assert content_of(root, A) == b"first"
    root.close()


def test_move_does_not_take_a_newer_file(server: Server) -> None:
    root = open_at(server)
    publish(root, A, b"damaged")

    def repaired(method: str, path: str) -> None:
        if method == "DELETE" and path.endswith(A):
            with server.lock:
                server.objects[path] = Object(b"whole")

    server.before = repaired
    assert root.move(A, Name("quarantine/a")) is True
    assert content_of(root, A) == b"whole"
    assert content_of(root, Name("quarantine/a")) == b"damaged"
    root.close()


def test_put_back_does_not_replace_a_newer_file(server: Server) -> None:
    root = open_at(server)
    publish(root, Name("quarantine/a"), b"old")

    def published(method: str, path: str) -> None:
        if method == "PUT" and path.endswith(A):
            with server.lock:
                server.objects.setdefault(path, Object(b"new"))

    server.before = published
    assert root.publish(Name("quarantine/a"), A, durable=False) is False
    assert content_of(root, A) == b"new"
    assert names(root, "quarantine") == set()
    root.close()


def test_memory_objects_read_what_the_name_holds_now() -> None:
    root = MemoryObjectRoot()
    publish(root, A, b"first")
    reader = root.open(A)
    assert reader is not None
    assert root.remove_if(A, looked(root, A))
    assert names(root, "") == set(), "a folder without files is no folder there"
    publish(root, A, b"again")
    memory = bytearray(9)
    assert reader.read([memoryview(memory)], 0, BufferLoan()) == 5
    assert memory[:5] == b"again"


def test_check_root_says_whether_gc_can_run(server: Server) -> None:
    root = open_at(server)
    probe = probed(root)
    assert probe is not None and probe.ok is True
    assert "kvstore-gc will run here" in probe.detail
    assert server.objects == {}
    server.deletes = False
    probe = probed(root)
    assert probe is not None and probe.ok is False, "a condition that is ignored after all"
    root.close()
    root = open_at(server)
    probe = probed(root)
    assert probe is not None and probe.ok is None and "kvstore-gc will not run here" in probe.consequence
    root.close()
