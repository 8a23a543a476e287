"""A clear as an operation: what the member deletes, with its progress and its result in counts."""

from __future__ import annotations

from typing import Any

from kvstore.census.selection import Selection
from kvstore.node.clearing import resolved
from kvstore.node.member import Member
from kvstore.operations import OperationRun

SESSIONS_SHOWN = 3


def begin_clear(
    member: Member,
    selection: Selection,
    *,
    dry_run: bool,
    pinned: bool,
    **who: Any,
) -> OperationRun:
    """Begins to clear the selected chunks. ``who`` are further arguments of ``Operations.begin``.

    Raises InvalidRequest for a selection of nothing, and what ``Operations.begin`` raises.
    """
    resolved(member.node, selection)

    def clear(operation: OperationRun) -> str:
        cleared = member.clear_selected(selection, operation.progress, dry_run=dry_run, pinned=pinned)
        operation.count(
            chunks=cleared.chunks,
            bytes=cleared.bytes,
            pinned=cleared.pinned,
            failed=cleared.failed,
            unconfirmed=len(cleared.unconfirmed),
        )
        message = ["dry run: nothing was deleted"] if dry_run else []
        if cleared.failed:
            message.append(f"{cleared.failed} chunks could not be deleted: clear again")
        if cleared.unconfirmed:
            sessions = [*cleared.unconfirmed[:SESSIONS_SHOWN], *["..."] * (len(cleared.unconfirmed) > SESSIONS_SHOWN)]
            message.append(
                f"{len(cleared.unconfirmed)} nodes did not confirm the clear (sessions {', '.join(sessions)}): "
                "restart them"
            )
        return "; ".join(message)

    return member.node.operations.begin("clear", clear, unit="shards", **{"about": selection.describe(), **who})
