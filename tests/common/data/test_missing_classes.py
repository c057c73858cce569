import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.data.partition.partition import draw_lists, partition, partition_faults
from common.data.partition.spec import MissingClassesSpec
from common.errors import BadInput
from tests.common.data.conftest import splits_of

FEDMLP = [("ICH", 5, 5, missing) for missing in (1, 2, 3, 4)] + [
    ("ChestXray14", 8, 8, missing) for missing in (1, 3, 7)
]


def missing_classes(**settings: Any) -> MissingClassesSpec:
    return MissingClassesSpec.model_validate({"kind": "missing_classes", **settings})


def active(owned: Any) -> list[list[int]]:
    return [np.flatnonzero(row).tolist() for row in owned]


@pytest.fixture(scope="module")
def sets(vectors: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((vectors / "fedmlp.json").read_text())["partial_labels"]["sets"]
    return loaded


@pytest.mark.parametrize(("name", "sites", "classes", "missing"), FEDMLP)
def test_class_lists_are_the_authors(sets: dict[str, Any], name: str, sites: int, classes: int, missing: int) -> None:
    owned = draw_lists(sites, classes, missing, seed=1037)
    assert active(owned) == sets[f"{name}_missing_{missing}"]["active"]


def test_the_authors_draw_that_leaves_a_class_without_owner_is_drawn_again(sets: dict[str, Any]) -> None:
    assert not sets["ChestXray14_missing_5"]["covers_all_classes"]
    owned = draw_lists(8, 8, 5, seed=1037)
    assert active(owned) != sets["ChestXray14_missing_5"]["active"]
    assert owned.any(axis=0).all()
    assert (owned.sum(axis=1) == 3).all()


@given(st.integers(2, 8), st.integers(3, 8), st.integers(0, 2), st.integers(0, 2**31))
def test_every_site_lacks_as_many_classes_and_every_class_has_an_owner(
    sites: int, classes: int, missing: int, seed: int
) -> None:
    owned = draw_lists(sites * classes, classes, missing, seed)
    assert (owned.sum(axis=1) == classes - missing).all()
    assert owned.any(axis=0).all()


def test_one_class_a_site_goes_round() -> None:
    assert active(draw_lists(5, 3, 2, seed=1)) == [[0], [1], [2], [0], [1]]


def test_sites_get_the_patients_they_get_in_other_partitions_and_the_lists_of_the_draw() -> None:
    splits = splits_of(40, 5)
    parts = partition(splits, missing_classes(sites=5, missing=1), seed=3).parts
    assert [part.class_names for part in parts][:2] == [("a", "b", "c", "d"), ("a", "b", "d", "e")]  # ICH missing 1
    hands = [set(splits.train.patients[part.train].tolist()) for part in parts]
    assert sum(map(len, hands)) == len(set().union(*hands)) > 0
    assert all(part.test is None for part in parts)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"sites": 2, "missing": 4},
            "partition.sites: 2 sites with 1 class each cannot have all 5. "
            "Take at least 5 sites, or more classes a site.",
        ),
        (
            {"sites": 2, "missing": 5},
            "partition.missing: 5 missing classes leave none of 5 to a site. Take at most 4.",
        ),
        ({"missing": 1}, 'partition.sites: the number of sites is missing. Only images = "source" implies it.'),
    ],
)
def test_lists_that_cannot_cover_all_classes_are_refused(spec: dict[str, Any], message: str) -> None:
    assert [str(fault) for fault in partition_faults("abcde", missing_classes(**spec))] == [message]


def test_too_few_centres_for_all_classes_are_refused() -> None:
    with pytest.raises(BadInput, match=r'partition.missing: no site annotates "d", "e"\. Take more sites, fewer'):
        partition(splits_of(30, 5), missing_classes(images="source", missing=4), seed=1)  # three centres, a class each
