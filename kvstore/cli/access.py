"""Options that say how a command reaches a store, and how both ends of its connections are secured."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kvstore.cli.options import argument, flag, group, option, takes
from kvstore.core.validate import parse_json, why
from kvstore.errors import InvalidRequest
from kvstore.security.audit import AuditLog
from kvstore.security.authentication import Account, Authenticator, account_secret
from kvstore.security.guard import ServerSecurity
from kvstore.security.tls import Certificate, ClientTls, is_loopback

if TYPE_CHECKING:
    from kvstore.client.pool import Credentials
    from kvstore.client.store import Store
    from kvstore.meta.etcd import EtcdMetadata, EtcdTls, EtcdUser

log = logging.getLogger(__name__)

SECRET_BYTES_MAX = 1 << 20
PRIVATE_UMASK = 0o077


class AddressList(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest click
    """Addresses with commas between, as a tuple."""

    name = "workers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(part.strip() for part in str(value).split(",") if part.strip())


@dataclass(frozen=True, slots=True)
class ClientAccess:
    """A client's proof of identity, and its trust in workers. Holds names of files only. Can be pickled."""

    ca_file: str | None = option(
        "--tls-ca", metavar="FILE", envvar="KVSTORE_TLS_CA", help="Authority that signed workers' certificates."
    )
    cert_file: str | None = option(
        "--tls-cert", metavar="FILE", envvar="KVSTORE_TLS_CERT", help="PEM file of the certificate to present."
    )
    key_file: str | None = option(
        "--tls-key", metavar="FILE", envvar="KVSTORE_TLS_KEY", help="PEM file of that certificate's key."
    )
    server_name: str | None = option(
        "--tls-server-name",
        metavar="NAME",
        envvar="KVSTORE_TLS_SERVER_NAME",
        help="Name in workers' certificates, if it is not their address.",
    )
    token_file: str | None = option(
        "--token-file", metavar="FILE", envvar="KVSTORE_TOKEN_FILE", help="File with the token to send to workers."
    )

    def tls(self) -> ClientTls | None:
        """The TLS files, if any."""
        if not (self.ca_file or self.cert_file or self.key_file or self.server_name):
            return None
        return ClientTls(self.ca_file, self.cert_file, self.key_file, self.server_name)


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """The security of a worker: TLS, access and audit. Holds names of files, not their content."""

    own: ClientAccess = group(ClientAccess, ClientAccess())
    """Its own certificate and token, for its clients and for other workers."""
    client_ca_file: str | None = option(
        "--tls-client-ca", metavar="FILE", help="Authority that signs clients' certificates; all clients then need one."
    )
    access_file: str | None = option(
        "--access", metavar="FILE", help="JSON file that says who may do what (kvstore/security/SECURITY.md)."
    )
    audit_file: str | None = option(
        "--audit-log", metavar="FILE", help="Where administrative calls and denials are logged, as JSON lines."
    )
    insecure: bool = flag(
        "--insecure", help="Listen on a network without TLS: any client that reaches it may do anything."
    )
    any_account: bool = flag(
        "--any-account",
        help="On loopback, serve every account on this host; by default, only the one that the worker runs as.",
    )
    private: bool | None = option(
        "--private/--no-private",
        default=None,
        help="Let only this user read new files on the root and the local disk; on by default with --access or --keys.",
    )

    def check(self, addresses: Iterable[str]) -> None:
        """Raises InvalidRequest where an address that others reach would be served without TLS (rule X1)."""
        if (self.own.cert_file is None) != (self.own.key_file is None):
            raise InvalidRequest("--tls-cert and --tls-key go together: give both, or neither")
        if self.client_ca_file is not None and self.own.cert_file is None:
            raise InvalidRequest("--tls-client-ca asks clients for certificates, which takes TLS: give --tls-cert too")
        if self.own.token_file is not None and self.own.cert_file is None:
            raise InvalidRequest(
                "--token-file would go to other workers in the clear: give --tls-cert and --tls-key too"
            )
        if self.own.cert_file is not None:
            return
        for address in addresses:
            if is_loopback(address):
                continue
            if self.insecure:
                log.warning("%s is served without TLS: any client that reaches it can read and write", address)
            else:
                raise InvalidRequest(
                    f"{address} can be reached by others, and nothing is encrypted: give --tls-cert and "
                    "--tls-key (and --access, which says who may do what), or --insecure if the network "
                    "itself is trusted"
                )

    def make_private(self, *, keeps_keys: bool) -> None:
        """Makes new files of this process and its children readable by this user alone, if that is wanted."""
        if self.private if self.private is not None else bool(self.access_file or keeps_keys):
            os.umask(PRIVATE_UMASK)

    def open(self, listen: str) -> ServerSecurity:
        """Reads the files, opens the audit log of a worker at ``listen``. Close ``audit``. Raises InvalidRequest."""
        tls = None
        if self.own.cert_file is not None and self.own.key_file is not None:
            tls = Certificate(self.client_ca_file, self.own.cert_file, self.own.key_file)
            assert tls.version
        authenticator = None
        if self.access_file is not None:
            authenticator = Authenticator(self.access_file)
            authenticator.load()
        audit = AuditLog(self.audit_file)
        account = None
        if self.client_ca_file is None and authenticator is None and is_loopback(listen):
            account = self._account(listen)
        return ServerSecurity(tls, self.client_ca_file is not None, authenticator, audit, account)

    def _account(self, listen: str) -> Account | None:
        if self.any_account:
            log.warning("worker.any_account every account of this host can read and write through this worker")
            return None
        try:
            return Account(None if listen.startswith("unix:") else account_secret())
        except InvalidRequest as cause:
            raise InvalidRequest(
                f"{cause}: the worker cannot tell its account's clients from others; give --any-account to serve every "
                "account of this host"
            ) from cause

    def as_client(self) -> ClientAccess:
        """The access of this worker to others. One authority that signs workers and clients is named only once."""
        if self.own.cert_file is None:
            return replace(self.own, ca_file=None, key_file=None)
        return replace(self.own, ca_file=self.own.ca_file or self.client_ca_file)

    def credentials(self) -> Credentials:
        """Returns the credentials for calls to other workers.

        Raises InvalidRequest if the files cannot be used: errors must surface before the first call.
        """
        from kvstore.client.pool import PLAIN, Credentials

        if self.own.cert_file is None:
            return PLAIN
        client = self.as_client()
        made = Credentials(client.tls(), client.token_file)
        assert made.version
        return made

    def of_worker(self, number: int) -> ServerAccess:
        """Returns the security of one of several workers on a host: each writes a separate audit log."""
        if number == 0 or self.audit_file is None:
            return self
        return replace(self, audit_file=f"{self.audit_file}-{number}")


