"""The load of the cluster's engines: a trace, its KV, and the way to a store. The same in every process.

Everything follows from the trace's file, so that any reader of a chunk can verify each byte of it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import kvstore
from kvstore.client.limits import ClientLimits
from kvstore.client.store import Store
from kvstore.meta.etcd import EtcdTls
from kvstore.replay import Content, replay_layout
from kvstore.security.tls import ClientTls

BYTES_PER_TOKEN = 64
"""32 KiB for each block of 512 tokens: with three hosts on two cores a file costs more than its bytes."""
NAMESPACE = "load"
CONTENT = Content(replay_layout(BYTES_PER_TOKEN), seed=7)
LIMITS = ClientLimits(match_s=2.0, read_s=5.0, write_s=10.0)
"""An engine would rather compute than wait for long."""


@dataclass(frozen=True, slots=True)
class Papers:
    """PEM files of one machine."""

    ca: Path
    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Reach:
    """The way from a process to the store: through the workers that etcd lists, or through one alone."""

    etcd: str
    papers: Papers
    worker: str | None = None

    def open(self) -> Store:
        """Connects."""
        papers = self.papers
        tls = ClientTls(str(papers.ca), str(papers.cert), str(papers.key))
        if self.worker is not None:
            return kvstore.connect(self.worker, limits=LIMITS, tls=tls)
        etcd_tls = EtcdTls(papers.ca, papers.cert, papers.key)
        return kvstore.connect(etcd=self.etcd, etcd_tls=etcd_tls, limits=LIMITS, tls=tls)

    def arguments(self) -> list[str]:
        """The command line for another process, which takes ``reach_options``."""
        papers = self.papers
        found = ["--etcd", self.etcd, "--ca", str(papers.ca), "--cert", str(papers.cert), "--key", str(papers.key)]
        return found if self.worker is None else [*found, "--worker", self.worker]


def reach_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``Reach.arguments``."""
    parser.add_argument("--etcd", required=True)
    for name in ("ca", "cert", "key"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--worker")


def reach_of(given: argparse.Namespace) -> Reach:
    """Returns the given way to the store."""
    return Reach(given.etcd, Papers(given.ca, given.cert, given.key), given.worker)
