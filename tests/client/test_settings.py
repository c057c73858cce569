"""A hospital's folder: the files of init, the keys of site.toml, and refusals before the start."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from polyclinic.client.site.policy import SitePolicy
from polyclinic.client.site.settings import choose_training_device, load_site, read_site_settings
from polyclinic.client.site.site_file import make_site_folder, read_and_check_connection_kit
from polyclinic.common.config import read_experiment
from polyclinic.common.errors import BadInput
from polyclinic.common.security.identity import (
    SiteConnectionKit,
    compute_public_key_fingerprint,
    read_admission_request,
    read_connection_kit,
    write_commented_toml_file,
)
from polyclinic.common.system.toml import read_toml
from polyclinic.data.base.image_set import LazyPictures
from polyclinic.data.base.spec import PhantomDatasetSpec
from polyclinic.data.images import store
from polyclinic.data.load import load_dataset
from tests.client.handshakes import coordinator_in
from tests.network.real import flwr_client

HEAD = 'name = "north"\n'
DATA = '[data]\nkind = "phantom"\nimages = 20\nimage_size = 16\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a site ``north``, with a key, a request and made images."""
    make_site_folder(tmp_path, "north")
    return write(tmp_path, HEAD + DATA)


def write(folder: Path, text: str) -> Path:
    (folder / "site.toml").write_text(text, encoding="utf-8")
    return folder


def places_of_faults(read: Callable[[Any], object], *arguments: Any) -> list[str]:
    with pytest.raises(BadInput) as refused:
        read(*arguments)
    return [fault.where.removeprefix("site.toml: ") for fault in refused.value.faults]


def pictures(folder: Path, parts: str) -> None:
    """Three images, each of its own patient and shade, with labels and the part that it belongs to."""
    (folder / "images").mkdir()
    lines = ["image,patient,Effusion,Pneumonia,part"]
    for index, part in enumerate(parts.split()):
        Image.fromarray(np.full((6, 4), 50 * index, np.uint8)).save(folder / "images" / f"{index}.png")
        lines.append(f"{index}.png,p{index},{index % 2},{1 - index % 2},{part}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_the_site_toml_that_init_writes_works_once_images_and_labels_are_there(tmp_path: Path) -> None:
    lines = make_site_folder(tmp_path, "north")
    request = read_admission_request(tmp_path / "north.request")
    assert request.site == "north"
    assert f"    {compute_public_key_fingerprint(request.public_key)}" in lines
    assert places_of_faults(read_site_settings, tmp_path) == ["data.images", "data.labels"]
    pictures(tmp_path, "train train test")
    site = load_site(read_site_settings(tmp_path))
    assert (site.name, site.declaration.names) == ("north", ("Effusion", "Pneumonia"))
    assert len(site.train) + len(site.validation) + len(site.test) == 3


def test_init_writes_what_the_coordinators_experiment_says_of_pixels(tmp_path: Path) -> None:
    experiment = tmp_path / "experiment.toml"
    model = '[model]\narchitecture = "tiny_cnn"\nchannels = 3\nimage_size = 48\n'
    table = '[pixels]\nwindow = [40, 400]\naxis = "coronal"\nown = ["frame"]\n'
    experiment.write_text(f'[run]\nmethod = "surgical"\n{model}{table}', encoding="utf-8")
    make_site_folder(tmp_path / "north", "north", read_experiment(experiment).experiment)
    data = read_toml(tmp_path / "north" / "site.toml")["data"]
    assert {key: data.get(key) for key in ("color", "image_size", "window", "axis", "resize", "frame")} == {
        "color": True,
        "image_size": 48,
        "window": [40, 400],
        "axis": "coronal",
        "resize": None,
        "frame": None,
    }
    make_site_folder(tmp_path / "south", "south")
    text = (tmp_path / "south" / "site.toml").read_text(encoding="utf-8")
    assert all(f"# {key} = " in text for key in ("color", "image_size", "resize", "window"))


def test_decoded_images_are_kept_as_the_policy_says_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "CACHE_THRESHOLD_BYTES", 0)
    make_site_folder(tmp_path, "north")
    pictures(tmp_path, "train train test")
    text, lines = (tmp_path / "site.toml").read_text(encoding="utf-8"), list[str]()
    for policy, folder in (("plain", "images-plain"), ("encrypted", "images-encrypted"), ("no", "")):
        line = f'\n[policy]\nkeep_images = "{policy}"\n'
        settings = read_site_settings(write(tmp_path, text.replace("\n[policy]\n", line)))
        site = load_site(settings, lines.append)
        assert [path.name for path in (tmp_path / "state").glob("images-*")] == [folder] * bool(folder)
        assert isinstance(site.train.stored, LazyPictures) == bool(folder)
        content = b"".join(path.read_bytes() for path in (tmp_path / "state").glob("*/*/pixels"))
        assert (bytes([50] * 100) in content) == (policy == "plain")
        assert site.train.images.max(axis=(1, 2)).tolist() == [0, 50, 100]
    assert sum("removed" in line for line in lines) == 2


