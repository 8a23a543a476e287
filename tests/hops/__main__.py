"""``python -m tests.hops``: prints the table as it is now; ``--write`` lowers it, ``--files WAY CALL`` lists files."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.hops.calls import WAYS, hops_by
from tests.hops.recording import files_of
from tests.hops.table import Hops, read_table, write_table


def main() -> int:
    """Measures each way once."""
    parser = argparse.ArgumentParser(prog="python -m tests.hops", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write what has fallen into the table")
    parser.add_argument("--files", nargs=2, metavar=("WAY", "CALL"), help='such as "shared, memory" get')
    asked = parser.parse_args()
    table = read_table()
    for way in [asked.files[0]] if asked.files else WAYS:
        with tempfile.TemporaryDirectory(prefix="kvstore-hops-") as root:
            found = hops_by(way, Path(root))
        if asked.files:
            print("\n".join(files_of(found[asked.files[1]])))
            continue
        for call, functions in found.items():
            hops = Hops(len(files_of(functions)), len(functions))
            before = table.setdefault(way, {}).setdefault(call, hops)
            table[way][call] = Hops(min(hops.files, before.files), min(hops.functions, before.functions))
            print(f"{way:18} {call:10} {hops.files:3} files {hops.functions:4} functions   (table: {before})")
    if asked.write:
        write_table(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
