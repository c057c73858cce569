"""Dice and Hausdorff distance by class and patient: numbers worked by hand, MONAI's metrics, and histograms."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import ndimage

from polyclinic.common.metrics.auroc import make_segmentation_metrics
from polyclinic.common.metrics.segmentation import (
    AreaComparison,
    PatientFigures,
    SiteOverlap,
    compute_hausdorff_distance,
    compute_mean_dice,
    compute_patient_figures,
    make_patient_histogram,
    pool_site_overlaps,
    summarise_patient_histograms,
    summarise_patients,
)


def bar(length: int, start: int = 0, height: int = 3, width: int = 30) -> np.ndarray:
    """A row of pixels in an image of unequal sides."""
    area = np.zeros((height, width), bool)
    area[1, start : start + length] = True
    return area


def test_hausdorff_distance_by_hand() -> None:
    # A bar of 4 pixels against one of 24 that begins at the same place: from the short to the long the distance is 0;
    # from the long to the short 20 of 24 pixels are 1 to 20 away. The 95th percentile of 0,0,0,0,1..20 lies at index
    # 21.85 of 0..23: between 18 and 19, at 18.85.
    short, long = bar(4), bar(24)
    assert compute_hausdorff_distance(short, long) == pytest.approx(18.85)
    assert compute_hausdorff_distance(long, short) == pytest.approx(18.85)
    assert compute_hausdorff_distance(short, long, spacing=(5.0, 0.5)) == pytest.approx(18.85 / 2)


@pytest.mark.parametrize("corner", [(0, 0, 0), (5, 9, 2), (24, 22, 20)])
def test_a_distance_does_not_depend_on_the_empty_image_around(corner: tuple[int, int, int]) -> None:
    random = np.random.default_rng(sum(corner))
    areas = np.zeros((2, 30, 30, 30), bool)
    place = tuple(slice(first, first + side) for first, side in zip(corner, (6, 8, 10), strict=True))
    areas[(slice(None), *place)] = random.random((2, 6, 8, 10)) < 0.4
    # As far from the border as in the whole image, where that is less than two voxels.
    margins = [(min(first, 2), min(30 - first - side, 2)) for first, side in zip(corner, (6, 8, 10), strict=True)]
    in_corner = np.pad(areas[(slice(None), *place)], [(0, 0), *margins])
    spacing = (3.0, 1.5, 0.7)
    whole = compute_hausdorff_distance(*areas, spacing)
    assert whole == compute_hausdorff_distance(*in_corner, spacing)
    ours = [area & ~ndimage.binary_erosion(area) for area in areas]
    distances = [
        ndimage.distance_transform_edt(~other, sampling=spacing)[surface] for surface, other in (ours, ours[::-1])
    ]
    assert whole == max(float(np.percentile(each, 95)) for each in distances)


def test_hausdorff_distance_is_undefined_without_one_of_the_areas() -> None:
    assert np.isnan(compute_hausdorff_distance(bar(0), bar(4)))
    assert np.isnan(compute_hausdorff_distance(bar(4), bar(0)))


@pytest.mark.filterwarnings("ignore:.*always_return_as_numpy:FutureWarning")  # of MONAI, about its own call
@pytest.mark.parametrize("shape", [(17, 23), (9, 11, 14)])
def test_distances_and_dice_against_monai(shape: tuple[int, ...]) -> None:
    metrics = pytest.importorskip("monai.metrics")
    random = np.random.default_rng(3)
    spacing = [1.5, 0.7, 2.5][-len(shape) :]
    grids = np.meshgrid(*(np.linspace(-1, 1, side) for side in shape), indexing="ij")
    areas = []
    for _ in range(2):
        centre, radius = random.uniform(-0.3, 0.3, len(shape)), random.uniform(0.3, 0.6, len(shape))
        areas.append(sum(((g - c) / r) ** 2 for g, c, r in zip(grids, centre, radius, strict=True)) < 1)
    first, second = (torch.from_numpy(area)[None, None].float() for area in areas)
    theirs = metrics.compute_hausdorff_distance(first, second, percentile=95, spacing=spacing)
    assert compute_hausdorff_distance(*areas, spacing) == pytest.approx(float(theirs), abs=1e-4)
    dice = metrics.compute_dice(first, second)
    sizes = [np.array([[area.sum()]]) for area in (*areas, areas[0] & areas[1])]
    ours = compute_patient_figures(AreaComparison(*sizes, np.array([[True]])), np.array(["a"]), 0)
    assert ours.dice.tolist() == pytest.approx([float(dice)], abs=1e-6)


# Three images of two patients, one class. Patient a: 10 of 12 predicted pixels lie in 14 outlined ones, and in the
# second image 2 of 4 lie in 6. Patient b: outlined 5, nothing predicted.
COMPARED = AreaComparison(
    predicted=np.array([[12], [4], [0]]),
    reference=np.array([[14], [6], [5]]),
    common=np.array([[10], [2], [0]]),
    is_known=np.array([[True], [True], [True]]),
    distances=np.array([[3.0], [7.0], [np.nan]]),
)
PATIENTS = np.array(["a", "a", "b"])


def test_the_images_of_a_patient_count_together() -> None:
    figures = compute_patient_figures(COMPARED, PATIENTS, 0)
    assert figures.dice.tolist() == pytest.approx([2 * 12 / (16 + 20), 0.0])
    assert figures.distances.tolist() == [5.0, np.inf]
    assert compute_mean_dice(COMPARED, PATIENTS, [0]) == pytest.approx(1 / 3)


def test_an_image_in_which_the_class_is_not_annotated_does_not_count() -> None:
    known = replace(COMPARED, is_known=np.array([[True], [False], [False]]))
    figures = compute_patient_figures(known, PATIENTS, 0)
    assert figures.dice.tolist() == pytest.approx([2 * 10 / (12 + 14)])


def test_class_metrics_by_hand() -> None:
    metrics = make_segmentation_metrics(compute_patient_figures(COMPARED, PATIENTS, 0))
    assert metrics.more == {"dice": pytest.approx(1 / 3), "hd95": 5.0}
    assert (metrics.positives, metrics.negatives) == (2, 2)
    assert metrics.main_figure == pytest.approx(1 / 3)
    assert metrics.auroc is None


def test_the_mean_of_a_histogram_is_that_of_its_patients() -> None:
    random = np.random.default_rng(1)
    exact = PatientFigures(random.beta(8, 2, 200), np.append(random.gamma(2, 6, 190), [np.inf] * 10))
    histogram = make_patient_histogram(exact)
    from_patients = summarise_patients({"Liver": exact}, np.random.default_rng(0))
    from_counts = summarise_patient_histograms({"Liver": histogram}, np.random.default_rng(0))
    ours, theirs = from_patients.per_class["Liver"], from_counts.per_class["Liver"]
    assert ours.dice == pytest.approx(exact.dice.mean())
    assert theirs.dice == pytest.approx(exact.dice.mean(), abs=2e-3)
    assert ours.hd95 == pytest.approx(exact.distances[:190].mean())
    assert theirs.hd95 == pytest.approx(exact.distances[:190].mean(), rel=0.02)
    assert (ours.patients, ours.missed) == (theirs.patients, theirs.missed) == (200, 10)
    assert ours.interval is not None
    assert theirs.interval is not None
    assert theirs.interval == pytest.approx(ours.interval, abs=0.01)


def test_the_sum_of_two_hospitals_histograms_is_that_of_all_their_patients() -> None:
    random = np.random.default_rng(2)
    figures = PatientFigures(random.random(40), random.random(40) * 30)
    parts = [PatientFigures(figures.dice[part], figures.distances[part]) for part in (slice(13), slice(13, 40))]
    first, second = map(make_patient_histogram, parts)
    summed, whole = first + second, make_patient_histogram(figures)
    assert np.array_equal(summed.positives, whole.positives)
    assert np.array_equal(summed.negatives, whole.negatives)


def test_a_class_that_no_patient_has_is_undefined() -> None:
    summary = summarise_patients({"Spleen": PatientFigures(np.zeros(0), np.zeros(0))}, np.random.default_rng(0))
    assert summary.mean_dice is None
    assert summary.per_class["Spleen"].dice is None


def site_overlap(scores: list[float], lengths: list[float], **sent: float | None) -> SiteOverlap:
    """A hospital's figures of patients with these Dice scores and distances; ``sent`` replaces the exact means."""
    histogram = make_patient_histogram(PatientFigures(np.array(scores), np.array(lengths)))
    finite = [length for length in lengths if length < np.inf]
    exact = {"dice": float(np.mean(scores)), "hd95": float(np.mean(finite)) if finite else None}
    return SiteOverlap(histogram, **(exact | sent))


