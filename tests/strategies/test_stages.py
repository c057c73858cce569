"""Stages, ramps and periods that a run's rounds do not reach are refused; defaults fit short runs."""

from pathlib import Path
from typing import Any

import pytest

import polyclinic as pc
from polyclinic.common.config import Experiment, make_hospital_plan, read_experiment
from polyclinic.common.errors import BadInput
from polyclinic.strategies.registry import STRATEGIES, build_experiment_strategy
from polyclinic.strategies.run_length import complete_round_settings, find_unreached_stage_faults
from tests.federations import experiment, federation, finished

PAPERS = ("fedmlp", "fedsld", "surgical", "unifed")
NOT_ROUNDS = {
    "warm_up_epochs": "epochs before round 1",
    "consensus_models": "models of one round",
    "consensus_sites": "sites of one model",
    "passes": "passes of one batch",
    "teachers": "models that travel with one model",
    "patience": "epochs: ends a training early, leaves no stage out",
    "server_patience": "epochs: ends a training early, leaves no stage out",
    "epoch_cap": "epochs: bounds a training",
    "global_patience": "ends a run early; a run that ends before has done all its rounds",
}
"""Settings that are whole numbers and follow from no stage of a run, with the reason."""


def made(method: str, rounds: int, **settings: Any) -> Experiment:
    """An experiment of a method, as the user wrote it."""
    model = {"architecture": "tiny_cnn", "channels": 1, "image_size": 16}
    run = {"method": method, "rounds": rounds}
    return Experiment.model_validate({"run": run, "method": settings, "model": model})


def faults(method: str, rounds: int, **settings: Any) -> list[str]:
    """The faults of a completed experiment, as text."""
    return [
        str(fault) for fault in find_unreached_stage_faults(complete_round_settings(made(method, rounds, **settings)))
    ]


@pytest.mark.parametrize("method", sorted(STRATEGIES))
def test_each_whole_number_of_a_method_is_in_a_stage_or_is_no_number_of_rounds(method: str) -> None:
    table = STRATEGIES[method].site_class.traits.parameters_class
    numbers = {name for name, field in table.model_fields.items() if field.annotation is int}
    staged = {key for stage in table().list_stages() for key in stage.settings}
    assert numbers == staged | (numbers & NOT_ROUNDS.keys())
    assert table.round_defaults.keys() <= staged
    assert not staged & NOT_ROUNDS.keys()


@pytest.mark.parametrize("method", sorted(STRATEGIES))
def test_with_defaults_every_run_of_three_rounds_or_more_reaches_every_stage(method: str) -> None:
    assert [rounds for rounds in range(3, 120) if faults(method, rounds)] == []


DEFAULTS = {
    # method: rounds -> values
    "fedmlp": {20: {"stage_one_rounds": 10}, 100: {"stage_one_rounds": 50}, 500: {"stage_one_rounds": 50}},
    "cbafed": {
        3: {"stage_one_rounds": 1, "residual_every": 1},
        20: {"stage_one_rounds": 10, "residual_every": 5},
        500: {"stage_one_rounds": 50, "residual_every": 5},
    },
    "fednoro": {
        3: {"stage_one_rounds": 1, "ramp_rounds": 1},
        20: {"stage_one_rounds": 6, "ramp_rounds": 8},
        100: {"stage_one_rounds": 10, "ramp_rounds": 39},
    },
    "fedirm": {
        2: {"supervised_rounds": 1, "ramp_rounds": 1},
        20: {"supervised_rounds": 6, "ramp_rounds": 10},
        60: {"supervised_rounds": 20, "ramp_rounds": 30},
    },
    "condistfl": {1: {"ramp_rounds": 0}, 3: {"ramp_rounds": 2}, 120: {"ramp_rounds": 119}},
    "polyclinic_passing": {2: {"training_rounds": 1}, 12: {"training_rounds": 11}},
    "polyclinic_parallel": {
        2: {"training_rounds": 1, "mean_rounds": 1},
        12: {"training_rounds": 11, "mean_rounds": 3},
        84: {"training_rounds": 83, "mean_rounds": 21},
    },
    "fedlsr": {2: {"ramp_rounds": 1}, 20: {"ramp_rounds": 4}, 500: {"ramp_rounds": 40}},
}


