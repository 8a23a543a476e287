"""The programs of ``deploy/examples`` as modules, and their servers."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import ModuleType


def load_example(name: str) -> ModuleType:
    """``deploy/examples/NAME.py``."""
    path = Path(__file__).resolve().parents[2] / "deploy/examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"kvstore_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def answering(server: ThreadingHTTPServer) -> Iterator[str]:
    """The URL of a server that runs in a thread."""
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
