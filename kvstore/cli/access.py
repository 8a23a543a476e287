"""How a command reaches a store: by its root, through workers, or through those that etcd lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore.cli.securing import ClientAccess
from kvstore.errors import InvalidRequest

if TYPE_CHECKING:
    from kvstore.client.store import Store
    from kvstore.meta.etcd import EtcdMeta, EtcdTls, EtcdUser


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """How to reach etcd; files are named, only the password is held. Can be pickled."""

    endpoints: str
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)

    def tls(self) -> EtcdTls | None:
        """The TLS files, if any."""
        from kvstore.meta.etcd import EtcdTls

        if not (self.ca_file or self.cert_file or self.key_file):
            return None
        return EtcdTls(self.ca_file, self.cert_file, self.key_file)

    def who(self) -> EtcdUser | None:
        """The user, if any. Raises InvalidRequest where it has no password."""
        from kvstore.meta.etcd import EtcdUser

        if self.user is None:
            return None
        if self.password is None:
            raise InvalidRequest(
                "--etcd-user needs a password: give --etcd-password-file, or set KVSTORE_ETCD_PASSWORD"
            )
        return EtcdUser(self.user, self.password)

    def open(self) -> EtcdMeta:
        """A connection to etcd itself, for the registry. Close it."""
        from kvstore.meta.etcd import EtcdMeta

        return EtcdMeta(self.endpoints, tls=self.tls(), user=self.who())


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach a store. Can be pickled, so that other processes reach the same."""

    root: str | None = None
    connect: tuple[str, ...] = ()
    etcd: EtcdAccess | None = None
    root_id: str | None = None
    root_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    durability: str = "none"
    client: ClientAccess = field(default_factory=ClientAccess)
    keys: str | None = None

    def __post_init__(self) -> None:
        if self.root is not None and self.connect:
            raise InvalidRequest("--root and --connect are two ways to the same store: give one of them")

    @property
    def is_given(self) -> bool:
        """Whether there is any way at all."""
        return bool(self.root is not None or self.connect or self.etcd)

    def open(self, *, create: bool = False) -> Store:
        """Opens the store. Raises InvalidRequest where no way was given, and what the way raised."""
        import kvstore

        tls, user = (self.etcd.tls(), self.etcd.who()) if self.etcd else (None, None)
        if self.root is not None:
            return kvstore.open(
                self.root,
                self.etcd.endpoints if self.etcd else None,
                durability=self.durability,
                etcd_tls=tls,
                etcd_user=user,
                root_options=self.root_options,
                create=create,
                keys=self.keys,
            )
        if self.connect:
            return kvstore.connect(*self.connect, tls=self.client.tls(), token_file=self.client.token_file)
        if self.etcd:
            return kvstore.connect(
                etcd=self.etcd.endpoints,
                root=self.root_id,
                etcd_tls=tls,
                etcd_user=user,
                tls=self.client.tls(),
                token_file=self.client.token_file,
            )
        raise InvalidRequest("which store? give --root URL, --connect HOST:PORT[,HOST:PORT] or --etcd ENDPOINTS")


def open_store(access: Access, create: bool = False) -> Store:
    """``access.open`` as a function of a module, which other processes can be told to call."""
    return access.open(create=create)
