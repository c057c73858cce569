"""The study's vocabulary: its words, and the words of hospitals that may mean one class."""

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from polyclinic.common.alike_words import are_alike, count_typing_errors
from polyclinic.common.config import Experiment, make_hospital_plan, parse_plan_json
from polyclinic.common.contract import LabelDeclaration
from polyclinic.common.errors import BadInput
from polyclinic.common.vocabulary import (
    Vocabulary,
    VocabularyEntry,
    find_vocabulary_faults,
    map_words_to_classes,
    name_images_by_vocabulary,
)
from polyclinic.data.base.image_set import ImageSet

BLOOD = {
    "Lymphocyte": VocabularyEntry(synonyms=("lympho", "Lymphozyt"), definition="mature, small"),
    "Monocyte": VocabularyEntry(),
}
TABLES: dict[str, Any] = {"run": {"method": "surgical"}, "model": {"architecture": "tiny_cnn", "image_size": 16}}


def declared(*names: str, **synonyms: str) -> LabelDeclaration:
    return LabelDeclaration("north", names, synonyms)


def experiment(vocabulary: dict[str, Any] | None) -> Experiment:
    return Experiment.model_validate(TABLES | ({} if vocabulary is None else {"vocabulary": vocabulary}))


@pytest.mark.parametrize(
    "words",
    [
        ("Mass", "Masse"),
        ("Lésion", "lesions"),
        ("Hæmorrhage", "Hemorrhage"),
        ("Tumour", "Tumor"),
        ("BCC", "Basal cell ca"),
        ("Konsolidation", "Consolidazione"),
        ("Linfocito", "Lymphocyte"),
        ("Pl. effusion", "Pleural effusion"),
        ("Lymphcoyte", "Lymphocyte"),  # two letters exchanged
        ("Monocye", "Monocyte"),  # a letter missing
        ("Monocyxte", "Monocyte"),  # a letter too many
        ("Monocyre", "Monocyte"),  # another letter
        ("Eosimophli", "Eosinophil"),  # two errors in ten letters
        ("Neutrophil", "Polynucleaire neutrophile"),
    ],
)
def test_words_of_one_spelling_between_languages_are_alike_in_both_orders(words: tuple[str, str]) -> None:
    assert are_alike(*words)
    assert are_alike(*reversed(words))


@pytest.mark.parametrize(
    "words",
    [
        ("Type 1", "Type 10"),
        ("Grade II", "Grade III"),
        ("Finding", "No finding"),
        ("Melanoma", "Melanosis"),
        ("T1", "T2"),
        ("Mass", "Mast cell"),
        ("Hyperplasia", "Hypoplasia"),
        ("Fibrosis", "Fibroma"),
        ("Monocyte", "Myelocyte"),
        ("0", "1"),
        ("Hypertrophy", "Hypotrophy"),
        ("Macrocyte", "Microcyte"),
        ("Typical", "Atypical"),
        ("Osteoblast", "Osteoclast"),
        ("Metacarpal", "Metatarsal"),
        ("Spondylosis", "Spondylitis"),
        ("Spondylosis", "Spondylolysis"),
        ("Hematoma", "Hepatoma"),
        ("Intracellular", "Intercellular"),
        ("Biliary", "Ciliary"),
        ("Grade 10000001", "Grade 10000011"),
        ("Monoblast", "Myoblast"),  # two letters, in words of fewer than ten
    ],
)
def test_words_of_two_classes_are_not_alike(words: tuple[str, str]) -> None:
    assert not are_alike(*words)
    assert not are_alike(*reversed(words))


@pytest.mark.parametrize(
    ("first", "second", "errors"),
    [
        ("abcd", "abcd", 0),
        ("abcd", "abdc", 1),
        ("abcd", "acd", 1),
        ("abcd", "abxcd", 1),
        ("abcd", "axcd", 1),
        ("abcd", "badc", 2),
        ("", "ab", 2),
    ],
)
def test_a_typing_error_is_a_letter_left_out_added_replaced_or_exchanged(first: str, second: str, errors: int) -> None:
    assert count_typing_errors(first, second, 9) == count_typing_errors(second, first, 9) == errors
    assert count_typing_errors(first, second, errors) == errors
    assert all(count_typing_errors(first, second, limit) > limit for limit in range(errors))


