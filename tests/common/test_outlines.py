"""Outlines drawn on pictures and volumes, for the report of a simulation and for a hospital's own page."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyclinic.common.config import Experiment
from polyclinic.common.metrics.segmentation import AreaComparison
from polyclinic.common.prediction.outlined_images import choose_spread_indices, rank_images
from polyclinic.data.images.outlines import (
    BOTH_COLOR,
    MIN_SIDE,
    OUTLINED_COLOR,
    PREDICTED_COLOR,
    draw_outlines,
    find_border,
)
from polyclinic.server.runs.samples import report_shows_sample_images
from tests.federations import finished
from tests.organs import ORGANS, VOLUMES


def test_the_border_of_an_area_is_inside_of_it_and_one_pixel_wide() -> None:
    area = np.zeros((7, 8), bool)
    area[1:6, 2:7] = True
    border = find_border(area)
    inner = np.zeros_like(area)
    inner[2:5, 3:6] = True
    assert np.array_equal(border, area & ~inner)
    assert find_border(np.ones((3, 3), bool)).sum() == 8  # the edge of the picture is a border


def test_each_kind_of_border_has_its_colour_and_the_rest_stays_grey() -> None:
    image = np.full((200, 300), 77, np.uint8)
    outlined, predicted = np.zeros((2, 200, 300), bool)
    outlined[10:20, 10:20] = predicted[10:20, 10:20] = True
    outlined[50:60, 10:20] = True
    predicted[90:95, 10:20] = True
    drawn = draw_outlines(image, outlined, predicted)
    assert drawn.shape == (200, 300, 3)
    assert drawn[10, 15].tolist() == list(BOTH_COLOR)
    assert drawn[50, 15].tolist() == list(OUTLINED_COLOR)
    assert drawn[94, 15].tolist() == list(PREDICTED_COLOR)
    assert drawn[92, 15].tolist() == drawn[150, 150].tolist() == [77, 77, 77]


def test_a_volume_is_shown_by_the_slice_with_most_of_the_outline_and_enlarged() -> None:
    volume = np.arange(5, dtype=np.uint8)[:, None, None, None] * np.ones((5, 20, 40, 1), np.uint8)
    outlined, predicted = np.zeros((2, 5, 20, 40), bool)
    outlined[3, 5:9, 5:9] = True
    outlined[1, 5:7, 5:7] = True
    predicted[4] = True
    factor = MIN_SIDE // 40
    drawn = draw_outlines(volume, outlined, predicted)
    assert drawn.shape == (20 * factor, 40 * factor, 3)
    assert drawn[0, 0].tolist() == [3, 3, 3]
    nothing = draw_outlines(volume, np.zeros_like(outlined), predicted)
    assert nothing[2 * factor, 2 * factor].tolist() == [4, 4, 4]


def test_images_are_ranked_by_their_own_dice_where_the_class_is_outlined() -> None:
    """Dice 2 * 3 / (3 + 5), 0, undefined, not annotated, 1."""
    counts = {"predicted": [[3], [4], [2], [9], [6]], "reference": [[5], [2], [0], [9], [6]]}
    arrays = {name: np.array(values) for name, values in counts.items()}
    known = np.array([[True], [True], [True], [False], [True]])
    compared = AreaComparison(**arrays, common=np.array([[3], [0], [0], [9], [6]]), is_known=known)
    rows, dice = rank_images(compared, 0)
    assert rows.tolist() == [1, 0, 4]
    np.testing.assert_allclose(dice, [0, 0.75, 1])


@pytest.mark.parametrize(("count", "places"), [(0, []), (1, [0]), (2, [1, 0]), (3, [2, 1, 0]), (9, [8, 4, 0])])
def test_the_best_a_middle_and_the_worst_are_chosen(count: int, places: list[int]) -> None:
    assert choose_spread_indices(count, 3) == places


@pytest.mark.parametrize("settings", [ORGANS, VOLUMES], ids=["pictures", "volumes"])
def test_the_report_of_drawn_organs_shows_outlines(settings: tuple[str, ...]) -> None:
    folder, _ = finished(*settings, pages=True)
    samples = json.loads((folder / "samples.json").read_text())
    assert [each["name"] for each in samples["outlines"]] == ["Kidney", "Liver", "Pancreas", "Spleen"]
    first = samples["outlines"][1]["samples"]
    assert len(first) == 3
    assert first[0]["dice"] >= first[1]["dice"] >= first[2]["dice"]
    with Image.open(io.BytesIO(base64.b64decode(first[0]["png"]))) as picture:
        colours = {tuple(colour) for colour in np.asarray(picture).reshape(-1, 3).tolist()}
    assert colours & {OUTLINED_COLOR, BOTH_COLOR}
    page = (folder / "report.html").read_text()
    assert "Outlines on test images" in page
    assert first[0]["png"] in page


def test_images_of_patients_are_shown_only_if_the_experiment_says_so(tmp_path: Path) -> None:
    data = {"kind": "folder", "images": "a", "labels": "b", "image_column": "c", "mask_columns": {"Liver": "d"}}
    tables = {
        "run": {"method": "surgical"},
        "model": {"architecture": "tiny_unet", "channels": 1, "image_size": 32, "task": "segmentation"},
        "data": data,
    }
    assert not report_shows_sample_images(Experiment.model_validate(tables))
    assert report_shows_sample_images(Experiment.model_validate({**tables, "evaluation": {"sample_grid": True}}))
