"""``flwr-client check`` of a hospital with masks."""

from pathlib import Path

import numpy as np
from PIL import Image

from tests.client.check.sites import CLASSES, hospital_in

LABELS = f'label_columns = ["{CLASSES[0]}", "{CLASSES[1]}"]\n'
MASKS = 'mask_column = "mask"\nmask_values = { Liver = 1, Spleen = 2 }\n'


def test_an_organ_that_no_mask_shows_is_said_and_not_one_that_every_mask_shows(tmp_path: Path) -> None:
    hospital = hospital_in(tmp_path / "north", images=20)
    values = np.zeros((32, 32), np.uint8)
    values[4:9, 4:9] = 1
    rows = hospital.table
    for number, row in enumerate(rows):
        Image.fromarray(values).save(hospital.folder / "images" / f"m{number}.png")
        row["mask"] = f"m{number}.png"
    hospital.rewrite(rows)
    hospital.edit(LABELS, MASKS)
    said = [str(finding) for area in hospital.checked().areas for finding in area.findings]
    assert any("no image shows Spleen" in each for each in said)
    assert not any("is without" in each and "Liver" in each for each in said)
