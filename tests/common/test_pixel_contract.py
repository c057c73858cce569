"""How sites agree on pixels: who is refused, with the line to write, and what is the same without one."""

from typing import Any

import pytest

from polyclinic.common.errors import Fault
from polyclinic.common.pixel_contract import PixelTerms, agree_on_pixels, find_pixel_faults
from polyclinic.data.base.pixel_form import (
    DECODING_RULES,
    RENDERING_KEYS,
    PixelForm,
    check_pixel_table,
    make_pixel_form,
)
from polyclinic.data.base.spec import (
    ONLY_FOR_VOLUMES,
    DigitsDatasetSpec,
    FolderDatasetSpec,
    NpzDatasetSpec,
    PictureTableSpec,
)

GREY, COLOUR = PixelTerms(channels=1, image_size=64), PixelTerms(channels=3, image_size=64)
OTHER_VALUES: dict[str, Any] = {
    "color": True,
    "image_size": 65,
    "resize": "stretch",
    "frame": 2,
    "axis": "coronal",
    "window": (40, 400),
    "bit_depth": 12,
    "jpeg_draft": True,
    "value_range": (0, 4095),
}
"""A value of each key that is not the default, for pictures."""
OTHER_VALUES_OF_VOLUMES: dict[str, Any] = {
    "image_size": (48, 48, 40),
    "resize": "stretch",
    "window": (40, 400),
    "spacing": (2.0, 1.0, 1.0),
}
VOLUMES = PixelTerms(channels=1, image_size=(48, 48, 48))


def folder(*, drops_color: bool = False, **keys: Any) -> PixelForm:
    """The form of a folder of pictures, of 64 pixels a side unless the keys say otherwise."""
    keys = {"image_size": 64, **keys}
    spec = FolderDatasetSpec(
        kind="folder", images="images", labels="labels.csv", image_column="image", label_columns=("a",), **keys
    )
    shape = (keys["image_size"],) * 2 + ((3,) if keys.get("color") else ())
    return make_pixel_form(spec, shape, drops_color=drops_color)


def volumes(**keys: Any) -> PixelForm:
    """The form of a folder of volumes, of 48 voxels a side unless the keys say otherwise."""
    keys = {"image_size": (48, 48, 48), **keys}
    spec = FolderDatasetSpec(
        kind="folder", images="images", labels="labels.csv", image_column="image", label_columns=("a",), **keys
    )
    return make_pixel_form(spec, (*keys["image_size"], 1))


def refused(terms: PixelTerms, **forms: PixelForm) -> dict[str, str]:
    """Site -> its faults, of sites that were admitted in this order."""
    faults: list[Fault] = find_pixel_faults(list(forms.items()), terms)
    return {fault.site: "\n".join(str(each) for each in faults if each.site == fault.site) for fault in faults}


def test_each_rendering_option_has_another_value_here() -> None:
    assert set(RENDERING_KEYS) - set(ONLY_FOR_VOLUMES) <= OTHER_VALUES.keys()
    assert set(RENDERING_KEYS) & set(ONLY_FOR_VOLUMES) <= OTHER_VALUES_OF_VOLUMES.keys()


@pytest.mark.parametrize("key_that_differs", [key for key in OTHER_VALUES if key in PictureTableSpec.model_fields])
def test_one_of_three_that_differs_in_a_key_is_refused_in_every_pair_with_the_line_to_write(
    key_that_differs: str,
) -> None:
    line = {
        "color": "color = false",
        "image_size": "image_size = 64",
        "resize": 'resize = "pad"',
        "axis": 'axis = "axial"',
        "jpeg_draft": "jpeg_draft = false",
    }.get(key_that_differs, f"Leave {key_that_differs} out")
    needed = {key: value for key, value in {"frame": 1, "bit_depth": 8}.items() if key == key_that_differs}
    line = next((f"{key} = {value}" for key, value in needed.items()), line)
    usual, other = folder(**needed), folder(**{key_that_differs: OTHER_VALUES[key_that_differs]})
    for odd in ("east", "north", "south"):
        forms = {site: other if site == odd else usual for site in ("east", "north", "south")}
        found = refused(GREY, **forms)
        assert found.keys() == {odd}
        assert f"site.toml of {odd}: data.{key_that_differs}" in found[odd]
        assert line in found[odd]
        assert agree_on_pixels([(site, form) for site, form in forms.items() if site != odd], GREY) == usual


def test_of_two_sites_the_one_that_was_admitted_first_counts() -> None:
    assert refused(GREY, north=folder(window=(40, 400)), east=folder()).keys() == {"east"}
    assert "window = [40, 400]" in refused(GREY, north=folder(window=(40, 400)), east=folder())["east"]