@pytest.mark.parametrize(
    ("method", "rounds"), [(name, rounds) for name, values in DEFAULTS.items() for rounds in values]
)
def test_a_default_is_a_share_of_the_rounds_and_at_most_the_papers_value(method: str, rounds: int) -> None:
    assert complete_round_settings(made(method, rounds)).method == DEFAULTS[method][rounds]


def test_the_defaults_of_all_other_methods_need_no_rounds() -> None:
    declared = {name for name, kind in STRATEGIES.items() if kind.site_class.traits.parameters_class.round_defaults}
    assert declared == DEFAULTS.keys()


@pytest.mark.parametrize(
    ("method", "settings", "where", "numbers", "lines"),
    [
        ("fedmlp", {"stage_one_rounds": 50}, "method.stage_one_rounds", ("50", "51", "20"), "stage_one_rounds = 10"),
        ("cbafed", {"stage_one_rounds": 20}, "method.stage_one_rounds", ("20", "21"), "stage_one_rounds = 10"),
        ("cbafed", {"residual_every": 10}, "method.residual_every", ("10", "21", "20"), "residual_every = 5"),
        ("fednoro", {"ramp_rounds": 39}, "method.ramp_rounds", ("39", "46", "20"), "ramp_rounds = 8"),
        ("fednoro", {"stage_one_rounds": 30}, "method.stage_one_rounds", ("30", "31", "20"), "stage_one_rounds = 6"),
        ("fedirm", {"supervised_rounds": 20}, "method.supervised_rounds", ("20", "21"), "supervised_rounds = 6"),
        ("fedirm", {"ramp_rounds": 30}, "method.ramp_rounds", ("30", "31", "20"), "ramp_rounds = 10"),
        ("condistfl", {"ramp_rounds": 119}, "method.ramp_rounds", ("119", "120", "20"), "ramp_rounds = 19"),
        ("fedlsr", {"ramp_rounds": 40}, "method.ramp_rounds", ("40", "41", "20"), "ramp_rounds = 4"),
        (
            "polyclinic_parallel",
            {"training_rounds": 20},
            "method.training_rounds",
            ("20", "21"),
            "training_rounds = 19",
        ),
        ("polyclinic_parallel", {"mean_rounds": 21}, "method.mean_rounds", ("21", "20"), "mean_rounds = 5"),
        ("polyclinic", {"mean_rounds": 21}, "method.mean_rounds", ("21", "20"), "run.rounds = 21"),
    ],
)
def test_a_value_that_the_rounds_do_not_reach_is_refused_with_both_numbers_and_the_lines_to_write(
    method: str, settings: dict[str, Any], where: str, numbers: tuple[str, ...], lines: str
) -> None:
    (text,) = [text for text in faults(method, 20, **settings) if text.startswith(f"{where}: ")]
    assert [number for number in numbers if number not in text] == []
    assert lines in text


@pytest.mark.parametrize(
    ("method", "rounds"), [("fedmlp", 1), ("cbafed", 2), ("fednoro", 2), ("fedirm", 1), ("fedlsr", 1)]
)
def test_fewer_rounds_than_a_method_has_stages_are_refused_by_the_number_of_rounds(method: str, rounds: int) -> None:
    (text, *_) = faults(method, rounds)
    assert text.startswith(f"run.rounds: is {rounds}: in {method}, ")
    assert f"Set run.rounds = {rounds + 1}" in text


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedmlp", {"stage_one_rounds": 50, "detection": False}),
        ("fednoro", {"stage_one_rounds": 3, "ramp_rounds": 50, "distillation": 0.0}),
        ("cbafed", {"stage_one_rounds": 19, "residual_every": 0}),
        ("fedirm", {"supervised_rounds": 50, "unlabelled_weight": 0.0}),
        ("fedirm", {"supervised_rounds": 0, "ramp_rounds": 0}),
        ("fedlsr", {"ramp_rounds": 50, "distance_weight": 0.0}),
        ("unifed", {"global_patience": 50}),
        ("polyclinic", {"mean_rounds": 20}),
    ],
)
def test_a_stage_that_is_off_need_not_be_reached(method: str, settings: dict[str, Any]) -> None:
    assert faults(method, 20, **settings) == []


