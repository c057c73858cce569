"""Data sets that a package of the user's reads: loaded, split, checked as closely as our own."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from polyclinic.client.check.source import open_site_image_source
from polyclinic.client.site.settings import read_site_settings
from polyclinic.common.errors import BadInput
from polyclinic.data import LabelledImages
from polyclinic.data.base.spec import PluginDatasetSpec
from polyclinic.data.load import find_dataset_faults, load_dataset
from polyclinic.data.sources import plugin
from tests.federations import federation
from tests.third_parties import install


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return install(tmp_path / "site-packages", monkeypatch)


def spec(**keys: object) -> PluginDatasetSpec:
    return PluginDatasetSpec.model_validate({"kind": "plugin", "name": "stripes", **keys})


@pytest.mark.usefixtures("installed")
def test_it_is_read_with_its_options_and_split_by_patient(tmp_path: Path) -> None:
    assert find_dataset_faults(spec(), tmp_path) == []
    splits = load_dataset(spec(options={"images": 200, "seed": 4}), tmp_path)
    assert splits.class_names == ("horizontal", "vertical")
    patients = [set(part.patients) for part in splits.parts]
    assert sum(map(len, patients)) == len(set.union(*patients)) == 100  # of two images each
    assert [len(part) for part in splits.parts] == [2 * len(names) for names in patients]
    again = load_dataset(spec(options={"images": 200, "seed": 4}), tmp_path)
    assert np.array_equal(splits.train.images, again.train.images)
    assert load_dataset(spec(image_size=32), tmp_path).train.images.shape[1:] == (32, 32)


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_a_federation_trains_on_it(tmp_path: Path) -> None:
    run = federation(
        tmp_path, "data.kind=plugin", "data.name=stripes", "data.image_size=none", "data.options={images=1200}",
        'partition={kind="class_lists",lists={east=["horizontal"],north=["vertical"]}}', "run.rounds=3",
    )  # fmt: skip
    assert run["test"]["mean_auroc"] > 0.9


def test_one_that_is_not_installed_is_named_before_anything_is_read(tmp_path: Path) -> None:
    (fault,) = find_dataset_faults(spec(name="strips"), tmp_path)
    assert "strips" in str(fault)
    with pytest.raises(BadInput, match="strips"):
        load_dataset(spec(name="strips"), tmp_path)


@pytest.mark.parametrize("name", ["", "../stripes", "a b", "plugin:stripes"])
def test_a_name_that_cannot_be_one_is_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        spec(name=name)


PICTURES = np.random.default_rng(0).integers(0, 256, (6, 8, 8), dtype=np.uint8)
GOOD = LabelledImages(PICTURES, np.eye(6, 2, dtype=np.float32), ("a", "b"))


def loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, read: Callable[..., object]) -> None:
    monkeypatch.setattr(plugin, "load_plugin_entry_point", lambda group, name: read)
    load_dataset(spec(), tmp_path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"images": np.zeros((6, 8, 8), np.int16)}, "is int16: which values are black and white is unknown"),
        ({"images": [[1]]}, "is no image: int of shape ()"),
        ({"images": np.zeros((6, 8, 8, 4), np.uint8)}, "must have the shape (n, height, width)"),
        ({"images": np.zeros((0, 8, 8), np.uint8)}, "must have the shape (n, height, width)"),
        ({"labels": np.zeros((6, 3), np.float32)}, "labels must have the shape (6, 2) (images, classes), not (6, 3)"),
        ({"labels": np.full((6, 2), -1.0)}, "labels must be 1 (present), 0 (absent) or NaN"),
        ({"labels": np.full((6, 2), "1")}, 'has a label for "1", which is no class'),
        ({"class_names": ("a", "a")}, '"a" stands there more than once'),
        ({"class_names": ("a", "")}, "class_names must be non-empty texts"),
        ({"patients": ["x"] * 5 + [""]}, "patients must be a name for each image"),
        ({"patients": ["x"] * 5 + [float("nan")]}, "patients must be a name for each image"),
        ({"patients": ["x"] * 5}, "patients must have one entry an image, 6, not the shape (5,)"),
        ({"parts": ["train"] * 5 + ["exam"]}, 'not "exam"'),
        ({"patients": ["x"] * 6, "parts": ["train"] * 5 + ["test"]}, "1 patient in both train and test"),
    ],
)
def test_what_does_not_fit_together_is_said(
    change: dict[str, Any], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadInput) as refused:
        loads(monkeypatch, tmp_path, lambda folder, options: replace(GOOD, **change))
    assert problem in str(refused.value)
    assert "plugin:stripes" in str(refused.value)


def test_one_that_fails_or_returns_something_else_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(folder: Path, options: Mapping[str, Any]) -> LabelledImages:
        raise KeyError("column")

    with pytest.raises(BadInput, match=r"plugin:stripes: failed: KeyError: 'column'"):
        loads(monkeypatch, tmp_path, fails)
    with pytest.raises(BadInput, match=r"returned tuple, not polyclinic\.data\.LabelledImages"):
        loads(monkeypatch, tmp_path, lambda folder, options: (1, 2))


def test_parts_of_its_own_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ["test", "train", "train", "validation", "train", "test"]
    monkeypatch.setattr(
        plugin, "load_plugin_entry_point", lambda group, name: lambda folder, options: replace(GOOD, parts=parts)
    )
    splits = load_dataset(spec(), tmp_path)
    assert [len(part) for part in splits.parts] == [3, 1, 2]


@pytest.mark.usefixtures("installed")
def test_a_hospital_can_check_and_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '\n[data]\nkind = "plugin"\nname = "stripes"\nannotates = ["vertical"]\n[data.options]\nimages = 100\n'
    (tmp_path / "site.toml").write_text(f'name = "east"\n{text}')
    source = open_site_image_source(read_site_settings(tmp_path))
    assert (len(source), source.patients_known) == (100, True)
    monkeypatch.setattr(plugin, "load_plugin_entry_point", lambda group, name: lambda folder, options: GOOD)
    assert not open_site_image_source(read_site_settings(tmp_path)).patients_known
