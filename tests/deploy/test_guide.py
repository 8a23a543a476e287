"""GUIDE.md as a newcomer follows it: every block is typed into a shell of the machine that it names, in order.

`make guide-test`; takes minutes.  With KVSTORE_GUIDE_SHOW set the output of each block is printed.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.deploy.machines import SOURCE, machines, why_not

GUIDE = (SOURCE / "deploy" / "GUIDE.md").read_text()
BLOCKS = [
    (section, names.split(), text)
    for section, body in re.findall(r"^## (.*?)$(.*?)(?=^## |\Z)", GUIDE, re.MULTILINE | re.DOTALL)
    for names, text in re.findall(r"^```sh ([abc ]+)\n(.*?)^```$", body, re.MULTILINE | re.DOTALL)
]


def test_every_shell_block_of_the_guide_says_where_it_is_run() -> None:
    assert len(BLOCKS) >= 20
    assert re.findall(r"^```(?!sh [abc]|text$|$).*$", GUIDE, re.MULTILINE) == []


@pytest.mark.guide
@pytest.mark.timeout(1500)
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_the_guide_alone_gives_a_secured_cluster_on_three_machines() -> None:
    with machines("abc") as hosts, ThreadPoolExecutor(len(hosts)) as hands:
        for section, names, text in BLOCKS:
            for name, printed in zip(
                names, hands.map(lambda name, text=text: hosts[name].run(text), names), strict=True
            ):
                if os.environ.get("KVSTORE_GUIDE_SHOW"):
                    print(f"== {section}, on {name}\n{printed}")
