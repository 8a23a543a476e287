"""Addresses of one command that are one port."""

from __future__ import annotations

import pytest

from kvstore.cli.options import check_free, check_ports
from kvstore.errors import InvalidRequest, Unavailable
from tests.kit.cases import for_each
from tests.kit.ports import free_port


@for_each(
    "one, other",
    [
        ("127.0.0.1:7171", "127.0.0.1:7171"),
        ("0.0.0.0:7171", "127.0.0.1:7171"),
        ("127.0.0.1:7171", "[::]:7171"),
        ("localhost:7171", "127.0.0.1:7171"),
        ("no-such-host.invalid:7171", "no-such-host.invalid:7171"),
    ],
)
def test_one_port_is_refused_with_both_options(one: str, other: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^--a .*7171 and --c .*7171 are one port"):
        check_ports([("--a", one), ("--b", None), ("--c", other)])


def test_what_is_two_ports_is_not() -> None:
    check_ports([("--a", "127.0.0.1:0"), ("--b", "127.0.0.1:0"), ("--c", "unix:/x"), ("--d", "unix:/x"), ("--e", None)])
    one, other = free_port(), free_port()
    while other == one:
        other = free_port()
    check_ports([("--a", f"127.0.0.1:{one}"), ("--b", f"127.0.0.1:{other}"), ("--c", f"127.0.0.2:{one}")])


def test_an_address_of_another_host_is_said_to_be_one() -> None:
    with pytest.raises(Unavailable, match=r"^cannot listen on --a 192\.0\.2\.1:7171 \(.*\): this host has no such"):
        check_free("--a", ["192.0.2.1:7171"])
    with pytest.raises(Unavailable, match=r"^cannot listen on --a no-such-host\.invalid:7171 \([^)]*\)$"):
        check_free("--a", ["no-such-host.invalid:7171"])
