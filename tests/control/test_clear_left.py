"""A clear at a worker that left something behind has the exit code of one that opened the root itself."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from kvstore.cli.app import app
from kvstore.meta.memory import MemoryStore
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.worker.server import Worker
from tests.kit.census import ModelNode, closing
from tests.kit.faulty_root import EIO, FaultyRoot, Rule
from tests.kit.patience import slowness
from tests.kit.workers import WAIT_S, connected


@pytest.fixture
def nodes() -> Iterator[tuple[ModelNode, ModelNode, Worker]]:
    files, store = MemoryFiles(), MemoryStore()
    good, bad = (
        ModelNode(root, store, model, clear_answer_s=0.5 * slowness())
        for root, model in ((FaultyRoot(MemoryRoot(files)), "stable"), (MemoryRoot(files), "canary"))
    )
    with closing(good, bad):
        worker = Worker(good.member, "127.0.0.1:0")
        worker.start()
        try:
            bad.put(1)
            bad.drain()
            yield good, bad, worker
        finally:
            worker.stop()


def silence(node: ModelNode) -> None:
    """Makes a node ignore orders, like one that hangs."""
    follower = node.member._follower
    assert follower is not None
    follower.close(1.0)


def clear(worker: Worker, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["clear", *arguments, "--yes", "--connect", worker.address, "--json"])


def test_a_node_that_did_not_answer_makes_exit_code_1(nodes: tuple[ModelNode, ModelNode, Worker]) -> None:
    _, bad, worker = nodes
    silence(bad)
    result = clear(worker, "canary")
    said = json.loads(result.stdout)
    assert (said["chunks"], said["unconfirmed"]) == (4, 1)
    assert bad.session.hex() in said["message"] and result.exit_code == 1
    with connected(worker.address) as store:
        operation = store.clear(bad.selection)
        assert operation.wait(WAIT_S) and operation.counts["unconfirmed"] == 1


def test_chunks_that_could_not_be_deleted_make_exit_code_1_and_the_next_one_0(
    nodes: tuple[ModelNode, ModelNode, Worker],
) -> None:
    good, _, worker = nodes
    assert isinstance(good.root, FaultyRoot)
    good.root.set_rules([Rule("remove", EIO)])
    result = clear(worker, "canary")
    assert json.loads(result.stdout)["failed"] == 4 and result.exit_code == 1
    good.root.set_rules([])
    result = clear(worker, "canary")
    assert json.loads(result.stdout)["chunks"] == 4 and result.exit_code == 0
