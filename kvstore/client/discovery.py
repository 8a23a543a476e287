"""Discovery of workers in etcd, for one root."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.brief import brief
from kvstore.errors import InvalidRequest
from kvstore.meta.etcd import EtcdMeta, EtcdTls, EtcdUser
from kvstore.meta.keys import ID_BYTES, Keys, parse_id
from kvstore.meta.store import Meta
from kvstore.meta.workers import Workers

ROOTS = "/kv/roots/"


class Discovery:
    """Looks up workers in a cluster's metadata. ``root`` is the root's id in hex, required if the cluster has several.

    Raises InvalidRequest if ``root`` is not an id.
    """

    def __init__(self, meta: Meta, root: str | None) -> None:
        self._meta = meta
        self._root: bytes | None = None
        if root is not None:
            self._root = parse_id(root) if isinstance(root, str) else None
            if self._root is None:
                raise InvalidRequest(
                    f"root={brief(root)}: expected the root's id, {2 * ID_BYTES} hex digits, as its FORMAT has it"
                )

    @classmethod
    def of_etcd(
        cls,
        etcd: str | Sequence[str],
        root: str | None,
        tls: EtcdTls | None,
        user: EtcdUser | None,
        timeout_s: float,
    ) -> Discovery:
        """Connects to etcd at ``host:port``; several as a list or separated by commas."""
        return cls(EtcdMeta(etcd, tls=tls, user=user, timeout_s=timeout_s), root)

    def addresses(self) -> list[str]:
        """Returns the addresses of all workers of the root; none if no root is known yet.

        Raises InvalidRequest, which names them, if there are several roots; Unavailable or PermissionDenied.
        """
        if self._root is None:
            found = self._meta.list(ROOTS)
            roots = sorted({kv.value for kv in found.items if len(kv.value) == ID_BYTES})
            if len(roots) > 1:
                # A root without workers, perhaps made from a mistyped path, must not hide the others.
                roots = [root for root in roots if Workers(self._meta, Keys(root)).list()] or roots
            if len(roots) > 1:
                names = ", ".join(root.hex() for root in roots)
                raise InvalidRequest(
                    f"etcd knows {len(roots)} roots: say which one is meant, root= (--root-id) one of {names}"
                )
            if not roots:
                return []
            self._root = roots[0]
        workers = Workers(self._meta, Keys(self._root)).list()
        return sorted({record.address for record in workers.values()})

    def close(self) -> None:
        """Closes the connection to etcd; idempotent."""
        self._meta.close()
