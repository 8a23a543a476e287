"""Collectors: plan, condemn, adopt, read (G1 to G4, G7, O1), rename, delete, lift the fence, close (G5, G6, F1 to F3).

No lock, no leader and no clock: which run acts next is anybody's guess, and any may stop for ever.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.configs import Config, Dropped
from tests.model.etcd import Step, write_gc
from tests.model.state import LIVE, UNKNOWN, UP, Condemned, Entry, Run, State, Sweep, Violation, address_of, put
from tests.model.world import NEW, any_left

# Where else a run is. The last three occur in mutations only.
(CONDEMN, GRACE, SETTLE_LIST, RENAME, DRAIN, RESTORE, UNLINK, LIFT, ABANDON, RECHECK, CLOSE, DONE) = range(1, 13)
READ_REFS, MAKE_FOLDER, LIFT_LATE = range(13, 16)
FINISHED = Run(DONE, (), 0, ())


def with_run(s: State, i: int, run: Run) -> State:
    """A copy of the state with another run ``i``."""
    return s._replace(runs=put(s.runs, i, run))


def begin(run: Run, pinned: bool, at: int = 0) -> Run:
    """Where work on sweep ``at`` begins; after the last one it is to close them."""
    if at == len(run.sweeps):
        return Run(CLOSE, run.sweeps, 0, ())
    if run.sweeps[at].inc == UNKNOWN:
        return Run(LIFT, run.sweeps, at, ())
    return Run(DRAIN if pinned or run.sweeps[at].spared else RENAME, run.sweeps, at, ())


def reaping_steps(s: State, i: int, run: Run, k: Config, dropped: Dropped) -> Iterator[Step]:
    """Returns the steps that a run may take on its current sweep."""
    if run.pc == RENAME:
        yield _delete(s, i, run, k, dropped) if k.objects else _rename(s, i, run, dropped)
    elif run.pc == DRAIN:
        yield from _drain(s, i, run, dropped)
    elif run.pc == RESTORE:
        yield _restore(s, i, run, k, dropped)
    elif run.pc == UNLINK:
        yield _unlink(s, i, run, k, dropped)
    elif run.pc == LIFT:
        yield _lift(s, i, run, dropped)
    elif run.pc == ABANDON:
        yield _abandon(s, i, run)
    elif run.pc == RECHECK:
        yield _recheck(s, i, run)
    elif run.pc == CLOSE:
        yield _close(s, i, run, dropped)


def _next(run: Run) -> Run:
    return begin(run, False, run.at + 1)


def _delete(s: State, i: int, run: Run, k: Config, dropped: Dropped) -> Step:
    """Object stores delete on a condition: only the incarnation that was condemned."""
    inc = s.files[0]
    if inc == run.sweeps[0].inc or ("s3_blind_delete" in dropped and inc):
        protected = any(n.ref > 0 or n.holds[0].stage for n in s.nodes if n.status == UP)
        if inc != run.sweeps[0].inc and not protected:
            raise Violation("I3", "a newer publication was destroyed", f"g{i}.delete")
        return f"g{i}.delete(i{inc})", with_run(s._replace(files=(0,)), i, _next(run))
    return f"g{i}.delete_noop", with_run(s, i, _next(run))


def _rename(s: State, i: int, run: Run, dropped: Dropped) -> Step:
    """G5, F1: only into the sweep's folder, and under a name of this run."""
    sweep = run.sweeps[run.at]
    inc = s.files[sweep.shard]
    if sweep.id not in s.folders and "no_fence" not in dropped:
        return f"g{i}.rename_fenced", with_run(s, i, _next(run))
    drains = run._replace(pc=DRAIN)
    if not inc:
        return f"g{i}.rename_enoent", with_run(s, i, drains)
    name, trash = i, s.trash
    if "fixed_trash_name" in dropped:
        name = 0
        replaced = [entry for entry in trash if entry[:2] == (sweep.id, name)]
        trash = trash.difference(replaced)
        if inc == sweep.inc and any(entry.inc != inc for entry in replaced) and all(e.inc == inc for e in trash):
            raise Violation("I3", "a newer publication was overwritten in the trash", f"g{i}.rename")
    taken = s._replace(files=put(s.files, sweep.shard, 0), trash=trash | {Entry(sweep.id, name, inc)})
    return f"g{i}.rename(i{inc}->trash)", with_run(taken, i, drains)


def _drain(s: State, i: int, run: Run, dropped: Dropped) -> Iterator[Step]:
    """G5: looks at each entry where nobody can change it. The condemned go, any other goes back."""
    sweep, found = run.sweeps[run.at], False
    for entry in s.trash:
        if entry.sweep != sweep.id:
            continue
        found = True
        if entry.inc == sweep.inc or ("no_incarnation" in dropped and sweep.inc != UNKNOWN):
            label = f"g{i}.see(t{entry.run}:i{entry.inc}=condemned)"
            yield label, with_run(s, i, run._replace(pc=UNLINK, memo=(entry.run,)))
        else:
            yield (
                f"g{i}.see(t{entry.run}:i{entry.inc})",
                with_run(s, i, run._replace(pc=RESTORE, memo=(entry.run, entry.inc))),
            )
    if not found:
        yield f"g{i}.drained", with_run(s, i, run._replace(pc=LIFT))


def _entry(s: State, run: Run) -> Entry | None:
    wanted = (run.sweeps[run.at].id, run.memo[0])
    return next((entry for entry in s.trash if entry[:2] == wanted), None)


