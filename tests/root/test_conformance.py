"""The contract of all roots, for each kind of root."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.testing import Hosts, RootTests
from tests.kit.roots import KINDS, mounted_roots, open_hosts


class TestRoots(RootTests):
    @pytest.fixture(params=[*KINDS, *mounted_roots()])
    def hosts(self, request: pytest.FixtureRequest) -> Iterator[Hosts]:
        with open_hosts(request.param, request) as opened:
            yield opened
