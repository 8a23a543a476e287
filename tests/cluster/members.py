"""etcd of three members, one on each host, which speak TLS and want a certificate of everybody, each other included."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore.meta.embedded_etcd import find_etcd
from tests.cluster.load import Papers
from tests.cluster.machine import Machine

ETCD = "etcd"
"""Name of the service."""
CLIENT_PORT, PEER_PORT = 2379, 2380
HEARTBEAT_MS, ELECTION_MS = 200, 2000
"""Twice etcd's defaults: two cores carry three hosts here."""


class EtcdMember:
    """The member on one host. ``addresses`` are those of all hosts, by name."""

    def __init__(self, machine: Machine, disk: Path, papers: Papers, addresses: dict[str, str]) -> None:
        self._machine = machine
        self._disk = disk
        self._papers = papers
        self._addresses = addresses

    def start(self) -> None:
        name, papers = self._machine.name, self._papers
        address = self._addresses[name]
        client, peer = f"https://{address}:{CLIENT_PORT}", f"https://{address}:{PEER_PORT}"
        members = [f"{each}=https://{other}:{PEER_PORT}" for each, other in self._addresses.items()]
        flags = {
            "name": name,
            "data-dir": self._disk / "etcd",
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": ",".join(members),
            "cert-file": papers.cert,
            "key-file": papers.key,
            "trusted-ca-file": papers.ca,
            "client-cert-auth": "true",
            "peer-cert-file": papers.cert,
            "peer-key-file": papers.key,
            "peer-trusted-ca-file": papers.ca,
            "peer-client-cert-auth": "true",
            "heartbeat-interval": HEARTBEAT_MS,
            "election-timeout": ELECTION_MS,
            "auto-compaction-mode": "periodic",
            "auto-compaction-retention": "1m",
            "logger": "zap",
            "log-level": "warn",
        }
        self._machine.start(ETCD, [find_etcd(), *(f"--{flag}={value}" for flag, value in flags.items())])

    def status(self, wait_s: float = 5.0) -> dict[str, Any] | None:
        """Returns the member's status; None if it does not answer."""
        papers = self._papers
        etcdctl = find_etcd().removesuffix("etcd") + "etcdctl"
        options = [f"--cacert={papers.ca}", f"--cert={papers.cert}", f"--key={papers.key}"]
        options.append(f"--endpoints=https://{self._addresses[self._machine.name]}:{CLIENT_PORT}")
        found = self._machine.run(
            [
                "env",
                "ETCDCTL_API=3",
                etcdctl,
                *options,
                "--command-timeout=2s",
                "endpoint",
                "status",
                "--write-out=json",
            ],
            wait_s,
        )
        if found.code:
            return None
        status: dict[str, Any] = json.loads(found.out)[0]["Status"]
        return status


def leader_of(members: Sequence[EtcdMember]) -> int | None:
    """The place of the leader among ``members``, as the first one that answers says; None where nobody knows one."""
    known = [member.status() for member in members]
    for status in known:
        if status and status.get("leader"):
            ids = [each["header"]["member_id"] if each else None for each in known]
            return ids.index(status["leader"]) if status["leader"] in ids else None
    return None
