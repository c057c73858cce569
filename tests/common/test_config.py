"""Experiment files: every fault at once, in words that say what to do."""

from pathlib import Path
from typing import Any

import pytest

from polyclinic.common import config
from polyclinic.common.config import (
    Experiment,
    make_hospital_plan,
    parse_plan_json,
    read_experiment,
    read_experiment_tables,
)
from polyclinic.common.errors import BadInput
from polyclinic.strategies.registry import build_site_method
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


OTHER_FILES = {"study.toml", "defaults.toml", "pyproject.toml", "benchmark.toml"}
EXPERIMENTS = sorted(path for path in (ROOT / "experiments").rglob("*.toml") if path.name not in OTHER_FILES)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_of_the_project_reads_and_those_after_a_paper_have_a_small_form(path: Path) -> None:
    forms = ["full", "small"] if "small" in read_experiment_tables(path)[0] else ["full"]
    full, *small = (read_experiment(path, [f"scale={form}"]).experiment for form in forms)
    assert [build_site_method(form).name for form in (full, *small)] == [full.run.method] * len(forms)
    assert all(0 < form.run.rounds <= full.run.rounds for form in small)
    # The collections of condistfl/ are nowhere here: tests/studies/test_condistfl_files.py runs it on stand-ins.
    assert small or path.parent.name in ("experiments", "benchmark", "ablation", "condistfl")


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
    before = config._parse_and_cache_plan.cache_info().misses
    monkeypatch.setattr(config, "MAX_CACHED_PLAN_CHARACTERS", len(text) - 1)
    assert parse_plan_json(text) == parse_plan_json(text)
    assert config._parse_and_cache_plan.cache_info().misses == before


@pytest.mark.parametrize(("text", "name"), [("plain words", "plain words"), ('"quoted"', "quoted"), ("none", "")])
def test_set_takes_any_value_also_of_new_keys_and_the_last_counts(text: str, name: str, tmp_path: Path) -> None:
    lists = 'partition={kind = "class_lists", lists = {north = ["1", "2"]}}'
    run = ("run.rounds=7", "run.seed=5", "run.seed=6", f"run.name={text}")
    experiment = read(tmp_path, *run, lists, "method.trunk=fedbn_plus")
    assert (experiment.run.rounds, experiment.run.seed, experiment.run.name) == (7, 6, name)
    assert experiment.method == {"trunk": "fedbn_plus"}
    assert experiment.partition.model_dump()["lists"] == {"north": ("1", "2")}


def test_the_plan_that_travels_has_no_paths_and_no_data(tmp_path: Path) -> None:
    text = DIGITS.replace("channels = 1", 'channels = 1\nweights = "/srv/secret.safetensors"')
    plan = make_hospital_plan(read(tmp_path, text=text)).model_dump_json()
    assert [word for word in ("secret", "digits", "partition") if word in plan] == []


@pytest.mark.parametrize(
    ("text", "overrides", "faults", "problem"),
    [
        (DIGITS.replace("rounds = 2", "rounds = 0"), ("nonsense", "run.seed=-1"), 3, "rounds"),
        (f"extends = 3\n{DIGITS}", (), 1, "e.toml: extends: "),
        (DIGITS, ("participation.largest_share=0.5", "privacy.secure_aggregation=true"), 1, "largest_share must be 1"),
    ],
    ids=["of the file and of an override", "extends names no file", "a bound on shares of secret updates"],
)
def test_all_faults_come_together(
    text: str, overrides: tuple[str, ...], faults: int, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=problem) as caught:
        read_experiment(written(tmp_path, text), overrides)
    assert len(caught.value.faults) == faults


@pytest.mark.parametrize("purpose", ["two\nlines", "a \x1b[2J b", "x" * (config.MAX_PURPOSE_CHARACTERS + 1)])
def test_a_purpose_is_one_line_that_hospitals_take(purpose: str) -> None:
    assert config.RunSection(method="surgical", purpose="Find fluid: früher?").purpose == "Find fluid: früher?"
    with pytest.raises(ValueError, match="use one line of at most 500 characters"):
        config.RunSection(method="surgical", purpose=purpose)
