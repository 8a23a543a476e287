"""A root on NFS, with the kernel's own server and clients: ``make hosts-test``."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.chaos.journal import VIOLATION, Journals
from tests.hosts.finding import PROMPTS
from tests.hosts.guests import BOOT_S, Export, Guest, missing, wait_for
from tests.kit.patience import slowness

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(missing()), reason=missing())]
FOUND_S = 3.0
CONFORMANCE_S = 300.0
CUT_S, LONG_CUT_S = 30.0, 120.0
HEALED_S = 20.0
LEFT_S = 300.0
LONGEST_S = 60.0
"""One action makes two calls at most. A read has 15 s and a put 30 s; the cores are slow."""


@pytest.mark.parametrize("options", ["vers=4.2", "vers=4.1", "vers=3,nolock", "vers=4.2,lookupcache=positive"])
def test_what_one_host_stored_another_finds_soon(tmp_path: Path, options: str) -> None:
    busy = slowness()  # what others use; the guests themselves are two
    with Export(tmp_path, 2, options) as export:
        jobs = [f"tests.hosts.finding {role} {tmp_path}" for role in ("writer", "reader")]
        said = export.run(jobs, 240)
    found = json.loads(said[1].splitlines()[-1])
    after_s = sorted(found["after_s"])
    print(f"{options}: found after {after_s[len(after_s) // 2]:.2f} s, at most {after_s[-1]:.2f} s; {found}")
    assert found["wrong"] == 0 and len(after_s) == PROMPTS
    assert after_s[-1] <= FOUND_S, f"looked for before or not, on a machine that was {busy:.1f} times slower than idle"


@pytest.mark.parametrize(("options", "path"), [("vers=4.2", "/"), ("vers=3,nolock", "/mnt/export")])
def test_a_root_on_nfs_conforms(tmp_path: Path, options: str, path: str) -> None:
    with Export(tmp_path, 1, options) as export:
        said = export.run([f"tests.hosts.conformance 10.99.0.1:{path} {options}"], CONFORMANCE_S)
    print(f"{options}: {said[0].splitlines()[-1]}")


@pytest.mark.parametrize(
    ("options", "cut_s"), [("vers=4.2", (CUT_S, LONG_CUT_S)), ("vers=3,nolock", (CUT_S,))], ids=["4.2", "3"]
)
def test_hosts_on_nfs_keep_promises(tmp_path: Path, options: str, cut_s: tuple[float, ...]) -> None:
    """Nodes and collectors on two hosts; the network is cut, a host loses power, then the server does."""
    with Export(tmp_path, 2, options) as export:
        job = f"tests.hosts.members {tmp_path} client{{}} {export.etcd()}"
        last = export.boot(1, job.format(1) + " --last")
        other = export.boot(2, job.format(2))
        for number in (1, 2):
            wait_for(tmp_path / f"client{number}.playing", BOOT_S)
        attacks_s = 10.0 + sum(cut + HEALED_S for cut in cut_s) + slowness() * BOOT_S / 2 + HEALED_S + HEALED_S
        _told(tmp_path / "ends", str(time.time() + attacks_s))
        time.sleep(10.0)
        for number, seconds in enumerate(cut_s, 1):
            export.cut(number, off=True)
            time.sleep(seconds)
            export.cut(number, off=False)
            time.sleep(HEALED_S)
        export.kill(2)
        (tmp_path / "client2.playing").unlink()
        other = export.boot(2, job.format(2))
        wait_for(tmp_path / "client2.playing", BOOT_S)  # a store that is opened while its server is gone gives up
        time.sleep(HEALED_S)
        export.boot_server()
        said = [_figures(other)]
        _told(tmp_path / "over", "")
        said.append(_figures(last))
    for host in said:
        print(f"{options}: {host}")
        assert host["counts"]["chunks verified"] > 0
        assert max(host["longest_s"].values()) <= LONGEST_S, "while nobody answered"
    killed = [fact for folder in tmp_path.glob("client2.*.cast") for fact in Journals(folder).new()]
    assert not [fact for _, fact in killed if fact["fact"] == VIOLATION]


def _told(path: Path, text: str) -> None:
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


def _figures(host: Guest) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads(host.output(LEFT_S).splitlines()[-1])
    return found
