"""The options of a policy file, and the goals that follow for the known namespaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore import Layout
from kvstore.cli.kinds import DURATION, SIZE
from kvstore.errors import InvalidRequest
from kvstore.namespace import Namespace
from kvstore_gc.config import Config, Share, read_config
from kvstore_gc.policy import Order
from tests.kit.cases import for_each

LAYOUT = Layout(layers=1, kv_heads=1, head_dim=4, dtype="int8", chunk_tokens=4)
ALL = """
ttl = "7d"
max_bytes = "2TiB"
high = 0.95
low = 0.7
order = "lru"

[[quota]]
tenant = "acme"
max_bytes = "200GiB"

[[quota]]
namespace = "llama"
max_bytes = 1000
"""


def read(folder: Path, text: str) -> Config:
    path = folder / "policy.toml"
    path.write_text(text)
    return read_config(
        str(path), lambda value: DURATION.convert(value, None, None), lambda value: SIZE.convert(value, None, None)
    )


def test_everything_can_be_said_in_the_units_of_the_command_line(tmp_path: Path) -> None:
    found = read(tmp_path, ALL)
    assert (found.ttl_s, found.max_bytes, found.high, found.low) == (7 * 86_400.0, 2 << 40, 0.95, 0.7)
    assert found.order is Order.LRU
    assert found.shares == (Share("acme", None, 200 << 30), Share(None, "llama", 1000))


def test_an_empty_file_asks_for_the_defaults(tmp_path: Path) -> None:
    assert read(tmp_path, "") == Config()


def test_a_quota_covers_the_namespaces_that_there_are(tmp_path: Path) -> None:
    spaces = [Namespace.of(name, LAYOUT, tenant=tenant) for name in ("llama", "qwen") for tenant in ("acme", "")]
    goals = read(tmp_path, ALL).goals(spaces, 123)
    of_acme, of_llama = (quota.namespaces for quota in goals.quotas)
    assert of_acme == {each.id for each in spaces if each.tenant == "acme"}
    assert of_llama == {each.id for each in spaces if each.name == "llama"}
    assert [quota.label for quota in goals.quotas] == ["tenant 'acme'", "namespace 'llama'"]
    assert goals.max_bytes == 123, "the room there is, not the limit: what is smaller counts"


def test_the_tenant_without_a_name_can_have_a_quota(tmp_path: Path) -> None:
    found = read(tmp_path, '[[quota]]\ntenant = ""\nnamespace = "llama"\nmax_bytes = 10')
    spaces = [Namespace.of("llama", LAYOUT, tenant=tenant) for tenant in ("acme", "")]
    assert found.goals(spaces, None).quotas[0].namespaces == {spaces[1].id}


@for_each(
    "text, says",
    [
        ("ttl = ", "is not TOML"),
        ('tll = "7d"', "'tll'"),
        ('order = "random"', "random"),
        ('high = "most"', "expected a share"),
        ("high = true", "expected a share"),
        ("quota = 3", "write [[quota]]"),
        ("[[quota]]\nmax_bytes = 3", "names nobody"),
        ("[[quota]]\ntenant = 3\nmax_bytes = 3", "as text"),
        ('[[quota]]\ntenant = "a"', "has no max_bytes"),
        ('[[quota]]\ntenant = "a"\nmax_bytes = 3\nttl = "1d"', "'ttl'"),
    ],
)
def test_what_is_not_understood_is_said(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        read(tmp_path, text)
    assert says in str(raised.value) and "policy.toml" in str(raised.value)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot read the policy"):
        read_config(str(tmp_path / "none.toml"), float, int)


def test_goals_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="0 < low < high"):
        Config(high=0.5).goals((), None)
