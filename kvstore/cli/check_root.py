"""``kvstore check-root``: tests on the real mount what the store relies on."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict

import click

from kvstore.cli.access import RootOptions, root_options_option
from kvstore.cli.app import Command, check_failed
from kvstore.cli.options import completes, json_option
from kvstore.cli.output import print_json, print_table, progress_bar
from kvstore.cli.selectors import open_existing


@click.command("check-root", cls=Command, short_help="Test a mount for what the store relies on.")
@click.argument("root", metavar="ROOT", envvar="KVSTORE_ROOT", shell_complete=completes("dir"))
@click.argument("second", metavar="[SECOND_MOUNT]", required=False, shell_complete=completes("dir"))
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
    if as_json:
        print_json({"root": opened.url, "sound": sound, "probes": [asdict(each) for each in probes]})
    else:
        words = {True: "holds", False: "FAILS", None: "-"}
        rows = [
            (each.name, words[each.ok], "; ".join(filter(None, (each.detail, each.consequence)))) for each in probes
        ]
        print_table(("probe", "result", "detail"), rows)
    if not sound:
        check_failed()
