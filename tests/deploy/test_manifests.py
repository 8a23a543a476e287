"""The chart: its objects are valid and hardened, and kvstore accepts every command line in them.

`make deploy-test`: needs Helm or its library, and the schemas of Kubernetes.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.deploy.commands import understood
from tests.deploy.rendering import CHART, DEPLOY, VALUES, charted, objects, pods

pytestmark = pytest.mark.deploy
KUBERNETES = ("1.28", "1.31", "1.34")


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("version", KUBERNETES)
def test_every_object_is_valid_by_the_schemas_of_kubernetes(values: str, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate: make deploy-test").validate
    for each in charted(VALUES[values]):
        validate(each, version, strict=True)


@pytest.mark.parametrize("name", ["engine.yaml", "etcd-backup.yaml"])
def test_the_examples_are_valid(name: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate: make deploy-test").validate
    for each in objects((DEPLOY / "examples" / name).read_text()):
        validate(each, KUBERNETES[-1], strict=True)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"worker.kind": "StatefulSet"}, "worker"),
        ({"worker.replicas": 0}, "replicas"),
        ({"wroker.kind": "Deployment"}, "wroker"),
        ({"etcd.deploy": False}, "etcd.endpoints must say where etcd is"),
    ],
)
def test_wrong_values_are_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        charted(None, settings)


@pytest.mark.parametrize("values", VALUES)
def test_no_pod_may_do_more_than_it_must(values: str) -> None:
    found = list(pods(charted(VALUES[values])))
    assert len(found) >= 2
    for name, pod in found:
        assert pod["automountServiceAccountToken"] is False, name
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys(), name
        assert not any("hostPath" in volume for volume in pod["volumes"]), name
        for volume in pod["volumes"]:
            assert volume.get("secret", {}).get("defaultMode", 0o440) == 0o440, name
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert container["resources"]["limits"].keys() >= {"cpu", "memory", "ephemeral-storage"}, name


@pytest.mark.parametrize("values", VALUES)
def test_a_worker_has_memory_for_its_tier_and_time_to_drain(values: str) -> None:
    pod = dict(pods(charted(VALUES[values])))[f"{'DaemonSet' if values == 'defaults' else 'Deployment'} kvstore-worker"]
    (worker,) = pod["containers"]
    args = dict(arg.removeprefix("--").split("=", 1) for arg in worker["args"])
    assert (
        int(worker["resources"]["limits"]["memory"].removesuffix("Gi")) >= int(args["memory"].removesuffix("GiB")) + 3
    )
    assert pod["terminationGracePeriodSeconds"] >= int(args["drain"].removesuffix("s")) + 20


@pytest.mark.parametrize("values", VALUES)
def test_kvstore_understands_every_command(values: str) -> None:
    for name, pod in pods(charted(VALUES[values])):
        for container in pod["containers"]:
            if container["name"] != "etcd":
                understood([*container["command"], *container["args"]], name)


@pytest.mark.parametrize("values", VALUES)
def test_everything_named_is_there(values: str) -> None:
    """Services and budgets select pods; pods mount declared volumes and listen on allowed ports."""
    found = charted(VALUES[values])
    labels = [
        (each["spec"].get("jobTemplate", {}).get("spec") or each["spec"])["template"]["metadata"]["labels"]
        for each in found
        if each["kind"] in ("DaemonSet", "Deployment", "StatefulSet", "CronJob")
    ]
    for each in found:
        selector = each.get("spec", {}).get("selector") or each.get("spec", {}).get("podSelector")
        wanted = selector.get("matchLabels", selector) if selector else {}
        if wanted:
            assert any(wanted.items() <= pod.items() for pod in labels), each["metadata"]["name"]
    for name, pod in pods(found):
        claims = [
            claim["metadata"]["name"]
            for each in found
            for claim in each.get("spec", {}).get("volumeClaimTemplates", [])
        ]
        volumes = {volume["name"] for volume in pod["volumes"]} | set(claims)
        mounts = itertools.chain.from_iterable(container["volumeMounts"] for container in pod["containers"])
        assert {mount["name"] for mount in mounts} <= volumes, name


def test_the_chart_has_the_version_of_the_package() -> None:
    from kvstore import __version__

    chart = (CHART / "Chart.yaml").read_text()
    assert f"\nappVersion: {__version__}\n" in chart
    assert charted(None)[0]["metadata"]["namespace"] == "kvstore"