def test_images_behind_a_link_go_when_the_policy_changes_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "CACHE_THRESHOLD_BYTES", 0)
    site, disk = tmp_path / "site", tmp_path / "disk"
    make_site_folder(site, "north")
    pictures(site, "train train test")
    (site / "state").mkdir()
    disk.mkdir()
    (disk / "other").write_text("mine")
    (site / "state" / "images-encrypted").symlink_to(disk)
    settings = read_site_settings(site)
    load_site(settings)
    assert len(list(disk.glob("*/*/pixels"))) == 1
    gone = replace(settings, file=settings.file.model_copy(update={"policy": SitePolicy(keep_images="no")}))
    assert len(load_site(gone).train.images) == 3
    assert not (site / "state" / "images-encrypted").is_symlink()
    assert [path.name for path in disk.iterdir()] == ["other"]


def test_without_its_key_a_folder_keeps_no_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "CACHE_THRESHOLD_BYTES", 0)
    make_site_folder(tmp_path, "north")
    pictures(tmp_path, "train train test")
    (tmp_path / "north.key").unlink()
    assert len(load_site(read_site_settings(tmp_path)).train.images) == 3
    assert not (tmp_path / "state").exists()


def test_init_again_or_with_a_name_that_leads_elsewhere_writes_nothing(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    lines = make_site_folder(folder, "north")
    with pytest.raises(BadInput, match="--name: use letters, digits"):
        make_site_folder(folder / "site", "../north")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert sum("is there already and stays." in line for line in lines) == 2


def test_init_with_an_experiment_says_that_it_leaves_a_site_toml_that_is_there(folder: Path, tmp_path: Path) -> None:
    experiment = tmp_path / "experiment.toml"
    text = '[run]\nmethod = "surgical"\n[model]\narchitecture = "tiny_cnn"\nchannels = 3\nimage_size = 48\n'
    experiment.write_text(text, encoding="utf-8")
    before = (folder / "site.toml").read_bytes()
    ended = flwr_client("init", folder, "--name", "north", "--experiment", experiment)
    assert ended.code == 0, ended.err
    assert (folder / "site.toml").read_bytes() == before
    assert f"flwr-client check {folder} --experiment {experiment}" in ended.out


def test_everything_may_be_left_out_but_name_and_data_and_kit_and_key_may_lie_elsewhere(folder: Path) -> None:
    settings = read_site_settings(folder)
    assert (settings.kit_path, settings.key_path) == (folder / "north.kit", folder / "north.key")
    assert (settings.state_folder, settings.labels, settings.synonyms) == (folder / "state", (), {})
    settings = read_site_settings(write(folder, f'{HEAD}kit = "mail/a.kit"\nkey = "/safe/b.key"\n{DATA}'))
    assert (settings.kit_path, settings.key_path) == (folder / "mail" / "a.kit", Path("/safe/b.key"))


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ('annotates = "Mass"', "data.annotates"),
        ("annotates = [1]", "data.annotates"),
        ("annotates = { Mass = 1 }", "data.annotates"),
        ('synonyms = ["Mass"]', "data.synonyms"),
        ("synonyms = { Mass = 1 }", "data.synonyms"),
    ],
)
def test_annotates_is_a_list_and_synonyms_a_table_of_names(line: str, where: str, folder: Path) -> None:
    assert places_of_faults(read_site_settings, write(folder, HEAD + DATA + line)) == [where]


def test_a_missing_gpu_is_a_fault_beside_those_of_the_data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = f'{HEAD}device = "cuda"\n[data]\nkind = "npz"\npath = "absent.npz"\n'
    assert places_of_faults(read_site_settings, write(folder, text)) == ["data.path", "device"]


