"""Limits that change while a node runs: one assignment, and each part of the node obeys the new ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.client.local import LocalPort
from kvstore.client.store import Store
from kvstore.errors import Unavailable
from kvstore.node.settings import Limits
from kvstore.root.memory import MemoryFiles, MemoryRoot
from tests.kit.faulty_root import FaultyRoot, Hang, Rule
from tests.kit.patience import NEVER_S, returns
from tests.kit.stores import TINY, kv_of, member_on

PATIENT = Limits(write_deadline_s=NEVER_S, stall_s=NEVER_S)


def test_a_put_obeys_a_deadline_that_was_changed() -> None:
    root, hang = FaultyRoot(MemoryRoot(MemoryFiles())), Hang()
    member = member_on(root, PATIENT)
    try:
        cache = Store(LocalPort(member)).namespace("m", TINY)
        member.adjust(replace(PATIENT, write_deadline_s=0.2))
        root.set_rules([Rule("stage", hang)])
        with pytest.raises(Unavailable):
            returns(lambda: cache.put(range(4), kv_of(TINY, range(4))), "the put")
    finally:
        root.set_rules([])
        hang.release.set()
        member.close()
