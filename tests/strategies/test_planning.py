"""Runs whose network the coordinator plans from all hospitals' volumes, by the rules of nnU-Net."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyclinic.client.counts.volumes import count_outlined_voxels
from polyclinic.client.site.policy import LEVEL_DEFAULTS
from polyclinic.common.errors import BadInput
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.base.masks import MaskSet
from polyclinic.strategies.engine.coordinator import Coordinator
from tests.data.masked_volumes import SHAPE, SPACING, folder_of
from tests.federations import GATED, federation, finished
from tests.organs import VOLUMES
from tests.server.killing import Killed, kill_at

pytest.importorskip("monai", reason="the extra monai is not installed")

DYN_UNET = (
    "model.task=exclusive_segmentation",
    "model.architecture=monai:DynUNet",
    "training.batch_size=none",  # which planning chooses
    "run.rounds=2",
)
UNPLANNED = (*VOLUMES, *DYN_UNET)
PLANNING = 'planning={kind = "nnunet", memory_gb = 0.005}'


def planned_tables(folder: Path) -> dict[str, Any]:
    tables: dict[str, Any] = json.loads((folder / "planning.json").read_text())
    return tables


def test_a_planned_run_is_the_run_with_the_planned_keys(tmp_path: Path) -> None:
    folder, planned = finished(*UNPLANNED, PLANNING)
    tables = planned_tables(folder)
    assert tables["sites"] == ["east", "north", "south"]
    assert (tables["spacing"], tables["median_shape"]) == ([1.0] * 3, [8.0, 24.0, 24.0])
    assert tables["training"] == {"batch_size": 2}
    model = planned["experiment"]["model"]
    assert {key: model[key] for key in tables["model"]} == tables["model"]
    keys = [f"model.{key}={json.dumps(value)}" for key, value in tables["model"].items()]
    written = federation(tmp_path, *UNPLANNED, *keys, "training.batch_size=2")
    assert planned["model_sha256"] == written["model_sha256"]
    assert not (tmp_path / "run" / "planning.json").exists()


@pytest.mark.parametrize("call", [1, 2])
def test_killed_and_resumed_it_has_the_same_plan_and_model(tmp_path: Path, call: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        kill_at(patched, Coordinator, "configure_train", call)
        with pytest.raises(Killed):
            federation(tmp_path, *UNPLANNED, PLANNING, out="killed")
    resumed = federation(tmp_path, *UNPLANNED, PLANNING, out="killed", resume=True)
    folder, undisturbed = finished(*UNPLANNED, PLANNING)
    assert resumed["model_sha256"] == undisturbed["model_sha256"]
    assert planned_tables(tmp_path / "killed") == planned_tables(folder)


def test_a_resumed_run_is_not_planned_otherwise(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        kill_at(patched, Coordinator, "configure_train", 2)
        with pytest.raises(Killed):
            federation(tmp_path, *UNPLANNED, PLANNING, out="killed")
    with pytest.raises(BadInput, match=r"planning\.memory_gb"):
        federation(tmp_path, *UNPLANNED, 'planning={kind = "nnunet", memory_gb = 0.01}', out="killed", resume=True)


CHOSEN = [
    ("model.mean=[0.2]",),
    ("model.patch_size=[8, 16, 16]",),
    ("training.batch_size=4",),
    ("model.architecture=tiny_unet",),
]


@pytest.mark.parametrize("overrides", CHOSEN, ids=[each[0] for each in CHOSEN])
def test_what_planning_chooses_cannot_be_chosen_beside_it(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    with pytest.raises(BadInput, match="planning"):
        federation(tmp_path, *UNPLANNED, PLANNING, *overrides)
    assert not (tmp_path / "run" / "rounds.jsonl").exists()


def test_without_sums_of_any_hospital_the_run_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    masked = GATED.model_copy(update={"label_counts": LEVEL_DEFAULTS["masked"].get("label_counts", False)})
    monkeypatch.setattr("polyclinic.client.simulation.SIMULATED_SITE_POLICY", masked)
    with pytest.raises(BadInput, match="none of the hospitals") as refused:
        federation(tmp_path, *UNPLANNED, PLANNING)
    assert all(site in str(refused.value) for site in ("east", "north", "south"))


def axes_of(spacing: float, count: int) -> dict[str, Any]:
    return {"spacing": [[(spacing, count)]] * 3, "extent": [[(24 * spacing, count)]] * 3, "grey": []}


WRONG_SUMS = {
    "none": "",
    "no JSON": "volumes",
    "a billion volumes": json.dumps(axes_of(1000.0, 10**9)),
    "unequal numbers": json.dumps({**axes_of(1.0, 3), "extent": [[(8.0, 2)]] * 3}),
    "voxels of no length": json.dumps(axes_of(0.0, 3)),
}


@pytest.mark.parametrize("text", WRONG_SUMS.values(), ids=WRONG_SUMS)
def test_a_hospital_without_possible_sums_is_left_out_of_the_plan_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    from polyclinic.client import app

    honest = app._describe_volumes
    monkeypatch.setattr(
        app, "_describe_volumes", lambda site, plan: text if site.name == "north" else honest(site, plan)
    )
    summary = federation(tmp_path, *UNPLANNED, PLANNING, "run.rounds=1")
    tables = planned_tables(tmp_path / "run")
    assert (tables["sites"], list(tables["left_out"])) == (["east", "south"], ["north"])
    assert tables["median_spacing"] == [1.0] * 3
    assert list(summary["per_site"]) == ["east", "north", "south"]


def test_grey_values_count_where_something_annotated_is_outlined() -> None:
    stored = np.arange(8, dtype=np.uint8).reshape(2, 1, 2, 2, 1)  # two volumes of 1 x 2 x 2
    outlines = np.array([[[[1, 3], [0, 2]]], [[[2, 0], [1, 0]]]], np.uint8)  # bit 1: liver, bit 2: spleen
    masks = MaskSet(outlines, np.arange(2), {"Liver": 1, "Spleen": 2})
    labels = np.array([[1, 1], [1, np.nan]], np.float32)  # nobody outlined the spleen in the second volume
    names = np.array(["a", "b"])
    counts = count_outlined_voxels(ImageSet(stored, labels, ("Liver", "Spleen"), names, names, masks=masks))
    assert np.flatnonzero(counts).tolist() == [0, 1, 3, 6]
    assert counts.sum() == 4


def nifti_settings(root: Path, size: Sequence[int] = SHAPE, **more: Any) -> tuple[str, ...]:
    folder_of(root)
    data = {"image_size": list(size), "window": [0, 1000], **more}
    keys = ", ".join(f"{key} = {json.dumps(value)}" for key, value in data.items())
    table = (
        '{kind = "folder", labels = "labels.csv", images = ".", image_column = "volume", patient_column = "patient", '
        f'split_column = "part", mask_column = "mask", mask_values = {{ Liver = 1, Spleen = 7 }}, {keys}}}'
    )
    partition = 'partition={kind = "class_lists", lists = { a = ["Liver", "Spleen"] }}'
    return (*DYN_UNET, f"model.image_size={list(size)}", f"data={table}", partition, "run.rounds=1")


def test_files_are_planned_for_their_spacing(tmp_path: Path) -> None:
    federation(tmp_path, *nifti_settings(tmp_path, [16, 16, 8], spacing=[1.0, 1.0, 1.0]), PLANNING)
    tables = planned_tables(tmp_path / "run")
    assert tables["median_spacing"] == list(SPACING)
    # 6 x 10 x 8 voxels of 3 x 2 x 1 mm are 18 x 20 x 8 of 1 mm, of which the cache has 16 x 16 x 8. 16 x 16 x 8 becomes
    # 8 x 8 x 4, and 4 x 4 x 4.
    assert tables["median_shape"] == [18.0, 20.0, 8.0]
    assert tables["model"]["patch_size"] == [16, 16, 8]
    assert tables["model"]["strides"] == [[1, 1, 1], [2, 2, 2], [2, 2, 1]]
    assert 0 < tables["model"]["mean"][0] < 1


def test_volumes_that_no_network_halves_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="6 × 10 × 4"):
        federation(tmp_path, *nifti_settings(tmp_path, spacing=[3.0, 2.0, 2.0]), PLANNING)


@pytest.mark.parametrize(("spacing", "sides"), [([9.0, 1.0, 1.0], "2 × 20 × 8"), ([18.0, 1.0, 1.0], "1 × 20 × 8")])
def test_volumes_of_few_slices_are_refused_as_nnunet_plans_none(
    tmp_path: Path, spacing: list[float], sides: str
) -> None:
    with pytest.raises(BadInput, match=f"{sides} voxels. Where an axis has fewer than 8"):
        federation(tmp_path, *nifti_settings(tmp_path, [16, 24, 16], spacing=spacing), PLANNING)


def test_files_of_any_spacing_are_refused_with_the_lines_to_write_before_a_voxel_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyclinic.data.images.volume_pixels.read_volume", None)
    with pytest.raises(BadInput) as refused:
        federation(tmp_path, *nifti_settings(tmp_path), PLANNING)
    (fault,) = refused.value.faults
    assert fault.remedy.endswith("spacing = [3.0, 2.0, 1.0]\n    image_size = [6, 10, 8]")
