"""Which arithmetic a site trains with: what a precision means where, what is measured, and that a choice is kept."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from polyclinic.common.config import HospitalPlan, make_hospital_plan
from polyclinic.common.models import network as networks
from polyclinic.common.models.network import Precision, autocast, cpu_supports_bf16, read_cpu_info, resolve_precision
from polyclinic.strategies.local import arithmetic
from polyclinic.strategies.local.arithmetic import (
    ARITHMETIC_FILE,
    DEFAULT_NUMBER_FORMAT,
    MAX_STORED_CHOICES,
    TrainingNumberFormat,
    choose_number_format,
    find_fastest_number_format,
    list_cpu_number_formats,
    time_training_steps,
)
from tests.federations import experiment, federation, json_lines

BF16, CONTIGUOUS = TrainingNumberFormat("bf16", "channels_last"), TrainingNumberFormat("float32", "contiguous")
needs_bf16 = pytest.mark.skipif(not cpu_supports_bf16(), reason="this CPU has no instructions for bfloat16")


@pytest.fixture(
    params=["flags\t\t: fpu avx512f avx512_bf16", "flags\t\t: fpu amx_bf16", "flags\t\t: fpu avx512f", None]
)
def cpu(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Yield whether it has bfloat16, of machines with it, without it, and one that does not tell."""
    if request.param is not None:
        facts = f"processor\t: 0\nmodel name\t: a CPU\nflags\t\t: fpu {request.param}\n"
        (tmp_path / "cpuinfo").write_text(facts, encoding="ascii")
    monkeypatch.setattr(networks, "CPU_INFO_FILE", tmp_path / "cpuinfo")
    read_cpu_info.cache_clear()
    yield "bf16" in (request.param or "")
    read_cpu_info.cache_clear()


def plan(tmp_path: Path, *overrides: str) -> HospitalPlan:
    return make_hospital_plan(experiment(tmp_path, "training.precision=fastest", *overrides).experiment)


def choose(tmp_path: Path, *overrides: str, device: str = "cpu") -> TrainingNumberFormat:
    return choose_number_format(plan(tmp_path, *overrides), device, tmp_path, durable=False)


def test_only_who_asks_for_it_gets_bfloat16_on_a_cpu_and_only_where_the_cpu_has_it(cpu: bool) -> None:
    precisions: tuple[Precision, ...] = ("auto", "float32", "fp16", "fastest", "bf16")
    on_cpu = [resolve_precision("cpu", precision) for precision in precisions]
    assert on_cpu == [*["float32"] * 4, "bf16" if cpu else "float32"]
    assert [resolve_precision("cuda", name) for name in precisions] == ["bf16", "float32", "fp16", "bf16", "bf16"]
    assert {choice.precision for choice in list_cpu_number_formats()} == ({"float32", "bf16"} if cpu else {"float32"})
    assert list_cpu_number_formats()[0] == DEFAULT_NUMBER_FORMAT


@needs_bf16
def test_bfloat16_is_computed_in_it() -> None:
    layer, images = torch.nn.Linear(4, 4), torch.ones(2, 4)
    with autocast(images.device, "bf16"):
        assert layer(images).dtype == torch.bfloat16
    with autocast(images.device, "auto"):
        assert layer(images).dtype == torch.float32


def test_another_choice_has_to_be_clearly_faster() -> None:
    assert (
        find_fastest_number_format({DEFAULT_NUMBER_FORMAT: 1.0, BF16: 0.95, CONTIGUOUS: 2.0}) == DEFAULT_NUMBER_FORMAT
    )
    assert find_fastest_number_format({DEFAULT_NUMBER_FORMAT: 1.0, BF16: 0.89, CONTIGUOUS: 0.5}) == CONTIGUOUS
    assert find_fastest_number_format({DEFAULT_NUMBER_FORMAT: 1.0}) == DEFAULT_NUMBER_FORMAT


