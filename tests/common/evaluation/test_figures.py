"""Figures of several models by data set, class and subgroup, from given scores; and the page of them."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from polyclinic.common.errors import BadInput
from polyclinic.common.evaluation.evaluation import DataToScore, Evaluation, evaluate_models, split_by_source
from polyclinic.common.evaluation.figures import ALL_DATA, ScoredImages, compute_evaluation_figures
from polyclinic.common.evaluation.groups import Grouping, parse_grouping
from polyclinic.common.evaluation.models import ModelToScore
from polyclinic.common.evaluation.page import write_evaluation_folder
from polyclinic.common.evaluation.results import list_limitations
from polyclinic.common.evaluation.thresholds import FixedThreshold
from polyclinic.common.vocabulary import VocabularyEntry
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.base.pixel_form import PixelForm
from tests.server.chromium import View, layout, needs_browser

FIXED = (FixedThreshold("stated", 0.5),)
Names = tuple[str, ...]


def make_images(count: int, class_names: Names = ("Mass", "Edema"), seed: int = 0, per_patient: int = 1) -> ImageSet:
    """Images whose first pixel, over 255, is the score that a model of these tests gives."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, (count, len(class_names))).astype(np.float32)
    pixels = random.integers(0, 256, (count, 4, 4), dtype=np.uint8)
    patients = np.array([f"P{seed}-{row // per_patient}" for row in range(count)])
    return ImageSet(pixels, labels, class_names, patients, np.array(["a", "b"])[random.integers(0, 2, count)])


def make_model(
    name: str, class_names: Names, shift: int = 0, synonyms: Mapping[str, str] | None = None
) -> ModelToScore:
    def compute_scores(images: ImageSet) -> NDArray[np.float32]:
        column = images.images[:, 0, shift].astype(np.float32) / 255
        return np.repeat(column[:, None], len(class_names), axis=1)

    words = {own: VocabularyEntry(synonyms=(word,)) for own, word in (synonyms or {}).items()}
    return ModelToScore(name, "run", "0" * 64, class_names, compute_scores, vocabulary=words)


def make_data(name: str, images: ImageSet) -> DataToScore:
    return DataToScore(name, images, lambda form: images, lambda column: images.sources, "All of them.")


def evaluate(*models: ModelToScore, data: list[DataToScore], by: tuple[str, ...] = ()) -> Evaluation:
    return evaluate_models(models, data, [parse_grouping(text) for text in by])


def test_words_of_all_models_together_match_classes_and_models_are_compared_by_them() -> None:
    first = make_model("first", ("Mass",), synonyms={"Mass": "Rundherd"})
    second = make_model("second", ("Rundherd", "Edema"), shift=1)
    evaluation = evaluate(first, second, data=[make_data("north", make_images(80))])
    assert evaluation.class_names == ("Mass", "Edema")
    (compared,) = evaluation.figures.comparisons
    assert (compared.class_name, compared.first, compared.second) == ("Mass", "first", "second")
    german = make_images(80, ("Rundherd",))
    assert evaluate(first, data=[make_data("south", german)]).class_names == ("Mass",)


def test_one_word_that_means_two_classes_and_two_outputs_of_one_class_are_refused() -> None:
    data = [make_data("north", make_images(20))]
    first = make_model("first", ("Mass",), synonyms={"Mass": "Rundherd"})
    with pytest.raises(BadInput, match="cannot mean two classes"):
        evaluate(first, make_model("second", ("Nodule",), synonyms={"Nodule": "Rundherd"}), data=data)
    with pytest.raises(BadInput, match="two outputs that mean"):
        evaluate(make_model("first", ("Mass", "Rundherd"), synonyms={"Mass": "Rundherd"}), data=data)


def test_a_table_with_a_column_of_hospitals_is_divided_by_them() -> None:
    images = make_images(200)
    parts = split_by_source(make_data("all.csv", images))
    assert [part.name for part in parts] == list(dict.fromkeys(images.sources.tolist()))
    evaluation = evaluate(make_model("first", ("Mass",)), data=parts, by=("hospital",))
    rows = {row.data: row.figures for row in evaluation.figures.rows if not row.column}
    for name in ("a", "b"):
        members = images.sources == name
        scores = images.images[members, 0, 0] / 255
        assert rows[name].auroc == pytest.approx(roc_auc_score(images.labels[members, 0], scores))
    by_group = {row.group: row.figures.auroc for row in evaluation.figures.rows if row.column}
    assert by_group == {name: pytest.approx(rows[name].auroc) for name in ("a", "b")}
    assert split_by_source(make_data("one", images.select_rows(np.flatnonzero(images.sources == "a"))))[0].name == "one"


