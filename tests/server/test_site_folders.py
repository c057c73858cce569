"""A simulated site and the hospital that reads its folder have the same images, labels and patients."""

from pathlib import Path

import numpy as np
import pytest

from polyclinic.client.site.settings import load_site, read_site_settings
from polyclinic.common.config import ExperimentFile
from polyclinic.common.errors import BadInput
from polyclinic.common.simulation import load_simulated_data, select_simulated_site_images
from polyclinic.data.base.image_set import ImageSet
from polyclinic.server.simulation.export_sites import export_simulated_sites
from tests.federations import DIGITS, experiment

LISTS = """
kind = "class_lists"
[partition.lists]
east = ["3", "0", "1", "2"]
north = ["9", "0", "4", "8", "6", "5"]
west = ["7"]
"""
PARTITION = 'kind = "class_subsets"\nsites = 3\nshared = 2\n'
assert PARTITION in DIGITS
SOME = DIGITS.replace(PARTITION, LISTS).replace("image_size = 16\n\n[partition]", "image_size = 8\n\n[partition]")


@pytest.fixture
def file(tmp_path: Path) -> ExperimentFile:
    """Three sites with other classes in other orders, one of them with a single class."""
    return experiment(tmp_path, text=SOME)


def check_same(images: ImageSet, expected: ImageSet) -> None:
    for name in ("images", "labels", "patients", "class_names"):
        np.testing.assert_array_equal(getattr(images, name), getattr(expected, name))


def test_a_hospital_reads_the_data_of_its_simulated_twin_without_pickles(file: ExperimentFile, tmp_path: Path) -> None:
    folders = export_simulated_sites(file, tmp_path / "sites")
    data = load_simulated_data(file.experiment, file.base_folder)
    assert [folder.name for folder in folders] == [part.site for part in data.parts] == ["east", "north", "west"]
    for index, folder in enumerate(folders):
        site, twin = load_site(read_site_settings(folder)), select_simulated_site_images(data, index, "no")
        assert site.name == folder.name
        assert site.declaration.canonical_names == twin.declaration.canonical_names
        for part in ("train", "validation", "test"):
            assert len(getattr(twin, part))
            check_same(getattr(site, part), getattr(twin, part))
        with np.load(folder / "images.npz", allow_pickle=False) as arrays:
            assert {arrays[name].dtype.kind for name in arrays} <= set("ufU")
    # The last site has one class: labels, and no class numbers.
    assert site.declaration.canonical_names == ("7",)
    assert site.test.labels.shape[1] == 1
    assert set(site.test.labels[:, 0].tolist()) == {0.0, 1.0}
    with np.load(folders[-1] / "images.npz") as arrays:  # nobody has annotated the second column
        assert np.isnan(arrays["test_labels"][:, 1]).all()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("path", ["east/images.npz", "east/site.toml", "west/site.toml"])
def test_nothing_is_written_into_a_folder_that_holds_a_site(path: str, file: ExperimentFile, tmp_path: Path) -> None:
    file_there = tmp_path / "sites" / path
    file_there.parent.mkdir(parents=True)
    file_there.write_text("mine", encoding="utf-8")
    with pytest.raises(BadInput, match=rf"{file_there.parent} holds a site already\. Name another folder\."):
        export_simulated_sites(file, tmp_path / "sites")
    assert contents(tmp_path / "sites") == {path: b"mine"}


def test_a_method_that_pools_all_images_has_no_sites_to_write(tmp_path: Path) -> None:
    pooled = experiment(tmp_path, 'run.method="centralised"', text=SOME)
    with pytest.raises(BadInput, match=r"experiment\.toml: run\.method: .* puts all images in one place; it has no"):
        export_simulated_sites(pooled, tmp_path / "sites")
    assert not (tmp_path / "sites").exists()
