"""Experiment files: every fault at once, in words that say what to do."""

from pathlib import Path
from typing import Any, get_args

import pytest

from common import config
from common.config import (
    EvaluationSection,
    Experiment,
    ParticipationSection,
    RunSection,
    SimulationSection,
    TrainingSection,
    make_hospital_plan,
    parse_plan_json,
    read_experiment,
    read_experiment_tables,
)
from common.data.base.spec import AugmentationSpec, DataSpec
from common.data.partition.spec import PartitionSpec
from common.errors import BadInput
from common.models.zoo.spec import ModelSpec
from strategies.aggregation.robust import RobustMeanRule
from strategies.aggregation.server_optimizer import ServerOptimizer
from strategies.registry import STRATEGIES, build_site_method
from tests.federations import DIGITS

ROOT = Path(__file__).parents[2]


def written(folder: Path, text: str = DIGITS, name: str = "e.toml") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def read(folder: Path, *overrides: str, text: str = DIGITS) -> Experiment:
    return read_experiment(written(folder, text), overrides).experiment


def extended(folder: Path, above: str, *overrides: str, below: str = DIGITS) -> Any:
    """An experiment above another one."""
    written(folder, below, "below.toml")
    return read(folder, *overrides, text=f'extends = "below.toml"\n{above}')


def complaints(folder: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(BadInput) as caught:
        read_experiment(written(folder, text), overrides)
    return [str(fault) for fault in caught.value.faults]


OTHER_FILES = {"study.toml", "defaults.toml", "pyproject.toml", "benchmark.toml"}
EXPERIMENTS = sorted(path for path in (ROOT / "experiments").rglob("*.toml") if path.name not in OTHER_FILES)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_of_the_project_reads_and_names_a_method(path: Path) -> None:
    experiment = read_experiment(path).experiment
    assert build_site_method(experiment).name == experiment.run.method


AFTER_A_PAPER = [path for path in EXPERIMENTS if path.parent.name not in ("experiments", "benchmark", "ablation")]


@pytest.mark.parametrize("path", AFTER_A_PAPER, ids=str)
def test_every_experiment_after_a_paper_has_a_small_form(path: Path) -> None:
    full, small = (read_experiment(path, [f"scale={scale}"]).experiment for scale in ("full", "small"))
    assert build_site_method(small).name == full.run.method
    assert small.run.rounds <= full.run.rounds


@pytest.mark.parametrize("path", [path for path in EXPERIMENTS if "small" in read_experiment_tables(path)[0]], ids=str)
def test_every_small_form_that_a_file_has_or_takes_over_reads(path: Path) -> None:
    assert read_experiment(path, ["scale=small"]).experiment.run.rounds > 0


def test_the_small_table_goes_over_the_rest_and_under_what_is_set(tmp_path: Path) -> None:
    path = written(tmp_path, DIGITS + "[small.run]\nrounds = 1\nseed = 8\n")
    full = read_experiment(path).experiment.run
    small = read_experiment(path, ["run.seed=5", "scale=small"]).experiment.run
    assert ((full.rounds, full.seed), (small.rounds, small.seed)) == ((2, 3), (1, 5))


def test_a_file_takes_over_what_it_does_not_say_but_no_table_of_another_kind(tmp_path: Path) -> None:
    above = '[run]\nmethod = "vanilla"\n[partition]\nkind = "random_owners"\nsites = 2\n'
    experiment = extended(tmp_path, above)
    assert (experiment.run.method, experiment.run.rounds, experiment.run.seed) == ("vanilla", 2, 3)
    assert experiment.partition.kind == "random_owners"


@pytest.mark.parametrize(
    ("above", "expected"),
    [
        ("[run]\nrounds = 3\n", ({"warmup_epochs": 0}, 8, 2)),
        ('[run]\nmethod = "vanilla"\n', ({}, 8, 2)),
        ('[data]\nkind = "phantom"\nimage_size = 32\n', ({"warmup_epochs": 0}, 32, 2)),
        ('[partition]\nkind = "random_owners"\nsites = 5\n', ({"warmup_epochs": 0}, 8, 5)),
    ],
)
def test_small_keys_stay_with_their_method_and_kind(above: str, expected: tuple[object, ...], tmp_path: Path) -> None:
    small = "[small.method]\nwarmup_epochs = 0\n[small.data]\nimage_size = 8\n[small.partition]\nsites = 2\n"
    experiment = extended(tmp_path, above, "scale=small", below=f"{DIGITS}\n{small}")
    assert (experiment.method, experiment.data.image_size, experiment.partition.sites) == expected


def test_who_writes_into_a_plan_s_parameters_changes_no_other_request_s(tmp_path: Path) -> None:
    text = make_hospital_plan(read(tmp_path, "method.warm_up_epochs=1")).model_dump_json()
    parse_plan_json(text).method["warm_up_epochs"] = 100
    assert parse_plan_json(text).method["warm_up_epochs"] == 1


def test_a_plan_without_end_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = make_hospital_plan(read(tmp_path)).model_dump_json()
    before = config._cached_plan.cache_info().misses
    monkeypatch.setattr(config, "LONGEST_CACHED", len(text) - 1)
    assert parse_plan_json(text) == parse_plan_json(text)
    assert config._cached_plan.cache_info().misses == before


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["run.rounds=7"], "rounds", 7),
        (["run.seed=5", "run.seed=6"], "seed", 6),
        (["run.name=plain words"], "name", "plain words"),
        (['run.name="quoted"'], "name", "quoted"),
        (["run.name=none"], "name", ""),
    ],
)
def test_set_takes_any_value_and_the_last_counts(overrides: list[str], key: str, value: object, tmp_path: Path) -> None:
    assert getattr(read(tmp_path, *overrides).run, key) == value


