"""A root on NFS, with the kernel's own server and clients: ``make hosts-test``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hosts.finding import PROMPTS
from tests.hosts.guests import Export, missing

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(missing()), reason=missing())]
FOUND_S = 3.0


@pytest.mark.parametrize("options", ["vers=4.2", "vers=4.1", "vers=3,nolock", "vers=4.2,lookupcache=positive"])
def test_what_one_host_stored_another_finds_soon(tmp_path: Path, options: str) -> None:
    with Export(tmp_path, 2, options) as export:
        jobs = [f"tests.hosts.finding {role} {tmp_path}" for role in ("writer", "reader")]
        said = export.run(jobs, 240)
    found = json.loads(said[1].splitlines()[-1])
    after_s = sorted(found["after_s"])
    print(f"{options}: found after {after_s[len(after_s) // 2]:.2f} s, at most {after_s[-1]:.2f} s; {found}")
    assert found["wrong"] == 0 and len(after_s) == PROMPTS
    assert after_s[-1] <= FOUND_S, "looked for before or not"
