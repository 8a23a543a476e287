"""X12: a worker on loopback serves only the account that it runs as, on every path, unless told otherwise."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import stat
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import pytest

import kvstore
from kvstore.cli.access import ServerAccess
from kvstore.client.pool import Bulk
from kvstore.engine.open import open_member
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.security import authentication
from kvstore.security.authentication import Account, account_secret, proof
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1.kvstore_pb2_grpc import KVStoreStub
from kvstore.worker.server import Worker
from tests.kit.cases import for_each
from tests.kit.patience import PATIENCE_S
from tests.kit.stores import SMALL, kv_of, same
from tests.kit.transports import WAYS

NOBODY = 65534
TOKENS = range(4 * SMALL.chunk_tokens)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a process of root becomes nobody")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of this account, for the time of a test."""
    monkeypatch.setattr(authentication, "_home", lambda: tmp_path)
    return tmp_path


@pytest.fixture(params=["tcp", "unix"])
def address(request: pytest.FixtureRequest, tmp_root: Path, home: Path) -> Iterator[str]:
    """A worker as ``kvstore worker`` starts it, on a port of loopback or on a path; and a prompt that it has."""
    # Not below pytest's own folder, which each run on this machine makes private again.
    folder = Path(tempfile.mkdtemp(prefix="kvstore-test-"))
    folder.chmod(0o711)
    listen = "127.0.0.1:0" if request.param == "tcp" else f"unix:{folder}/worker.socket"
    member = open_member(str(tmp_root))
    worker = Worker(member, listen, security=ServerAccess().open(listen))
    try:
        at = worker.start()
        with kvstore.connect(at) as store:
            store.namespace("m", SMALL).put(TOKENS, kv_of(SMALL, TOKENS))
        yield at
    finally:
        worker.stop()
        member.close()
        shutil.rmtree(folder)


def _reads(address: str, way: str) -> str:
    """Reads the prompt by one way; returns how that ended."""
    try:
        with kvstore.connect(address, bulk=Bulk.of(way)) as store:
            count, kv = store.namespace("m", SMALL).get(TOKENS)
            assert same(kv, kv_of(SMALL, TOKENS))
            return str(count)
    except KVStoreError as error:
        return f"{type(error).__name__}: {error}"


def _in_child(answer: Connection, call: Callable[..., str], *given: object) -> None:
    try:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        answer.send(call(*given))
    except BaseException:
        answer.send(traceback.format_exc())
        raise


def as_nobody(call: Callable[..., str], *given: object) -> str:
    """What a call returns in a process of another account."""
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    child = context.Process(target=_in_child, args=(its, call, *given))
    child.start()
    its.close()
    try:
        assert mine.poll(PATIENCE_S), "no answer"
        return str(mine.recv())
    finally:
        child.join(PATIENCE_S)


@needs_root
@pytest.mark.slow
@for_each("way", WAYS)
def test_only_its_own_account_is_served(address: str, way: str) -> None:
    if way != "tcp" or not address.startswith("unix:"):  # a worker on a path has no port
        assert _reads(address, way) == str(len(TOKENS))
    said = as_nobody(_reads, address, way)
    if address.startswith("unix:"):
        assert said.startswith("Unavailable: ") and "run as the account of the worker" in said, said
    else:
        assert said.startswith("Unauthenticated: this worker serves only the account that it runs as, 'root': run"), (
            said
        )


def test_plain_grpc_client_on_a_unix_socket_is_served(tmp_path: Path, home: Path) -> None:
    listen = f"unix:{tmp_path}/worker.socket"
    member = open_member(str(tmp_path / "root"))
    worker = Worker(member, listen, security=ServerAccess().open(listen))
    try:
        with grpc.insecure_channel(worker.start()) as channel:
            KVStoreStub(channel).Stats(pb.StatsRequest(), timeout=PATIENCE_S)
        assert stat.S_IMODE((tmp_path / "worker.socket").stat().st_mode) == 0o600
        assert not list(home.glob(".local/**/*.secret"))
    finally:
        worker.stop()
        member.close()


@needs_root
@pytest.mark.slow
def test_any_account_is_served_if_asked_for(tmp_root: Path, home: Path, caplog: pytest.LogCaptureFixture) -> None:
    security = ServerAccess(any_account=True).open("127.0.0.1:0")
    assert security.account is None
    assert [each.getMessage().split()[0] for each in caplog.records] == ["worker.any_account"]
    member = open_member(str(tmp_root))
    worker = Worker(member, "127.0.0.1:0", security=security)
    try:
        at = worker.start()
        with kvstore.connect(at) as store:
            store.namespace("m", SMALL).put(TOKENS, kv_of(SMALL, TOKENS))
        assert as_nobody(_reads, at, "grpc") == str(len(TOKENS))
    finally:
        worker.stop()
        member.close()


def test_secret_is_made_once_for_its_account(home: Path) -> None:
    first = account_secret()
    path = home / ".local/state/kvstore/account.secret"
    assert len(first) == 32 and account_secret() == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_proof_of_one_port_proves_nothing_at_another(home: Path) -> None:
    served = Account(account_secret())
    assert not served.is_proved_by("")
    served.serve("127.0.0.1:7070")
    assert served.is_proved_by(proof(account_secret(), "localhost:7070"))
    for other in (proof(account_secret(), "127.0.0.1:7071"), proof(b"another", "127.0.0.1:7070"), "", "é"):
        assert not served.is_proved_by(other)


@for_each("listen", ["0.0.0.0:7070", "10.0.0.7:7070"])
def test_reachable_worker_has_no_account(home: Path, listen: str) -> None:
    assert ServerAccess(insecure=True).open(listen).account is None


@for_each("content", ["", "ab", "0" * 62, "0" * 66, "no hex"])
def test_x12_bad_secret_is_refused(home: Path, content: str) -> None:
    path = home / ".local/state/kvstore/account.secret"
    path.unlink(missing_ok=True)
    account_secret()
    path.chmod(0o644)
    with pytest.raises(InvalidRequest, match=r"so that others can read it: .*give --any-account"):
        ServerAccess().open("127.0.0.1:7070")
    path.chmod(0o600)
    path.write_text(content)
    with pytest.raises(InvalidRequest, match=r"remove it, and start the workers again|is over 64 bytes"):
        account_secret()