def test_faults_of_the_file_and_of_an_override_come_together(tmp_path: Path) -> None:
    assert len(complaints(tmp_path, DIGITS.replace("rounds = 2", "rounds = 0"), "nonsense", "run.seed=-1")) == 3


def test_the_plan_that_travels_has_no_paths_and_no_data(tmp_path: Path) -> None:
    text = DIGITS.replace("channels = 1", 'channels = 1\nweights = "/srv/secret.safetensors"')
    plan = make_hospital_plan(read(tmp_path, text=text)).model_dump_json()
    assert [word for word in ("secret", "digits", "partition") if word in plan] == []


def keys_of(section: object) -> set[str]:
    """Every key of a pydantic model, or of all members of an annotated union."""
    members = get_args(get_args(section)[0]) if get_args(section) else (section,)
    return {key for member in members for key in member.model_fields} - {"kind"}


@pytest.mark.parametrize(
    "section",
    [
        RunSection, TrainingSection, ParticipationSection, SimulationSection, ModelSpec, AugmentationSpec,
        DataSpec, PartitionSpec, EvaluationSection, ServerOptimizer, RobustMeanRule,
        *dict.fromkeys(entry.site_class.table for entry in STRATEGIES.values()),
    ],
)  # fmt: skip
def test_every_key_is_in_the_documentation(section: object) -> None:
    text = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    missing = {key for key in keys_of(section) if f"`{key}`" not in text}
    assert missing == set(), f"docs/experiments.md names none of {sorted(missing)}: a line for each, in backticks"


def test_no_share_can_be_bounded_where_sites_weigh_their_own_updates(tmp_path: Path) -> None:
    text = DIGITS + "[participation]\nlargest_share = 0.5\n[privacy]\nsecure_aggregation = true\n"
    faults = complaints(tmp_path, text)
    assert any("participation.largest_share must be 1" in fault for fault in faults)


def test_set_takes_tables_lists_and_keys_that_the_file_does_not_have(tmp_path: Path) -> None:
    lists = 'partition={kind = "class_lists", lists = {north = ["1", "2"]}}'
    experiment = read(tmp_path, lists, "method.trunk=fedbn_plus")
    assert experiment.method == {"trunk": "fedbn_plus"}
    assert experiment.partition.model_dump()["lists"] == {"north": ("1", "2")}


def test_extends_that_names_no_file_is_a_fault(tmp_path: Path) -> None:
    (fault,) = complaints(tmp_path, f"extends = 3\n{DIGITS}")
    assert fault.startswith("e.toml: extends: ")
