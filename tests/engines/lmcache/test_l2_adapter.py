"""The needs of LMCache's controllers: its keys, objects and factory, with our adapter behind them."""

from __future__ import annotations

import threading
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmcache.v1.distributed import api
from lmcache.v1.distributed.internal_api import L2AdapterListener, L2StoreResult

from kvstore.connectors.lmcache_keys import OPAQUE, tensors
from kvstore.errors import InvalidRequest
from tests.engines.lmcache.objects import adapter, equal, found, key, layouts, loaded, made, stored
from tests.kit.stores import chunk_files, flip
from tests.kit.workers import serving

WAYS = ("root", "worker")


class Told(L2AdapterListener):  # type: ignore[misc]
    """What LMCache's listeners are told of stores."""

    def __init__(self) -> None:
        self.stored: list[list[Any]] = []

    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        assert len(keys) == len(sizes)
        self.stored.append(keys)

    def on_l2_keys_accessed(self, keys: list[Any]) -> None:
        pass

    def on_l2_keys_deleted(self, keys: list[Any]) -> None:
        pass


@contextmanager
def opened(way: str, root: Path, **params: Any) -> Iterator[Any]:
    if way == "root":
        with adapter(root=str(root), **params) as l2:
            yield l2
    else:
        with serving(root) as served, adapter(connect=served.address, **params) as l2:
            yield l2


@pytest.mark.smoke
@pytest.mark.parametrize("way", WAYS)
def test_what_was_stored_is_found_and_loaded_bit_for_bit_also_after_a_restart(tmp_root: Path, way: str) -> None:
    keys = [key(number) for number in range(8)]
    objects = [made(number) for number in range(8)]
    with opened(way, tmp_root) as l2:
        result = stored(l2, keys, objects)
        assert result.is_successful()
        assert result.bytes_transferred() == sum(each.get_size() for each in objects)
        assert l2.get_usage().total_bytes_used == result.bytes_transferred()
        assert stored(l2, keys, objects).bytes_transferred() == 0, "it was there"
    with opened(way, tmp_root) as l2:
        assert found(l2, keys) == list(range(8))
        targets = [made() for _ in keys]
        assert loaded(l2, keys, targets) == list(range(8))
        assert equal(objects, targets)
        l2.submit_unlock(keys)


@pytest.mark.parametrize("way", WAYS)
def test_a_store_counts_only_the_objects_that_were_not_there(tmp_root: Path, way: str) -> None:
    keys, objects = [key(number) for number in range(6)], [made(number) for number in range(6)]
    size = objects[0].get_size()
    with opened(way, tmp_root) as l2:
        told = Told()
        l2.register_listener(told)
        assert stored(l2, keys[::2], objects[::2]) == L2StoreResult(True, 3 * size)
        assert stored(l2, keys, objects) == L2StoreResult(True, 3 * size)
        assert stored(l2, keys, objects) == L2StoreResult(True, 0)
        assert told.stored == [keys[::2], keys[1::2]]
        assert loaded(l2, keys, [made() for _ in keys]) == [*range(6)]


def test_of_an_object_that_is_only_bytes_the_first_stays(tmp_root: Path) -> None:
    first, longer = made(1, torch.uint8, (5000,)), made(2, torch.uint8, (6000,))
    with adapter(root=str(tmp_root)) as l2:
        assert stored(l2, [key(1)], [first]) == L2StoreResult(True, 5000)
        assert stored(l2, [key(1)], [longer]) == L2StoreResult(True, 0)
        target = made(None, torch.uint8, (5000,))
        assert loaded(l2, [key(1)], [target]) == [0]
        assert equal([target], [first])


@pytest.mark.parametrize(
    ("place", "residency"),
    [
        ({"root": "{}"}, "local"),
        ({"root": "file://{}"}, "local"),
        ({"root": "{}", "etcd": "127.0.0.1:1"}, "remote"),
        ({"connect": "127.0.0.1:1"}, "remote"),
    ],
    ids=str,
)
def test_memory_tags_say_if_other_hosts_share_the_store(
    tmp_root: Path, monkeypatch: pytest.MonkeyPatch, place: dict[str, str], residency: str
) -> None:
    if not hasattr(api, "MemoryTags"):  # before LMCache 0.5.7
        monkeypatch.setattr(api, "MemoryTags", namedtuple("MemoryTags", "segment residency"), raising=False)
        monkeypatch.setattr(api, "MemorySegment", SimpleNamespace(STORAGE="storage"), raising=False)
        monkeypatch.setattr(api, "MemoryResidency", SimpleNamespace(LOCAL="local", REMOTE="remote"), raising=False)
    with adapter(**{name: value.format(tmp_root) for name, value in place.items()}) as l2:
        tags = l2.get_memory_tags()
    assert (tags.segment, tags.residency) == ("storage", residency)


OTHERS = {
    "rank": {"kv_rank": 0x02000200},
    "group": {"object_group_id": 1},
    "user": {"cache_salt": "alice"},
    "model": {"model_name": "org/other"},
    "hash": {"chunk_hash": bytes(32)},
}


@pytest.mark.parametrize("told", OTHERS.values(), ids=OTHERS)
def test_another_rank_group_user_model_or_hash_is_another_object(tmp_root: Path, told: dict[str, Any]) -> None:
    described = {**layouts(), 1: layouts()[0]}
    with adapter(root=str(tmp_root)) as l2:
        stored(l2, [key(1)], [made(1)])
        assert found(l2, [key(1, **told)], described) == []
        assert loaded(l2, [key(1, **told)], [made()]) == []


