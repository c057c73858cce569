"""Every recipe of docs/recipes.md runs as it stands, on small files in the place of the reader's."""

import base64
import json
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image
from pydicom import dcmread
from pydicom.uid import generate_uid
from safetensors.torch import save_file

import polyclinic.studies.cli
from polyclinic import load
from polyclinic.common.config import read_experiment
from polyclinic.data.base.image_set import ImageSet, concatenate_image_sets
from polyclinic.data.load import load_dataset
from polyclinic.strategies.registry import find_method_faults
from tests.bad_input.catalogue import changed
from tests.data.dicom_files import dicom
from tests.data.fake_pacs import FakePacs, Picture, running
from tests.doc_pages import blocks, lines, saved
from tests.network.real import typed
from tests.third_parties import install_module

PAGE = "recipes"
LARGE, SMALL = "timm:vit_base_patch16_224", "timm:test_vit"
"""In the place of a network of 85 million parameters, one of its kind that is trained in seconds."""
PATIENTS = 60
INVERTED = {"PhotometricInterpretation": "MONOCHROME1", "WindowCenter": 128, "WindowWidth": 256}
INVERTED |= {"BitsAllocated": 8, "BitsStored": 8, "HighBit": 7}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the page speaks of, and those that it says to save."""
    folder = tmp_path_factory.mktemp("files")
    random = np.random.default_rng(1)
    names, columns = [f"{number:04}" for number in range(2 * PATIENTS)], ["Fluid", "Mass", "Nodule"]
    for kind in ("scans", "dicom", "volumes"):
        (folder / kind).mkdir()
    rows = []
    for number, name in enumerate(names):
        shown = random.integers(0, 2, 3)
        pixels = random.integers(0, 60, (32, 32), dtype=np.uint8)
        for place, present in enumerate(shown):
            pixels[10 * place : 10 * place + 8] += np.uint8(120 * present)
        Image.fromarray(pixels).save(folder / "scans" / f"{name}.png")
        content = dicom(255 - pixels, **INVERTED, SOPInstanceUID=generate_uid())
        (folder / "dicom" / f"{name}.dcm").write_bytes(content)
        # Of three slices, the middle one shows the pixels in a window of 40 ± 200.
        slices = np.zeros((*pixels.shape, 3))
        slices[..., 1] = pixels[::-1, ::-1].T / 255 * 399 - 160
        nibabel.save(nibabel.Nifti1Image(slices.astype("<f4"), np.eye(4)), folder / "volumes" / f"{name}.nii.gz")
        cells = ["" if random.random() < 0.1 else str(value) for value in shown]
        rows.append((name, f"p{number // 2}", *cells))
    for table, suffix in (("labels", "png"), ("dicom", "dcm"), ("volumes", "nii.gz")):
        write_csv(folder, table, ("file", "patient", *columns), ((f"{name}.{suffix}", *rest) for name, *rest in rows))
    saved(PAGE, folder)
    return folder


@pytest.fixture(autouse=True)
def reader(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the reader's own with these files; runs in it draw no report."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("polyclinic.server.federation.set_up.write_run_pages", lambda *arguments, **options: None)
    return shutil.copytree(files, tmp_path, dirs_exist_ok=True)


def write_csv(folder: Path, table: str, heading: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    text = "\n".join(",".join(map(str, row)) for row in (heading, *rows))
    (folder / f"{table}.csv").write_text(f"{text}\n", encoding="utf-8")


def read_csv(folder: Path, table: str) -> list[list[str]]:
    return [line.split(",") for line in (folder / f"{table}.csv").read_text(encoding="utf-8").splitlines()]


def scans(folder: Path) -> list[Path]:
    return sorted((folder / "scans").iterdir())


def images_of(folder: Path, name: str) -> ImageSet:
    """All images that an experiment reads."""
    data = read_experiment(folder / f"{name}.toml", [], find_method_faults).experiment.data
    assert data is not None
    return concatenate_image_sets(load_dataset(data, folder).parts)


def typed_from_the_page(*beginnings: str, changes: Mapping[str, str] | None = None) -> None:
    """Type the one command of the page that contains each of these, with some words changed; each ends with 0."""
    for beginning in beginnings:
        ((program, *words),) = [words for words in lines(PAGE) if beginning in shlex.join(words)]
        assert program == "flwr-sim"
        for old, new in (changes or {}).items():
            words = [word.replace(old, new) for word in words]
        ended = typed(polyclinic.studies.cli.main, *words)
        assert ended.code == 0, ended.out + ended.err


def run_block(part: str) -> None:
    """Run the one Python block of the page that contains a text."""
    (block,) = [block for block in blocks(PAGE, "python") if part in block]
    exec(compile(block, "docs/recipes.md", "exec"), {})


def archive_of(folder: Path) -> FakePacs:
    """The pictures of the DICOM folder as studies, and a table that names them."""
    pictures, rows = [], []
    for number, (name, patient, *cells) in enumerate(read_csv(folder, "dicom")[1:]):
        file = folder / "dicom" / name
        uid = str(dcmread(file).SOPInstanceUID)
        pictures.append(Picture(f"1.2.{number}", uid, patient, f"A{number}", file.read_bytes()))
        rows.append((f"1.2.{number}", *cells))
    write_csv(folder, "pacs", ("study", "Fluid", "Mass", "Nodule"), rows)
    return FakePacs(pictures)


def test_the_first_experiment_is_written_by_a_command_and_runs() -> None:
    typed_from_the_page("init labels.csv ", "runs/first ")
    assert set(load("runs/first").classes.index) == {"Fluid", "Mass", "Nodule"}


def test_a_folder_for_each_finding_becomes_a_table(reader: Path) -> None:
    for number, scan in enumerate(scans(reader)):
        for folder in (("Effusion ",), ("Mass",), ("Effusion ", "Mass"))[number % 3]:
            (reader / "pictures" / folder).mkdir(parents=True, exist_ok=True)
            (reader / "pictures" / folder / scan.name).write_bytes(scan.read_bytes())
    (reader / "pictures" / "Mass" / "Thumbs.db").write_text("no picture")
    run_block("folders.csv")
    typed_from_the_page("init folders.csv ", "runs/folders ")
    labels = images_of(reader, "folders").labels
    assert labels.sum(axis=0).tolist() == [2 * PATIENTS * 2 / 3] * 2  # each of two of three pictures, 40 show both
    assert len(labels) == 2 * PATIENTS


def test_patients_are_taken_from_the_names_of_pictures(reader: Path) -> None:
    rows = []
    for number, scan in enumerate(scans(reader)):
        rows.append((f"P{number // 2:04}_IM{number % 2}.png", number % 2, number // 2 % 2))
        (reader / "scans" / rows[-1][0]).write_bytes(scan.read_bytes())
    write_csv(reader, "export", ("file", "Fluid", "Mass"), rows)
    run_block("named.csv")
    typed_from_the_page("init named.csv ")
    assert len(set(images_of(reader, "named").patients)) == PATIENTS


LONG = ("file", "reader", "finding", "value")


def test_a_line_for_each_reader_and_finding_becomes_a_line_for_each_picture(reader: Path) -> None:
    rows, shown = [], [("yes", "yes"), ("no", "no"), ("yes", "no"), ("unclear", "unclear")]
    for number, scan in enumerate(scans(reader)):
        for name, value in zip("AB", shown[number % 4], strict=True):
            rows.append((scan.name, name, ("Mass", "mass ")[number % 2], value))
            rows.append((scan.name, name, "Fluid", "yes" if number % 3 else "no"))
    write_csv(reader, "long", LONG, rows)
    run_block("long.csv")
    typed_from_the_page("init wide.csv ")
    wide = read_csv(reader, "wide")
    assert wide[0] == ["file", "Fluid", "Mass"]
    assert [row[2] for row in wide[1:5]] == ["1", "0", "-1", "-1"]
    assert [row[1] for row in wide[1:4]] == ["0", "1", "1"]


def test_a_word_that_is_no_opinion_is_blank_in_any_order_of_the_lines(reader: Path) -> None:
    opinions = {
        "0000": ("yes", "unreadable", "1"),
        "0001": ("unreadable", "unreadable", ""),
        "0002": ("no", "withdrawn", "0"),
        "0003": ("yes", "no", "-1"),
        "0004": ("unclear", "unreadable", "-1"),
    }
    rows = [(f"{name}.png", word, "Mass", word) for name, (*words, _) in opinions.items() for word in words]
    for ordered in (rows, rows[::-1]):
        write_csv(reader, "long", LONG, ordered)
        run_block("long.csv")
        labels = [[f"{name}.png", label] for name, (_, _, label) in opinions.items()]
        assert read_csv(reader, "wide") == [["file", "Mass"], *labels]


def test_two_pictures_in_a_line_become_two_lines(reader: Path) -> None:
    names = [scan.name for scan in scans(reader)]
    heading = ("patient", "left", "right", "Mass_left", "Mass_right", "Fluid_left", "Fluid_right")
    rows = [
        (f"p{number}", left, right if number else "", number % 2, 0, 1, number // 2 % 2)
        for number, (left, right) in enumerate(zip(names[::2], names[1::2], strict=True))
    ]
    write_csv(reader, "eyes", heading, rows)
    run_block("eyes.csv")
    typed_from_the_page("init lines.csv ")
    images = images_of(reader, "lines")
    counts = dict(zip(images.class_names, images.labels.sum(axis=0).tolist(), strict=True))
    assert (len(images), counts) == (2 * PATIENTS - 1, {"Mass": PATIENTS / 2, "Fluid": PATIENTS + PATIENTS / 2})
    assert len(set(images.patients)) == PATIENTS


def test_annotations_of_coco_become_a_table(reader: Path) -> None:
    names = [scan.name for scan in scans(reader)]
    coco = {
        "categories": [{"id": 1, "name": "Mass"}, {"id": 4, "name": "Fluid"}],
        "images": [{"id": number, "file_name": name} for number, name in enumerate(names)],
        "annotations": [
            {"image_id": number, "category_id": (1, 4)[number % 2]} for number in range(0, 2 * PATIENTS, 3)
        ],
    }
    (reader / "annotations.json").write_text(json.dumps(coco))
    run_block("annotations.json")
    rows = read_csv(reader, "coco")
    assert rows[:4] == [["file", "Mass", "Fluid"], [names[0], "1", "0"], [names[3], "0", "1"], [names[6], "1", "0"]]
    assert len(rows) == 1 + 2 * PATIENTS / 3
    typed_from_the_page("init coco.csv ")


def test_an_npz_file_of_one_set_with_words_is_divided_by_patients(reader: Path) -> None:
    random = np.random.default_rng(2)
    labels = np.array(["naevus", "keratosis"])[np.arange(120) % 2]
    images = (random.integers(0, 60, (120, 32, 32)) + 90 * (np.arange(120) % 2)[:, None, None]).astype(np.uint8)
    np.savez(reader / "skin.npz", images=images, labels=labels, patient=np.arange(120) // 4)
    run_block("skin.npz")
    divided = np.load(reader / "divided.npz")
    assert not set(divided["train_patient"]) & set(divided["test_patient"])
    assert (len(divided["train_labels"]), int(divided["test_labels"].sum())) == (96, 12)
    typed_from_the_page("runs/npz ")
    assert list(load("runs/npz").classes.index) == ["keratosis", "naevus"]


def test_a_csv_with_pictures_dicom_files_slices_of_volumes_or_a_pacs_make_the_same_model(
    reader: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The DICOM files hold the same pixels, inverted. Not over TLS here: the long test with a real PACS has that."""
    typed_from_the_page("runs/csv ", "runs/dicom ", "runs/nifti --backend")
    with running(archive_of(reader)) as pacs:
        pacs.secret = f"Basic {base64.b64encode(b'anna:word').decode()}"
        own = (("https://pacs.hospital.example", f"http://127.0.0.1:{pacs.port}"), ("NAME:PASSWORD", "anna:word"))
        (secrets,) = [block for block in blocks(PAGE, "") if "authentication" in block]
        kept = reader / "config" / "polyclinic" / "secrets.toml"
        kept.parent.mkdir(parents=True)
        kept.write_text(changed(secrets, *own, ('ca_file = "hospital-ca.pem"', "")))
        kept.chmod(0o600)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(reader / "config"))
        (reader / "pacs.toml").write_text(changed((reader / "pacs.toml").read_text(), own[0]))
        typed_from_the_page("runs/pacs ")
    runs = [load(f"runs/{name}") for name in ("csv", "dicom", "nifti", "pacs")]
    assert len({run.model_sha256 for run in runs}) == 1
    assert set(runs[0].sites.loc["east", "classes"]) == {"Fluid", "Mass"}
    typed_from_the_page("predict ")
    assert len(Path("slices.csv").read_text().splitlines()) == 2 * PATIENTS + 1


