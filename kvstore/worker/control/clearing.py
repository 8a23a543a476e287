"""The operation of clearing selected chunks: the member's clear, with its progress on a ticket."""

from __future__ import annotations

from kvstore.census.selection import Selection
from kvstore.node.member import Member
from kvstore.v1 import control_pb2 as pb
from kvstore.worker.control.runner import Step


def selection_of(message: pb.Selection) -> Selection:
    """Returns the selection in a message. Raises InvalidRequest if it is empty or makes no sense."""
    return Selection(
        namespace=message.namespace or None,
        tenant=message.tenant if message.HasField("tenant") else None,
        fingerprint=message.fingerprint,
        older_than_s=message.older_than_s,
        written_by=message.written_by,
        since_s=message.since_s,
        until_s=message.until_s,
    )


def clear_selected(member: Member, selection: Selection, step: Step, *, dry_run: bool, pinned: bool) -> str:
    """Clears the selected chunks. Raises what the member raised."""
    cleared = member.clear_selected(selection, step.progress, dry_run=dry_run, pinned=pinned)
    step.count(
        chunks=cleared.chunks,
        bytes=cleared.bytes,
        pinned_chunks=cleared.pinned,
        failed_chunks=cleared.failed,
        unconfirmed_nodes=len(cleared.unconfirmed),
    )
    said = ["dry run: nothing was deleted"] if dry_run else []
    if cleared.failed:
        said.append(f"{cleared.failed} chunks could not be deleted: clear again")
    if cleared.unconfirmed:
        said.append(
            f"{len(cleared.unconfirmed)} nodes did not confirm the clear (sessions "
            f"{', '.join(cleared.unconfirmed[:3])}{', ...' if len(cleared.unconfirmed) > 3 else ''}): "
            "restart them"
        )
    return "; ".join(said)