EAST, NORTH = ([0.8, 0.6, 0.1], [2.0, 4.5, np.inf]), ([0.3], [10.25])


def test_pooled_means_are_those_of_the_hospitals_weighed_by_their_patients() -> None:
    # Dice: (0.8 + 0.6 + 0.1 + 0.3) / 4 = 0.45, not the mean of 0.5 and 0.3. Distance: of the three patients in whom
    # something is predicted, (2 + 4.5 + 10.25) / 3.
    pooled = pool_site_overlaps({"Liver": [site_overlap(*EAST), site_overlap(*NORTH)]}, None)
    of_class = pooled.per_class["Liver"]
    assert of_class.dice == pytest.approx(0.45, abs=1e-15)
    assert of_class.hd95 == pytest.approx(16.75 / 3, abs=1e-14)
    assert (of_class.patients, of_class.missed) == (4, 1)
    assert pooled.mean_dice == of_class.dice


def test_hospitals_that_test_on_the_same_images_have_their_own_figure_to_the_last_digit() -> None:
    pooled = pool_site_overlaps({"Liver": [site_overlap(*EAST)] * 3}, None).per_class["Liver"]
    assert (pooled.dice, pooled.hd95) == (float(np.mean(EAST[0])), 3.25)


@pytest.mark.parametrize("dice", [None, 0.9, 1e6, float("-inf")])
@pytest.mark.parametrize("hd95", [None, 40.0, -1.0])
def test_a_mean_that_no_patient_of_the_histogram_allows_does_not_count(dice: float | None, hd95: float | None) -> None:
    liar = site_overlap(*EAST, dice=dice, hd95=hd95)
    assert (liar.exact_dice, liar.exact_hd95) == (None, None)
    pooled = pool_site_overlaps({"Liver": [liar, site_overlap(*NORTH)]}, None).per_class["Liver"]
    assert pooled.dice == pytest.approx(0.45, abs=2e-3)
    assert pooled.hd95 == pytest.approx(16.75 / 3, rel=0.02)


def test_exact_means_of_any_patients_are_possible_in_their_bins() -> None:
    random = np.random.default_rng(3)
    for _ in range(200):
        count = int(random.integers(1, 12))
        overlap = site_overlap(random.beta(0.5, 0.5, count).tolist(), random.gamma(0.5, 40, count).tolist())
        assert (overlap.exact_dice, overlap.exact_hd95) == (overlap.dice, overlap.hd95)
    ends = site_overlap([0.0, 1.0], [0.0, 1000.0])
    assert (ends.exact_dice, ends.exact_hd95) == (0.5, 500.0)
