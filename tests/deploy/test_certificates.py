"""certificates.sh: its certificates serve their stated purpose and no other, and can be renewed in place."""

from __future__ import annotations

import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.kit.programs import ended

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "certificates.sh"
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


def certificates(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return ended(SCRIPT, *arguments)


def openssl(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return ended("openssl", *arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("certificates")
    for arguments in (
        ("authorities", place),
        ("worker", place, "worker-a", "a.example", "10.77.0.1"),
        ("client", place, "engine"),
        ("etcd-member", place, "etcd-a", "a.example", "fd00::1"),
        ("etcd-client", place, "etcd-client"),
    ):
        made = certificates(*arguments)
        assert made.returncode == 0, made.stderr
    return place


def good_for(folder: Path, authority: str, name: str, purpose: str, *more: str) -> bool:
    certificate = folder / name / "tls.crt"
    return (
        openssl("verify", "-CAfile", folder / f"{authority}.crt", "-purpose", purpose, *more, certificate).returncode
        == 0
    )


def test_a_worker_serves_and_calls_under_its_names(folder: Path) -> None:
    for more in (
        ("-verify_hostname", "kvstore-worker"),
        ("-verify_hostname", "a.example"),
        ("-verify_ip", "10.77.0.1"),
    ):
        assert good_for(folder, "kvstore-ca", "worker-a", "sslserver", *more), more
    assert good_for(folder, "kvstore-ca", "worker-a", "sslclient")
    assert not good_for(folder, "kvstore-ca", "worker-a", "sslserver", "-verify_hostname", "b.example")


def test_a_client_cannot_serve(folder: Path) -> None:
    assert good_for(folder, "kvstore-ca", "engine", "sslclient")
    assert not good_for(folder, "kvstore-ca", "engine", "sslserver")


def test_clients_of_kvstore_are_strangers_to_etcd_and_the_other_way_round(folder: Path) -> None:
    assert good_for(folder, "etcd-ca", "etcd-a", "sslserver", "-verify_ip", "fd00::1")
    assert good_for(folder, "etcd-ca", "etcd-client", "sslclient")
    assert not good_for(folder, "etcd-ca", "engine", "sslclient")
    assert not good_for(folder, "kvstore-ca", "etcd-client", "sslclient")


def test_keys_are_for_their_owner_alone(folder: Path) -> None:
    keys = list(folder.rglob("*.key"))
    assert len(keys) == 6
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}
