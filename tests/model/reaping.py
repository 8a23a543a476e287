"""Collectors after the grace: rename, look, delete or put back, lift the fence, close (G5, G6, F1 to F3)."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.config import Config, Dropped
from tests.model.etcd import Step, write_gc
from tests.model.state import UNKNOWN, UP, Entry, Run, State, Violation, address_of, put
from tests.model.world import NEW as NEW  # where a run begins
from tests.model.world import any_left

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


def steps(s: State, i: int, run: Run, k: Config, dropped: Dropped) -> Iterator[Step]:
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
