"""``kvstore fsck`` and ``check-root``: check a root against its format and repair it; check a mount."""

from __future__ import annotations

from collections.abc import Set
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.access import EtcdAccess, RootOptions, RootPlace, etcd_options, root_option, root_options_option
from kvstore.cli.app import Command, check_failed
from kvstore.cli.options import FOLDER, SIZE, flag, json_option, option, takes
from kvstore.cli.output import print_json, print_rows, progress_bar, progress_to
from kvstore.cli.selectors import identified, open_existing
from kvstore.core.validate import shown, size
from kvstore.errors import InvalidRequest, RootMismatch
from kvstore.meta.cluster import difference, read_generation

if TYPE_CHECKING:
    from kvstore.fsck import Adopted, Finding, FsckReport
    from kvstore.root.identity import RootIdentity
    from kvstore.root.interface import Root

TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Checks:
    """The options of a check."""

    repair: bool = flag("--repair", help="Repair problems; the root may be in use.")
    adopt: bool = flag("--adopt", help="First bind an empty, restored or different etcd to this root.")
    quick: bool = flag("--quick", help="Read headers only, not the KV itself.")
    rate: int | None = option("--rate", type=SIZE, help="Read at most this much a second, such as 200MiB.")


@click.command(cls=Command, short_help="Check every file of a root, and repair it.")
@root_option
@takes("checks", Checks)
@etcd_options
@json_option
def fsck(root: RootPlace, checks: Checks, etcd: EtcdAccess | None, as_json: bool) -> None:
    """Check every file of ROOT, while the store goes on working.

    A damaged chunk is a miss for readers; a check finds it earlier. With --repair damaged chunks go to quarantine, are
    checked again at the end, and deleted if they are still damaged. Misplaced chunks are moved to their place, and
    files of dead writers are deleted. One run does all of that. With --etcd it knows which writers are alive; without,
    files staged more than an hour ago count as left behind.

    Leftovers are listed separately: staged files of dead writers, files in quarantine, and the like. A sound root may
    have some; collectors and --repair remove them.

    --adopt is for an etcd that was wiped, restored from a snapshot or exchanged, and for a root that was copied or
    restored: it ends all sessions (living nodes begin new ones), puts back what unfinished garbage collection took,
    records the namespaces and the pins in etcd, and gives both the same generation. Safe to repeat.
    See deploy/RUNBOOK.md.

    It also says if etcd is not the root's any more, so that --adopt is needed.

    Exit codes: 0 clean, or only leftovers; 1 damage or other problems found (or repaired); 2 could not run.

    \b
    Examples:
      kvstore fsck --root /mnt/kv
      kvstore fsck /mnt/kv --repair --etcd 10.0.0.5:2379 --rate 200MiB
      kvstore fsck /mnt/kv --adopt --etcd 10.0.0.5:2379
    """
    if checks.rate is not None and checks.rate < 1:
        raise InvalidRequest("--rate is 0: give how much to read a second, such as 200MiB")
    with identified(root.url, root.options.read()) as (opened, identity):
        # Before the check, which may take hours on a root whose nodes refuse pins until they have a generation again.
        adopted = _adopt(opened, identity, etcd) if checks.adopt else None
        if adopted is not None and not as_json:
            _print_adopted(adopted)
        lost = _metadata_loss(opened, identity, etcd)
        if lost is not None and not as_json:
            print(shown(f"metadata        {lost}"), flush=True)
        report = _check(opened, identity, checks, etcd, as_json)
    if as_json:
        print_json({**_json(identity, report, adopted), "metadata": lost})
    else:
        _print(report, lost is not None)
    if not report.is_clean or lost is not None or (adopted and adopted.refused):
        check_failed()


def _metadata_loss(root: Root, identity: RootIdentity, etcd: EtcdAccess | None) -> str | None:
    """Returns why the metadata are not those of the root, with what to do; None if they are, or if it has none.

    Makes no file. Raises the errors of etcd.
    """
    from kvstore.meta.keys import Keys
    from kvstore.root.identity import newest_number, read_newest

    if etcd is None or not newest_number(root):
        return None
    try:
        with closing(etcd.open()) as meta:
            on_root, in_meta = read_newest(root), read_generation(meta, Keys(identity.root), TIMEOUT_S)
    except RootMismatch as mismatch:
        return f"{mismatch}: run `kvstore fsck ROOT --adopt`"
    return None if on_root is None or on_root == in_meta else difference(on_root, in_meta)


def _check(root: Root, identity: RootIdentity, checks: Checks, etcd: EtcdAccess | None, as_json: bool) -> FsckReport:
    from kvstore.fsck import Options
    from kvstore.fsck import fsck as check
    from kvstore.meta.keys import Keys
    from kvstore.meta.session import live_sessions

    def found(finding: Finding) -> None:
        if not (as_json or finding.is_leftover):
            _show(finding)

    live: Set[bytes] | None = None
    if etcd is not None:
        with closing(etcd.open()) as meta:
            live = live_sessions(meta, Keys(identity.root), TIMEOUT_S)
    options = Options(
        repair=checks.repair,
        verify_payload=not checks.quick,
        live_sessions=live,
        bytes_per_s=checks.rate,
    )
    with progress_to("checking, shards") as show:
        return check(root, identity, options, found=found, progress=lambda done: show(done, 1 << identity.shard_bits))