def test_another_type_or_shape_of_the_same_size_is_a_miss(tmp_root: Path) -> None:
    turned = (2, 4, 128, 64)
    with adapter(root=str(tmp_root)) as l2:
        stored(l2, [key(1)], [made(1)])
        assert found(l2, [key(1)], layouts(torch.bfloat16)) == []
        assert found(l2, [key(1)], layouts(shape=turned)) == []
        assert loaded(l2, [key(1)], [made(dtype=torch.bfloat16)]) == []
        assert loaded(l2, [key(1)], [made(shape=turned)]) == []


def test_an_object_that_is_only_bytes_is_found_whatever_comes_out_of_it(tmp_root: Path) -> None:
    """LMCache's serialisers look up with the tensors' layout and store bytes."""
    packed = {"dtype": torch.uint8, "shape": (5000,)}
    with adapter(root=str(tmp_root)) as l2:
        stored(l2, [key(1)], [made(1, **packed)])
        assert found(l2, [key(1), key(2)]) == [0]
        target = made(**packed)
        assert loaded(l2, [key(1)], [target]) == [0]
        assert equal([target], [made(1, **packed)])
    assert tensors([(5000,)], [torch.uint8]) == OPAQUE


def test_bytes_of_a_serialiser_are_shared_with_those_that_are_told_the_same_of_it(tmp_root: Path) -> None:
    """Equally long bytes may come from another type, shape or serialiser, and LMCache does not say which."""
    packed = {"dtype": torch.uint8, "shape": (5000,)}
    for settings, found_by in (({}, []), ({"serde": "fp8 e4m3 tp4"}, [{"serde": "fp8 e4m3 tp4"}])):
        with adapter(root=str(tmp_root), **settings) as l2:
            stored(l2, [key(1)], [made(1, **packed)])
            assert found(l2, [key(1)]) == [0]
        for other in ({}, {"serde": "fp8 e5m2 tp4"}, {"serde": "fp8 e4m3 tp4"}):
            expected = [0] if other in found_by else []
            with adapter(root=str(tmp_root), **other) as l2:
                assert found(l2, [key(1)]) == expected
                assert loaded(l2, [key(1)], [made(**packed)]) == expected


def test_what_is_refused_or_breaks_is_told_in_the_status(tmp_root: Path) -> None:
    with adapter(root=str(tmp_root)) as l2:
        assert not stored(l2, [key(1), key(2)], [made(1)]).is_successful()
        assert l2.report_status()["error"]
        assert found(l2, [key(1)]) == []
        assert l2.report_status()["is_healthy"]
        many = [key(number) for number in range(70_000)]
        assert found(l2, many) == []
        assert "65536" in l2.report_status()["error"]


def test_calls_after_it_was_closed_fail_and_raise_nothing(tmp_root: Path) -> None:
    with adapter(root=str(tmp_root)) as l2:
        pass
    l2.submit_store_task([key(1)], [made(1)])
    l2.submit_lookup_and_lock_task([key(1)], layouts())
    l2.submit_load_task([key(1)], [made()])
    l2.submit_unlock([key(1)])
    assert not l2.report_status()["is_healthy"]
    l2.close()


@pytest.mark.parametrize(
    ("name", "other"), [("fingerprint", "two"), ("tenant", "two"), ("fingerprint", {"org/model": "x"})]
)
def test_other_weights_or_another_tenant_share_nothing(tmp_root: Path, name: str, other: Any) -> None:
    with adapter(root=str(tmp_root), **{name: "one"}) as l2:
        stored(l2, [key(1)], [made(1)])
    with adapter(root=str(tmp_root), **{name: other}) as l2:
        assert found(l2, [key(1)]) == []
    with adapter(root=str(tmp_root), **{name: "one"}) as l2:
        assert found(l2, [key(1)]) == [0]


def test_an_object_may_be_locked_twice_and_unlocking_too_often_does_no_harm(tmp_root: Path) -> None:
    with adapter(root=str(tmp_root)) as l2:
        stored(l2, [key(1), key(2)], [made(1), made(2)])
        assert found(l2, [key(1), key(2)]) == [0, 1]
        assert found(l2, [key(1)]) == [0]
        assert l2.report_status()["locked_keys"] == 2
        l2.submit_unlock([key(1), key(2)])
        assert l2.report_status()["locked_keys"] == 1
        l2.submit_unlock([key(1), key(1), key(3)])
        assert l2.report_status()["locked_keys"] == 0


def test_what_is_never_unlocked_is_let_go_after_its_time(tmp_root: Path) -> None:
    with adapter(root=str(tmp_root), lock_s=0.2) as l2:
        stored(l2, [key(1)], [made(1)])
        assert found(l2, [key(1)]) == [0]
        threading.Event().wait(0.3)
        assert loaded(l2, [key(1)], [made()]) == [0], "its hold has ended, but it is there still"
        assert found(l2, [key(2)]) == []
        assert l2.report_status()["locked_keys"] == 0


def test_a_damaged_object_is_a_miss_and_the_next_store_repairs_it(tmp_root: Path) -> None:
    keys = [key(number) for number in range(3)]
    objects = [made(number) for number in range(3)]
    with adapter(root=str(tmp_root)) as l2:
        stored(l2, keys, objects)
        victim = chunk_files(tmp_root)[1]
        flip(victim)
        assert found(l2, keys) == [0, 1, 2]
        targets = [made() for _ in keys]
        hits = loaded(l2, keys, targets)
        assert len(hits) == 2
        assert equal([objects[at] for at in hits], [targets[at] for at in hits])
        assert found(l2, keys) == hits, "it is not found again"
        assert stored(l2, keys, objects).bytes_transferred() == objects[0].get_size()
        assert loaded(l2, keys, targets) == [0, 1, 2]
        assert equal(objects, targets)


def test_settings_that_are_wrong_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="load_timeout_s"), adapter(root="/x", load_timeout_s=0):
        pass
