"""``kvstore blend-check``: whether KV of documents may be reused out of place with a model, and how."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.access import Access, access_options
from kvstore.cli.app import Command, check_failed
from kvstore.cli.options import flag, json_option, option, takes
from kvstore.cli.output import print_json, print_rows, print_values, progress_bar
from kvstore.errors import InvalidRequest
from kvstore.segments import Bounds, Verdict

if TYPE_CHECKING:
    from kvstore.connectors.transformers.gate import Choice

NEEDED = ("torch", "transformers")
SHARE = click.FloatRange(0, 1)
DEFAULT = Bounds(work_max=0.6)


@dataclass(frozen=True, slots=True)
class Checked:
    """The options of a check other than the model, the prompts and the store."""

    agreement: float = option(
        "--agreement",
        type=SHARE,
        default=DEFAULT.agreement_min,
        show_default=True,
        help="Least share of answer tokens that stay the most likely ones.",
    )
    kl: float = option(
        "--kl",
        type=click.FloatRange(0),
        default=DEFAULT.kl_max,
        show_default=True,
        help="Largest mean KL divergence from full prefill, in nats a token.",
    )
    answers_lost: float = option(
        "--answers-lost",
        type=SHARE,
        default=DEFAULT.answers_lost_max,
        show_default=True,
        help="Largest share of right answers that become wrong, of any kind of question.",
    )
    work: float = option(
        "--work",
        type=SHARE,
        default=DEFAULT.work_max,
        show_default=True,
        help="Largest share of the reused tokens times layers to recompute.",
    )
    chunk_tokens: int = option(
        "--chunk-tokens", type=click.IntRange(1), default=64, show_default=True, help="Tokens of a chunk of segments."
    )
    answer_tokens: int = option(
        "--answer-tokens",
        type=click.IntRange(1, 4096),
        default=16,
        show_default=True,
        help="Tokens to compare where a prompt has no answer.",
    )
    tenant: str = option("--tenant", default="", help="The namespace's tenant.")
    fingerprint: str = option(
        "--fingerprint", default="", help="Digest of the weights, if the engine is given one; else it is computed."
    )
    device: str = option("--device", default="cpu", show_default=True, help="Device of torch to run the model on.")
    dry_run: bool = flag("--dry-run", help="Only report: record no verdict, and need no store.")

    @property
    def bounds(self) -> Bounds:
        """The bounds of the verdict."""
        return Bounds(self.agreement, self.kl, self.answers_lost, self.work)


@click.command(
    cls=Command, short_help="Compare blended prefill with full prefill, and record whether and how to blend."
)
@click.argument("model", metavar="MODEL")
@click.argument("prompts", metavar="PROMPTS")
@takes("checked", Checked)
@access_options
@json_option
def blend_check(model: str, prompts: str, checked: Checked, access: Access, as_json: bool) -> None:
    """Find the cheapest recomputation with which MODEL answers PROMPTS over reused documents as after full prefill.

    MODEL is a name or folder that transformers loads. PROMPTS has one JSON object a line, with "documents" (a list),
    "question", and if you like "system" and "answer"; each a text or a list of token ids. Without an answer, the
    model's own continuation after full prefill is what must not change. With a "kind" of question (a text) in each, the
    bound on lost answers holds for every kind. At least 10 prompts; use some hundreds.

    Half of the prompts, dealt by a fixed seed, choose: the cheapest rule that loses at most half of what the bounds
    allow. The other half reports: the verdict holds if the choice holds the bounds there. It is recorded in the store
    for these weights and this RoPE. Without one that holds, segments are not read and documents are computed in full;
    one that does not hold closes the gate that an earlier one opened. Needs torch and transformers.

    Exit codes: 0 the verdict holds, 1 it does not, 2 could not run.

    \b
    Examples:
      kvstore blend-check Qwen/Qwen3-8B prompts.jsonl --dry-run
      kvstore blend-check Qwen/Qwen3-8B prompts.jsonl --root /mnt/kv
      kvstore blend-check ./my-model prompts.jsonl --connect 10.0.0.7:7070 --kl 0.01 --work 0.4
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise InvalidRequest(f"blend-check runs the model and needs {' and '.join(missing)}: pip install {missing[0]}")
    choice = _choice(model, prompts, checked, access)
    if as_json:
        print_json(_values(choice))
    else:
        _print(choice)
    if not choice.verdict.holds:
        check_failed()


def _choice(name: str, prompts: str, checked: Checked, access: Access) -> Choice:
    """Measures, and records the verdict unless it is a dry run."""
    from kvstore.connectors.transformers import model_cache
    from kvstore.connectors.transformers.cache_spec import weights_fingerprint
    from kvstore.connectors.transformers.decoder import Decoder
    from kvstore.connectors.transformers.gate import candidates, choose, load_model, read_cases

    with ExitStack() as undo:
        store = None if checked.dry_run else undo.enter_context(access.open(create=True))
        model, encode = load_model(name, checked.device)
        decoder = Decoder(model)
        rope = decoder.rope()
        segments, fingerprint = None, checked.fingerprint or weights_fingerprint(model)
        if store is not None:
            cache = model_cache(model, store, fingerprint=fingerprint, tenant=checked.tenant)
            segments = cache.segments(rope, chunk_tokens=checked.chunk_tokens)
        cases = read_cases(
            prompts, model, encode, chunk_tokens=checked.chunk_tokens, answer_tokens=checked.answer_tokens
        )
        tries = candidates(decoder.layers, fingerprint, rope.digest, checked.bounds)
        with progress_bar("rules tried", len(tries)) as moved:
            choice = choose(decoder, cases, tries, checked.bounds, moved)
        if segments is not None:
            segments.record(choice.verdict)
    return choice


def _values(choice: Choice) -> dict[str, Any]:
    return {
        "holds": choice.verdict.holds,
        "prompts": {"searched": choice.searched, "held_out": choice.held_out},
        "verdict": _row_of(choice.verdict),
        "bounds": asdict(choice.verdict.bounds),
        "tried": [_row_of(each) for each in choice.tried],
    }


def _row_of(verdict: Verdict) -> dict[str, Any]:
    return {
        "rule": verdict.rule.value,
        "check_layers": verdict.check_layers,
        "ratios": verdict.ratios,
        **asdict(verdict.measured),
    }


def _print(choice: Choice) -> None:
    values = _values(choice)
    columns = ("rule", "check_layers", "ratios", "work", "agreement", "kl", "answers_lost", "prompts")
    print_rows("tried", values["tried"], columns, as_json=False)
    print_values({"verdict": _outcome(choice), **values["verdict"]}, as_json=False)


def _outcome(choice: Choice) -> str:
    if choice.verdict.holds:
        return f"holds on {choice.held_out} prompts that had no part in the choice"
    if choice.is_chosen:
        return (
            f"the choice does not hold on {choice.held_out} prompts that had no part in it: compute documents in full, "
            "or give more prompts"
        )
    return f"nothing holds half of the bounds on {choice.searched} prompts to choose by: compute documents in full"