def test_the_remedies_are_right() -> None:
    for rounds in (2, 3, 5, 20):
        for method, keys in DEFAULTS.items():
            for key in keys[max(keys)]:
                for text in faults(method, rounds, **{key: 60}):
                    choices = text[text.index(" Set ") + 5 : -1].split(", or ")
                    for choice in choices:
                        lines = dict(line.split(" = ") for line in choice.split(", "))
                        changed = {name.partition(".")[2]: int(value) for name, value in lines.items()}
                        longer = changed.pop("rounds", rounds)
                        settled = faults(method, longer, **{key: 60, **changed})
                        assert text not in settled, (method, rounds, key, choice)


def test_a_learning_rate_that_is_never_reached_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refused:
        federation(tmp_path, "training.schedule_warm_up=2")
    (fault,) = refused.value.faults
    assert fault.where == "experiment.toml: training.schedule_warm_up"
    assert "training.schedule_warm_up = 1, or run.rounds = 3" in fault.remedy


def test_the_plan_that_hospitals_receive_states_the_values_and_another_coordinators_plan_is_not_checked() -> None:
    assert make_hospital_plan(complete_round_settings(made("fedmlp", 20))).method == {"stage_one_rounds": 10}
    assert build_experiment_strategy(make_hospital_plan(made("fedmlp", 20))).site.parameters.stage_one_rounds == 50


FEDMLP = ("run.method=fedmlp", "run.rounds=2", "training.batch_size=256")


def test_a_run_states_its_values_and_a_longer_one_keeps_them(tmp_path: Path) -> None:
    begun = federation(tmp_path, *FEDMLP)
    assert begun["experiment"]["method"] == {"stage_one_rounds": 1}
    longer = federation(tmp_path, *FEDMLP, "run.rounds=5", resume=True)
    assert (longer["rounds"], longer["experiment"]["method"]) == (5, {"stage_one_rounds": 1})


def test_a_run_that_an_earlier_release_began_goes_on_as_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr("polyclinic.server.simulation.simulate.complete_round_settings", lambda it, begun=None: it)
        earlier.setattr("polyclinic.server.simulation.simulate.find_unreached_stage_faults", lambda it: [])
        federation(tmp_path, *FEDMLP)
    longer = federation(tmp_path, *FEDMLP, "run.rounds=3", resume=True)
    assert (longer["rounds"], longer["experiment"]["method"]) == (3, {})


def test_an_example_with_fewer_rounds_than_its_stages_is_refused_by_name(tmp_path: Path) -> None:
    text = '[run]\nmethod = "fedmlp"\nrounds = 100\n[method]\nstage_one_rounds = 50\n'
    rest = (
        '[model]\narchitecture = "tiny_cnn"\nchannels = 1\nimage_size = 16\n[data]\nkind = "digits"\nimage_size = 16\n'
    )
    file = experiment(tmp_path, "run.rounds=3", text=f"{text}{rest}")
    (fault,) = find_unreached_stage_faults(complete_round_settings(file.experiment))
    assert fault.problem.endswith("begins in round 51, and run.rounds is 3.")
    assert fault.remedy == "Set method.stage_one_rounds = 1, or run.rounds = 51."


def test_python_says_both_numbers_and_the_lines(tmp_path: Path) -> None:
    settings = {"run.method": "fedmlp", "method.stage_one_rounds": 50, "run.rounds": 3, "simulation.backend": "inline"}
    with pytest.raises(BadInput) as refused:
        pc.simulate("digits_surgical", settings=settings, out=tmp_path / "run")
    assert "method.stage_one_rounds: is 50: " in str(refused.value)
    assert "round 51, and run.rounds is 3. Set method.stage_one_rounds = 1, or run.rounds = 51." in str(refused.value)


EXPERIMENTS = Path(__file__).parents[2] / "experiments"
FILES = [*EXPERIMENTS.glob("*.toml"), *(path for name in PAPERS for path in (EXPERIMENTS / name).glob("*.toml"))]


@pytest.mark.parametrize("scale", ["full", "small"])
def test_every_experiment_of_ours_reaches_its_stages(scale: str) -> None:
    assert len(FILES) > 60
    for file in FILES:
        override = (f"scale={scale}",) if scale == "full" or "[small" in file.read_text(encoding="utf-8") else ()
        experiment = read_experiment(file, override).experiment
        assert find_unreached_stage_faults(complete_round_settings(experiment)) == [], file


def test_default_and_written_value_give_one_model() -> None:
    written = finished(*FEDMLP, "method.stage_one_rounds=1")[1]["model_sha256"]
    assert finished(*FEDMLP)[1]["model_sha256"] == written