def _adopt(root: Root, identity: RootIdentity, etcd: EtcdAccess | None) -> Adopted:
    from kvstore.fsck import adopt
    from kvstore.host.tables import check_left
    from kvstore.meta.cluster import bind_root

    if etcd is None:
        raise InvalidRequest("--adopt writes to etcd: give --etcd ENDPOINTS; a folder of one host has nothing to adopt")
    check_left(root)
    with closing(etcd.open()) as meta:
        bind_root(meta, root.url, identity.root)
        return adopt(root, identity, meta)


def _print_adopted(adopted: Adopted) -> None:
    print(
        f"generation {adopted.previous or 'none'} -> {adopted.generation}: {adopted.sessions_count} sessions ended, "
        f"{adopted.trash_count} sweeps put back, {adopted.condemned_count} sweeps dropped"
    )
    print(
        f"pins: {adopted.pins_restored_count} restored, {adopted.pins_known_count} known, "
        f"{adopted.pins_ended_count} ended; {adopted.added_count} namespaces are known anew, "
        f"{adopted.known_count} were known",
        flush=True,
    )
    for refused in adopted.refused:
        print(f"left out: {shown(str(refused))}")


def _show(finding: Finding) -> None:
    done = f" [{finding.action.value}]" if finding.action else ""
    print(shown(f"{finding.kind.value:15} {finding.name}{': ' if finding.detail else ''}{finding.detail}{done}"))


def _print(report: FsckReport, is_lost: bool) -> None:
    leftovers = [each for each in report.findings if each.is_leftover]
    if leftovers:
        print("leftovers (not damage):")
    for finding in leftovers:
        _show(finding)
    if report.leftovers_count > len(leftovers):
        print(f"and {report.leftovers_count - len(leftovers)} more")
    problems, left = report.problems_count + is_lost, report.unrepaired_count + is_lost
    print(
        f"{report.chunks_count} intact chunks, {size(report.chunks_bytes)}; {problems} problem{'s' * (problems != 1)}, "
        f"{left} not repaired; {report.leftovers_count} leftovers"
    )


def _finding(finding: Finding) -> dict[str, str | None]:
    return {
        "kind": finding.kind.value,
        "name": finding.name,
        "detail": finding.detail,
        "action": finding.action.value if finding.action else None,
    }


def _json(identity: RootIdentity, report: FsckReport, adopted: Adopted | None) -> dict[str, Any]:
    return {
        "root": identity.root.hex(),
        "clean": report.is_clean,
        "namespaces": report.namespaces_count,
        "chunks": report.chunks_count,
        "bytes": report.chunks_bytes,
        "bytes_read": report.read_bytes,
        "problems": report.problems_count,
        "unrepaired": report.unrepaired_count,
        "counts": {kind.value: count for kind, count in report.counts.items()},
        "actions": {action.value: count for action, count in report.actions.items()},
        "findings": [_finding(each) for each in report.findings if not each.is_leftover],
        "leftovers": [_finding(each) for each in report.findings if each.is_leftover],
        "leftovers_count": report.leftovers_count,
        "findings_truncated": report.is_truncated,
        "adopted": asdict(adopted) if adopted else None,
    }


@click.command("check-root", cls=Command, short_help="Test whether a mount does what the store relies on.")
@click.argument("root", metavar="ROOT", envvar="KVSTORE_ROOT", type=FOLDER)
@click.argument("second", metavar="[SECOND_MOUNT]", required=False, type=FOLDER)
@root_options_option
@json_option
def check_root(root: str, second: str | None, options: RootOptions, as_json: bool) -> None:
    """Test whether ROOT does what the store relies on, and name what does not hold.

    Writes a few MiB to a scratch folder and removes it. With SECOND_MOUNT, another mount of the same file system on
    this host, it also tests that each mount sees the other's writes.

    Exit codes: 0 everything holds, 1 something does not, 2 could not run.

    \b
    Examples:
      kvstore check-root /mnt/kv
      kvstore check-root /mnt/kv /mnt/kv-again --json
    """
    from kvstore.root.check import check_root as check
    from kvstore.root.check import is_sound

    with closing(open_existing(root, options.read())) as opened, progress_bar("probes", None) as moved:
        probes = check(opened, second=second, progress=lambda probe: moved(1))
    sound = is_sound(probes)
    rows = [asdict(each) for each in probes]
    columns = ("name", "ok", "detail", "consequence")
    print_rows("probes", rows, columns, as_json, root=opened.url, sound=sound)
    if not sound:
        check_failed()