def test_a_synonym_means_its_class_and_a_class_means_itself() -> None:
    assert map_words_to_classes(("Lymphozyt", "Monocyte", "Mass"), BLOOD) == {"Lymphozyt": "Lymphocyte"}
    assert find_vocabulary_faults([declared("Lymphocyte", "Monocyte")], BLOOD) == []
    assert find_vocabulary_faults([declared("Mass")], {}) == []


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("lymphozyten", '"lymphozyten" = "Lymphocyte"'),
        ("monocytes", '"monocytes" = "Monocyte"'),
        ("Monozytt", '"Monozytt" = "Monocyte"'),
        ("Blast", '[vocabulary."Blast"]'),
        ("Blast", '"Blast" = "???"'),
    ],
)
def test_a_word_outside_is_refused_with_the_line_to_write(word: str, line: str) -> None:
    (fault,) = find_vocabulary_faults([declared(word)], BLOOD)
    assert fault.site == "north"
    assert '"Lymphocyte", "Monocyte"' in fault.problem
    assert line in fault.remedy


def test_the_line_has_the_sites_own_name_where_it_maps_that_to_a_word_outside() -> None:
    (fault,) = find_vocabulary_faults([declared("L", L="lymphocytes")], BLOOD)
    assert '"L" = "Lymphocyte"' in fault.remedy


@pytest.mark.parametrize(
    ("vocabulary", "reason"),
    [
        ({}, "is empty"),
        ({"Mass": {"synonyms": ["nodule"]}, "Nodule": {}}, "cannot mean two classes"),
        ({"Mass": {}, "mass": {}}, "cannot mean two classes"),
        ({"Mass": {"synonyms": ["x" * 101]}}, "cannot be a word"),
        ({"Mass": {"definition": "x" * 501}}, "500"),
        ({"Mass": {"definition": "\x1b[2J"}}, "cannot be printed"),
    ],
    ids=["empty", "a synonym is a class", "two spellings", "long word", "long definition", "control"],
)
def test_a_vocabulary_whose_words_are_not_clear_is_refused(vocabulary: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        experiment(vocabulary)


def test_a_plan_carries_the_vocabulary_and_one_without_it_is_the_plan_of_before() -> None:
    plan = make_hospital_plan(experiment({"Mass": {"synonyms": ["Masse"], "definition": "3 cm\n  and more"}}))
    assert parse_plan_json(plan.model_dump_json()) == plan
    assert plan.vocabulary == {"Mass": VocabularyEntry(synonyms=("Masse",), definition="3 cm and more")}
    assert "vocabulary" not in make_hospital_plan(experiment(None)).model_dump_json()


def images(*names: str) -> ImageSet:
    labels = np.zeros((2, len(names)), np.float32)
    return ImageSet(np.zeros((2, 4, 4), np.uint8), labels, names, np.array(["a", "b"]), np.array(["", ""]))


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("Lymphozyten",), r'If it means "Lymphocyte", add it to synonyms under \[vocabulary."Lymphocyte"\]'),
        (("Blast",), r'add \[vocabulary\."Blast"\]'),
    ],
)
def test_a_simulations_columns_outside_the_vocabulary_are_refused(names: tuple[str, ...], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        name_images_by_vocabulary(images(*names), BLOOD, "data")


def test_columns_of_one_class_are_one_class_present_where_one_of_them_says_so() -> None:
    labels = np.array([[1, 0, 0], [0, 0, 1], [np.nan, 1, 0], [np.nan, 0, np.nan]], np.float32)
    names = np.array(["a", "b", "c", "d"])
    table = ImageSet(np.zeros((4, 4, 4), np.uint8), labels, ("Lymphozyt", "Monocyte", "lympho"), names, names)
    named = name_images_by_vocabulary(table, BLOOD, "data")
    assert named.class_names == ("Lymphocyte", "Monocyte")
    np.testing.assert_array_equal(named.labels, [[1, 0], [1, 0], [0, 1], [np.nan, 0]])


@pytest.mark.parametrize("vocabulary", [None, BLOOD], ids=["none", "with"])
def test_columns_that_are_synonyms_get_the_classes_names(vocabulary: Vocabulary | None) -> None:
    named = name_images_by_vocabulary(images("Monocyte", "lympho"), vocabulary, "data")
    assert named.class_names == (("Monocyte", "lympho") if vocabulary is None else ("Monocyte", "Lymphocyte"))
