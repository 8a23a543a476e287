"""Fixtures that the connectors' tests share with those of the peers' defects."""

from __future__ import annotations

from tests.peers.conftest import small_root

__all__ = ["small_root"]