def _restore(s: State, i: int, run: Run, k: Config, dropped: Dropped) -> Step:
    entry, unlinks = _entry(s, run), run._replace(pc=UNLINK)
    if entry is not None:
        address = address_of(entry.inc)
        there = s.files[address]
        if there == 0 or k.replaces or "restore_overwrites" in dropped:
            if there not in (0, entry.inc) and not k.replaces:
                raise Violation("I3", "a restore replaced a newer publication", f"g{i}.restore")
            return f"g{i}.restore(i{entry.inc})", with_run(
                s._replace(files=put(s.files, address, entry.inc)), i, unlinks
            )
    return f"g{i}.restore_exists", with_run(s, i, unlinks)


def _unlink(s: State, i: int, run: Run, k: Config, dropped: Dropped) -> Step:
    entry, drains = _entry(s, run), run._replace(pc=DRAIN, memo=())
    if entry is None:
        return f"g{i}.unlink_enoent", with_run(s, i, drains)
    left = s._replace(trash=s.trash - {entry})
    condemned = run.sweeps[run.at].inc
    # Once a file was damaged the promise is a weaker one: a publication goes only where some file had its name when it
    # was to go back. After a rollback too: what survives may be a condemned one.
    is_weak = k.replaces or (s.damaged and "strict_after_damage" not in dropped)
    excepted = is_weak or entry.inc == condemned or condemned == UNKNOWN or entry.inc in s.damaged
    if not excepted and not any_left(left, entry.inc, 0 if k.rollback else condemned):
        raise Violation("I3", "a newer publication was destroyed", f"g{i}.unlink(i{entry.inc})")
    return f"g{i}.unlink(t{entry.run}:i{entry.inc})", with_run(left, i, drains)


def _lift(s: State, i: int, run: Run, dropped: Dropped) -> Step:
    """G6: after this nothing can be renamed into the folder. Before the key goes, never after (F1)."""
    sweep = run.sweeps[run.at]
    if dropped & {"no_fence", "close_before_fence"}:
        return f"g{i}.no_rmdir", with_run(s, i, _next(run))
    if sweep.id not in s.folders:
        return f"g{i}.rmdir_enoent", with_run(s, i, _next(run))
    if any(entry.sweep == sweep.id for entry in s.trash):
        # F3: what nobody condemned, as far as we know, may be condemned by now.
        return f"g{i}.rmdir_enotempty", with_run(s, i, run._replace(pc=RECHECK if sweep.inc == UNKNOWN else DRAIN))
    return f"g{i}.rmdir", with_run(s._replace(folders=s.folders - {sweep.id}), i, _next(run))


def _recheck(s: State, i: int, run: Run) -> Step:
    """F3: a folder that is not empty was condemned once: it is named by now, or etcd has lost it (C13)."""
    sweep = run.sweeps[run.at]
    if any(key is not None and key.sweep == sweep.id for key in s.condemned):
        return f"g{i}.listed:leave", with_run(s, i, _without_current(run))
    return f"g{i}.unlisted:restore", with_run(s, i, run._replace(pc=DRAIN))


def _abandon(s: State, i: int, run: Run) -> Step:
    """The grace took too long: closes without having taken anything; where another run has, it is left to that one."""
    sweep = run.sweeps[run.at]
    onwards = run._replace(at=run.at + 1) if run.at + 1 < len(run.sweeps) else Run(CLOSE, run.sweeps, 0, ())
    if sweep.id not in s.folders:
        return f"g{i}.rmdir_enoent", with_run(s, i, onwards)
    if any(entry.sweep == sweep.id for entry in s.trash):
        return f"g{i}.rmdir_enotempty", with_run(s, i, _without_current(run))
    return f"g{i}.rmdir", with_run(s._replace(folders=s.folders - {sweep.id}), i, onwards)


def _without_current(run: Run) -> Run:
    left = run.sweeps[: run.at] + run.sweeps[run.at + 1 :]
    if not left:
        return FINISHED
    if run.pc == ABANDON and run.at < len(left):
        return run._replace(sweeps=left)
    return begin(run._replace(sweeps=left), False, run.at)


def _close(s: State, i: int, run: Run, dropped: Dropped) -> Step:
    """G6: one transaction deletes all keys that are still of these sweeps."""
    sweeps = {sweep.shard: sweep for sweep in run.sweeps}
    ours = [shard for shard, sweep in sweeps.items() if _names(s, shard, sweep.id)]
    if "close_blind" in dropped:
        ours = [shard for shard, sweep in sweeps.items() if s.condemned[shard] is not None and sweep.inc != UNKNOWN]
    if "close_compares_first" in dropped and run.sweeps[0].shard in ours:
        ours = [shard for shard in sweeps if s.condemned[shard] is not None]
    if not ours:
        return f"g{i}.close_noop", with_run(s, i, FINISHED)
    condemned, names = s.condemned, []
    for shard in ours:
        key = condemned[shard]
        assert key is not None
        names.append(f"s{key.sweep}")
        condemned = put(condemned, shard, None)
    end = Run(LIFT_LATE, run.sweeps, 0, ()) if "close_before_fence" in dropped else FINISHED
    return f"g{i}.close({','.join(names)})", with_run(write_gc(s, condemned, s.rev), i, end)


def _names(s: State, shard: int, sweep: int) -> bool:
    key = s.condemned[shard]
    return key is not None and key.sweep == sweep


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
            yield from reaping_steps(s, i, run, k, dropped)


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
