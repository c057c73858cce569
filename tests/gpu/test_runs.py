"""Whole runs on a GPU: every method and wrapper, the same bits inline, on Ray, after a kill and over the network."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from polyclinic.common.models import gpu
from polyclinic.server.simulation import simulate
from polyclinic.strategies.registry import STRATEGIES
from tests.federations import DIGITS, federation
from tests.hashed_runs import cases

CASES = cases(STRATEGIES)
PRIVATE = ("privacy.noise_multiplier=1", "evaluation.checkpoint=last", "model.norm=group")
MORE = {
    "resnet18": ("model.architecture=resnet18", "model.image_size=32"),
    "lora": ("model.train=lora:4", "model.neck=16"),
    "frozen": ("model.train=neck", "model.neck=16", "augmentation.contrast=0.1"),
    "head": ("model.train=head",),
    "sample": ("privacy.level=sample", *PRIVATE),
    "patient": ("privacy.level=patient", *PRIVATE),
    "fp16": ("training.precision=fp16",),
    "fastest": ("training.precision=fastest",),
    "alone": ("evaluation.compare_local=true",),
    "accumulated": ("training.gradient_accumulation_steps=3",),
}
ON_CPU = "simulation.gpus_per_site=0"
FLOAT32 = "training.precision=float32"


@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_every_method_and_wrapper_ends_in_the_same_bits_twice(tmp_path: Path, name: str) -> None:
    overrides = CASES.get(name) or ("run.rounds=4", *MORE[name])
    first, second = (federation(tmp_path, *overrides, out=out) for out in ("first", "second"))
    assert first["model_sha256"] == second["model_sha256"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_method_is_as_good_as_on_a_cpu(tmp_path: Path, name: str) -> None:
    overrides = (*CASES[name], FLOAT32)
    on_gpu, on_cpu = (federation(tmp_path, *overrides, *more, out=f"run{len(more)}") for more in ((), (ON_CPU,)))
    apart = abs(on_gpu["test"]["mean_auroc"] - on_cpu["test"]["mean_auroc"])
    print(name, apart)
    assert apart < 0.02
    assert on_gpu["model_sha256"] != on_cpu["model_sha256"], "was it trained on the GPU?"


@pytest.mark.parametrize("name", ["surgical", "fedsld", "fedmlp", "unifed", "surgical+some"])
def test_sites_that_share_the_gpu_on_ray_end_in_the_same_bits(tmp_path: Path, name: str) -> None:
    ray = ("simulation.backend=ray", "simulation.workers=3")
    inline, shared = (federation(tmp_path, *CASES[name], *more, out=f"run{len(more)}") for more in ((), ray))
    assert inline["model_sha256"] == shared["model_sha256"]


@pytest.mark.parametrize("name", ["surgical", "surgical+momentum"])
def test_a_run_that_is_killed_ends_in_the_same_bits(tmp_path: Path, name: str) -> None:
    overrides = (*CASES[name], "run.rounds=12")
    whole = federation(tmp_path, *overrides, out="whole")
    (tmp_path / "again.toml").write_text(DIGITS, encoding="utf-8")
    program = [sys.executable, "-m", "polyclinic.studies.cli", "run", "again.toml", "--out", "killed"]
    settings = [part for setting in overrides for part in ("--set", setting)]
    for more in ([], ["--resume"]):
        process = subprocess.Popen(
            [*program, *settings, *more], cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        )
        rounds = tmp_path / "killed" / "rounds.jsonl"
        while process.poll() is None and not more:
            time.sleep(0.02)
            if rounds.exists() and rounds.read_bytes().count(b"\n") >= 3:
                process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=120) == (0 if more else -signal.SIGKILL)
    assert json.loads((tmp_path / "killed" / "summary.json").read_text())["model_sha256"] == whole["model_sha256"]


def test_images_without_room_on_the_gpu_come_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = federation(tmp_path, *CASES["surgical"], out="there")
    monkeypatch.setattr("polyclinic.data.images.pixels.MAX_GPU_MEMORY_SHARE", 0.0)
    assert federation(tmp_path, *CASES["surgical"], out="here")["model_sha256"] == there["model_sha256"]


def test_a_run_on_the_gpu_can_be_used_on_a_cpu(tmp_path: Path) -> None:
    federation(tmp_path, *CASES["surgical"], pages=True)
    assert load_file(next((tmp_path / "run").glob("**/model.safetensors")))
    assert (tmp_path / "run" / "report.html").exists()


def devices(count: int) -> tuple[torch.device, ...]:
    """Several GPUs where there are any, else the first as often."""
    there = torch.cuda.device_count()
    return tuple(torch.device("cuda", index if there >= count else 0) for index in range(count))


@pytest.mark.parametrize("gpus", [2, 3])
@pytest.mark.parametrize("name", ["surgical", "fedmlp", "fedirm", "rscfed", "resnet18", "fp16", "lora"])
def test_a_site_over_several_gpus_ends_in_the_same_bits_twice_and_learns_as_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, gpus: int
) -> None:
    overrides = (*(CASES.get(name) or ("run.rounds=4", *MORE[name])), "model.norm=group")
    single = federation(tmp_path, *overrides, out="single")
    monkeypatch.setattr(simulate, "count_visible_gpus", lambda: gpus)
    monkeypatch.setattr(gpu, "list_first_gpus", devices)
    several = f"simulation.gpus_per_site={gpus}"
    two, again = (federation(tmp_path, *overrides, several, out=out) for out in ("two", "again"))
    assert two["model_sha256"] == again["model_sha256"]
    assert two["model_sha256"] != single["model_sha256"], "did it go over several?"
    assert abs(two["test"]["mean_auroc"] - single["test"]["mean_auroc"]) < 0.02
