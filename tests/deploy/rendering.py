"""The objects that the Helm chart renders.

Helm is the helm command if there is one, else its code as a Python library (.ci/deploy.sh installs it).
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).resolve().parents[2]
DEPLOY = SOURCE / "deploy"
CHART = DEPLOY / "helm" / "kvstore"
VALUES = {"defaults": None, "external": CHART / "values-external.yaml"}
RENDER_S = 60

Object = dict[str, Any]


def charted(values: Path | None, settings: dict[str, Any] | None = None) -> list[Object]:
    """The objects of the chart as release kvstore in namespace kvstore, with values from a file and over it."""
    merged: dict[str, Any] = _yaml().safe_load(values.read_text()) if values else {}
    for name, value in (settings or {}).items():
        part, _, key = name.partition(".")
        merged.setdefault(part, {})[key] = value
    if shutil.which("helm") is not None:
        command = [
            "helm",
            "template",
            "kvstore",
            str(CHART),
            "--namespace",
            "kvstore",
            "--kube-version",
            "1.31.0",
            "-f",
            "-",
        ]
        ran = subprocess.run(
            command, input=json.dumps(merged), capture_output=True, text=True, timeout=RENDER_S, check=False
        )
        if ran.returncode != 0:
            raise ValueError(ran.stderr)
        return objects(ran.stdout)
    helm = pytest.importorskip("helm_python.chart", reason="needs helm, or its library: make deploy-test")
    from helm_python.errors import HelmError

    try:
        with helm.Chart.load(str(CHART)) as chart:
            rendered = chart.render(values=merged, name="kvstore", namespace="kvstore")
    except HelmError as cause:
        raise ValueError(str(cause)) from cause
    return objects("\n---\n".join(rendered.values()))


def objects(text: str) -> list[Object]:
    """The documents of a YAML stream that are not empty."""
    return [found for found in _yaml().safe_load_all(text) if found]


def pods(found: list[Object]) -> Iterator[tuple[str, Object]]:
    """Name and pod specification of everything that starts pods."""
    for each in found:
        spec = each.get("spec", {})
        template = spec.get("jobTemplate", {}).get("spec", spec).get("template")
        if template:
            yield f"{each['kind']} {each['metadata']['name']}", template["spec"]


def _yaml() -> Any:
    return pytest.importorskip("yaml", reason="needs PyYAML: make deploy-test")
