"""Fixtures of the root's tests: each kind of root in turn, and a real S3 server."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.root.interface import Root
from kvstore.testing.roots import Hosts
from tests.kit.roots import BUCKET, KINDS, mounted_roots, open_hosts, rclone


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The URL of a real S3 server with one bucket, BUCKET."""
    with tempfile.TemporaryDirectory(prefix="kvstore-test-s3-") as folder:
        (Path(folder) / BUCKET).mkdir()
        with rclone(Path(folder)) as endpoint:
            yield endpoint


@pytest.fixture(params=[*KINDS, *mounted_roots()])
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """One root as two hosts have it open."""
    with open_hosts(request.param, request) as opened:
        yield opened


@pytest.fixture
def root(hosts: Hosts) -> Root:
    """The first host's."""
    return hosts.first
