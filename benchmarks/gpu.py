"""KV into and out of a GPU: the pages of an engine beside a plain copy; a whole prefill with and without a store, and
over documents that were computed alone.

    python -m benchmarks.gpu [--tokens 4096 32768 131072] [--blended 8192 16384] [--root FOLDER] [--small]

Needs torch, transformers and kvstore. Without a GPU, or with ``--small``, everything is tiny, which only shows that it
runs. Hypotheses: pages come and go at nine tenths of the speed of one pinned copy of the same bytes, and a matrix
product beside them loses at most 3 %; a warm prefill takes the time that the bus and the store need; one that stores
in the background takes at most a tenth longer than one without a store; a blended one with 15 % recomputed takes half
of a full one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import gpu_blending, gpu_prefill
from benchmarks.gpu_model import LLAMA_8B, SMALL
from benchmarks.gpu_pages import moves
from benchmarks.machine import describe, file_system
from benchmarks.result import Cell, Result, Table, markdown, save


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", help="lengths of prompts (default: 4096 32768 131072)")
    parser.add_argument("--blended", type=int, nargs="+", help="lengths of blended prompts (default: 8192 16384)")
    parser.add_argument("--root", type=Path, metavar="FOLDER", help="where to make the root (default: temporary files)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="keep the raw figures there, as JSON")
    asked = parser.parse_args(arguments)
    began_s, machine = time.monotonic(), describe()
    is_small = asked.small or not torch.cuda.is_available()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = SMALL if is_small else LLAMA_8B
    lengths = asked.tokens or ([512] if is_small else [4096, 32_768, 131_072])
    blended = asked.blended or ([1024] if is_small else [8192, 16_384])
    about = f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}, torch {torch.__version__}"
    print(f"{about}{', a tiny model' if is_small else ''}, {asked.rounds} rounds", flush=True)
    tables = [moves(shape, device, 512 if is_small else 8192, asked.rounds)]
    show(tables[0])
    prefill = gpu_prefill.Prefill(shape, device, max(*lengths, *blended))
    with tempfile.TemporaryDirectory(dir=asked.root, prefix="kvstore-gpu-") as folder:
        conditions = (
            about,
            f"medians of {asked.rounds} rounds, in turns; the root on {file_system(Path(folder))}",
            f"random weights, {'tiny' if is_small else 'the shape of Llama-3.1-8B in bfloat16'}",
            "KV that was loaded equals what was computed to the last bit; so does the first token, but for rounding",
        )
        rows = list[list[Cell]]()
        for tokens in lengths:
            with tempfile.TemporaryDirectory(dir=folder) as root:
                rows.append(prefill.row(Path(root), tokens, asked.rounds))
        tables.append(Table("Time to first token", gpu_prefill.COLUMNS, rows))
        show(tables[1])
        rows = []
        for tokens in blended:
            with tempfile.TemporaryDirectory(dir=folder) as root:
                rows.append(gpu_blending.row(prefill.model, shape.token_bytes, Path(root), tokens, asked.rounds))
        title = (
            f"Time to first token over {gpu_blending.DOCUMENTS} documents, {100 * gpu_blending.RATIO:g} % recomputed"
        )
        tables.append(Table(title, gpu_blending.COLUMNS, rows))
        show(tables[2])
    if asked.save:
        hypothesis = " ".join((__doc__ or "").split("Hypotheses: ")[1].split())
        name, took_s = "gpu-small" if is_small else "gpu", time.monotonic() - began_s
        save(Result(name, hypothesis, conditions, machine, tables, [], took_s), asked.save)
    return 0


def show(table: Table) -> None:
    """Prints a table."""
    print(f"\n{table.title}\n\n{markdown(table)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
