"""experiments/condistfl on stand-ins: drawn volumes in the folders of KiTS19, LiTS, MSD, AMOS and BTCV; one round."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyclinic.client.gate.plan_costs import estimate_training_memory_bytes
from polyclinic.common.config import make_hospital_plan, read_experiment
from polyclinic.data.base.image_set import ImageSet, concatenate_image_sets
from polyclinic.data.load import load_dataset, load_external_test_images
from tests import mask_layouts as layouts
from tests.network.real import flwr_sim

FILES = Path(__file__).parents[2] / "experiments" / "condistfl"
COUNT = 14
SIZE = "[10, 24, 24]"
NO_PATIENTS = ("--patient-column", "")
SMALL = (
    "run.rounds=1", "model.architecture=tiny_unet", f"model.image_size={SIZE}", "model.patch_size=[8, 16, 16]",
    f"data.image_size={SIZE}", f"external_test.image_size={SIZE}", "training.epochs=1", "training.batch_size=4",
    "training.momentum=0", "data.spacing=[6, 3, 3]", "external_test.spacing=[6, 3, 3]",
)  # fmt: skip


@pytest.fixture(scope="module")
def collections(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files, and beside them the six folders with a table of each, which init writes."""
    root = tmp_path_factory.mktemp("condistfl")
    for file in FILES.glob("*.toml"):
        shutil.copy(file, root)
    layouts.write_cases(root / "kits19", COUNT, {"Kidney": 1, "Spleen": 2})
    layouts.write_decathlon(root / "lits", COUNT, {"Liver": 1}, stem="liver")
    layouts.write_decathlon(root / "pancreas", COUNT, {"Pancreas": 1}, stem="pancreas")
    layouts.write_decathlon(root / "spleen", COUNT, {"Spleen": 1}, stem="spleen")
    layouts.write_nnunet(
        root / "amos", COUNT, {"Spleen": 1, "Kidney": 3, "Liver": 6, "Pancreas": 10}, channel="", stem="amos"
    )
    layouts.write_image_and_label_folders(root / "btcv", COUNT, {"Kidney": 2, "Liver": 6, "Pancreas": 11})
    write_table(root, "kits19", "--mask-class", "1=Kidney", "--mask-class", "2=Kidney tumour")
    for name in ("lits", "pancreas", "spleen", "amos"):
        write_table(root, name, *NO_PATIENTS)
    btcv = {"2": "Right kidney", "6": "Liver", "11": "Pancreas"}
    named = [word for value, name in btcv.items() for word in ("--mask-class", f"{value}={name}")]
    write_table(root, "btcv", *NO_PATIENTS, *named)
    return root


def write_table(root: Path, name: str, *options: str) -> None:
    ended = flwr_sim("init", root / name, "--out", root / f"{name}.toml", *options)
    assert ended.code == 0, ended.out + ended.err


def read(collections: Path) -> tuple[Any, ImageSet]:
    experiment = read_experiment(collections / "condistfl.toml", SMALL).experiment
    assert experiment.data is not None
    return experiment, concatenate_image_sets(load_dataset(experiment.data, collections).parts)


def test_each_collection_knows_its_own_organs_and_the_masks_are_joined_by_name(collections: Path) -> None:
    _, images = read(collections)
    assert images.masks is not None
    assert len(images) == 4 * COUNT
    spleens = np.array([areas["Spleen"].any() for _, areas in layouts.draw(COUNT)])
    assert images.labels[images.sources == "spleen"][:, images.class_names.index("Spleen")].sum() == spleens.sum()
    for name, source in {"Kidney": "kits19", "Liver": "lits", "Pancreas": "pancreas", "Spleen": "spleen"}.items():
        column = images.class_names.index(name)
        known = ~np.isnan(images.labels[:, column])
        assert set(images.sources[known].tolist()) == {source}
        shown = images.masks.read_class_areas(np.flatnonzero(images.sources == source), (name,)).any((1, 2, 3, 4))
        assert np.array_equal(shown, images.labels[images.sources == source][:, column] == 1)


def test_left_and_right_kidneys_of_the_external_sets_are_kidneys(collections: Path) -> None:
    experiment, _ = read(collections)
    images = load_external_test_images(experiment.external_test, collections)
    assert images is not None
    assert images.masks is not None
    assert images.class_names == ("Kidney", "Liver", "Pancreas", "Spleen")
    amos = np.flatnonzero(images.sources == "amos")
    kidneys = np.array([areas["Kidney"].any() for _, areas in layouts.draw(COUNT)])
    assert images.labels[amos, 0].sum() == kidneys.sum()
    assert images.masks.read_class_areas(amos, ("Kidney",)).any((1, 2, 3, 4)).sum() == kidneys.sum()


@pytest.mark.parametrize("name", [file.stem for file in sorted(FILES.glob("*.toml"))])
def test_a_round_of_each_file_ends_with_figures_of_the_external_test(collections: Path, name: str) -> None:
    options = [word for setting in SMALL for word in ("--set", setting)]
    out = collections / f"run-{name}"
    ended = flwr_sim("run", collections / f"{name}.toml", "--out", out, "--backend", "inline", *options)
    assert ended.code == 0, ended.err
    assert "external test set" in (out / "report.html").read_text(encoding="utf-8").lower()


def test_a_volume_setting_of_one_collection_alone_is_refused(collections: Path) -> None:
    own = "data.collections.lits.window=[40, 400]"
    ended = flwr_sim("run", collections / "condistfl.toml", "--out", collections / "no", "--set", own)
    assert ended.code == 2
    assert "stands once, beside collections" in " ".join(ended.err.split())


@pytest.mark.parametrize("name", [file.stem for file in sorted(FILES.glob("*.toml"))])
def test_training_by_each_file_fits_8_gb(name: str) -> None:
    # The estimate is a lower bound: measured, a step of the two largest batches took 5.6 GiB where it says 5.1.
    plan = make_hospital_plan(read_experiment(FILES / f"{name}.toml").experiment)
    assert estimate_training_memory_bytes(plan, rows=7, images=131, device="cpu") < 0.8 * 8 * 10**9
