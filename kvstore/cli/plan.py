"""``kvstore plan``: the order of an offline batch that computes the fewest tokens."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.access import Access, access_options
from kvstore.cli.app import Command, check_failed
from kvstore.cli.options import COUNT, DURATION, flag, json_option, option, takes
from kvstore.cli.output import print_values, progress_bar, progress_to
from kvstore.cli.selectors import open_cache
from kvstore.core.validate import shown
from kvstore.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from kvstore.batch import Plan
    from kvstore.batch.file import RequestFile
    from kvstore.batch.upload import Sent

BLOCK_TOKENS = 16
"""Tokens of a block where no store says otherwise: the default of vLLM."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The options of a plan other than the batch and the store."""

    memory_tokens: int = option(
        "--memory-tokens",
        type=COUNT,
        required=True,
        metavar="N",
        help="Tokens of KV that the engine keeps for prefixes, such as 400000 or 400k.",
    )
    output: str | None = option("--output", metavar="FILE", help="Write the reordered batch.")
    server: str | None = option(
        "--server",
        metavar="URL",
        help="Send the requests to this OpenAI-compatible server, in order; OPENAI_API_KEY is its key.",
    )
    results: str | None = option(
        "--results",
        metavar="FILE",
        help="With --server: write results here, and skip requests that have one; BATCH.results.jsonl by default.",
    )
    concurrency: int = option(
        "--concurrency",
        type=click.IntRange(1, 1024),
        default=16,
        show_default=True,
        metavar="N",
        help="With --server: concurrent requests.",
    )
    timeout_s: float = option(
        "--timeout", type=DURATION, default="10m", show_default=True, help="With --server: limit for one answer."
    )
    dry_run: bool = flag("--dry-run", help="Only report: write nothing.")
    tokenizer: str | None = option(
        "--tokenizer", metavar="NAME", help="Model name or folder of the tokenizer, for prompts that are text."
    )
    block_tokens: int | None = option(
        "--block-tokens",
        type=click.IntRange(min=1),
        metavar="N",
        help=f"Tokens that prompts share as a whole; {BLOCK_TOKENS} by default, and with --namespace its chunks.",
    )
    namespace: str | None = option(
        "--namespace", metavar="NAME", help="Plan with what the store holds in this namespace."
    )
    tenant: str = option("--tenant", default="", help="The namespace's tenant.")
    fingerprint: str | None = option(
        "--fingerprint", help="Digest of the weights, needed if a name has several; its first characters are enough."
    )

    def __post_init__(self) -> None:
        if self.namespace is not None and self.block_tokens is not None:
            raise InvalidRequest("--block-tokens with --namespace: prompts share the chunks of the namespace")
        if self.server is not None and self.output is not None:
            raise InvalidRequest("--output with --server: give --output to write the batch, or --server to send it")
        if self.results is not None and self.server is None:
            raise InvalidRequest("--results without --server: results come from a server; --output is the batch")


@click.command(cls=Command, short_help="Put an offline batch in the order that computes the fewest tokens.")
@click.argument("batch", metavar="BATCH")
@takes("planned", Planned)
@access_options
@json_option
def plan(batch: str, planned: Planned, access: Access, as_json: bool) -> None:
    """Put the requests of BATCH in the order that computes the fewest tokens, and report what that saves.

    BATCH is an OpenAI batch file. Prompts are token ids, or text and --tokenizer. Requests stay as they are, custom_id
    included; only their order changes. With --namespace and a store, what the store holds counts as free.

    With --server the requests are sent in this order, and each result is written as it comes. Run the same command
    again to go on after a kill or an error: requests with a result are not sent again.

    Exit codes: 0 done, 1 the server did not do some requests, or calls them wrong, 2 could not run.

    \b
    Examples:
      kvstore plan batch.jsonl --memory-tokens 400000 --dry-run
      kvstore plan batch.jsonl --memory-tokens 400000 --tokenizer Qwen/Qwen3-8B --output ordered.jsonl
      kvstore plan batch.jsonl --memory-tokens 400000 --tokenizer Qwen/Qwen3-8B --server http://127.0.0.1:8000
      kvstore plan batch.jsonl --memory-tokens 400000 --namespace llama-3.1-8b --connect 10.0.0.7:7070 --dry-run
    """
    from kvstore.batch.file import load_tokenizer, read_batch

    tokenizer = load_tokenizer(planned.tokenizer) if planned.tokenizer is not None else None
    with progress_to("reading, bytes") as moved:
        found = read_batch(batch, tokenizer, planned.block_tokens or BLOCK_TOKENS, moved)
    with progress_bar("planning", None):
        made = _plan(found, planned, access)
    if planned.output is not None and not planned.dry_run:
        found.write(made.order, Path(planned.output))
    sent = _sent(found, made, planned) if planned.server is not None and not planned.dry_run else None
    print_values({**_values(batch, made), "sent": sent and asdict(sent)}, as_json)
    if sent is not None and not as_json:
        print_values(asdict(sent), as_json)
    if planned.output is None and planned.server is None and not planned.dry_run:
        print("kvstore plan: nothing is written or sent without --output FILE or --server URL", file=sys.stderr)
    if sent is not None and sent.failed + sent.refused + sent.refused_before:
        check_failed()


def _sent(batch: RequestFile, plan: Plan, planned: Planned) -> Sent:
    """Sends the batch."""
    from kvstore.batch.upload import Results, Server, send

    assert planned.server is not None
    server = Server(planned.server, planned.timeout_s, os.environ.get("OPENAI_API_KEY"))
    path = Path(planned.results or f"{batch.path}.results.jsonl")
    order = plan.order
    with Results(path) as results, progress_bar("requests", len(order)) as moved:
        try:
            sent = send(batch, order, server, results, planned.concurrency, moved, _note)
        except Unavailable as error:
            raise Unavailable(
                f"{error}; {len(results.known)} results are in {str(path)!r}, run again to go on"
            ) from error
    if wrong := sent.refused + sent.refused_before:
        _note(
            f"the server refused {wrong:,} requests, which are not sent again: to do so, remove their lines from "
            f"{str(path)!r} (status_code 400 and more)"
        )
    return sent


def _note(line: str) -> None:
    print(f"kvstore plan: {shown(line)}", file=sys.stderr)


def _plan(batch: RequestFile, planned: Planned, access: Access) -> Plan:
    """The plan, with what a store holds if a namespace is named."""
    if planned.namespace is None:
        from kvstore.batch import make_plan

        return make_plan(batch.prompts, memory_tokens=planned.memory_tokens)
    with access.open() as store:
        cache = open_cache(store, planned.namespace, planned.tenant, planned.fingerprint)
        prompts = (batch.prompts.tokens(at) for at in range(len(batch.prompts)))
        return cache.plan(prompts, memory_tokens=planned.memory_tokens)


def _values(batch: str, plan: Plan) -> dict[str, Any]:
    return {
        "batch": batch,
        "prompts": len(plan.order),
        "groups": len(plan.groups),
        "groups_shared": _shared(plan),
        "tokens_total": plan.tokens_total,
        "tokens_stored": plan.tokens_stored,
        "tokens_to_compute": plan.tokens_to_compute,
        "tokens_optimum": plan.tokens_optimum,
        "tokens_one_level": plan.tokens_one_level,
        "tokens_arrival": plan.tokens_arrival,
        "saving": plan.saving,
        "memory_tokens": plan.memory_tokens,
        "block_tokens": plan.block_tokens,
    }


def _shared(plan: Plan) -> int:
    return sum(len(group.members) > 1 for group in plan.groups)
