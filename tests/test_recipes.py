"""Every recipe of docs/recipes.md runs as it stands, on small files in the place of the reader's."""

import base64
import io
import re
import shlex
import tomllib
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image
from pydicom import dcmread
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, generate_uid
from safetensors.torch import save_file

import studies.cli
from polyclinic import load
from tests.common.data.fake_pacs import FakePacs, Picture, running
from tests.doc_pages import blocks, lines, saved
from tests.network.real import typed
from tests.third_parties import install_module

PAGE = "recipes"
LARGE, SMALL = "timm:vit_base_patch16_224", "timm:test_vit"
"""In the place of a network of 85 million parameters, one of its kind that is trained in seconds."""
PATIENTS = 60


@pytest.fixture(autouse=True)
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the page speaks of."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(1)
    names, columns = [f"{number:04}" for number in range(2 * PATIENTS)], ["Fluid", "Mass", "Nodule"]
    for folder in ("scans", "dicom", "volumes"):
        (tmp_path / folder).mkdir()
    rows = []
    for number, name in enumerate(names):
        shown = random.integers(0, 2, 3)
        pixels = random.integers(0, 60, (32, 32), dtype=np.uint8)
        for place, present in enumerate(shown):
            pixels[10 * place : 10 * place + 8] += np.uint8(120 * present)
        Image.fromarray(pixels).save(tmp_path / "scans" / f"{name}.png")
        write_dicom(tmp_path / "dicom" / f"{name}.dcm", pixels)
        write_volume(tmp_path / "volumes" / f"{name}.nii.gz", pixels)
        cells = ["" if random.random() < 0.1 else str(value) for value in shown]
        rows.append((name, f"p{number // 2}", *cells))
    for table, suffix in (("labels.csv", "png"), ("dicom.csv", "dcm"), ("volumes.csv", "nii.gz")):
        text = [",".join((f"{name}.{suffix}", *rest)) for name, *rest in rows]
        (tmp_path / table).write_text("\n".join((",".join(("file", "patient", *columns)), *text)) + "\n")
    saved(PAGE, tmp_path)
    return tmp_path


def write_volume(path: Path, pixels: np.ndarray) -> None:
    """A volume of three slices, whose middle one shows the pixels in a window of 40 ± 200."""
    slices = np.zeros((*pixels.shape, 3))
    slices[..., 1] = pixels[::-1, ::-1].T / 255 * 399 - 160
    nibabel.save(nibabel.Nifti1Image(slices.astype("<f4"), np.eye(4)), path)


def archive_of(folder: Path) -> FakePacs:
    """The pictures of the DICOM folder as studies, and a table that names them."""
    pictures, rows = [], ["study,Fluid,Mass,Nodule"]
    for number, line in enumerate((folder / "dicom.csv").read_text().splitlines()[1:]):
        name, patient, *cells = line.split(",")
        image = dcmread(folder / "dicom" / name)
        image.SOPInstanceUID = image.file_meta.MediaStorageSOPInstanceUID
        content = io.BytesIO()
        image.save_as(content, enforce_file_format=True)
        uid = str(image.SOPInstanceUID)
        pictures.append(Picture(f"1.2.{number}", uid, patient, f"A{number}", content.getvalue()))
        rows.append(",".join((f"1.2.{number}", *cells)))
    (folder / "pacs.csv").write_text("\n".join(rows), encoding="utf-8")
    return FakePacs(pictures)


def write_dicom(path: Path, pixels: np.ndarray) -> None:
    image = Dataset()
    image.file_meta = FileMetaDataset()
    image.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    image.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.1"
    image.file_meta.MediaStorageSOPInstanceUID = generate_uid()
    image.Rows, image.Columns = pixels.shape
    image.SamplesPerPixel, image.PhotometricInterpretation = 1, "MONOCHROME1"
    image.BitsAllocated = image.BitsStored = 8
    image.HighBit, image.PixelRepresentation = 7, 0
    image.WindowCenter, image.WindowWidth = 128, 256
    image.PixelData = (255 - pixels).tobytes()
    image.save_as(path, enforce_file_format=True)


def command(beginning: str) -> list[str]:
    """The one command of the page that contains this."""
    (found,) = [words for words in lines(PAGE) if beginning in shlex.join(words)]
    assert found[0] == "flwr-sim"
    return found[1:]


def test_the_first_experiment_is_written_by_a_command_and_runs() -> None:
    for recipe in ("init ", "runs/first "):
        ended = typed(studies.cli.main, *command(recipe))
        assert ended.code == 0, ended.out + ended.err
    assert set(load("runs/first").classes.index) == {"Fluid", "Mass", "Nodule"}