def test_of_sizes_that_differ_the_networks_counts_and_a_size_that_all_have_is_resized_alike() -> None:
    small, large = folder(), folder(image_size=224)
    assert refused(GREY, east=large, north=large, south=small).keys() == {"east", "north"}
    assert refused(GREY, east=large, north=large) == {}
    assert refused(GREY, east=large, north=large, south=folder(image_size=128)).keys() == {"south"}


def test_a_network_of_three_channels_takes_colour_unless_the_experiment_says_grey() -> None:
    dropped = folder(drops_color=True)
    found = refused(COLOUR, east=dropped, north=dropped)
    assert found.keys() == {"east", "north"}
    assert "color = true" in found["east"]
    assert "color = false under [pixels]" in found["east"]
    grey = PixelTerms(channels=3, image_size=64, table={"color": False})
    assert refused(grey, east=dropped, north=dropped) == {}
    assert refused(grey, east=folder(color=True)).keys() == {"east"}
    simulated = PixelTerms(channels=3, image_size=64, model_decides_color=False)
    assert refused(simulated, east=dropped, north=dropped) == {}


def test_pictures_without_any_colour_are_the_same_read_in_grey_and_in_colour() -> None:
    assert refused(COLOUR, east=folder(), north=folder(color=True)) == {}
    digits = make_pixel_form(DigitsDatasetSpec(kind="digits", image_size=64), (64, 64))
    assert refused(COLOUR, east=folder(color=True), north=digits) == {}


def test_a_key_that_needs_no_value_for_a_sites_files_contradicts_none() -> None:
    deep, flat = folder(bit_depth=12, frame=1), folder()
    assert refused(GREY, east=deep, north=flat) == {}
    arrays = make_pixel_form(NpzDatasetSpec(kind="npz", path="a.npz"), (64, 64))
    assert refused(GREY, east=folder(window=(40, 400)), north=arrays) == {}
    assert (arrays.resize, arrays.decoded) == (None, False)


def test_arrays_in_other_colours_are_told_what_can_be_done_about_them() -> None:
    arrays = make_pixel_form(NpzDatasetSpec(kind="npz", path="a.npz"), (64, 64, 3))
    found = refused(GREY, east=folder(), north=folder(), south=arrays)
    assert "store it in grey" in found["south"]


def test_the_experiments_table_counts_before_the_sites_and_frees_what_is_each_sites_own() -> None:
    window = PixelTerms(channels=1, image_size=64, table=check_pixel_table({"window": [40, 400]}))
    assert refused(window, east=folder(), north=folder(), south=folder(window=(40, 400))).keys() == {"east", "north"}
    own = PixelTerms(channels=1, image_size=64, table=check_pixel_table({"own": ["bit_depth"]}))
    forms = {"east": folder(bit_depth=12), "north": folder(bit_depth=16)}
    assert refused(GREY, **forms).keys() == {"north"}
    assert 'own = ["bit_depth"]' in refused(GREY, **forms)["north"]
    assert refused(own, **forms) == {}
    agreed = agree_on_pixels(list(forms.items()), own)
    assert agreed is not None
    assert agreed.rendering == {}


def test_a_late_site_is_compared_with_the_form_that_the_run_began_with() -> None:
    begun = PixelTerms(channels=1, image_size=64, begun=folder(image_size=224, window=(40, 400)))
    assert refused(begun, east=folder(image_size=224, window=(40, 400))) == {}
    assert "the run began with image_size = 224" in refused(begun, east=folder(window=(40, 400)))["east"]


def test_a_release_that_turns_files_into_pixels_by_other_rules_is_refused() -> None:
    other = folder().model_copy(update={"rules": DECODING_RULES + 1})
    assert "Install the coordinator's release" in refused(GREY, east=folder(), north=folder(), south=other)["south"]


