"""Experiment files: every fault at once, in words that say what to do."""

from pathlib import Path
from typing import Any, get_args

import pytest

from common import config
from common.config import (
    EvaluationSection,
    ParticipationSection,
    RunSection,
    SimulationSection,
    TrainingSection,
    plan_of,
    plan_of_text,
    read_experiment,
    read_tables,
)
from common.data.base.spec import AugmentationSpec, DataSpec
from common.data.partition.spec import PartitionSpec
from common.errors import BadInput
from common.models.zoo.spec import ModelSpec
from strategies.aggregation.robust import RobustMean
from strategies.aggregation.server_optimizer import ServerOptimizer
from strategies.registry import STRATEGIES, method_of, strategy_named
from tests.federations import DIGITS

ROOT = Path(__file__).parents[2]


def written(folder: Path, text: str) -> Path:
    (folder / "e.toml").write_text(text, encoding="utf-8")
    return folder / "e.toml"


def complaints(folder: Path, text: str, *overrides: str) -> list[str]:
    (folder / "e.toml").write_text(text, encoding="utf-8")
    with pytest.raises(BadInput) as caught:
        read_experiment(folder / "e.toml", overrides)
    return [str(fault) for fault in caught.value.faults]


OTHER_FILES = {"study.toml", "pyproject.toml", "benchmark.toml"}
EXPERIMENTS = sorted(path for path in (ROOT / "experiments").rglob("*.toml") if path.name not in OTHER_FILES)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_of_the_project_reads_and_names_a_method(path: Path) -> None:
    experiment = read_experiment(path).experiment
    assert method_of(experiment).name == experiment.run.method


AFTER_A_PAPER = [path for path in EXPERIMENTS if path.parent.name not in ("experiments", "benchmark", "ablation")]


@pytest.mark.parametrize("path", AFTER_A_PAPER, ids=str)
def test_every_experiment_after_a_paper_has_a_small_form(path: Path) -> None:
    full, small = (read_experiment(path, [f"scale={scale}"]).experiment for scale in ("full", "small"))
    assert method_of(small).name == full.run.method
    assert small.run.rounds <= full.run.rounds


@pytest.mark.parametrize("path", [path for path in EXPERIMENTS if "small" in read_tables(path)[0]], ids=str)
def test_every_small_form_that_a_file_has_or_takes_over_reads(path: Path) -> None:
    assert read_experiment(path, ["scale=small"]).experiment.run.rounds > 0


