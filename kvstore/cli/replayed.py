"""How the outcome of a replay is printed, the same for ``replay`` and ``demo``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvstore.cli.output import print_json, print_pairs

if TYPE_CHECKING:
    from kvstore.replay import Report

GIB = 1 << 30


def print_report(report: Report, as_json: bool, about: Mapping[str, Any]) -> None:
    """Prints the figures; what was wrong goes to standard error, too."""
    if as_json:
        print_json({**about, **report.to_dict()})
    else:
        _print_table(report)
    for line in (*report.failures, *report.tally.differences):
        print(f"FAILED: {line}", file=sys.stderr)


def _print_table(report: Report) -> None:
    tally = report.tally
    expected = "undefined (several callers)" if report.tokens_expected is None else f"{report.tokens_expected:,}"
    rows = [
        ("requests", f"{tally.requests:,}"),
        ("tokens", f"{tally.tokens:,}"),
        ("tokens matched", f"{tally.tokens_matched:,}"),
        ("tokens expected to match", expected),
        ("hit ratio", f"{report.hit_ratio:.1%}"),
        ("chunks written", f"{tally.chunks_written:,}"),
        ("GiB put", f"{tally.bytes_put / GIB:.3f}"),
        ("GiB got", f"{tally.bytes_got / GIB:.3f}"),
        ("MiB/s put", f"{report.put_mib_per_s:,.0f}"),
        ("MiB/s get", f"{report.get_mib_per_s:,.0f}"),
        ("callers", f"{report.lanes}"),
        ("time", f"{report.seconds:.1f} s"),
        ("wrong bytes", f"{tally.wrong_bytes:,}"),
    ]
    print_pairs(rows)
    if not report.ok:
        verdict = "FAILED"
    elif report.tokens_expected is None:
        verdict = "every byte was compared, each chunk was written once, nothing is missing"
    else:
        verdict = "every byte was compared, every hit is as the trace contains it"
    print(f"wrong bytes: {tally.wrong_bytes}; {verdict}")
