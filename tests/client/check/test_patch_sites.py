"""``flwr-client check`` before a run that trains on patches: a trial step, and images that are too small."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyclinic.client.check.findings import CheckResult
from polyclinic.common.config import read_experiment
from tests.client.check.sites import CLASSES, hospital_in

pytest.importorskip("monai", reason="the extra monai is not installed")
EXPERIMENT = """
[run]
method = "surgical"
[model]
task = "segmentation"
architecture = "tiny_unet"
channels = 1
image_size = 64
patch_size = {patch_size}
[training]
batch_size = 4
patches_per_volume = 2
"""


def check(folder: Path, patch_size: int) -> CheckResult:
    """Check a hospital with pictures of 32 x 32 pixels and their masks."""
    hospital = hospital_in(folder / "north", images=20)
    rows = hospital.table
    for number, row in enumerate(rows):
        values = np.full((32, 32), 1 + number % 2, np.uint8)
        Image.fromarray(values).save(hospital.folder / "images" / f"m{number}.png")
        row["mask"] = f"m{number}.png"
    hospital.rewrite(rows)
    labels = f'label_columns = ["{CLASSES[0]}", "{CLASSES[1]}"]\n'
    hospital.edit(labels, 'mask_column = "mask"\nmask_values = { Liver = 1, Spleen = 2 }\n')
    file = folder / "experiment.toml"
    file.write_text(EXPERIMENT.format(patch_size=patch_size), encoding="utf-8")
    return hospital.checked(experiment=read_experiment(file).experiment)


def test_a_step_on_patches_is_tried_and_nothing_is_resized(tmp_path: Path) -> None:
    result = check(tmp_path, patch_size=16)
    passed = " ".join(line for area in result.areas for line in area.passed)
    assert "tiny_unet, 16 pixels, batches of 4 patches" in passed
    assert "a step on cpu works" in passed
    findings = " ".join(str(finding) for area in result.areas for finding in area.findings)
    assert "resizes" not in findings


def test_images_that_are_smaller_than_a_patch_are_named_with_the_line_to_write(tmp_path: Path) -> None:
    result = check(tmp_path, patch_size=48)
    findings = " ".join(str(finding) for area in result.areas for finding in area.findings)
    assert "smaller than the run's patches, 48 × 48 pixels" in findings
    assert "image_size = 64" in findings
