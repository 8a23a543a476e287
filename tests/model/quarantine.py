"""Writers (W1), and damaged files: set aside by rename, checked, put back if the wrong one was taken (W3).

This needs no session and may stop after any step; a collector's round then puts whole files back.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.configs import Config, Dropped
from tests.model.etcd import Step
from tests.model.state import INCS_PER_ADDRESS, Mender, Set, State, Violation, put
from tests.model.world import NEW, any_left


def publishing_steps(s: State, k: Config, dropped: Dropped) -> Iterator[Step]:
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


SAW_DAMAGE, TAKEN, WHOLE, LINKED, DROPPING, ENDED = range(1, 7)


def steps(s: State, k: Config, dropped: Dropped) -> Iterator[Step]:
    """Returns the possible next steps of all repairers; the last ``k.restorers`` of them are collectors."""
    for i, mender in enumerate(s.menders):
        if mender.pc == NEW and i < k.menders:
            if s.files[0] in s.damaged:
                yield f"m{i}.read_damaged(i{s.files[0]})", _with(s, i, SAW_DAMAGE, None)
        elif mender.pc == NEW:
            if "aside_never_restored" not in dropped:
                yield from _round(s, i, dropped)
        elif mender.pc == SAW_DAMAGE:
            yield _take(s, i, dropped)
        elif mender.taken is not None:
            yield _settle(s, i, mender.pc, mender.taken, ENDED if i < k.menders else NEW, dropped)


def _round(s: State, i: int, dropped: Dropped) -> Iterator[Step]:
    for entry in s.quarantine:
        is_whole = entry.inc not in s.damaged or "aside_restored_unlooked" in dropped
        pc = DROPPING if "aside_emptied_unlooked" in dropped or not is_whole else WHOLE
        yield f"m{i}.round_sees(q{entry.name}:i{entry.inc})", _with(s, i, pc, entry)


def _take(s: State, i: int, dropped: Dropped) -> Step:
    """The look is old by now: this may take a whole file, which another has put there since."""
    inc = s.files[0]
    if not inc:
        return f"m{i}.aside_enoent", _with(s, i, ENDED, None)
    taken = Set(i, inc)
    gone = s._replace(files=put(s.files, 0, 0))
    if "aside_by_unlink" in dropped:
        _check_loss(gone, inc, f"m{i}.unlink(i{inc})")
        return f"m{i}.unlink(i{inc})", _with(gone, i, ENDED, None)
    return f"m{i}.aside(i{inc}->q{i})", _with(gone._replace(quarantine=s.quarantine | {taken}), i, TAKEN, taken)


def _settle(s: State, i: int, pc: int, entry: Set, end: int, dropped: Dropped) -> Step:
    if pc == TAKEN:
        if entry.inc in s.damaged and "aside_restored_unlooked" not in dropped:
            return f"m{i}.is_damaged", _with(s, i, ENDED, None)
        if "aside_never_restored" in dropped:
            return f"m{i}.is_whole:leave", _with(s, i, ENDED, None)
        return f"m{i}.is_whole", _with(s, i, DROPPING if "aside_unlooked" in dropped else WHOLE, entry)
    if pc == WHOLE:
        return _link_back(s, i, entry, dropped)
    left = s._replace(quarantine=s.quarantine - {entry})
    if pc == DROPPING and entry in s.quarantine:
        _check_loss(left, entry.inc, f"m{i}.unlink(q{entry.name})")
    return f"m{i}.unlink(q{entry.name})", _with(left, i, end, None)


def _link_back(s: State, i: int, entry: Set, dropped: Dropped) -> Step:
    """By link, if absent: a newer one at the name stays. Another may have settled the entry already."""
    there = s.files[0]
    label = f"m{i}.link_back(i{entry.inc})"
    if entry not in s.quarantine:
        return f"m{i}.link_back_enoent", _with(s, i, LINKED, entry)
    if there and "aside_overwrites" not in dropped:
        # The first one has the name, whatever it is: a put may so be lost, which is a miss.
        if "strict_after_damage" in dropped:
            _check_loss(s._replace(quarantine=s.quarantine - {entry}), entry.inc, f"m{i}.link_back_exists")
        return f"m{i}.link_back_exists", _with(s, i, LINKED, entry)
    if entry.inc in s.damaged:
        raise Violation("I4", "a damaged file was put back at its name", label)
    if there not in (0, entry.inc) and there not in s.damaged:
        raise Violation("I3", "putting back replaced a newer publication", label)
    return label, _with(s._replace(files=put(s.files, 0, entry.inc)), i, LINKED, entry)


def _check_loss(left: State, inc: int, label: str) -> None:
    """Raises if a whole publication goes while no other whole or newer one is left."""
    if inc not in left.damaged and not any_left(left, inc):
        raise Violation("I3", "a whole publication was destroyed", label)


def _with(s: State, i: int, pc: int, taken: Set | None) -> State:
    return s._replace(menders=put(s.menders, i, Mender(pc, taken)))