def test_each_choice_is_timed_and_nothing_else_changes(tmp_path: Path) -> None:
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    seconds = time_training_steps(plan(tmp_path, "training.threads=2"), list_cpu_number_formats())
    assert seconds.keys() == set(list_cpu_number_formats())
    assert all(value > 0 for value in seconds.values())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_num_threads() == threads


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[HospitalPlan]:
    """The plans that were measured, each with contiguous memory ahead."""
    plans: list[HospitalPlan] = []

    def seconds(plan: HospitalPlan, choices: Any) -> dict[TrainingNumberFormat, float]:
        plans.append(plan)
        return {DEFAULT_NUMBER_FORMAT: 1.0, CONTIGUOUS: 0.5}

    monkeypatch.setattr(arithmetic, "time_training_steps", seconds)
    return plans


def test_what_was_measured_is_kept_for_the_same_network_batch_threads_and_torch(
    tmp_path: Path, measured: list[HospitalPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        assert choose(tmp_path, "run.rounds=7", "training.lr=1") == CONTIGUOUS
        assert choose(tmp_path) == CONTIGUOUS
    assert len(measured) == 1
    for other in ("training.batch_size=7", "training.threads=2", "model.image_size=32", "model.norm=group"):
        assert choose(tmp_path, other) == CONTIGUOUS
    assert len(measured) == 5
    monkeypatch.setattr(torch, "__version__", "9.9")
    choose(tmp_path)
    assert len(measured) == 6


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', '{"a": {"precision": "float32"}}', '{"a": {"x": 1}}'])
def test_a_damaged_file_is_measured_again(content: str, tmp_path: Path, measured: list[HospitalPlan]) -> None:
    (tmp_path / ARITHMETIC_FILE).write_text(content, encoding="utf-8")
    assert choose(tmp_path) == CONTIGUOUS
    assert len(measured) == 1


def test_a_coordinator_with_many_networks_does_not_fill_the_disk(tmp_path: Path, measured: list[HospitalPlan]) -> None:
    for size in range(1, MAX_STORED_CHOICES + 11):
        choose(tmp_path, f"training.batch_size={size}")
    assert len(json.loads((tmp_path / ARITHMETIC_FILE).read_bytes())) == MAX_STORED_CHOICES
    choose(tmp_path, f"training.batch_size={MAX_STORED_CHOICES + 10}")
    assert len(measured) == MAX_STORED_CHOICES + 10


def test_nothing_is_measured_on_a_gpu_or_where_a_plan_says_what_it_wants(
    tmp_path: Path, measured: list[HospitalPlan]
) -> None:
    assert choose(tmp_path, device="cuda") == BF16
    assert choose(tmp_path, "training.precision=float32", "training.memory_format=contiguous") == CONTIGUOUS
    assert measured == []


def stated(summary: dict[str, Any]) -> set[str]:
    return {site["arithmetic"] for site in summary["sites"].values()}


@pytest.mark.slow
def test_a_run_by_the_fastest_is_the_run_that_names_it(tmp_path: Path, measured: list[HospitalPlan]) -> None:
    by_choice = federation(tmp_path, "training.precision=fastest", out="chosen")
    by_name = federation(tmp_path, "training.precision=float32", "training.memory_format=contiguous", out="named")
    by_default = federation(tmp_path, out="default")
    assert by_choice["model_sha256"] == by_name["model_sha256"]
    assert by_choice["test"] == by_name["test"]
    assert stated(by_choice) == stated(by_name) == {"float32, contiguous"}
    assert stated(by_default) == {"float32, channels_last"}
    assert len(measured) == 1  # once for all sites
    lines = json_lines(tmp_path / "chosen" / "rounds.jsonl")
    assert [set(line["arithmetic"].values()) for line in lines] == [{"float32, contiguous"}] * 2


@pytest.mark.slow
@needs_bf16
def test_a_federation_in_bfloat16_learns_as_one_in_float32_does(tmp_path: Path) -> None:
    narrow = federation(tmp_path, "training.precision=bf16", "run.rounds=4", out="narrow")
    wide = federation(tmp_path, "run.rounds=4", out="wide")
    assert narrow["model_sha256"] != wide["model_sha256"]
    assert stated(narrow) == {"bf16, channels_last"}
    assert narrow["test"]["mean_auroc"] == pytest.approx(wide["test"]["mean_auroc"], abs=0.01)
