"""Labels are settled by name, before training; contradictions come with the lines that fix them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.common.contract import LabelDeclaration, merge_label_declarations
from polyclinic.common.errors import BadInput

NORTH = LabelDeclaration("north", ("Effusion", "Mass"), {"Effusion": "Pleural Effusion"})
SOUTH = LabelDeclaration("south", ("Pneumonia", "Pleural Effusion"))


def complaint(*declarations: LabelDeclaration, class_names: tuple[str, ...] | None = None) -> str:
    with pytest.raises(BadInput) as caught:
        merge_label_declarations(declarations, class_names)
    return str(caught.value)


def test_synonyms_bring_local_names_to_canonical_ones_in_the_sites_own_order() -> None:
    contract = merge_label_declarations([SOUTH, NORTH])
    assert contract.class_names == ("Mass", "Pleural Effusion", "Pneumonia")
    assert dict(contract.sites) == {"north": ("Pleural Effusion", "Mass"), "south": ("Pneumonia", "Pleural Effusion")}
    assert contract.shared_classes == ("Pleural Effusion",)
    assert contract.unique_classes == ("Mass", "Pneumonia")
    assert contract.annotating_sites("Mass") == ("north",)
    np.testing.assert_array_equal(contract.annotation_matrix(), [[True, True, False], [False, True, True]])


@given(st.permutations(["a", "b", "c", "d"]))
def test_the_contract_and_its_hash_do_not_depend_on_who_answered_first(order: list[str]) -> None:
    sites = {"a": ("x", "y"), "b": ("z",), "c": ("y", "x"), "d": ("x", "z")}
    merged = merge_label_declarations(LabelDeclaration(site, sites[site]) for site in order)
    again = merge_label_declarations(LabelDeclaration(site, sites[site]) for site in "abcd")
    assert merged == again
    assert merged.hash == again.hash


def test_another_owner_gives_another_hash() -> None:
    first = merge_label_declarations([LabelDeclaration("a", ("x", "y")), LabelDeclaration("b", ("x",))])
    second = merge_label_declarations([LabelDeclaration("a", ("x",)), LabelDeclaration("b", ("x", "y"))])
    assert first.class_names == second.class_names
    assert first.hash != second.hash


def test_one_class_under_two_spellings_is_refused_with_the_line_that_settles_it() -> None:
    text = complaint(LabelDeclaration("north", ("Pleural Effusion",)), LabelDeclaration("south", ("pleural_effusion",)))
    assert '"Pleural Effusion" (site north) and "pleural_effusion" (site south) look like one class.' in text
    assert 'settles it:\n    "pleural_effusion" = "Pleural Effusion"' in text
    mapped = LabelDeclaration("south", ("Fluid",), {"Fluid": "pleural_effusion"})  # it is called as its site calls it
    text = complaint(LabelDeclaration("north", ("Pleural Effusion",)), mapped)
    assert 'site.toml of south, settles it:\n    "Fluid" = "Pleural Effusion"' in text
    settled = LabelDeclaration("south", ("Fluid",), {"Fluid": "Pleural Effusion"})
    contract = merge_label_declarations([LabelDeclaration("north", ("Pleural Effusion",)), settled])
    assert contract.shared_classes == ("Pleural Effusion",)


def test_names_that_merely_resemble_one_another_are_not_guessed_to_be_one() -> None:
    contract = merge_label_declarations([LabelDeclaration("a", ("Lesion",)), LabelDeclaration("b", ("Lung Lesion",))])
    assert contract.class_names == ("Lesion", "Lung Lesion")


def test_every_contradiction_comes_at_once() -> None:
    text = complaint(
        LabelDeclaration("a", ("Mass", "Mass")),
        LabelDeclaration("b", ("Nodule", "Node"), {"Node": "Nodule"}),
        LabelDeclaration("c", ("Hernia",), {"Herna": "Hernia"}),
        LabelDeclaration("d", ()),
    )
    assert 'site.toml of a: data.annotates: "Mass" is listed more than once.' in text
    assert 'site.toml of b: data.annotates: "Nodule", "Node" both mean "Nodule"' in text
    assert 'site.toml of c: data.synonyms: "Herna" is not one of the site\'s labels. Did you mean "Hernia"?' in text
    assert "site.toml of d: data.annotates: names no label" in text


def test_a_site_that_answers_twice_is_refused() -> None:
    assert "site a: answered the roll call twice." in complaint(
        LabelDeclaration("a", ("x",)), LabelDeclaration("a", ("y",))
    )


def test_with_the_runs_classes_fixed_strangers_and_orphans_are_named() -> None:
    text = complaint(LabelDeclaration("a", ("Infiltrate",)), class_names=("Infiltration", "Mass"))
    assert '"Infiltrate" is not a class of this run.' in text
    assert 'Did you mean "Infiltration"?' in text
    assert 'run classes: no site annotates "Infiltration", "Mass".' in text


@given(st.dictionaries(st.sampled_from("pqrs"), st.permutations("abc").map(lambda names: names[:2]), min_size=1))
def test_owners_coverage_shared_and_unique_tell_one_story(sites: dict[str, list[str]]) -> None:
    contract = merge_label_declarations(LabelDeclaration(site, tuple(names)) for site, names in sites.items())
    owners = contract.annotation_matrix().sum(axis=0)  # (classes,)
    assert [len(contract.annotating_sites(name)) for name in contract.class_names] == owners.tolist()
    # With one site all classes are shared and none is unique.
    assert [name in contract.shared_classes for name in contract.class_names] == (owners == len(sites)).tolist()
    unique = {name for name, count in zip(contract.class_names, owners, strict=True) if count == 1 < len(sites)}
    assert set(contract.unique_classes) == unique
    assert owners.min() >= 1
