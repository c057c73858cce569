"""``flwr-client check`` of a hospital with volumes: shapes, spacings, memory, a trial step, what is cropped."""

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyclinic.client.check.findings import CheckResult
from polyclinic.client.preview.images import write_class_samples_page
from polyclinic.common.config import read_experiment
from tests.client.check.sites import CLASSES, Hospital, hospital_in
from tests.data.volume_files import write_nifti, write_series

KEYS = "image_size = [8, 8, 8]\nwindow = [400, 1000]\n"
EXPERIMENT = """
[run]
method = "surgical"
[model]
architecture = "tiny_cnn_3d"
channels = 1
image_size = [8, 8, 8]
[training]
batch_size = 4
"""


@pytest.fixture
def hospital(tmp_path: Path) -> Hospital:
    """Twenty volumes, half of them folders of slices; one patient each."""
    hospital, rows = hospital_in(tmp_path / "north", images=5), []
    for number in range(20):
        voxels = np.random.default_rng(number).integers(-100, 900, (6, 8, 8)).astype(np.int16)
        name = f"p{number}" if number % 2 else f"p{number}.nii.gz"
        write = write_series if number % 2 else write_nifti
        write(hospital.folder / "images" / name, voxels, spacing=(5, 1, 1))
        part = ("train", "train", "train", "val", "test")[number // 2 % 5]
        rows.append(
            {
                "image": name,
                "patient": f"P{number}",
                "part": part,
                CLASSES[0]: f"{number % 2}",
                CLASSES[1]: f"{number // 5 % 2}",
            }
        )
    hospital.rewrite(rows)
    hospital.edit("image_size = 32\n", KEYS)
    return hospital


def check(hospital: Hospital, text: str = EXPERIMENT) -> tuple[CheckResult, str]:
    """Check the hospital before a run of this experiment; return the result, and all that it says."""
    file = hospital.folder / "asked.toml"
    file.write_text(text, encoding="utf-8")
    result = hospital.checked(experiment=read_experiment(file).experiment)
    said = [line for area in result.areas for line in area.passed]
    said += [str(finding) for area in result.areas for finding in area.findings]
    return result, " ".join(" ".join(said).split())


def test_it_says_shapes_spacings_and_memory_and_tries_a_step(hospital: Hospital) -> None:
    _, said = check(hospital)
    assert "20 of them decoded: 10 NIfTI grey, 10 DICOM series grey" in said
    assert "6 × 8 × 8 voxels of 5 × 1 × 1 mm (depth × height × width)" in said
    assert "20 volumes of 8 × 8 × 8 voxels take" in said
    assert "tiny_cnn_3d, 8 × 8 × 8 voxels, batches of 4" in said
    assert "a step on cpu works" in said


def test_volumes_that_a_spacing_crops_are_counted(hospital: Hospital) -> None:
    hospital.edit(KEYS, KEYS + "spacing = [2, 1, 1]\n")
    _, said = check(hospital)
    assert "20 of 20 volumes that were read are larger than the grid of 16 × 8 × 8 mm, and are cropped" in said


def test_a_missing_window_and_unlike_voxels_are_named_with_the_line_to_write(hospital: Hospital) -> None:
    hospital.edit("window = [400, 1000]\n", "")
    voxels = np.random.default_rng(5).integers(-100, 900, (6, 8, 8)).astype(np.int16)
    write_nifti(hospital.folder / "images" / "p0.nii.gz", voxels, spacing=(2, 1, 1))
    _, said = check(hospital)
    assert "no window: each volume is shown from its own 0.5th to its 99.5th percentile" in said
    assert "spacing = [5, 1, 1] under [data] resamples all to the median" in said


def test_a_damaged_series_is_named_with_its_reason(hospital: Hospital) -> None:
    write_series(hospital.folder / "images" / "p1", np.zeros((6, 8, 8)), spacing=(5, 1, 1))[2].unlink()
    _, said = check(hospital)
    assert "farther apart than most, 10 and 5 mm; slices are missing" in said


def test_volumes_do_not_fit_a_run_of_pictures(hospital: Hospital) -> None:
    pictures = EXPERIMENT.replace("tiny_cnn_3d", "tiny_cnn").replace("[8, 8, 8]", "32")
    _, said = check(hospital, pictures)
    assert "its images are volumes of 8 × 8 × 8 voxels, and the network takes pictures, 32." in said


def test_the_page_of_samples_shows_volumes_by_their_middle_slices(hospital: Hospital) -> None:
    file = hospital.folder / "asked.toml"
    file.write_text(EXPERIMENT + "[augmentation]\nrotation = 0.05\n", encoding="utf-8")
    page = write_class_samples_page(hospital.folder, hospital.folder / "page.html", read_experiment(file).experiment)
    text = page.read_text(encoding="utf-8")
    assert "tiny_cnn_3d is given 8 × 8 × 8 voxels in" in text
    first = re.search(r"data:image/png;base64,([A-Za-z0-9+/=]+)", text)
    assert first is not None
    with Image.open(io.BytesIO(base64.b64decode(first[1]))) as picture:
        assert picture.size == (26, 8)  # three slices of 8 × 8, with a column between
