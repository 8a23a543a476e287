"""``kvstore fsck``: checks a root against its format, repairs it, tells etcd what it knows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.access import EtcdAccess
from kvstore.cli.command import CHECK_FAILED, Command
from kvstore.cli.kinds import SIZE
from kvstore.cli.options import etcd_options, json_option, read_root_options, root_options_option
from kvstore.cli.output import print_json, progress_bar, size
from kvstore.cli.rooted import open_existing
from kvstore.errors import InvalidRequest, RootMismatch

if TYPE_CHECKING:
    from kvstore.fsck import Adopted, Finding, Progress, Report
    from kvstore.root.identity import RootIdentity
    from kvstore.root.interface import Root


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the user asked for."""

    repair: bool
    quick: bool
    rate: int | None
    etcd: EtcdAccess | None
    as_json: bool


@click.command(cls=Command, no_args_is_help=True, short_help="Check every file of a root, and repair it.")
@click.argument("root", metavar="ROOT")
@click.option("--repair", is_flag=True, help="Put right what is wrong; the root may be in use meanwhile.")
@click.option("--adopt", "adopting", is_flag=True, help="Make an empty, restored or other etcd this root's, first.")
@click.option("--quick", is_flag=True, help="Read headers only, not the KV itself.")
@click.option("--rate", type=SIZE, metavar="SIZE", help="Read at most this much a second, such as 200MiB.")
@root_options_option
@etcd_options
@json_option
def fsck(
    root: str,
    repair: bool,
    adopting: bool,
    quick: bool,
    rate: int | None,
    root_options_file: str | None,
    etcd: EtcdAccess | None,
    as_json: bool,
) -> None:
    """Check every file of ROOT, beside a store that goes on working.

    Damaged chunks are only misses to those who read them: a check finds them before anybody asks. With --repair they
    are set aside, looked at again at the end, and deleted if they are damaged still; misplaced ones go where they
    belong, and what dead writers left is deleted. One run does all of that. With --etcd it knows which writers live;
    without, what was staged more than an hour ago counts as left behind.

    Housekeeping is listed apart: chunks without their parent, staged files of dead writers, what was set aside, and the
    like. A sound root may have it; collectors and --repair tidy it.

    --adopt is for an etcd that was wiped, restored from a snapshot or exchanged, and for a root that was copied or
    restored: it ends all sessions (living nodes begin new ones), puts back what unfinished garbage collection took,
    tells etcd the namespaces and the pins, and makes both one generation again. Safe to repeat. See gc/RUNBOOK.md.

    Exit codes: 0 clean, or nothing but housekeeping; 1 damage or other problems found (or repaired); 2 could not run.

    \b
    Examples:
      kvstore fsck /mnt/kv
      kvstore fsck /mnt/kv --repair --etcd 10.0.0.5:2379 --rate 200MiB
      kvstore fsck /mnt/kv --adopt --etcd 10.0.0.5:2379
    """
    if adopting and etcd is None:
        raise InvalidRequest("--adopt writes to etcd: give --etcd ENDPOINTS")
    if rate is not None and rate < 1:
        raise InvalidRequest("--rate is 0: give how much to read a second, such as 200MiB")
    from kvstore.root.identity import read_identity

    opened = open_existing(root, read_root_options(root_options_file))
    try:
        identity = read_identity(opened)
        if identity is None:
            raise RootMismatch(f"{opened.url} is no kvstore root: it has no FORMAT file. Is the file system mounted?")
        # Before the check, which may take hours on a root whose nodes refuse pins until they have a generation again.
        adopted = _adopt(opened, identity, etcd) if adopting and etcd else None
        if adopted is not None and not as_json:
            _print_adopted(adopted)
        report = _check(opened, identity, _Wanted(repair, quick, rate, etcd, as_json))
    finally:
        opened.close()
    if as_json:
        print_json(_json(identity, report, adopted))
    else:
        _print(report)
    if not report.is_clean or (adopted and adopted.refused):
        click.get_current_context().exit(CHECK_FAILED)


