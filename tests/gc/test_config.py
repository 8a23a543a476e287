"""The options of a policy file, and the goals that follow for the known namespaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.cli.options import DURATION, SIZE
from kvstore.errors import InvalidRequest
from kvstore_gc.config import Config, QuotaRule, read_config
from kvstore_gc.policy import EvictionOrder
from tests.kit.cases import for_each

ALL = """
ttl = "7d"
max_bytes = "2TiB"
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
    assert (found.ttl_s, found.max_bytes) == (7 * 86_400.0, 2 << 40)
    assert found.order is EvictionOrder.LRU
    assert found.shares == (QuotaRule("acme", None, 200 << 30), QuotaRule(None, "llama", 1000))


@for_each(
    "text, says",
    [
        ("ttl = ", "is not TOML"),
        ('tll = "7d"', "'tll'"),
        ('order = "random"', "random"),
        ("high = 0.9", "'high'"),
        ("quota = 3", "write [[quota]]"),
        ("[[quota]]\nmax_bytes = 3", "has no owner"),
        ("[[quota]]\ntenant = 3\nmax_bytes = 3", "as text"),
        ('[[quota]]\ntenant = "a"', "has no max_bytes"),
        ('[[quota]]\ntenant = "a"\nmax_bytes = 3\nttl = "1d"', "'ttl'"),
    ],
)
def test_what_is_not_understood_is_said(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        read(tmp_path, text)
    assert says in str(raised.value) and "policy.toml" in str(raised.value)
