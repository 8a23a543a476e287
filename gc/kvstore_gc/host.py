"""The collector that a store of one host runs as its child: ``python -m kvstore_gc.host FOLDER``.

It runs with the base install; the command ``kvstore-gc`` also needs the packages of the ``server`` extra.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys

from kvstore.errors import KVStoreError
from kvstore_gc.config import Config
from kvstore_gc.serving import Collector, opened

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
NICENESS = 10


def main() -> None:
    """Collects until a signal comes."""
    parser = argparse.ArgumentParser(prog="kvstore_gc.host")
    parser.add_argument("folder")
    parser.add_argument("--interval", type=float, required=True, help="seconds")
    parser.add_argument("--max-bytes", type=int)
    parser.add_argument("--ttl", type=float, help="seconds")
    options = parser.parse_args()
    # Threads inherit the mask, so that only the wait below receives a signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    os.nice(NICENESS)
    try:
        with opened(options.folder, {}, None) as site:
            config = Config(ttl_s=options.ttl, max_bytes=options.max_bytes)
            Collector(site, config, _is_signalled).serve(options.interval)
    except KVStoreError as error:
        sys.exit(str(error))


def _is_signalled(timeout_s: float) -> bool:
    return signal.sigtimedwait(SIGNALS, timeout_s) is not None


if __name__ == "__main__":
    main()