def test_the_small_table_goes_over_the_rest_and_under_what_is_set(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(DIGITS + "[small.run]\nrounds = 1\nseed = 8\n", encoding="utf-8")
    full = read_experiment(tmp_path / "e.toml").experiment.run
    small = read_experiment(tmp_path / "e.toml", ["run.seed=5", "scale=small"]).experiment.run
    assert ((full.rounds, full.seed), (small.rounds, small.seed)) == ((2, 3), (1, 5))


def test_a_scale_that_the_file_does_not_have_is_a_fault(tmp_path: Path) -> None:
    assert complaints(tmp_path, DIGITS, "scale=small") == ["e.toml: scale: has no [small] table."]
    (fault,) = complaints(tmp_path, DIGITS, "scale=tiny")
    assert fault == 'e.toml: scale: there is no scale "tiny"; there are full and small.'


def test_a_file_takes_over_what_it_does_not_say_from_the_one_it_extends(tmp_path: Path) -> None:
    (tmp_path / "below.toml").write_text(DIGITS, encoding="utf-8")
    (tmp_path / "above.toml").write_text('extends = "below.toml"\n[run]\nmethod = "vanilla"\n', encoding="utf-8")
    experiment = read_experiment(tmp_path / "above.toml").experiment
    assert (experiment.run.method, experiment.run.rounds, experiment.run.seed) == ("vanilla", 2, 3)


def test_a_table_of_another_kind_replaces_the_one_below(tmp_path: Path) -> None:
    (tmp_path / "below.toml").write_text(DIGITS, encoding="utf-8")
    more = 'extends = "below.toml"\n[partition]\nkind = "random_owners"\nsites = 2\n'
    (tmp_path / "above.toml").write_text(more, encoding="utf-8")
    partition = read_experiment(tmp_path / "above.toml").experiment.partition
    assert partition is not None
    assert partition.kind == "random_owners"


def test_the_small_parameters_of_a_method_stay_with_it(tmp_path: Path) -> None:
    (tmp_path / "below.toml").write_text(f"{DIGITS}\n[small.method]\nwarmup_epochs = 0\n", encoding="utf-8")
    for name, method, expected in (("same", "surgical", {"warmup_epochs": 0}), ("other", "vanilla", {})):
        text = f'extends = "below.toml"\n[run]\nmethod = "{method}"\n'
        (tmp_path / f"{name}.toml").write_text(text, encoding="utf-8")
        assert read_experiment(tmp_path / f"{name}.toml", ["scale=small"]).experiment.method == expected


def test_the_small_keys_of_a_kind_of_data_or_partition_stay_with_it(tmp_path: Path) -> None:
    small = "[small.data]\nimage_size = 8\n[small.partition]\nsites = 2\n"
    (tmp_path / "below.toml").write_text(f"{DIGITS}\n{small}", encoding="utf-8")
    for name, more, expected in (
        ("same", "[run]\nrounds = 3\n", (8, 2)),
        ("data", '[data]\nkind = "phantom"\nimage_size = 32\n', (32, 2)),
        ("partition", '[partition]\nkind = "random_owners"\nsites = 5\n', (8, 5)),
    ):
        (tmp_path / f"{name}.toml").write_text(f'extends = "below.toml"\n{more}', encoding="utf-8")
        read: Any = read_experiment(tmp_path / f"{name}.toml", ["scale=small"]).experiment
        assert (read.data.image_size, read.partition.sites) == expected, name


def test_who_writes_into_a_plan_s_parameters_changes_no_other_request_s(tmp_path: Path) -> None:
    text = plan_of(read_experiment(written(tmp_path, DIGITS), ["method.warm_up_epochs=1"]).experiment).model_dump_json()
    plan_of_text(text).method["warm_up_epochs"] = 100
    assert plan_of_text(text).method["warm_up_epochs"] == 1


def test_a_plan_without_end_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = plan_of(read_experiment(written(tmp_path, DIGITS)).experiment).model_dump_json()
    kept = config._cached_plan.cache_info().misses
    monkeypatch.setattr(config, "LONGEST_CACHED", len(text) - 1)
    assert plan_of_text(text) == plan_of_text(text)
    assert config._cached_plan.cache_info().misses == kept


def test_files_that_extend_one_another_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('extends = "b.toml"', encoding="utf-8")
    (tmp_path / "b.toml").write_text('extends = "a.toml"', encoding="utf-8")
    with pytest.raises(BadInput, match=r"a.toml: extends: the files extend one another in a circle\."):
        read_experiment(tmp_path / "a.toml")


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("run.rounds=7", "rounds", 7),
        ("run.name=plain words", "name", "plain words"),
        ('run.name="quoted"', "name", "quoted"),
        ("run.name=none", "name", ""),
    ],
)
def test_set_takes_numbers_text_and_none(override: str, key: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(DIGITS, encoding="utf-8")
    assert getattr(read_experiment(tmp_path / "e.toml", [override]).experiment.run, key) == value


def test_faults_of_the_file_and_of_an_override_come_together(tmp_path: Path) -> None:
    found = complaints(tmp_path, DIGITS.replace("rounds = 2", "rounds = 0"), "nonsense", "run.seed=-1")
    assert len(found) == 3


def test_the_plan_that_travels_has_no_paths_and_no_data(tmp_path: Path) -> None:
    text = DIGITS.replace("channels = 1", 'channels = 1\nweights = "/srv/secret.safetensors"')
    (tmp_path / "e.toml").write_text(text, encoding="utf-8")
    plan = plan_of(read_experiment(tmp_path / "e.toml").experiment).model_dump_json()
    assert "secret" not in plan
    assert "digits" not in plan
    assert "partition" not in plan


@pytest.mark.parametrize(
    ("name", "parameters", "fault"),
    [
        ("surgicl", {}, 'run.method: "surgicl" is not a method. Did you mean "surgical"?'),
        ("surgical", {"trnk": "fedbn"}, 'method.trnk: is not a parameter of this method. Did you mean "trunk"?'),
        (
            "surgical",
            {"warm_up_epochs": -1},
            "method.warm_up_epochs: must be greater than or equal to 0; got -1.",
        ),
    ],
)
def test_methods_and_their_parameters_are_checked(name: str, parameters: dict[str, object], fault: str) -> None:
    with pytest.raises(BadInput) as caught:
        strategy_named(name, parameters)
    assert str(caught.value) == fault


def keys_of(section: object) -> set[str]:
    """Every key of a pydantic model, or of all members of an annotated union."""
    members = get_args(get_args(section)[0]) if get_args(section) else (section,)
    return {key for member in members for key in member.model_fields} - {"kind"}


@pytest.mark.parametrize(
    "section",
    [
        RunSection, TrainingSection, ParticipationSection, SimulationSection, ModelSpec, AugmentationSpec,
        DataSpec, PartitionSpec, EvaluationSection, ServerOptimizer, RobustMean,
        *dict.fromkeys(entry.site_class.table for entry in STRATEGIES.values()),
    ],
)  # fmt: skip
def test_every_key_is_in_the_documentation(section: object) -> None:
    text = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    missing = {key for key in keys_of(section) if f"`{key}`" not in text}
    assert missing == set(), f"docs/experiments.md says nothing of {sorted(missing)}: a line for each, in backticks"


def test_no_share_can_be_bounded_where_sites_weigh_their_own_updates(tmp_path: Path) -> None:
    text = DIGITS + "[participation]\nlargest_share = 0.5\n[privacy]\nsecure_aggregation = true\n"
    faults = complaints(tmp_path, text)
    assert any("each site weighs its own update: participation.largest_share must be 1" in fault for fault in faults)


def test_set_takes_tables_lists_and_keys_that_the_file_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(DIGITS, encoding="utf-8")
    lists = 'partition={kind = "class_lists", lists = {north = ["1", "2"]}}'
    experiment = read_experiment(tmp_path / "e.toml", [lists, "method.trunk=fedbn_plus"]).experiment
    assert experiment.method == {"trunk": "fedbn_plus"}
    assert experiment.partition is not None
    assert experiment.partition.model_dump()["lists"] == {"north": ("1", "2")}


def test_a_later_override_wins(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(DIGITS, encoding="utf-8")
    assert read_experiment(tmp_path / "e.toml", ["run.seed=5", "run.seed=6"]).experiment.run.seed == 6


@pytest.mark.parametrize("parent", ["3", '"../elsewhere/e.toml"'])
def test_extends_names_a_file_in_the_same_folder(parent: str, tmp_path: Path) -> None:
    found = complaints(tmp_path, f"extends = {parent}\n{DIGITS}")
    assert found == ["e.toml: extends: must name a file in the same folder."]