def test_the_python_of_the_page_runs_from_top_to_bottom() -> None:
    """But for the blocks that read somebody's files, which have their tests above."""
    space: dict[str, object] = {}
    files = ("read_csv", "annotations.json", "skin.npz")
    for block in (block for block in blocks(PAGE, "python") if not any(file in block for file in files)):
        exec(compile(block, "docs/recipes.md", "exec"), space)
    for run, key in (("network", "model.architecture"), ("loss", "training.loss")):
        section, name = key.split(".")
        assert load(f"runs/{run}").summary["experiment"][section][name].startswith("plugin:own-")


def test_a_network_in_a_package_takes_fifteen_lines_at_most(reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project,), (module,) = blocks(PAGE, "package"), blocks(PAGE, "module")
    points = tomllib.loads(project)["project"]["entry-points"]
    install_module(reader / "site-packages", monkeypatch, "mine", module, points)
    typed_from_the_page("runs/mine ")
    assert load("runs/mine").summary["experiment"]["model"]["architecture"] == "plugin:mine"
    assert len((project + module + (reader / "mine.toml").read_text()).splitlines()) <= 15


@pytest.mark.parametrize(("recipe", "needed"), [("gpu", 1), ("gpus", 2), ("both", 2)])
def test_the_recipes_for_gpus_run_or_say_that_there_is_none(recipe: str, needed: int) -> None:
    ((_, *words),) = [words for words in lines(PAGE) if f"runs/{recipe} " in shlex.join(words)]
    ended = typed(polyclinic.studies.cli.main, *words)
    if torch.cuda.device_count() >= needed:
        assert ended.code == 0, ended.out + ended.err
    elif not torch.cuda.is_available():
        assert "this machine shows no GPU" in ended.out + ended.err


def test_a_foundation_model_is_made_a_trunk_whose_head_is_trained(reader: Path) -> None:
    import timm  # here: each worker collects this module, and one runs it

    save_file(timm.create_model(SMALL.partition(":")[2], img_size=32).state_dict(), reader / "model.safetensors")
    file = reader / "foundation.toml"
    file.write_text(changed(file.read_text(), (LARGE, SMALL), ("image_size = 224", "image_size = 32")))
    typed_from_the_page("weights ", "runs/foundation ", changes={LARGE: SMALL, "224": "32"})
    run = load("runs/foundation")
    assert run.summary["experiment"]["model"]["train"] == "head"
    trunk = Path("runs/foundation/model.safetensors").stat().st_size
    # Head rows, and scores by bin of test and validation images.
    assert run.sites["bytes_up"].max() < 40_000 < trunk / 10


def test_every_command_of_the_page_is_tried_here() -> None:
    outs = [re.search(r"runs/(\w+)|(weights|init) ", shlex.join(words)) for words in lines(PAGE)]
    names = "init first folders csv npz dicom pacs nifti mine gpu gpus both foundation weights"
    assert {out[1] or out[2] for out in outs} == set(names.split())