def test_a_csv_and_pictures_and_then_dicom_files_make_the_same_model() -> None:
    """The DICOM files hold the same pixels, inverted."""
    for recipe in ("csv", "dicom"):
        ended = typed(studies.cli.main, *command(f"runs/{recipe} "))
        assert ended.code == 0, ended.out + ended.err
    first, second = load("runs/csv"), load("runs/dicom")
    assert first.model_sha256 == second.model_sha256
    assert set(first.sites.loc["east", "classes"]) == {"Fluid", "Mass"}


def test_slices_of_volumes_are_the_same_pictures_and_predict_takes_others() -> None:
    for recipe in ("csv ", "nifti "):
        ended = typed(studies.cli.main, *command(f"runs/{recipe}--backend"))
        assert ended.code == 0, ended.out + ended.err
    first, second = load("runs/csv"), load("runs/nifti")
    assert first.model_sha256 == second.model_sha256
    ended = typed(studies.cli.main, *command("predict "))
    assert ended.code == 0, ended.out + ended.err
    assert len(Path("slices.csv").read_text().splitlines()) == 2 * PATIENTS + 1


def test_images_of_a_pacs_make_the_same_model_as_those_of_a_folder(reader: Path) -> None:
    """Not over TLS here: the long test with a real PACS has that."""
    with running(archive_of(reader)) as pacs:
        pacs.secret = f"Basic {base64.b64encode(b'anna:word').decode()}"
        (reader / "pacs.secret").write_text("anna:word\n")
        (reader / "pacs.secret").chmod(0o600)
        text = (reader / "pacs.toml").read_text()
        for words, instead in (
            ("https://pacs.hospital.example/dicom-web", pacs.url),
            ('ca_file = "hospital-ca.pem"', ""),
        ):
            assert words in text
            text = text.replace(words, instead)
        (reader / "pacs.toml").write_text(text)
        for recipe in ("dicom", "pacs"):
            ended = typed(studies.cli.main, *command(f"runs/{recipe} "))
            assert ended.code == 0, ended.out + ended.err
    assert load("runs/dicom").model_sha256 == load("runs/pacs").model_sha256


def test_the_python_of_the_page_runs_from_top_to_bottom() -> None:
    space: dict[str, object] = {}
    for block in blocks(PAGE, "python"):
        exec(compile(block, "docs/recipes.md", "exec"), space)
    for run, key in (("network", "model.architecture"), ("loss", "training.loss")):
        section, name = key.split(".")
        assert load(f"runs/{run}").summary["experiment"][section][name].startswith("plugin:own-")


def test_a_network_in_a_package_takes_fifteen_lines_at_most(reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project,), (module,) = blocks(PAGE, "package"), blocks(PAGE, "module")
    points = tomllib.loads(project)["project"]["entry-points"]
    install_module(reader / "site-packages", monkeypatch, "mine", module, points)
    ended = typed(studies.cli.main, *command("runs/mine "))
    assert ended.code == 0, ended.out + ended.err
    assert load("runs/mine").summary["experiment"]["model"]["architecture"] == "plugin:mine"
    assert len((project + module + (reader / "mine.toml").read_text()).splitlines()) <= 15


@pytest.mark.parametrize("recipe", ["gpu", "gpus", "both"])
def test_the_recipes_for_gpus_run_or_say_that_there_is_none(recipe: str) -> None:
    ended = typed(studies.cli.main, *command(f"runs/{recipe} "))
    wanted = 1 if recipe == "gpu" else 2
    if torch.cuda.device_count() >= wanted:
        assert ended.code == 0, ended.out + ended.err
    elif not torch.cuda.is_available():
        assert "this machine shows no GPU" in ended.out + ended.err


def test_a_foundation_model_is_made_a_trunk_whose_head_is_trained(reader: Path) -> None:
    import timm  # here: each worker collects this module, and one runs it

    save_file(timm.create_model(SMALL.partition(":")[2], img_size=32).state_dict(), reader / "model.safetensors")
    file = reader / "foundation.toml"
    text = file.read_text()
    assert LARGE in text
    file.write_text(text.replace(LARGE, SMALL).replace("image_size = 224", "image_size = 32"))
    for recipe in ("weights ", "runs/foundation "):
        words = [word.replace(LARGE, SMALL).replace("224", "32") for word in command(recipe)]
        ended = typed(studies.cli.main, *words)
        assert ended.code == 0, ended.out + ended.err
    run = load("runs/foundation")
    assert run.summary["experiment"]["model"]["train"] == "head"
    trunk = Path("runs/foundation/model.safetensors").stat().st_size
    assert (
        run.sites["bytes_up"].max() < 40_000 < trunk / 10
    )  # head rows, and scores by bin of test and validation images


def test_every_command_of_the_page_is_tried_here() -> None:
    outs = [re.search(r"runs/(\w+)|(weights|init) ", shlex.join(words)) for words in lines(PAGE)]
    assert all(found for found in outs)
    assert {found[1] or found[2] for found in outs if found} == {
        *("init", "first", "csv", "dicom", "pacs", "nifti", "mine", "gpu", "gpus", "both", "foundation", "weights")
    }
