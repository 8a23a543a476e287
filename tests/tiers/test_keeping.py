"""Chunks that stay in memory as long as somebody uses them: holds and views (MEMORY.md, R3, I2, L1)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.kit.faulty_root import EROFS, Rule
from tests.kit.scattering import press
from tests.kit.stores import same
from tests.kit.tiers import Acting, eventually, faulty, on_posix


@pytest.fixture(params=["faulty", "posix"])
def node(request: pytest.FixtureRequest, tmp_root: Path) -> Iterator[Acting]:
    """With a local disk; over a root in memory, and over one that native code reads."""
    root = on_posix(tmp_root / "root") if request.param == "posix" else faulty()
    with Acting(root, disk=tmp_root / "disk") as acting:
        yield acting


def test_r3_a_hold_keeps_its_chunks_in_memory_under_pressure(node: Acting) -> None:
    node.put(1, 10)
    node.drain()
    hold = node.cache.hold(node.prompts.tokens(1, 10))
    node.lose(1, 10)
    press(node)
    assert all(node.in_memory(1, 10)) and hold.tokens == 10 * node.size
    out = np.empty(node.cache.layout.shape(hold.tokens), node.cache.layout.numpy_dtype)
    assert hold.read_into(out) == hold.tokens and same(out, node.prompts.kv(1, 10))
    hold.release()
    press(node, 20)
    assert not any(node.in_memory(1, 10))
    node.assert_settled()


def test_r3_a_hold_that_ends_by_itself_lets_go() -> None:
    with Acting(faulty()) as node:
        node.put(1, 4)
        node.drain()
        hold_id = node.node.hold(node.chain(1, 4), ttl_s=0.001).id
        assert node.stat("memory_referenced_bytes") > 0
        eventually(lambda: not node.node.holds.find(hold_id))
        node.member.node.holds.expire()
        node.assert_settled()


def test_hold_ended_during_its_lookup_keeps_no_memory() -> None:
    root, ended = faulty(), list[object]()
    with Acting(root) as node:
        node.put(1, 4)
        node.drain()

        def end(name: object) -> bool:
            node.node.holds.drop_all()  # as when the session is lost
            ended.append(name)
            return False

        root.set_rules([Rule("stat", EROFS, end)])
        node.node.hold(node.chain(1, 6))
        assert ended and node.stat("memory_referenced_bytes") == 0


def test_views_keep_their_chunks_for_as_long_as_they_live(node: Acting) -> None:
    node.put(1, 10)
    node.drain()
    with node.cache.hold(node.prompts.tokens(1, 10)) as hold:
        views = hold.view()
    node.lose(1, 10)
    press(node)
    assert len(views) == 10 and same(np.concatenate(views, axis=2), node.prompts.kv(1, 10))
    assert not any(view.flags.writeable for view in views)
    assert node.stat("memory_leased_bytes") == 10 * node.unit_bytes
    part = views[3][1:, :, :5]
    del views
    gc.collect()
    assert node.stat("memory_leased_bytes") == node.unit_bytes
    press(node, 20)
    assert same(np.ascontiguousarray(part), np.ascontiguousarray(node.prompts.kv(1, 4, first=3)[1:, :, :5]))
    node.cache.clear()
    press(node, 40)
    assert same(np.ascontiguousarray(part), np.ascontiguousarray(node.prompts.kv(1, 4, first=3)[1:, :, :5]))
    del part
    gc.collect()
    node.assert_settled()


def test_l1_views_beyond_half_of_memory_come_from_the_root(node: Acting) -> None:
    node.put(1, 30)
    node.drain()
    node.put(2, 10)
    node.drain()
    with node.cache.hold(node.prompts.tokens(1, 30)) as first, node.cache.hold(node.prompts.tokens(2, 10)) as second:
        views, others = first.view(), second.view()
    assert (len(views), len(others)) == (30, 10)
    assert node.stat("memory_leased_bytes") == 31 * node.unit_bytes <= node.memory.size_bytes // 2
    assert same(np.concatenate(others, axis=2), node.prompts.kv(2, 10))
    del views, others
    gc.collect()
    node.assert_settled()


def test_views_outlive_the_store(tmp_root: Path) -> None:
    with Acting(on_posix(tmp_root)) as node:
        node.put(1, 4)
        with node.cache.hold(node.prompts.tokens(1, 4)) as hold:
            views = hold.view()
    assert same(np.concatenate(views, axis=2), node.prompts.kv(1, 4))
    del views
    gc.collect()
