"""Collectors up to the end of the grace: plan, condemn, adopt, read (G1 to G4, G7, O1).

No lock, no leader and no clock: which run acts next is anybody's guess, and any may stop for ever.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model import reaping
from tests.model.config import Config, Dropped
from tests.model.etcd import Step, write_gc
from tests.model.reaping import (
    ABANDON,
    CLOSE,
    CONDEMN,
    DONE,
    DRAIN,
    FINISHED,
    GRACE,
    LIFT,
    LIFT_LATE,
    MAKE_FOLDER,
    NEW,
    READ_REFS,
    RENAME,
    SETTLE_LIST,
    begin,
    with_run,
)
from tests.model.state import LIVE, UNKNOWN, UP, Condemned, Run, State, Sweep, put

GRACE_SKIPPED = -1


def steps(s: State, k: Config, dropped: Dropped) -> Iterator[Step]:
    """Returns the possible next steps of each run."""
    for i, run in enumerate(s.runs):
        if run.pc == NEW:
            yield from _start(s, i, k, dropped)
            return  # runs behind it are new too, and can do nothing else
        if run.pc == CONDEMN:
            yield from _condemn(s, i, run, dropped)
        elif run.pc == GRACE:
            yield from _grace(s, i, run, k, dropped)
        elif run.pc == SETTLE_LIST:
            yield from _settle_list(s, i, run, k, dropped)
        elif run.pc == READ_REFS:  # only in the mutations split_read and split_named
            if "split_named" in dropped:
                run = run._replace(sweeps=_spared(s, run.sweeps, dropped))
            yield f"g{i}.refs,pinned={_any_pin(s)}", with_run(s, i, begin(run, _any_pin(s)))
        elif run.pc == MAKE_FOLDER:  # only in the mutation late_mkdir
            made = s._replace(folders=s.folders | {run.sweeps[0].id})
            yield f"g{i}.mkdir_late", with_run(made, i, run._replace(pc=GRACE))
        elif run.pc == LIFT_LATE:  # only in the mutation close_before_fence
            yield f"g{i}.rmdir_late", with_run(s._replace(folders=s.folders - {run.sweeps[0].id}), i, FINISHED)
        elif run.pc != DONE:
            yield from reaping.steps(s, i, run, k, dropped)


def _start(s: State, i: int, k: Config, dropped: Dropped) -> Iterator[Step]:
    free = [a for a in k.addresses if s.files[a] and (s.condemned[a] is None or "condemn_blind" in dropped)]
    open_ = [a for a in k.addresses if s.condemned[a] is not None]
    for group in k.groups:
        if s.sweeps_count + len(group) <= k.sweeps and all(a in free for a in group):
            yield _plan(s, i, group, k, dropped)
        # G7: any run may continue sweeps in flight, at the grace.
        if "no_adopt" not in dropped and all(a in open_ for a in group):
            keys = [key for a in group if (key := s.condemned[a]) is not None]
            sweeps = tuple(Sweep(a, key.sweep, key.inc, key.stamp) for a, key in zip(group, keys, strict=True))
            names = ",".join(f"s{key.sweep}" for key in keys)
            yield f"g{i}.adopt({names})", with_run(s, i, Run(_after_adopting(dropped), sweeps, 0, ()))
    if "no_unlisted" not in dropped:
        named = {key.sweep for key in s.condemned if key is not None}
        for folder in s.folders:
            if folder not in named:
                # F3. Its sweep may not be condemned yet, so nobody may take its entries for restored ones.
                pc = DRAIN if "fence_drains" in dropped else LIFT
                sweep = Sweep(0, folder, UNKNOWN, 0)
                yield f"g{i}.fence_unlisted(s{folder})", with_run(s, i, Run(pc, (sweep,), 0, ()))


def _after_adopting(dropped: Dropped) -> int:
    return MAKE_FOLDER if "late_mkdir" in dropped else GRACE


def _plan(s: State, i: int, group: tuple[int, ...], k: Config, dropped: Dropped) -> Step:
    """G1: lists, chooses, and makes the folder of each sweep, before anybody can know of it (F2)."""
    stamp = s.rev + 1 if "stale_stamp" in dropped else 0
    sweeps = tuple(Sweep(a, s.sweeps_count + 1 + at, s.files[a], stamp) for at, a in enumerate(group))
    memo: tuple[int, ...] = ()
    if "refs_before_condemn" in dropped:
        memo = (int(_any_pin(s)),)
    if "grace_stale_read" in dropped:
        memo = () if _announced(s, dropped) else (GRACE_SKIPPED,)
    folders = s.folders if k.objects else s.folders | {sweep.id for sweep in sweeps}
    planned = s._replace(sweeps_count=s.sweeps_count + len(group), folders=folders)
    names = ",".join(f"i{sweep.inc},s{sweep.id}" for sweep in sweeps)
    return f"g{i}.plan({names})+mkdir", with_run(planned, i, Run(CONDEMN, sweeps, 0, memo))


def _condemn(s: State, i: int, run: Run, dropped: Dropped) -> Iterator[Step]:
    """G2: one transaction for all shards that no other sweep is in; the others' folders only have to go again."""
    free = [s.condemned[sweep.shard] is None or "condemn_blind" in dropped for sweep in run.sweeps]
    if "condemn_compares_first" in dropped and free[0]:
        free = [True] * len(free)
    if not any(free):
        lost = tuple(sweep._replace(inc=UNKNOWN) for sweep in run.sweeps)
        yield f"g{i}.condemn_lost", with_run(s, i, Run(LIFT, lost, 0, ()))
        return
    condemned, sweeps = s.condemned, []
    for sweep, is_free in zip(run.sweeps, free, strict=True):
        if is_free:
            sweep = sweep._replace(stamp=sweep.stamp if "stale_stamp" in dropped else s.rev + 1)
            condemned = put(condemned, sweep.shard, Condemned(sweep.id, sweep.inc, sweep.stamp, 1, 0))
            sweeps.append(sweep)
        else:
            sweeps.append(sweep._replace(inc=UNKNOWN))
    memo = (int(_any_pin(s)),) if "refs_before_grace" in dropped else run.memo
    if "named_before_grace" in dropped:
        sweeps = list(_spared(s, tuple(sweeps), frozenset()))
    names = ",".join(f"s{sweep.id},i{sweep.inc}" for sweep in sweeps)
    begun = write_gc(s, condemned, s.rev + 1)
    yield f"g{i}.condemn({names})", with_run(begun, i, Run(GRACE, tuple(sweeps), 0, memo))


