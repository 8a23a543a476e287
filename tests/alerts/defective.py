"""``kvstore`` with a defect: every call about a prompt fails. ``python -m tests.alerts.defective worker ...``."""

from __future__ import annotations

from typing import Any

from kvstore.cli.main import main
from kvstore.worker.context import WorkerContext


def _fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a defect")


WorkerContext.chain = _fails  # type: ignore[method-assign]  # a defect cannot be had otherwise

if __name__ == "__main__":
    main()
