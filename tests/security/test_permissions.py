"""The permissions of each method, asked of the guard alone; operations.py has the table by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.errors import PermissionDenied
from kvstore.security.access import PERMISSIONS, Presented
from kvstore.security.authentication import Authenticator
from kvstore.security.guard import Guard
from tests.kit.cases import for_each
from tests.security.operations import OPERATIONS

RANK = {"read": 1, "write": 2, "admin": 3}
IDENTITIES = {
    **{f"cert:{role}": {"acme": role} for role in RANK},
    **{f"cert:every {role}": {"*": role} for role in RANK},
    "cert:nothing": {},
}


@pytest.fixture
def guard(tmp_path: Path) -> Guard:
    (tmp_path / "access.json").write_text(json.dumps({"identities": IDENTITIES}))
    return Guard(lambda name: None, Authenticator(tmp_path / "access.json"))


def may(guard: Guard, method: str, who: str, tenant: str = "") -> bool:
    """True if the identity is admitted, and may do that in a tenant."""
    try:
        visit = guard.admit(method, Presented(names=(who,)))
        if tenant:
            visit.allow(tenant)
    except PermissionDenied:
        return False
    return True


def needs() -> dict[str, str]:
    """Returns the least that the operations of each method need; further needs are checked later."""
    found: dict[str, str] = {}
    for operation in OPERATIONS.values():
        need, before = operation.need, found.get(operation.method)
        if before is None or before.startswith("every:") or (":" not in need and RANK[need] < RANK.get(before, 0)):
            found[operation.method] = need
    return found


@for_each("method, need", [each for each in needs().items() if ":" not in each[1]])
def test_each_method_needs_what_its_operations_need(guard: Guard, method: str, need: str) -> None:
    for role, rank in RANK.items():
        enough = rank >= RANK[need]
        assert may(guard, method, role, "acme") == may(guard, method, f"every {role}", "acme") == enough, role
        assert not may(guard, method, role, "globex"), "it has no role there"
    assert not may(guard, method, "nothing", "acme")


@for_each("method, need", [each for each in needs().items() if each[1].startswith("every:")])
def test_what_is_about_the_worker_needs_every_tenant(guard: Guard, method: str, need: str) -> None:
    for role, rank in RANK.items():
        assert may(guard, method, f"every {role}") == (rank >= RANK[need.partition(":")[2]]), role
        assert not may(guard, method, role), "in one tenant it is not enough"


def test_who_has_no_such_role_anywhere_is_not_let_in(guard: Guard) -> None:
    assert not may(guard, "Put", "read") and may(guard, "Put", "write")
    assert not may(guard, "ListPins", "nothing") and may(guard, "ListPins", "read")


def test_a_method_that_is_not_in_the_table_is_denied_to_everybody(guard: Guard) -> None:
    assert "Format" not in PERMISSIONS
    assert not may(guard, "Format", "every admin")
