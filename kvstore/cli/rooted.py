"""Roots that must be there already: a mistyped path is an error, not a new empty folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.root.interface import Root


def local_path(url: str) -> str | None:
    """The absolute path of a root that is a folder; None for any other URL."""
    path = url.removeprefix("file://") if url.startswith("file://") else url
    return None if "://" in path else os.path.abspath(os.path.expanduser(path))


def open_existing(url: str, options: Mapping[str, Any]) -> Root:
    """Opens a root without making its folder. Raises as ``open_root``."""
    from kvstore.root.open import open_root

    return open_root(url, options, create=False)