def _check(root: Root, identity: RootIdentity, wanted: _Wanted) -> Report:
    from kvstore.cli.registry import live_sessions
    from kvstore.fsck import fsck as check

    def show(finding: Finding) -> None:
        if not (wanted.as_json or finding.is_housekeeping):
            _show(finding)

    shards = 0
    with progress_bar("checking shards", 1 << identity.shard_bits) as moved:

        def told(progress: Progress) -> None:
            nonlocal shards
            moved(progress.shards_done - shards)
            shards = progress.shards_done

        return check(
            root,
            identity,
            repair=wanted.repair,
            verify_payload=not wanted.quick,
            live_sessions=live_sessions(wanted.etcd, identity.root) if wanted.etcd else None,
            bytes_per_s=wanted.rate,
            found=show,
            progress=told,
        )


def _adopt(root: Root, identity: RootIdentity, etcd: EtcdAccess) -> Adopted:
    from kvstore.fsck import adopt
    from kvstore.meta.roots import bind_root

    meta = etcd.open()
    try:
        bind_root(meta, root.url, identity.root)
        return adopt(root, identity, meta)
    finally:
        meta.close()


def _print_adopted(adopted: Adopted) -> None:
    print(
        f"generation {adopted.previous or 'none'} -> {adopted.generation}: {adopted.sessions_count} sessions ended, "
        f"{adopted.trash_count} sweeps put back, {adopted.condemned_count} sweeps dropped"
    )
    print(
        f"pins: {adopted.pins_restored_count} restored, {adopted.pins_known_count} known, "
        f"{adopted.pins_ended_count} ended; etcd has {adopted.added_count} namespaces more, "
        f"{adopted.known_count} it knew",
        flush=True,
    )
    for refused in adopted.refused:
        print(f"left out: {refused}")


def _show(finding: Finding) -> None:
    done = f" [{finding.action.value}]" if finding.action else ""
    print(f"{finding.kind.value:15} {finding.name}{': ' if finding.detail else ''}{finding.detail}{done}")


def _print(report: Report) -> None:
    housekeeping = [each for each in report.findings if each.is_housekeeping]
    if housekeeping:
        print("housekeeping, which is no damage:")
    for finding in housekeeping:
        _show(finding)
    if report.housekeeping_count > len(housekeeping):
        print(f"and {report.housekeeping_count - len(housekeeping)} more")
    print(
        f"{report.chunks_count} whole chunks, {size(report.chunks_bytes)}; {report.problems_count} problems, "
        f"{report.unrepaired_count} not repaired; {report.housekeeping_count} of housekeeping"
    )


def _finding(finding: Finding) -> dict[str, str | None]:
    return {
        "kind": finding.kind.value,
        "name": finding.name,
        "detail": finding.detail,
        "action": finding.action.value if finding.action else None,
    }


def _json(identity: RootIdentity, report: Report, adopted: Adopted | None) -> dict[str, Any]:
    return {
        "root": identity.root.hex(),
        "clean": report.is_clean,
        "namespaces": report.namespaces_count,
        "chunks": report.chunks_count,
        "bytes": report.chunks_bytes,
        "bytes_read": report.read_bytes,
        "problems": report.problems_count,
        "unrepaired": report.unrepaired_count,
        "unreachable": report.unreachable_count,
        "counts": {kind.value: count for kind, count in report.counts.items()},
        "actions": {action.value: count for action, count in report.actions.items()},
        "findings": [_finding(each) for each in report.findings if not each.is_housekeeping],
        "housekeeping": [_finding(each) for each in report.findings if each.is_housekeeping],
        "housekeeping_count": report.housekeeping_count,
        "findings_truncated": report.is_truncated,
        "adopted": asdict(adopted) if adopted else None,
    }