@dataclass(frozen=True, slots=True)
class RootOptions:
    """The file with the options of a root."""

    file: str | None = option(
        "--root-options",
        metavar="FILE",
        envvar="KVSTORE_ROOT_OPTIONS",
        help="JSON file with options for a root that is not mounted (endpoint, keys); also KVSTORE_ROOT_OPTIONS.",
    )

    def read(self) -> dict[str, Any]:
        """Returns the options in the file; none if no file is given. Raises InvalidRequest."""
        if self.file is None:
            return {}
        try:
            found = parse_json(_read(self.file, "root options"))
        except ValueError as cause:
            raise InvalidRequest(f"the root options {self.file!r} are not JSON: {cause}") from cause
        if not isinstance(found, dict):
            raise InvalidRequest(f"the root options {self.file!r} are not a JSON object")
        return found


def keys_option() -> Any:
    """The field ``--keys``: the file with the keys of encrypted chunks."""
    return option(
        "--keys",
        metavar="FILE",
        help="File with the keys of tenants whose chunks are encrypted on root and local disk; reloaded when it "
        "changes.",
    )


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """The way to etcd. Holds names of files, not their content. Can be pickled."""

    endpoints: str = option(
        "--etcd",
        metavar="ENDPOINTS",
        envvar="KVSTORE_ETCD",
        show_envvar=True,
        help="etcd as HOST:PORT[,HOST:PORT...].",
    )
    ca_file: str | None = option(
        "--etcd-ca", metavar="FILE", help="PEM file of the authority that signed etcd's certificate."
    )
    cert_file: str | None = option(
        "--etcd-cert", metavar="FILE", help="PEM file of the certificate to present to etcd."
    )
    key_file: str | None = option("--etcd-key", metavar="FILE", help="PEM file of that certificate's key.")
    user: str | None = option("--etcd-user", metavar="NAME", envvar="KVSTORE_ETCD_USER", help="User name for etcd.")
    password_file: str | None = option(
        "--etcd-password-file",
        metavar="FILE",
        help="File with that user's password; without it, KVSTORE_ETCD_PASSWORD is used.",
    )

    @classmethod
    def of_options(cls, endpoints: str | None, **given: str | None) -> EtcdAccess | None:
        """Returns None if no etcd is named. Raises InvalidRequest if other options still say how to reach one."""
        if endpoints:
            return cls(endpoints, **given)
        if any(value for name, value in given.items() if name != "user"):  # a user may come from the environment
            raise InvalidRequest("--etcd-... options say how to reach etcd: give --etcd ENDPOINTS as well")
        return None

    def tls(self) -> EtcdTls | None:
        """The TLS files, if any."""
        from kvstore.meta.etcd import EtcdTls

        if not (self.ca_file or self.cert_file or self.key_file):
            return None
        return EtcdTls(self.ca_file, self.cert_file, self.key_file)

    def who(self) -> EtcdUser | None:
        """The user, if any. Raises InvalidRequest if it has no password."""
        from kvstore.meta.etcd import EtcdUser

        if self.user is None:
            return None
        password = os.environ.get("KVSTORE_ETCD_PASSWORD")
        if self.password_file is not None:
            password = _read(self.password_file, "password file").rstrip("\r\n")
        if password is None:
            raise InvalidRequest(
                "--etcd-user needs a password: give --etcd-password-file, or set KVSTORE_ETCD_PASSWORD"
            )
        return EtcdUser(self.user, password)

    def open(self) -> EtcdMetadata:
        """A connection to etcd itself, for the registry. Close it."""
        from kvstore.meta.etcd import EtcdMetadata

        return EtcdMetadata(self.endpoints, tls=self.tls(), user=self.who())


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """The root and the etcd of a cluster, for the programs that it consists of."""

    root: str = option(
        "--root",
        metavar="URL",
        envvar="KVSTORE_ROOT",
        show_envvar=True,
        help="A folder, file:///path, s3://bucket/prefix, ...",
    )
    root_options: RootOptions = group(RootOptions, RootOptions())
    etcd: EtcdAccess | None = group(EtcdAccess)

    def __post_init__(self) -> None:
        check_root_given(self.root)


