"""The Helm chart: its values have a schema, and what it makes has one pod on a folder, no rights, and no way in."""

import copy
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from polyclinic.common import __version__

CHART = Path(__file__).parents[1] / "deploy" / "helm" / "polyclinic"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
HELM = shutil.which("helm")
NEEDS_HELM = pytest.mark.skipif(HELM is None, reason="helm is not installed")
FULL: dict[str, Any] = {
    "imagePullSecrets": [{"name": "registry"}],
    "server": {
        "enabled": True,
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}, "loadBalancerSourceRanges": ["192.0.2.0/24"]},
        "networkPolicy": {"enabled": True, "from": ["192.0.2.0/24"]},
    },
    "client": {
        "enabled": True,
        "ledger": {"existingClaim": "ledger"},
        "images": {"nfs": {"server": "pacs", "path": "/export/chest"}},
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "runtimeClassName": "nvidia",
        "env": {"HTTPS_PROXY": "http://proxy:3128"},
        "envFrom": [{"secretRef": {"name": "proxy"}}],
        "nodeSelector": {"gpu": "yes"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "networkPolicy": {"enabled": True, "coordinator": {"cidr": "198.51.100.7/32"}},
    },
}
ONE_EACH: list[dict[str, Any]] = [{}, {"server": {"enabled": True}}, {"client": {"enabled": True}}, FULL]


def merged(changes: dict[str, Any], values: dict[str, Any] = VALUES) -> dict[str, Any]:
    """The chart's values with changes, as Helm merges them."""
    result = copy.deepcopy(values)
    for key, value in changes.items():
        inner = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(value, result[key]) if inner else value
    return result


def rendered(tmp_path: Path, changes: dict[str, Any]) -> list[dict[str, Any]]:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(changes), encoding="utf-8")
    command = [str(HELM), "template", "north", str(CHART), "--values", str(tmp_path / "values.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


@pytest.mark.parametrize("changes", ONE_EACH)
def test_the_values_fit_their_schema(changes: dict[str, Any]) -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(merged(changes), SCHEMA)


@pytest.mark.parametrize(
    "changes",
    [
        {"clients": {"enabled": True}},
        {"client": {"replicas": 2}},
        {"client": {"enabled": "yes"}},
        {"server": {"port": 443}},
        {"server": {"service": {"type": "ExternalName"}}},
        {"client": {"images": {"nfs": {}, "hostPath": {}}}},
        {"client": {"data": {"size": "many"}}},
        {"client": {"networkPolicy": {"coordinator": {"cidr": "fl.hospital.example"}}}},
        {"client": {"networkPolicy": {"enabled": True}}},
        {"client": {"networkPolicy": {"enabled": True, "coordinator": {"port": 443}}}},
        {"client": {"envFrom": [{"secretRef": {}}]}},
        {"server": {"envFrom": [{"secret": {"name": "proxy"}}]}},
    ],
)
def test_a_value_that_does_not_exist_or_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(merged(changes), SCHEMA)


def test_the_chart_is_of_this_release() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


@pytest.mark.parametrize("part", ["client", "server"])
def test_an_update_replaces_the_pod_of_a_refused_program_which_is_never_ready(part: str) -> None:
    """By Kubernetes' default, OrderedReady, an update waits until the pod that it would replace is ready."""
    assert "\n  podManagementPolicy: Parallel\n" in (CHART / "templates" / f"{part}.yaml").read_text(encoding="utf-8")


def test_every_rule_of_the_hospitals_way_out_names_where_to() -> None:
    """A rule without ``to`` allows any host."""
    text = (CHART / "templates" / "client.yaml").read_text(encoding="utf-8")
    rules = text.partition("  egress:\n")[2].partition("{{- with")[0].split("    - ports:")[1:]
    assert ["      to:\n" in rule and "{{- if" not in rule for rule in rules] == [True, True]


@NEEDS_HELM
@pytest.mark.parametrize("changes", ONE_EACH)
def test_helm_finds_no_fault(changes: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(changes), encoding="utf-8")
    command = [str(HELM), "lint", str(CHART), "--strict", "--values", str(tmp_path / "values.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@NEEDS_HELM
def test_each_program_is_one_pod_without_rights_and_the_hospitals_has_no_way_in(tmp_path: Path) -> None:
    manifests = {(each["kind"], each["metadata"]["name"]): each for each in rendered(tmp_path, FULL)}
    assert manifests.keys() == {
        ("StatefulSet", "north-client"),
        ("StatefulSet", "north-server"),
        ("Service", "north-server"),
        ("NetworkPolicy", "north-client"),
        ("NetworkPolicy", "north-server"),
    }
    for part in ("client", "server"):
        workload = manifests["StatefulSet", f"north-{part}"]["spec"]
        pod, (container,) = workload["template"]["spec"], workload["template"]["spec"]["containers"]
        assert (workload["replicas"], workload["podManagementPolicy"]) == (1, "Parallel")
        assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsNonRoot"]) == (10001, True)
        assert pod["automountServiceAccountToken"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["image"] == f"flwr-{part}:{__version__}"
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        claims = {claim["metadata"]["name"] for claim in workload["volumeClaimTemplates"]}
        assert mounted == claims | {volume["name"] for volume in pod["volumes"]}
    client = manifests["StatefulSet", "north-client"]["spec"]["template"]["spec"]["containers"][0]
    assert "ports" not in client
    assert {"name": "images", "mountPath": "/images", "readOnly": True} in client["volumeMounts"]
    assert client["env"] == [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}]
    assert client["envFrom"] == [{"secretRef": {"name": "proxy"}}]
    policy = manifests["NetworkPolicy", "north-client"]["spec"]
    assert (policy["ingress"], set(policy["policyTypes"])) == ([], {"Ingress", "Egress"})
    dns, coordinator = policy["egress"]
    assert dns["to"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}]
    assert coordinator["to"] == [{"ipBlock": {"cidr": "198.51.100.7/32"}}]


@NEEDS_HELM
@pytest.mark.parametrize("changes", ONE_EACH)
def test_kubernetes_schemas_accept_every_manifest(changes: dict[str, Any], tmp_path: Path) -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    for manifest in rendered(tmp_path, changes):
        schemas.validate(manifest, "1.31", strict=True)