def _grace(s: State, i: int, run: Run, k: Config, dropped: Dropped) -> Iterator[Step]:
    """G4: one read says that the keys are still ours, that every session has announced them, and which pins exist."""
    rereads = not dropped & {"no_reread", "split_read", "split_named"}
    ours = [sweep for sweep in run.sweeps if sweep.inc != UNKNOWN and (not rereads or _is_ours(s, sweep))]
    if not ours:
        gone = tuple(sweep._replace(inc=UNKNOWN) for sweep in run.sweeps)
        yield f"g{i}.not_ours", with_run(s, i, FINISHED if k.objects else Run(LIFT, gone, 0, ()))
        return
    announced = _announced(s, dropped)
    skipped = "no_grace" in dropped or run.memo == (GRACE_SKIPPED,)
    over = [sweep for sweep in ours if skipped or all(each >= sweep.stamp for each in announced)]
    if over:
        # Unfinished sweeps are left to those that adopt them; those that never began are only lifted.
        sweeps = tuple(sweep for sweep in run.sweeps if sweep in over or sweep.inc == UNKNOWN)
        yield from _grace_over(s, i, run, sweeps, k, dropped)
    if k.abandoning:
        yield (
            f"g{i}.abandon",
            with_run(s, i, Run(CLOSE if "abandon_keeps_fence" in dropped else ABANDON, tuple(ours), 0, ())),
        )


def _grace_over(s: State, i: int, run: Run, sweeps: tuple[Sweep, ...], k: Config, dropped: Dropped) -> Iterator[Step]:
    early = dropped & {"refs_before_condemn", "refs_before_grace"}
    pinned = run.memo == (1,) if early else _any_pin(s)
    run = run._replace(sweeps=_spared(s, sweeps, dropped), memo=())
    if dropped & {"split_read", "split_named"}:
        yield f"g{i}.grace_over", with_run(s, i, run._replace(pc=READ_REFS))
    elif k.final_list:
        key, pinned = s.condemned[0], pinned or bool(run.sweeps[0].spared)
        seen = (*key, int(pinned)) if key is not None else (int(pinned),)
        yield f"g{i}.grace_over,pinned={pinned}", with_run(s, i, run._replace(pc=SETTLE_LIST, memo=seen))
    else:
        yield f"g{i}.grace_over,pinned={pinned}", with_run(s, i, begin(run, pinned))


def _settle_list(s: State, i: int, run: Run, k: Config, dropped: Dropped) -> Iterator[Step]:
    """O1: a transaction fixes the final list; every run deletes from that one, whichever run fixed it."""
    pinned, key = bool(run.memo[-1]), s.condemned[0]
    seen = Condemned(*run.memo[:-1]) if len(run.memo) > 1 else None
    named = key is not None and key.sweep == run.sweeps[0].id

    def deletes(wanted: bool) -> Run:
        return run._replace(pc=RENAME if wanted else DRAIN, memo=())

    if key is not None and named and key.final:
        wanted = not pinned if "own_list" in dropped else bool(key.listed)
        yield f"g{i}.reaping_already", with_run(s, i, deletes(wanted))
    elif key is not None and named and key == seen:
        is_listed = int(seen is not None and bool(seen.listed) and not pinned)
        final = key._replace(stamp=run.sweeps[0].stamp, inc=run.sweeps[0].inc, listed=is_listed, final=1)
        told = s._replace(condemned=(final,)) if is_listed == key.listed else write_gc(s, (final,), s.rev)
        wanted = bool(is_listed) or ("own_list" in dropped and not pinned)
        yield f"g{i}.reaping({is_listed})", with_run(told, i, deletes(wanted))
    elif named:
        yield f"g{i}.changed:reread", with_run(s, i, run._replace(pc=GRACE, memo=()))
    else:
        yield f"g{i}.not_ours", with_run(s, i, FINISHED if k.objects else run._replace(pc=LIFT, memo=()))


def _is_ours(s: State, sweep: Sweep) -> bool:
    key = s.condemned[sweep.shard]
    return key is not None and key[:3] == sweep[1:4]


def _any_pin(s: State) -> bool:
    return any(n.ref > 0 for n in s.nodes)


def _spared(s: State, sweeps: tuple[Sweep, ...], dropped: Dropped) -> tuple[Sweep, ...]:
    """G4: what the read that ends the grace finds named by a session is spared."""
    if dropped & {"held_not_spared", "named_before_grace"}:
        return sweeps
    live = [n.named for n in s.nodes if n.status in LIVE]
    return tuple(sweep._replace(spared=max([named[sweep.shard] for named in live], default=0)) for sweep in sweeps)


def _announced(s: State, dropped: Dropped) -> list[int]:
    """Returns the announcements of the sessions in etcd."""
    if "view_before_session" in dropped:
        return [n.announced for n in s.nodes if n.status == UP]
    return [n.announced for n in s.nodes if n.status in LIVE]
