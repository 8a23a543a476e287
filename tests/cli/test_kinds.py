"""Durations, sizes and addresses as people type them, and where secrets come from."""

from __future__ import annotations

import pickle
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvstore.cli.access import Access, EtcdAccess, RootOptions, access_options
from kvstore.cli.app import Command
from kvstore.cli.options import (
    BOUND,
    COUNT,
    DURATION,
    HOST_PORT,
    LISTEN,
    SIZE,
    HostPort,
    Scaled,
    StorageLimits,
    arguments,
    split,
    takes,
)
from kvstore.cli.up import UpOptions
from kvstore.cli.worker import WorkerOptions
from kvstore.errors import InvalidRequest
from kvstore.meta.etcd import EtcdUser
from kvstore.security.tls import is_loopback
from tests.kit.cases import for_each


@for_each(
    "kind, text, value",
    [
        *((DURATION, text, seconds) for text, seconds in (("30s", 30), ("5m", 300), ("1h", 3600), ("2d", 172_800))),
        *((DURATION, text, seconds) for text, seconds in (("500ms", 0.5), ("7", 7), ("1.5 h", 5400))),
        *(
            (SIZE, text, count)
            for text, count in (("8GiB", 8 << 30), ("2GB", 2 * 10**9), ("100", 100), ("1.5kib", 1536))
        ),
        (BOUND, "200GiB", 200 << 30),
        (BOUND, "1MiB", 1 << 20),
        (COUNT, "1.6M", 1_600_000),
    ],
)
def test_number_with_a_unit_is_scaled(kind: Scaled | HostPort, text: str, value: float) -> None:
    assert kind.convert(text, None, None) == value


@for_each(
    "kind, text",
    [
        *((DURATION, text) for text in ("", "s", "-1s", "1 year", "1e3s")),
        *((SIZE, text) for text in ("", "GiB", "-1GiB", "1 gallon")),
        *((COUNT, text) for text in ("", "k", "-1", "1KiB")),
        *((BOUND, text) for text in ("200", "0", "1023KiB")),
        *((HOST_PORT, text) for text in ("", "7070", ":7070", "::1:7070", "host:", "host:x", "host:70000", "host:-1")),
    ],
)
def test_other_text_is_refused(kind: Scaled | HostPort, text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"write|give"):
        kind.convert(text, None, None)


@for_each(
    "text, host, port, loopback",
    [
        ("127.0.0.1:7070", "127.0.0.1", 7070, True),
        ("localhost:0", "localhost", 0, True),
        ("[::1]:80", "::1", 80, True),
        ("0.0.0.0:80", "0.0.0.0", 80, False),
        ("node7:80", "node7", 80, False),
        ("[::]:80", "::", 80, False),
    ],
)
def test_addresses(text: str, host: str, port: int, loopback: bool) -> None:
    assert HOST_PORT.convert(text, None, None) == text
    assert split(text) == (host, port)
    assert is_loopback(text) == loopback


def test_a_socket_file_is_an_address_to_listen_on_only() -> None:
    assert LISTEN.convert("unix:/run/kv.sock", None, None) == "unix:/run/kv.sock"
    assert is_loopback("unix:/run/kv.sock")
    with pytest.raises(click.BadParameter):
        HOST_PORT.convert("unix:/run/kv.sock", None, None)


def given(*arguments: str, env: dict[str, str] | None = None) -> Access:
    """Returns the values of the shared options for these arguments."""
    seen: list[Access] = []

    @click.command(cls=Command)
    @access_options
    def command(access: Access) -> None:
        seen.append(access)

    result = CliRunner().invoke(command, list(arguments), env=env)
    assert result.exit_code == 0, result.output
    return seen[0]


def test_the_password_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "password"
    file.write_text("from file\n")
    at = ("--etcd", "h:1", "--etcd-user", "kv")
    by_file = given(*at, "--etcd-password-file", str(file))
    assert by_file.etcd == EtcdAccess("h:1", user="kv", password_file=str(file))
    assert by_file.etcd.who() == EtcdUser("kv", "from file")
    by_environment = given(*at).etcd
    monkeypatch.setenv("KVSTORE_ETCD_PASSWORD", "from environment")
    assert by_environment is not None and by_environment.who() == EtcdUser("kv", "from environment")
    assert pickle.loads(pickle.dumps(by_file)) == by_file


def test_root_options_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    file.write_text('{"key": "secret"}')
    access = given("--root", "s3://bucket", env={"KVSTORE_ROOT_OPTIONS": str(file)})
    assert access.root_options.read() == {"key": "secret"}
    assert "secret" not in repr(access)
    file.write_text("[1]")
    with pytest.raises(InvalidRequest, match="not a JSON object"):
        RootOptions(str(file)).read()
    with pytest.raises(InvalidRequest, match="cannot read"):
        RootOptions(str(tmp_path / "missing")).read()


@for_each(
    "kind, line",
    [
        (StorageLimits, "--max-bytes 200GiB --ttl 7d"),
        (WorkerOptions, "--root /r --memory 8GiB --disk /d:200GiB --sync-interval 500ms --write through --no-private"),
        (WorkerOptions, "--root s3://b/p --etcd h:1,h:2 --durability fsync --tls-cert c --compress --log-format json"),
        (UpOptions, "--workers 2 --drain 90s --ttl 12h --max-bytes 1GiB --no-gc --listen 0.0.0.0:1"),
    ],
)
def test_a_child_gets_the_options_that_were_given(kind: type, line: str) -> None:
    found = list[object]()

    @click.command()
    @takes("value", kind)
    def command(value: object) -> None:
        found.append(value)

    CliRunner().invoke(command, line.split(), catch_exceptions=False)
    CliRunner().invoke(command, arguments(found[0]), catch_exceptions=False)
    assert found[0] == found[1]
