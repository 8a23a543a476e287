"""Conformance suites for a root or a metadata store of your own. They need pytest.

A suite is a class of tests. A subclass gives it a fixture, and pytest collects it:

    from kvstore.testing import Hosts, RootTests

    class TestMyRoot(RootTests):
        @pytest.fixture
        def hosts(self, tmp_path):
            return Hosts(MyRoot(tmp_path), MyRoot(tmp_path))
"""

from __future__ import annotations

from kvstore.testing.metadata import MetadataClients, MetadataStoreTests
from kvstore.testing.roots import Hosts, RootTests

__all__ = ["Hosts", "MetadataClients", "MetadataStoreTests", "RootTests"]
