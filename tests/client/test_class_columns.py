"""Several columns of a hospital that mean one class: by its own synonyms, and by the study's vocabulary."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyclinic.client.site.class_columns import make_label_declaration
from polyclinic.client.site.settings import load_site, read_site_settings
from polyclinic.client.site.site import Site
from polyclinic.client.site.site_file import make_site_folder
from polyclinic.common.class_columns import list_annotated_columns
from polyclinic.common.contract import LabelDeclaration
from polyclinic.common.vocabulary import VocabularyEntry
from polyclinic.data.base.image_set import ImageSet
from tests.client.rounds import site as make_site

DATA = '[data]\nkind = "phantom"\nimages = 40\nimage_size = 16\n'
STUDY = {"Lesion": VocabularyEntry(synonyms=("Mass", "Nodule")), "Edema": VocabularyEntry()}
UNKNOWN = np.nan


def images(*rows: tuple[float, ...]) -> ImageSet:
    patients = np.array([f"p{row}" for row in range(len(rows))])
    pixels = np.zeros((len(rows), 4, 4), np.uint8)
    return ImageSet(pixels, np.array(rows, np.float32), ("Mass", "Edema", "Nodule"), patients, patients)


def written(folder: Path, lines: str = "", tables: str = "") -> Site:
    make_site_folder(folder, "north")
    (folder / "site.toml").write_text(f'name = "north"\n{DATA}{lines}{tables}', encoding="utf-8")
    return load_site(read_site_settings(folder))


def test_a_class_of_several_columns_is_present_where_one_says_so_and_unknown_where_none_says_anything() -> None:
    merged = images((1, 0, 0), (0, 1, 0), (UNKNOWN, 1, 0), (UNKNOWN, 0, UNKNOWN)).merge_label_columns(
        [("Mass", "Nodule")]
    )
    assert merged.class_names == ("Mass", "Edema")
    np.testing.assert_array_equal(merged.labels, [[1, 0], [0, 1], [0, 1], [UNKNOWN, 0]])


@pytest.mark.parametrize("annotates", [(), ("Lesion", "Edema"), ("Mass", "Nodule", "Edema")])
def test_columns_that_synonyms_join_are_one_class_of_the_site(tmp_path: Path, annotates: tuple[str, ...]) -> None:
    lines = f"annotates = {list(annotates)}\n" if annotates else ""
    site = written(tmp_path, lines, '[data.synonyms]\nMass = "Lesion"\nNodule = "Lesion"\n')
    plain = written(tmp_path, 'annotates = ["Mass", "Nodule"]\n')
    assert site.declaration.canonical_names.count("Lesion") == 1
    assert site.train.class_names == site.declaration.canonical_names
    lesion = site.train.labels[:, site.train.class_names.index("Lesion")]
    np.testing.assert_array_equal(lesion, np.fmax(*plain.train.labels.T))
    assert 0 < plain.train.labels[:, 0].sum() < lesion.sum()


def test_a_column_that_annotates_leaves_out_is_not_joined(tmp_path: Path) -> None:
    site = written(tmp_path, 'annotates = ["Mass"]\n', '[data.synonyms]\nMass = "Nodule"\n')
    plain = written(tmp_path, 'annotates = ["Mass"]\n')
    assert site.declaration == LabelDeclaration("north", ("Mass",), {"Mass": "Nodule"})
    np.testing.assert_array_equal(site.train.labels, plain.train.labels)


def test_the_check_counts_the_columns_of_a_class_that_annotates_names(tmp_path: Path) -> None:
    written(tmp_path, 'annotates = ["Lesion"]\n', '[data.synonyms]\nMass = "Lesion"\nNodule = "Lesion"\n')
    settings = read_site_settings(tmp_path)
    columns = ("Edema", "Mass", "Nodule")
    assert list_annotated_columns(columns, settings.labels, settings.synonyms) == ("Mass", "Nodule")
    assert make_label_declaration(settings, columns) == LabelDeclaration("north", ("Mass",), {"Mass": "Lesion"})


def test_words_that_the_vocabulary_joins_are_one_class_of_the_run(tmp_path: Path) -> None:
    part = images((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0))
    words = LabelDeclaration("north", part.class_names)
    site = replace(make_site(tmp_path), declaration=words, train=part, validation=part, test=part)
    named = site.name_classes_by(STUDY)
    assert named.declaration == LabelDeclaration("north", ("Mass", "Edema"), {"Mass": "Lesion"})
    for images_of_part in (named.train, named.validation, named.test):
        assert images_of_part.class_names == ("Lesion", "Edema")
        np.testing.assert_array_equal(images_of_part.labels, [[1, 0], [0, 1], [1, 0], [0, 0]])


def test_a_class_of_several_words_is_hidden_if_one_of_them_is(tmp_path: Path) -> None:
    part = images((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0))
    words = LabelDeclaration("north", part.class_names)
    hidden = {"train": frozenset({"Nodule"})}
    site = replace(make_site(tmp_path), declaration=words, train=part, validation=part, test=part, hidden=hidden)
    assert site.name_classes_by(STUDY).hidden_classes("train") == {"Lesion"}
