"""The examples for clusters: a Slurm job with stand-ins for Slurm's programs, and a manifest for KubeRay."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from polyclinic.common.system.stopping import STOPPED_EXIT_CODE
from tests.federations import ALL_DIGITS, DIGITS, finished
from tests.network.real import lines_of
from tests.server.commands import rounds_of
from tests.server.machines import POSSIBLE, Machine, inside, two_machines

WITHIN_S = 300
ROOT = Path(__file__).parents[2]
SLURM, KUBERAY = (ROOT / "experiments" / "cluster" / name for name in ("slurm.sh", "kuberay.yaml"))
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
    case $1 in --nodelist=*) node=${1#--nodelist=} ;; esac
    shift
done
echo "$node $*" >> "$CALLS"
if [ "$1" = hostname ]; then echo 10.77.0.1; exit; fi
[ "$node" = node2 ] && exec nsenter --target="$NODE2" --net --mount --wdns=/ "$@"
exec "$@"
"""
SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames node[1-2]" ] && printf 'node1\\nnode2\\n'
"""


def slurm(folder: Path, *arguments: str, machines: tuple[Machine, Machine] | None = None) -> subprocess.Popen[str]:
    """Start the job on the first of two machines, or here."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
        "NODE2": str(machines[1].pid if machines else 0),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_PER_TASK": "1",
        "POLYCLINIC_BIN": str(Path(sys.executable).parent),
    }
    command = ["env", f"--chdir={folder}", "bash", str(SLURM), *arguments]
    if machines:
        return machines[0].start(*command, more=environment)
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env={**os.environ, **environment}, stdout=pipe, stderr=pipe, text=True)


def calls_of(folder: Path) -> list[str]:
    calls = folder / "calls"
    return calls.read_text().splitlines() if calls.exists() else []


def test_a_slurm_job_without_its_arguments_says_how_it_is_called(tmp_path: Path) -> None:
    done = slurm(tmp_path)
    _, err = done.communicate(timeout=60)
    assert (done.returncode, calls_of(tmp_path)) == (2, [])
    assert err.startswith("usage: sbatch slurm.sh")


@pytest.mark.long
@pytest.mark.skipif(not POSSIBLE, reason="network namespaces need root")
def test_a_slurm_job_past_its_time_limit_goes_on_when_submitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "experiment.toml").write_text(DIGITS, encoding="utf-8")
    run, settings = tmp_path / "run", ("run.rounds=40", "evaluation.checkpoint=last", "simulation.workers=2")
    arguments = ["experiment.toml", "run", *(part for setting in settings for part in ("--set", setting))]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as place, two_machines(tmp_path) as machines:
        monkeypatch.setenv("RAY_TMPDIR", place)
        first = slurm(tmp_path, *arguments, machines=machines)
        until = time.monotonic() + WITHIN_S
        while len(rounds_of(run)) < 2 and first.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        os.kill(first.pid, signal.SIGTERM)
        _, err = first.communicate(timeout=WITHIN_S)
        assert first.returncode == STOPPED_EXIT_CODE, err
        again = slurm(tmp_path, *arguments, machines=machines)
        _, err = again.communicate(timeout=WITHIN_S)
        assert again.returncode == 0, err
        assert [process.pid for machine in machines for process in inside(machine) if process.name() == "raylet"] == []
    calls = calls_of(tmp_path)
    assert ["--resume" in call for call in calls if "flwr-sim" in call] == [False, True]
    assert [call.split()[0] for call in calls if "ray start" in call] == ["node1", "node2"] * 2
    events = lines_of(run / "events.jsonl")
    resumed = max(place for place, event in enumerate(events) if event["event"] == "resumed")
    assert len({event["node"] for event in events[resumed:] if event["event"] == "worker_ready"}) == 2
    summary = json.loads((run / "summary.json").read_text())
    assert summary["model_sha256"] == finished(ALL_DIGITS, *settings[:2])[1]["model_sha256"]