@pytest.mark.parametrize(("available", "device"), [(True, "cuda"), (False, "cpu")])
def test_auto_takes_a_gpu_if_any(available: bool, device: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert choose_training_device(read_site_settings(folder)) == device
    assert choose_training_device(read_site_settings(write(folder, f'{HEAD}device = "cpu"\n{DATA}'))) == "cpu"


@pytest.mark.parametrize(
    ("lines", "visible"), [("gpus = 2\n", 0), ("gpus = 2\n", 1), ("gpus = 4\n", 3), ('device = "cpu"\ngpus = 2\n', 4)]
)
def test_several_gpus_must_be_there(folder: Path, monkeypatch: pytest.MonkeyPatch, lines: str, visible: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert places_of_faults(read_site_settings, write(folder, f"{HEAD}{lines}{DATA}")) == ["gpus"]
    assert load_site(read_site_settings(write(folder, f"{HEAD}{DATA}"))).gpus == 1
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert load_site(read_site_settings(write(folder, f"{HEAD}gpus = 2\n{DATA}"))).gpus == 2


def test_only_the_annotated_classes_are_left_in_the_sites_order_under_the_federations_names(folder: Path) -> None:
    splits = load_dataset(PhantomDatasetSpec(kind="phantom", images=20, image_size=16), folder)
    assert load_site(read_site_settings(folder)).declaration.canonical_names == splits.class_names
    text = 'annotates = ["Mass", "Device", "Edema"]\n[data.synonyms]\nDevice = "Implant"\n'
    site = load_site(read_site_settings(write(folder, HEAD + DATA + text)))
    columns = [splits.class_names.index(name) for name in ("Mass", "Device", "Edema")]
    for ours, theirs in ((site.train, splits.train), (site.validation, splits.validation), (site.test, splits.test)):
        assert ours.class_names == ("Mass", "Implant", "Edema")
        assert np.array_equal(ours.labels, theirs.labels[:, columns], equal_nan=True)
        assert np.array_equal(ours.images, theirs.images)
    assert site.declaration.names == ("Mass", "Device", "Edema")


def test_a_site_without_a_training_image_is_refused(folder: Path) -> None:
    pictures(folder, "test test test")
    table = 'images = "images"\nlabels = "labels.csv"\nimage_column = "image"\nlabel_columns = ["Effusion"]\n'
    write(folder, f'{HEAD}[data]\nkind = "folder"\n{table}split_column = "part"\nimage_size = 8\n')
    with pytest.raises(BadInput, match="no training image"):
        load_site(read_site_settings(folder))


def test_a_hospitals_own_words_for_present_and_absent_are_read_from_its_site_toml(folder: Path) -> None:
    pictures(folder, "train train test")
    table = (folder / "labels.csv").read_text(encoding="utf-8").replace(",1", ",ja").replace(",0", ",nein")
    (folder / "labels.csv").write_text(table, encoding="utf-8")
    data = 'images = "images"\nlabels = "labels.csv"\nimage_column = "image"\nlabel_columns = ["Effusion"]\n'
    data += 'present = ["ja"]\nabsent = ["nein"]\nsplit_column = "part"\nimage_size = 8\n'
    site = load_site(read_site_settings(write(folder, f'{HEAD}[data]\nkind = "folder"\n{data}')))
    assert np.concatenate([site.train.labels, site.validation.labels, site.test.labels]).tolist() == [[0], [1], [0]]


def kit_for(folder: Path, site: str = "north") -> SiteConnectionKit:
    """Write ``north.kit`` as a coordinator would for a site of this name with its key."""
    certificate = coordinator_in(folder / "coordinator").ca_certificate_path.read_text(encoding="ascii")
    line = read_admission_request(folder / f"{site}.request").public_key
    kit = SiteConnectionKit(
        coordinator="trial", address="fl.example:9092", site=site, public_key=line, ca_certificate=certificate
    )
    write_commented_toml_file(folder / "north.kit", kit, "")
    return kit


def test_a_kit_for_this_site_and_this_key_is_accepted(folder: Path) -> None:
    kit = kit_for(folder)
    assert read_and_check_connection_kit(read_site_settings(folder)) == kit == read_connection_kit(folder / "north.kit")


def test_a_kit_for_another_site_with_another_key_has_both_faults(folder: Path) -> None:
    """Each alone is in the catalogue of tests/bad_input."""
    make_site_folder(folder, "south")
    kit_for(folder, site="south")
    assert places_of_faults(read_and_check_connection_kit, read_site_settings(folder)) == ["name", "north.key"]
