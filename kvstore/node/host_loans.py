"""The loans of a node on a root of one host, as its claims use them (rule S8)."""

from __future__ import annotations

from kvstore.meta.keys import Keys
from kvstore.meta.sqlite.loans import Loans, are_left, end_loans
from kvstore.node.astray import why_astray
from kvstore.node.node import Node
from kvstore.root.posix import PosixRoot
from kvstore.root.used import used_bytes

TIMEOUT_S = 1.0
"""Who may write to the metadata for longer than this leaves it open whether they are lost."""


class HostLoans:
    """See ``Lending``. Looks at the root on the node's lanes."""

    def __init__(self, node: Node, root: PosixRoot, keys: Keys, max_bytes: int) -> None:
        self._node = node
        self._root = root
        self._keys = keys
        self._loans = Loans(root.path, max_bytes, lambda: used_bytes(root), node.clock)

    def is_lost(self) -> bool:
        """See ``Lending``."""
        return self._node.on_root(lambda: why_astray(self._root, self._keys, TIMEOUT_S)) is not None

    def lend(self, size_bytes: int, more_bytes: int) -> int | None:
        """See ``Lending``."""
        return self._node.on_root(lambda: self._loans.lend(size_bytes, more_bytes))

    def are_left(self) -> bool:
        """See ``Lending``."""
        return self._node.on_root(lambda: are_left(self._root.path))

    def end(self) -> None:
        """See ``Lending``."""
        self._node.on_root(lambda: end_loans(self._root.path))