def only(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


TEXT, WHOLE, ANY = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "object"}
PARAMETERS = {"type": "object", "additionalProperties": TEXT}
QUANTITIES = {"type": "object", "additionalProperties": {"type": "string", "pattern": r"^\d+(\.\d+)?(m|[KMGT]i)?$"}}
CONTAINER = only(
    ("name", "image"),
    name=TEXT, image=TEXT,
    env={"type": "array", "items": only(("name",), name=TEXT, value=TEXT)},
    resources=only(requests=QUANTITIES, limits=QUANTITIES),
    volumeMounts={"type": "array", "items": only(("name", "mountPath"), name=TEXT, mountPath=TEXT)},
)  # fmt: skip
TEMPLATE = only(
    ("spec",),
    metadata=only(labels=PARAMETERS),
    spec=only(
        ("containers",), containers={"type": "array", "items": CONTAINER, "minItems": 1}, volumes={"type": "array"}
    ),
)
HEAD = only(("template",), rayStartParams=PARAMETERS, template=TEMPLATE, serviceType=TEXT)
GROUP = only(
    ("groupName", "template", "minReplicas", "maxReplicas"),
    groupName=TEXT, replicas=WHOLE, minReplicas=WHOLE, maxReplicas=WHOLE, numOfHosts=WHOLE,
    rayStartParams=PARAMETERS, template=TEMPLATE,
)  # fmt: skip
RAY_JOB = only(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=ANY,
    spec=only(
        ("entrypoint", "rayClusterSpec"),
        entrypoint=TEXT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
        shutdownAfterJobFinishes={"type": "boolean"},
        ttlSecondsAfterFinished=WHOLE,
        backoffLimit=WHOLE,
        activeDeadlineSeconds=WHOLE,
        rayClusterSpec=only(
            ("headGroupSpec",), rayVersion=TEXT, headGroupSpec=HEAD, workerGroupSpecs={"type": "array", "items": GROUP}
        ),
    ),
)
"""The fields of KubeRay's ``rayjobs.ray.io`` (v1) that the manifest may use, written after that definition."""


def manifests() -> tuple[dict[str, Any], dict[str, Any]]:
    job, policy = yaml.safe_load_all(KUBERAY.read_text())
    return job, policy


def test_the_manifest_has_the_fields_that_kuberay_knows() -> None:
    job, policy = manifests()
    assert [error.message for error in Draft202012Validator(RAY_JOB).iter_errors(job)] == []
    assert policy["kind"] == "NetworkPolicy"
    misspelt = json.loads(json.dumps(job).replace("rayStartParams", "rayStartParameters"))
    assert list(Draft202012Validator(RAY_JOB).iter_errors(misspelt)) != []


def test_every_node_of_the_manifest_has_the_same_image_and_the_version_of_ray_that_is_tested() -> None:
    job, policy = manifests()
    cluster = job["spec"]["rayClusterSpec"]
    templates = [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]
    assert len({container["image"] for template in templates for container in template["spec"]["containers"]}) == 1
    assert f"ray>={cluster['rayVersion']}" in (ROOT / "pyproject.toml").read_text()
    chosen = policy["spec"]["podSelector"]["matchLabels"].items()
    assert all(chosen <= template["metadata"]["labels"].items() for template in templates)
    head = templates[0]["spec"]
    mounted = {mount["name"] for container in head["containers"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in head["volumes"]}


def test_the_jobs_entry_point_is_a_shell_line_that_goes_on_where_a_run_has_begun(tmp_path: Path) -> None:
    (tmp_path / "flwr-sim").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "flwr-sim").chmod(0o755)
    line = manifests()[0]["spec"]["entrypoint"].replace("/runs/first", str(tmp_path / "run"))
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    calls = []
    for _ in range(2):
        done = subprocess.run(line, shell=True, env=environment, capture_output=True, text=True, check=True)
        calls.append(done.stdout.split())
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "events.jsonl").touch()
    assert calls[0][:3] == ["run", "/experiment/experiment.toml", "--out"]
    assert calls[1] == [*calls[0], "--resume"]
    assert "--resume" not in calls[0]