def test_a_form_survives_its_json() -> None:
    form = folder(color=True, window=(40, 400), frame="middle")
    assert PixelForm.model_validate_json(form.to_json()) == form
    assert PixelForm.model_validate_json(form.to_json()).rendering_options == form.rendering_options
    assert form.describe() == 'colour, 64 × 64 pixels, resize = "pad", frame = "middle", window = [40, 400]'


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"colour": True}, "has no key colour"),
        ({"image_size": 0}, "image_size"),
        ({"own": ["color"]}, "own must be a list"),
        ({"window": [40, 400], "own": ["window"]}, "either all hospitals have one value"),
        ({"largest_mb": 1}, "has no key largest_mb"),
    ],
)
def test_a_table_of_pixels_with_a_fault_is_refused(table: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_pixel_table(table)


def dark(white: int = 15) -> PixelForm:
    """The form of a folder of nearly black pictures."""
    return folder().model_copy(update={"white_of_dark": white})


def test_nearly_black_images_are_refused_only_beside_those_of_other_sites() -> None:
    faults = refused(GREY, east=folder(), north=dark(), south=folder())
    assert faults.keys() == {"north"}
    assert "\n    value_range = [0, 15]\n" in faults["north"]
    assert refused(GREY, east=dark(), north=dark(31)) == {}
    assert refused(GREY, north=dark()) == {}


def test_a_site_with_nearly_black_images_may_not_join_a_run_of_brighter_ones() -> None:
    begun = agree_on_pixels([("east", folder()), ("south", folder())], GREY)
    late = PixelTerms(channels=1, image_size=64, begun=begun)
    assert refused(late, north=dark()).keys() == {"north"}
    all_dark = PixelTerms(channels=1, image_size=64, begun=agree_on_pixels([("east", dark())], GREY))
    assert refused(all_dark, north=dark()) == {}


def test_a_stated_range_beside_other_ranges_goes_on_where_the_experiment_lets_them_differ() -> None:
    stated = PixelTerms(channels=1, image_size=64, table={"own": ["value_range"]})
    assert refused(stated, east=folder(), north=folder(value_range=(0, 15))) == {}


# ---------------------------------------------------------------------- volumes


@pytest.mark.parametrize("key_that_differs", OTHER_VALUES_OF_VOLUMES)
def test_one_of_three_sites_of_volumes_that_differs_in_a_key_is_refused_with_the_line_to_write(
    key_that_differs: str,
) -> None:
    line = {"image_size": "image_size = [48, 48, 48]", "resize": 'resize = "pad"'}
    line_to_write = line.get(key_that_differs, f"Leave {key_that_differs} out")
    usual, other = volumes(), volumes(**{key_that_differs: OTHER_VALUES_OF_VOLUMES[key_that_differs]})
    for odd in ("east", "north", "south"):
        forms = {site: other if site == odd else usual for site in ("east", "north", "south")}
        found = refused(VOLUMES, **forms)
        assert found.keys() == {odd}
        assert f"site.toml of {odd}: data.{key_that_differs}" in found[odd]
        assert line_to_write in found[odd]
        assert agree_on_pixels([(site, form) for site, form in forms.items() if site != odd], VOLUMES) == usual


def test_the_experiments_spacing_counts_and_its_line_is_named() -> None:
    table = check_pixel_table({"spacing": [2, 1, 1], "window": [40, 400]})
    terms = PixelTerms(channels=1, image_size=(48, 48, 48), table=table)
    found = refused(terms, east=volumes(window=(40, 400)), north=volumes(window=(40, 400), spacing=(2, 1, 1)))
    assert found.keys() == {"east"}
    assert "spacing = [2, 1, 1]" in found["east"]


def test_a_site_whose_volumes_are_smaller_than_the_runs_patches_is_refused() -> None:
    terms = PixelTerms(channels=1, image_size=(64, 96, 96), patch_sides=(32, 48, 48))
    found = refused(terms, east=volumes(), north=volumes(image_size=(48, 40, 48)), south=volumes())
    assert found.keys() == {"north"}
    assert "smaller than the run's patches, 32 × 48 × 48 voxels" in found["north"]
    assert "image_size = [64, 96, 96]" in found["north"]


def test_pictures_and_volumes_do_not_go_into_one_network() -> None:
    found = refused(VOLUMES, east=volumes(), north=folder(), south=volumes())
    assert found.keys() == {"north"}
    assert "image_size = [48, 48, 48]" in found["north"]
    found = refused(GREY, east=volumes(), north=folder())
    assert found.keys() == {"east"}
    assert "image_size = 64" in found["east"]


def test_a_network_of_three_channels_takes_volumes_which_are_grey() -> None:
    terms = PixelTerms(channels=3, image_size=(48, 48, 48))
    assert refused(terms, east=volumes(), north=volumes()) == {}
    agreed = agree_on_pixels([("east", volumes())], terms)
    assert agreed == volumes()


def test_keys_of_pictures_mean_nothing_for_volumes_and_the_other_way_round() -> None:
    assert not any(volumes().has_setting(key) for key in ("frame", "axis", "bit_depth", "jpeg_draft", "value_range"))
    assert volumes().has_setting("spacing")
    assert not folder().has_setting("spacing")


def test_the_form_of_pictures_is_written_as_before_volumes_were_read() -> None:
    assert "depth" not in folder().to_json()
    assert PixelForm.model_validate_json(volumes().to_json()) == volumes()
    assert volumes().describe() == 'grey, 48 × 48 × 48 voxels, resize = "pad"'
