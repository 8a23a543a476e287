"""Writers: anybody, also the zombie of a dead session, may publish at any moment (W1, W3). And files may rot."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.config import Config, Dropped
from tests.model.etcd import Step
from tests.model.state import INCS_PER_ADDRESS, State, put


def steps(s: State, k: Config, dropped: Dropped) -> Iterator[Step]:
    """W1: link(2), so the first writer wins and nothing is ever replaced."""
    for address in k.addresses:
        inc = s.next_inc[address]
        if inc - INCS_PER_ADDRESS * address > k.incs:
            continue
        published = s._replace(files=put(s.files, address, inc), next_inc=put(s.next_inc, address, inc + 1))
        if s.files[address] == 0:
            yield f"link(i{inc})", published
        elif k.replaces or "publish_replaces" in dropped:
            yield f"rename_over(i{inc})", published
    if k.menders and not s.damaged and s.files[0]:
        yield f"damage(i{s.files[0]})", s._replace(damaged=frozenset({s.files[0]}))
