"""Segmentation over the network: the model of simulation, also killed and resumed; figures as policies allow."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.network.federated import connected, undisturbed
from tests.network.organ_files import ORGANS, PATCHES, VOLUMES
from tests.network.real import Coordinator, lines_of, summary_of, written

pytestmark = pytest.mark.slow

MASKED = "privacy.secure_aggregation=true"
VALIDATION_KEYS = ("round", "sites", "train_loss", "validation_loss", "validation_auroc")
Connected = tuple[Coordinator, Path]


@pytest.fixture(scope="module")
def outlining(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connected]:
    """Three hospitals that outline two of four organs each."""
    experiment = written(ORGANS, folder := tmp_path_factory.mktemp("outlining"))
    with connected(experiment, folder / "machine") as (coordinator, _):
        yield coordinator, experiment


def test_sites_train_the_model_of_simulation_and_tell_dice_by_patients(outlining: Connected, tmp_path: Path) -> None:
    coordinator, experiment = outlining
    run = coordinator.run(experiment, tmp_path / "network", pages=True, once=True)
    undisturbed(experiment, tmp_path / "simulation")
    run.succeeds()
    network, simulation = (summary_of(tmp_path / name) for name in ("network", "simulation"))
    assert network["model_sha256"] == simulation["model_sha256"]
    overlap = network["test"]["segmentation"]
    assert set(overlap["per_class"]) == {"Kidney", "Liver", "Pancreas", "Spleen"}
    assert set(network["per_site"]["east"]["per_class"]) == {"Liver", "Pancreas"}
    have_equal_figures(tmp_path)
    assert "Dice by hospital and class" in (tmp_path / "network" / "report.html").read_text()


def have_equal_figures(folder: Path) -> None:
    """The runs in ``network`` and ``simulation`` report the same figures, to the last digit.

    Every hospital tests on all test images here, so that the network counts a patient at each of them: numbers of
    patients, and intervals, differ.
    """
    network, simulation = (summary_of(folder / name) for name in ("network", "simulation"))
    assert network["best_round"] == simulation["best_round"]
    assert network["test"]["mean_more"] == simulation["test"]["mean_more"]
    for name, of_class in simulation["test"]["per_class"].items():
        assert network["test"]["per_class"][name]["more"] == of_class["more"]
    pooled = [summary["test"]["segmentation"] for summary in (network, simulation)]
    assert pooled[0]["mean_dice"] == pooled[1]["mean_dice"]
    for name, of_class in pooled[1]["per_class"].items():
        figures = [{key: each[key] for key in ("dice", "hd95")} for each in (pooled[0]["per_class"][name], of_class)]
        assert figures[0] == figures[1]
    for site, record in simulation["per_site"].items():
        assert network["per_site"][site]["per_class"] == record["per_class"]
        assert network["per_site"][site]["validation_loss"] == record["validation_loss"]
    rounds = [lines_of(folder / name / "rounds.jsonl") for name in ("network", "simulation")]
    for ours, theirs in zip(*rounds, strict=True):
        assert {key: ours[key] for key in VALIDATION_KEYS} == {key: theirs[key] for key in VALIDATION_KEYS}


def run_killed_in_round_2(connected: Connected, folder: Path) -> dict[str, Any]:
    """The leading process is killed, and the model is that of an undisturbed run; the summary of the killed one."""
    coordinator, experiment = connected
    run = coordinator.run(experiment, folder / "network")
    run.says("round 1 of 3")
    coordinator.kill_leading(run)
    run.succeeds()
    undisturbed(experiment, folder / "simulation")
    network, simulation = (summary_of(folder / name) for name in ("network", "simulation"))
    assert network["model_sha256"] == simulation["model_sha256"]
    have_equal_figures(folder)
    return network


def test_killed_and_resumed_it_ends_in_the_same_model(outlining: Connected, tmp_path: Path) -> None:
    run_killed_in_round_2(outlining, tmp_path)


def test_under_masks_figures_leave_in_a_sum_alone(outlining: Connected, tmp_path: Path) -> None:
    coordinator, experiment = outlining
    coordinator.run(experiment, tmp_path / "run", MASKED, once=True).succeeds()
    summary = summary_of(tmp_path / "run")
    assert all(not site["per_class"] for site in summary["per_site"].values())
    overlap = summary["test"]["segmentation"]
    # Two hospitals outline liver and pancreas; nothing is opened of an organ that one hospital alone outlines.
    assert set(overlap["per_class"]) == {"Liver", "Pancreas"}
    assert overlap["per_class"]["Liver"]["dice"] == summary["test"]["per_class"]["Liver"]["more"]["dice"]


def test_volumes_too_give_the_model_of_simulation(tmp_path: Path) -> None:
    experiment = written(VOLUMES, tmp_path)
    with connected(experiment, tmp_path / "machine") as (coordinator, _):
        coordinator.run(experiment, tmp_path / "network", once=True).succeeds()
    undisturbed(experiment, tmp_path / "simulation")
    network, simulation = (summary_of(tmp_path / name) for name in ("network", "simulation"))
    assert network["model_sha256"] == simulation["model_sha256"]
    have_equal_figures(tmp_path)
    assert set(network["test"]["segmentation"]["per_class"]) == {"Kidney", "Liver", "Pancreas", "Spleen"}


@pytest.fixture(scope="module")
def outlining_volumes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connected]:
    """The same hospitals with volumes, which are trained in patches."""
    pytest.importorskip("monai", reason="the extra monai is not installed")
    experiment = written(PATCHES, folder := tmp_path_factory.mktemp("volumes"))
    with connected(experiment, folder / "machine") as (coordinator, _):
        yield coordinator, experiment


@pytest.mark.network
def test_killed_and_resumed_volumes_in_patches_give_the_model_of_simulation(
    outlining_volumes: Connected, tmp_path: Path
) -> None:
    network = run_killed_in_round_2(outlining_volumes, tmp_path)
    assert set(network["test"]["segmentation"]["per_class"]) == {"Kidney", "Liver", "Pancreas", "Spleen"}


@pytest.mark.network
def test_a_network_planned_from_all_hospitals_volumes_is_that_of_simulation(
    outlining_volumes: Connected, tmp_path: Path
) -> None:
    coordinator, experiment = outlining_volumes
    options = ("model.patch_size=none", "training.batch_size=none", "training.patches_per_volume=2")
    settings = ("model.architecture=monai:DynUNet", *options, 'planning={kind = "nnunet", memory_gb = 0.005}')
    run = coordinator.run(experiment, tmp_path / "network", *settings)
    run.says("round 1 of 3")
    coordinator.kill_leading(run)
    run.succeeds()
    undisturbed(experiment, tmp_path / "simulation", *settings)
    plans = [(tmp_path / name / "planning.json").read_text() for name in ("network", "simulation")]
    assert plans[0] == plans[1]
    network, simulation = (summary_of(tmp_path / name) for name in ("network", "simulation"))
    assert network["model_sha256"] == simulation["model_sha256"]
    have_equal_figures(tmp_path)


@pytest.mark.parametrize("kind", ["pictures", pytest.param("volumes in patches", marks=pytest.mark.network)])
def test_under_masks_a_segmentation_killed_and_resumed_ends_in_the_model_of_simulation(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    connection: Connected = request.getfixturevalue("outlining" if kind == "pictures" else "outlining_volumes")
    coordinator, experiment = connection
    run = coordinator.run(experiment, tmp_path / "network", MASKED)
    run.says("round 1 of 3")
    coordinator.kill_leading(run)
    run.succeeds()
    undisturbed(experiment, tmp_path / "simulation", MASKED)
    network, simulation = (summary_of(tmp_path / name) for name in ("network", "simulation"))
    assert network["model_sha256"] == simulation["model_sha256"]


@pytest.mark.network
def test_under_masks_volumes_in_patches_end_in_a_model_and_figures_of_sums_alone(
    outlining_volumes: Connected, tmp_path: Path
) -> None:
    coordinator, experiment = outlining_volumes
    coordinator.run(experiment, tmp_path / "run", MASKED, once=True).succeeds()
    summary = summary_of(tmp_path / "run")
    assert all(not site["per_class"] for site in summary["per_site"].values())
    assert set(summary["test"]["segmentation"]["per_class"]) == {"Liver", "Pancreas"}
