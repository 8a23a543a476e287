"""How commands select what they work on: roots, namespaces, prompts."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from kvstore.census.selection import Selection
from kvstore.cli.options import argument, option, takes
from kvstore.core.address import TOKENS_MAX
from kvstore.core.clock import RandomIds
from kvstore.core.namespace import Namespace
from kvstore.core.validate import shown, why
from kvstore.errors import InvalidRequest

if TYPE_CHECKING:
    from kvstore.client.cache import Cache
    from kvstore.client.store import Store
    from kvstore.root.identity import RootIdentity
    from kvstore.root.interface import Root


# Roots that must be there already: a mistyped path is an error, not a new empty folder.


def local_path(url: str) -> str | None:
    """The absolute path of a root that is a folder; None for any other URL."""
    path = unquote(url.removeprefix("file://").removeprefix("localhost")) if url.startswith("file://") else url
    return None if "://" in path else os.path.abspath(os.path.expanduser(path))


def open_existing(url: str, options: Mapping[str, Any]) -> Root:
    """Opens a root without making its folder. Raises as ``open_root``."""
    from kvstore.root.open import open_root

    return open_root(url, options, create=False)


def check_pins_known(store: Store, *, instead: str = "") -> None:
    """Raises InvalidRequest if this process opened the store alone, and so sees no other process's pins."""
    from kvstore.client.local import LocalTransport

    port = store._port
    if not isinstance(port, LocalTransport):
        return
    member = port._store.member
    if member.in_cluster or member.host is not None:
        return
    cause = "the pins of this root are in etcd, or it has none: give --etcd ENDPOINTS, or --connect HOST:PORT"
    raise InvalidRequest(cause + instead)


@contextmanager
def identified(url: str, options: Mapping[str, Any]) -> Iterator[tuple[Root, RootIdentity]]:
    """Opens a root and reads its identity. Raises RootMismatch if it has none, and as ``open_root``."""
    from kvstore.root.identity import create_or_open

    with closing(open_existing(url, options)) as root:
        yield root, create_or_open(root, RandomIds(), create=False)


# Options that say what a command is about: a namespace, a prompt in it, or a selection of chunks.


TEXT_BYTES_MAX = 16 * TOKENS_MAX


@dataclass(frozen=True, slots=True)
class Prompt:
    """A namespace that exists, and the tokens of one prompt."""

    name: str = argument(metavar="NAME")
    tokens: str | None = argument(metavar="[TOKENS]", required=False)
    tokens_file: str | None = option(
        "--tokens-file", metavar="FILE", help="Read the token ids from FILE instead; - is standard input."
    )
    tenant: str = option("--tenant", default="", help="The namespace's tenant.")
    fingerprint: str | None = option(
        "--fingerprint", help="Digest of the weights, needed if a name has several; its first characters are enough."
    )

    def ids(self) -> list[int]:
        """Reads them from the argument, a file or standard input (``-``). Raises InvalidRequest."""
        text, file = self.tokens, self.tokens_file
        if (text is None) == (file is None):
            raise InvalidRequest(
                "no tokens are given: give TOKENS, or --tokens-file FILE (- for standard input)"
                if text is None
                else "give TOKENS or --tokens-file, not both"
            )
        if file is not None:
            try:
                text = sys.stdin.read(TEXT_BYTES_MAX + 1) if file == "-" else Path(file).read_text()
            except (OSError, UnicodeDecodeError) as cause:
                raise InvalidRequest(f"cannot read the tokens from {file!r}: {why(cause)}") from cause
        assert text is not None
        if len(text) > TEXT_BYTES_MAX:
            raise InvalidRequest(f"the tokens are over {TEXT_BYTES_MAX} bytes of text: at most {TOKENS_MAX} tokens")
        inner = text.strip().removeprefix("[").removesuffix("]").strip()
        if not inner:
            return []
        try:
            return [int(word) for word in re.split(r"\s*,\s*|\s+", inner)]
        except ValueError as cause:
            raise InvalidRequest(f"not token ids with commas between, such as 101,2023: {cause}") from cause

    def cache(self, store: Store) -> Cache:
        """The namespace's cache. Raises InvalidRequest if there is no such namespace."""
        return open_cache(store, self.name, self.tenant, self.fingerprint)


@dataclass(frozen=True, slots=True)
class Selected:
    """Chunks: those of a namespace, or those that match all options that were given."""

    name: str | None = argument(metavar="[NAME]", required=False)
    tenant: str | None = option(
        "--tenant", help="Chunks of this tenant ('' for none); with NAME, the namespace's tenant."
    )
    fingerprint: str = option("--fingerprint", default="", help="Chunks of weights whose digest begins with this.")

    def selection(self, store: Store) -> Selection:
        """The selection as the store takes it. Raises InvalidRequest if it is empty, or names no namespace."""
        digest, tenant, fingerprint = None, self.tenant, self.fingerprint
        if self.name is not None:
            digest = choose_namespace(store.namespaces(), self.name, tenant or "", fingerprint or None).digest
            tenant, fingerprint = None, ""
        return Selection(digest, tenant, fingerprint)


prompt_options = takes("prompt", Prompt)
selection_options = takes("selected", Selected)


def open_cache(store: Store, name: str, tenant: str, fingerprint: str | None) -> Cache:
    """The cache of a namespace that exists, its layout taken from the store's records."""
    found = choose_namespace(store.namespaces(), name, tenant, fingerprint)
    return store.namespace(
        found.name, found.layout, fingerprint=found.fingerprint, tenant=found.tenant, attributes=dict(found.attributes)
    )


def choose_namespace(found: Sequence[Namespace], name: str, tenant: str, fingerprint: str | None) -> Namespace:
    """The namespace with this name, tenant and fingerprint. Raises InvalidRequest if there is none, or several."""
    named = [each for each in found if each.name == name]
    if not named:
        raise InvalidRequest(f"there is no namespace {name!r}; there are: {_listed(each.name for each in found)}")
    meant = [each for each in named if each.tenant == tenant and each.fingerprint.startswith(fingerprint or "")]
    if len(meant) == 1:
        return meant[0]
    variants = _listed(f"tenant {each.tenant!r} with fingerprint {each.fingerprint!r}" for each in named)
    raise InvalidRequest(
        f"{len(meant) or 'none'} of the namespaces {name!r} has tenant {tenant!r} and fingerprint "
        f"{fingerprint or ''!r}; there are: {variants}: give --tenant and --fingerprint"
    )


def _listed(names: Iterable[str]) -> str:
    known = sorted(set(map(shown, names)))
    return ", ".join(known[:10]) + (", ..." if len(known) > 10 else "") or "none"
