"""Roots that break their contract (kvstore/root/interface.py): PROTOCOL W, FORMAT 1 and 2."""

from __future__ import annotations

import os
from typing import Any

from tests.mutants.catalogue.interfaces import OBJECT_DOUBLE, READER, ROOT, at, giving
from tests.mutants.mutant import Mutant, mutant

CONTRACT = ("root/test_conformance.py -k 'not s3'",)
POSIX_ROOT = ROOT[0]
FENCED = ROOT[:2]
"""Roots that can rename."""


def _publish_over(real: Any, self: Any, staged: str, name: str, **how: Any) -> Any:
    self.remove(name)
    return real(self, staged, name, **how)


def _stage_again(real: Any, self: Any, name: str, pieces: Any, **how: Any) -> Any:
    self.discard(name)
    return real(self, name, pieces, **how)


def _open_links(real: Any, self: Any, name: str) -> Any:
    from kvstore.root.interface import local_files

    files = local_files(self)
    if files is None:
        return real(self, name)
    path = os.path.realpath(os.path.join(files.path, name))
    return real(self, os.path.relpath(path, files.path))


def _remove_full_folder(real: Any, self: Any, name: str, **how: Any) -> Any:
    for entry in list(self.list(name)):
        self.remove(f"{name}/{entry.name}")
    return real(self, name, **how)


def _all_but_one(real: Any, self: Any, folder: str) -> Any:
    entries = list(real(self, folder))
    return iter(entries[1:])


def _write_to_withdrawn(real: Any, self: Any, pieces: Any, offset: int, borrowed: Any) -> Any:
    from kvstore.core.buffers import BufferLoan

    return real(self, pieces, offset, BufferLoan())


CONTRACTS = [
    mutant("w1-publishes-over", at(ROOT[:2], "publish", _publish_over), *CONTRACT),
    mutant(
        "w1-loser-wins",
        at(ROOT, "publish", lambda real, self, *names, **how: real(self, *names, **how) or True),
        *CONTRACT,
    ),
    mutant("w2-stages-twice", at(ROOT, "stage", _stage_again), *CONTRACT),
    mutant(
        "w1-stages-without-sync",
        at(
            POSIX_ROOT,
            "stage",
            lambda real, self, name, pieces, *, stamp_ns, durable: real(
                self, name, pieces, stamp_ns=stamp_ns, durable=False
            ),
        ),
        "contract/test_root_rules.py",
    ),
    mutant(
        "w1-publishes-without-sync",
        at(POSIX_ROOT, "publish", lambda real, self, staged, name, *, durable: real(self, staged, name, durable=False)),
        "contract/test_root_rules.py",
    ),
    mutant(
        "g6-fences-without-sync",
        at(POSIX_ROOT, "remove_folder", lambda real, self, name, *, durable=False: real(self, name)),
        "contract/test_root_rules.py",
    ),
    mutant(
        "f1-move-makes-the-folder",
        at(FENCED, "move", lambda real, self, source, name, *, make_folder=True: real(self, source, name)),
        "gc/test_protocol.py contract/test_root_rules.py",
    ),
    mutant(
        "o1-removes-another-version",
        at((OBJECT_DOUBLE, ROOT[2]), "remove_if", lambda real, self, name, seen: self.remove(name)),
        *CONTRACT,
    ),
    mutant("g6-removes-full-folders", at(FENCED, "remove_folder", _remove_full_folder), *CONTRACT),
    mutant(
        "root-move-loses", at(FENCED, "move", lambda real, self, source, name, **how: self.remove(source)), *CONTRACT
    ),
    mutant("root-remove-lies", at(ROOT, "remove", giving(True)), *CONTRACT),
    mutant("root-list-hides", at(ROOT, "list", _all_but_one), *CONTRACT),
    mutant("root-touch-lies", at(FENCED, "touch", giving(True)), *CONTRACT),
    mutant("root-open-follows-links", at(POSIX_ROOT, "open", _open_links), "root/test_posix.py"),
    mutant(
        "reader-ignores-offset",
        at(READER, "read", lambda real, self, pieces, offset, borrowed: real(self, pieces, 0, borrowed)),
        *CONTRACT,
    ),
    mutant("reader-writes-withdrawn", at(READER, "read", _write_to_withdrawn), *CONTRACT),
    mutant(
        "root-full-disk-unavailable",
        at("kvstore.root.posix", "error_of", lambda real, action, path, cause: real(action, path, OSError(5, "io"))),
        "root/test_posix.py",
    ),
]


IDENTITY = [
    mutant(
        "root-any-id",
        at(
            "kvstore.root.identity",
            "create_or_open",
            lambda real, root, ids, **how: real(root, ids, **{**how, "expect": None}),
        ),
        "root/test_identity.py",
    ),
    mutant(
        "root-check-always-sound",
        at("kvstore.root.check", "is_sound", giving(True)),
        "root/test_check.py root/test_conditional.py",
    ),
]


MUTANTS: list[Mutant] = [*CONTRACTS, *IDENTITY]