@dataclass(frozen=True, slots=True)
class RootPlace:
    """The root that a command is about: an argument, or an option as elsewhere."""

    given: str | None = argument(metavar="[ROOT]", required=False)
    named: str | None = option(
        "--root", metavar="URL", envvar="KVSTORE_ROOT", show_envvar=True, help="The root, if not as an argument."
    )
    options: RootOptions = group(RootOptions, RootOptions())

    @property
    def url(self) -> str:
        """The URL. Raises InvalidRequest if no root is given, or two."""
        if self.given and self.named and is_typed("root_named"):
            raise InvalidRequest("ROOT and --root are two ways to say which root: give one of them")
        return check_root_given(self.given or self.named)


def check_root_given(root: str | None) -> str:
    """Raises InvalidRequest if there is none."""
    if not root:
        raise InvalidRequest("which root? give --root URL (a folder, file:///path, s3://...), or set KVSTORE_ROOT")
    return root


@dataclass(frozen=True, slots=True)
class Access:
    """The way to a store. Can be pickled, so that other processes reach the same."""

    root: str | None = option(
        "--root",
        metavar="URL",
        envvar="KVSTORE_ROOT",
        show_envvar=True,
        help="The root itself: a folder, file:///path, s3://bucket/prefix, or any fsspec URL.",
    )
    root_options: RootOptions = group(RootOptions, RootOptions())
    connect: tuple[str, ...] = option(
        "--connect",
        type=AddressList(),
        default=(),
        metavar="HOST:PORT[,...]",
        envvar="KVSTORE_CONNECT",
        show_envvar=True,
        help="One or more workers.",
    )
    root_id: str | None = option("--root-id", metavar="HEX", help="Id of the root, needed if etcd has several.")
    keys: str | None = keys_option()
    etcd: EtcdAccess | None = group(EtcdAccess)
    client: ClientAccess = group(ClientAccess, ClientAccess())

    @classmethod
    def of_options(cls, root: str | None, connect: tuple[str, ...], **given: Any) -> Access:
        """An option that was typed wins over the environment, which may have all three ways to a store: there workers
        win over the root.
        """
        has_root, has_connect = is_typed("access_root"), is_typed("access_connect")
        if has_root or has_connect or (given["etcd"] and is_typed("access_etcd_endpoints")):
            root, connect = root if has_root else None, connect if has_connect else ()
        elif connect:
            root = None
        return cls(root, connect=connect, **given)

    def __post_init__(self) -> None:
        if self.root is not None and self.connect:
            raise InvalidRequest("--root and --connect are two ways to the same store: give one of them")

    @property
    def is_given(self) -> bool:
        """True if the options name a store."""
        return bool(self.root is not None or self.connect or self.etcd)

    def open(self, *, create: bool = False) -> Store:
        """Opens the store. Raises InvalidRequest if no store is named, and what opening it raises."""
        import kvstore

        tls, user = (self.etcd.tls(), self.etcd.who()) if self.etcd else (None, None)
        if self.root is not None:
            return kvstore.open(
                self.root,
                self.etcd.endpoints if self.etcd else None,
                etcd_tls=tls,
                etcd_user=user,
                root_options=self.root_options.read(),
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
        raise InvalidRequest(
            "which store? give --root URL, --connect HOST:PORT[,HOST:PORT] or --etcd ENDPOINTS, or set KVSTORE_ROOT, "
            "KVSTORE_CONNECT or KVSTORE_ETCD"
        )

    def open_workers(self) -> Store:
        """Opens the store through its workers, those that etcd lists where a root is named too: a root has no control.

        Raises InvalidRequest where neither workers nor etcd are named, and what opening it raises.
        """
        if self.root is not None and self.etcd is None:
            raise InvalidRequest("this needs a worker: give --connect HOST:PORT[,...] or --etcd ENDPOINTS, not --root")
        return replace(self, root=None).open()


def is_typed(name: str) -> bool:
    """True if a parameter of the command was on its command line, and not in the environment."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


access_options = takes("access", Access)
etcd_options = takes("etcd", EtcdAccess)
root_options_option = takes("options", RootOptions)
root_option = takes("root", RootPlace)


def _read(path: str, what: str) -> str:
    try:
        if Path(path).stat().st_size > SECRET_BYTES_MAX:
            raise InvalidRequest(f"the {what} {path!r} is over {SECRET_BYTES_MAX} bytes")
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as cause:
        raise InvalidRequest(f"cannot read the {what} {path!r}: {why(cause)}") from cause