def test_patients_of_two_hospitals_with_one_name_are_two_patients() -> None:
    images = make_images(60, seed=1)
    scored = [
        ScoredImages(name, images.labels, images.class_names, images.patients, {"m": {"Mass": images.labels[:, 0]}})
        for name in ("a", "b")
    ]
    figures = compute_evaluation_figures(scored, ("Mass",), {"m": {"Mass": FIXED}})
    (together,) = [row.figures for row in figures.rows if row.data == ALL_DATA]
    assert together.positive_patients == 2 * int(images.labels[:, 0].sum())


def test_of_patients_with_several_images_the_test_is_by_patient_and_intervals_are_wider() -> None:
    models = make_model("first", ("Mass",)), make_model("second", ("Mass",), shift=1)
    images = make_images(60)
    repeated = images.select_rows(np.repeat(np.arange(60), 4))
    once, often = (evaluate(*models, data=[make_data("north", each)]).figures for each in (images, repeated))
    assert once.comparisons[0].test == "DeLong"
    assert once.comparisons[0].p_value == once.comparisons[0].delong_p
    assert often.comparisons[0].test == "bootstrap by patient"
    # The same patients, each with four equal images: nothing more is known, and only DeLong's test believes it.
    assert often.comparisons[0].patient_p == pytest.approx(once.comparisons[0].patient_p)
    assert (often.comparisons[0].delong_p or 1) < (once.comparisons[0].delong_p or 0)
    assert often.rows[0].figures.auroc_interval == pytest.approx(once.rows[0].figures.auroc_interval)


def test_holm_corrects_over_the_classes_of_two_models() -> None:
    models = make_model("first", ("Mass", "Edema")), make_model("second", ("Mass", "Edema"), shift=1)
    compared = evaluate(*models, data=[make_data("north", make_images(200))]).figures.comparisons
    smaller, larger = sorted(compared, key=lambda each: each.p_value or 0)
    assert smaller.p_value is not None
    assert larger.p_value is not None
    assert smaller.holm_p == pytest.approx(min(1, 2 * smaller.p_value))
    assert larger.holm_p == pytest.approx(max(smaller.holm_p or 0, larger.p_value))


def test_a_class_that_no_image_shows_or_that_nobody_looked_for_has_no_auroc_and_is_named() -> None:
    images = make_images(40)
    images.labels[:, 0], images.labels[:, 1] = 0, np.nan
    evaluation = evaluate(make_model("first", ("Mass", "Edema")), data=[make_data("north", images)])
    (row,) = evaluation.figures.rows
    assert (row.class_name, row.figures.auroc, row.figures.average_precision) == ("Mass", None, None)
    assert row.figures.points[0].decisions.sensitivity is None
    limits = list(list_limitations(evaluation))
    assert "north has no image with a known label of “Edema”: no figures." in limits
    assert "Fewer than 30 images with or without the finding: “Mass” (0 with, 40 without)." in limits


def test_other_images_in_the_form_of_a_model_are_refused_because_they_may_be_training_images() -> None:
    images, others = make_images(20), make_images(20, seed=5)
    form = PixelForm(color=False, height=8, width=8)
    model = ModelToScore("first", "run", "", ("Mass",), lambda each: np.zeros((len(each), 1), np.float32), form)
    data = DataToScore("north", images, lambda form: others, lambda column: images.sources, "")
    with pytest.raises(BadInput, match="other test images where pictures are read as first needs them"):
        evaluate(model, data=[data])


def test_bands_and_rare_values_of_a_column() -> None:
    ages = Grouping("age", (0, 40, 65))
    cells = np.array(["039Y", "40", "64,9", "65", "", "-1", "old"])
    groups = ages.assign_groups(cells).tolist()
    under, middle, over = "0 to below 40", "40 to below 65", "65 and more"
    assert groups == [under, middle, middle, over, "not stated", "below 0", "not stated"]
    assert ages.order_groups(groups) == ["below 0", under, middle, over, "not stated"]
    devices = Grouping("device").assign_groups(np.array([f"D{min(row, 20)}" for row in range(60)]))
    assert len(set(devices.tolist())) == 13
    assert "other values" in devices


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("view", [View(), View(500, dark=True)], ids=["desk", "phone"])
def test_on_the_page_nothing_overlaps_is_cut_pale_or_from_elsewhere(tmp_path: Path, view: View) -> None:
    classes = tuple(f"Finding number {number}" for number in range(8))
    models = [make_model(f"model-{shift}", classes[shift:], shift) for shift in range(3)]
    data = [make_data(f"hospital {seed}", make_images(90, classes, seed)) for seed in range(3)]
    page = write_evaluation_folder(
        evaluate(*models, data=data, by=("device",)), tmp_path / "out", "Title", private=False
    )
    measured = layout(page, view)
    width, window = measured["page"]
    assert width <= window
    for fault in ("beyond", "overlapping", "cut", "pale", "asked"):
        assert measured[fault] == [], fault
