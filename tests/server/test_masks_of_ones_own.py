"""A stranger's images and masks: ``flwr-sim init`` finds the masks, names or asks their classes, and the run ends."""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from polyclinic.common.config import read_experiment
from polyclinic.common.errors import BadInput
from polyclinic.data.base.image_set import ImageSet, concatenate_image_sets
from polyclinic.data.base.spec import FolderDatasetSpec
from polyclinic.data.images.volume_header import VolumeHeader
from polyclinic.data.load import load_dataset
from polyclinic.data.tables.labels import assign_split_parts, open_folder_label_table
from polyclinic.data.tables.mask_folders import find_mask_folders
from polyclinic.studies.init.table import choose_volume_size, choose_volume_spacing
from tests import mask_layouts as layouts
from tests.network.real import flwr_sim

COUNT = 12
VALUES = {"Liver": 1, "Spleen": 2, "Kidney": 3}
NO_PATIENTS = ("--patient-column", "")
NAMED = tuple(word for name, value in VALUES.items() for word in ("--mask-class", f"{value}={name}"))


def made(source: Path, *options: str, code: int = 0) -> tuple[Path, str]:
    """The experiment that init writes, and what it prints as one line."""
    out = source.parent / "mine.toml"
    ended = flwr_sim("init", source, "--out", out, *options)
    text = " ".join((ended.out + ended.err).split())
    assert (ended.code, out.exists()) == (code, code == 0), text
    return out, text


def read(experiment: Path) -> ImageSet:
    spec = read_experiment(experiment).experiment.data
    assert spec is not None
    return concatenate_image_sets(load_dataset(spec, experiment.parent).parts)


def areas_of(images: ImageSet, name: str) -> list[int]:
    assert images.masks is not None
    return sorted(images.masks.read_class_areas(np.arange(len(images)), (name,)).sum((1, 2, 3, 4)).tolist())


def drawn_areas(name: str, count: int = COUNT) -> list[int]:
    """Voxels of an organ, each of which is two of the grid that init proposes: 6 mm become 3."""
    return sorted(2 * int(areas[name].sum()) for _, areas in layouts.draw(count))


LAYOUTS: dict[str, tuple[Callable[[Path], Path], tuple[str, ...], tuple[str, ...]]] = {
    "nnU-Net": (lambda root: layouts.write_nnunet(root, COUNT, VALUES), NO_PATIENTS, ("Kidney", "Liver", "Spleen")),
    "Decathlon": (lambda root: layouts.write_decathlon(root, COUNT, {"Liver": 1}), NO_PATIENTS, ("Liver",)),
    "a folder a patient": (lambda root: layouts.write_cases(root, COUNT, VALUES), NAMED, tuple(sorted(VALUES))),
    "side by side": (
        lambda root: layouts.write_side_by_side(root, COUNT, VALUES),
        (*NO_PATIENTS, *NAMED),
        tuple(sorted(VALUES)),
    ),
    "img and label": (
        lambda root: layouts.write_image_and_label_folders(root, COUNT, VALUES),
        (*NO_PATIENTS, *NAMED),
        tuple(sorted(VALUES)),
    ),
    "a file a class": (lambda root: layouts.write_file_for_each_class(root, COUNT), (), layouts.NAMES),
    "DICOM series": (lambda root: layouts.write_patients_of_series(root, COUNT, VALUES), NAMED, tuple(sorted(VALUES))),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_of_images_and_masks_becomes_an_experiment(tmp_path: Path, layout: str) -> None:
    write, options, classes = LAYOUTS[layout]
    experiment, text = made(write(tmp_path / "data"), *options)
    settings = read_experiment(experiment).experiment
    assert settings.model.architecture == "tiny_unet"
    assert settings.model.task == ("segmentation" if layout == "a file a class" else "exclusive_segmentation")
    assert f"task: {settings.model.task}, because" in text
    images = read(experiment)
    assert sorted(images.class_names) == sorted(classes)
    assert all(areas_of(images, name) == drawn_areas(name) for name in classes)
    # One image of the Decathlon has no mask, and a Mac left a file there.
    assert ("that no line names" in text) == (layout == "Decathlon")


def test_pictures_beside_their_masks_become_an_experiment(tmp_path: Path) -> None:
    experiment, text = made(layouts.write_pictures(tmp_path / "data", 30, VALUES), *NO_PATIENTS, *NAMED)
    assert read_experiment(experiment).experiment.model.task == "exclusive_segmentation"
    images = read(experiment)
    assert images.masks is not None
    assert len(images) == 30
    assert "a table of 30 images with a mask each" in text


def table_of(folder: Path, heading: str = "outline") -> Path:
    layouts.write_image_and_label_folders(folder / "data", COUNT, VALUES)
    lines = [f"scan,{heading},patient"]
    for number in range(1, COUNT + 1):
        images, masks = f"Training/img/img{number:04}.nii.gz", f"Training/label/label{number:04}.nii.gz"
        lines.append(f"{images},{masks},P{number}")
    (folder / "own.csv").write_text("\n".join(lines) + "\n")
    return folder / "own.csv"


def test_a_column_of_masks_is_recognised_and_its_values_are_asked(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    _, text = made(table, "--images", str(tmp_path / "data"), code=2)
    assert "masks: outline: its files lie on the grid of the pictures, with few whole values" in text
    assert "images: scan" in text
    assert "--findings" not in text
    assert all(f"--mask-class '{value}=???'" in text for value in VALUES.values())
    experiment, _ = made(table, "--images", str(tmp_path / "data"), *NAMED)
    assert areas_of(read(experiment), "Spleen") == drawn_areas("Spleen")


def test_the_heading_names_the_only_class_of_a_label_map(tmp_path: Path) -> None:
    layouts.write_side_by_side(tmp_path / "data", COUNT, {"Liver": 255})
    lines = ["volume,liver_mask,patient"]
    lines += [f"volume-{number}.nii,segmentation-{number}.nii,P{number}" for number in range(COUNT)]
    (tmp_path / "own.csv").write_text("\n".join(lines) + "\n")
    experiment, text = made(tmp_path / "own.csv", "--images", str(tmp_path / "data"))
    assert "255 liver" in text
    assert areas_of(read(experiment), "liver") == drawn_areas("Liver")


def test_findings_that_the_user_names_go_before_masks(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    rows = list(csv.reader(table.read_text().splitlines()))
    with_findings = [[*rows[0], "Fluid"], *([*row, str(place % 2)] for place, row in enumerate(rows[1:]))]
    table.write_text("\n".join(map(",".join, with_findings)) + "\n")
    options = ("--images", str(tmp_path / "data"), "--findings", "Fluid", "--image-column", "scan")
    experiment, _ = made(table, *options)
    assert read_experiment(experiment).experiment.model.task == "multi_label"


def test_hospitals_of_a_table_of_masks_are_the_sites(tmp_path: Path) -> None:
    layouts.write_file_for_each_class(tmp_path / "data", 16)
    lines = ["image,Kidney,Liver,patient,hospital"]
    for number in range(16):
        folder, north = f"s{number:04}", number % 2
        cells = [f"{folder}/segmentations/{name}.nii.gz" for name in ("Kidney", "Liver")]
        cells[north] = ""  # each of them outlines one organ
        lines.append(",".join([f"{folder}/ct.nii.gz", *cells, f"P{number}", ("south", "north")[north]]))
    (tmp_path / "own.csv").write_text("\n".join(lines) + "\n")
    experiment, text = made(tmp_path / "own.csv", "--images", str(tmp_path / "data"))
    partition: Any = read_experiment(experiment).experiment.partition
    assert partition.lists == {"north": ("Kidney",), "south": ("Liver",)}
    assert "hospitals: column hospital, 2 of them" in text


OWN_ORGANS = {"north": ("Kidney", "Liver"), "south": ("Liver", "Pancreas"), "St. Mary": ("Pancreas", "Spleen")}
ORGANS = {"Kidney": 1, "Liver": 2, "Pancreas": 3, "Spleen": 4}
ORGANS_NAMED = tuple(word for name, value in ORGANS.items() for word in ("--mask-class", f"{value}={name}"))


def write_hospitals(root: Path, counts: Mapping[str, int], *, unlike: bool = False) -> Path:
    """A folder for each hospital, with images and label maps of its own two organs."""
    for seed, (hospital, count) in enumerate(counts.items()):
        for number, (voxels, areas) in enumerate(layouts.draw(count, seed + 6)):
            values = {name: ORGANS[name] for name in OWN_ORGANS[hospital]}
            spacing = (12.0, 2.0, 2.0) if unlike and number % 2 else layouts.SPACING
            layouts.write(root / hospital / "images" / f"c{number}.nii.gz", voxels, spacing)
            layouts.write(root / hospital / "masks" / f"c{number}.nii.gz", layouts.label_map(areas, values), spacing)
    return root


def test_a_folder_for_each_hospital_makes_them_sites_that_annotate_what_their_masks_show(tmp_path: Path) -> None:
    counts = {"north": 12, "south": 12, "St. Mary": 2}
    experiment, text = made(write_hospitals(tmp_path / "data", counts), *NO_PATIENTS, *ORGANS_NAMED)
    assert "Its column hospital is the first folder of each path: St. Mary, north and south." in text
    assert 'If these are no hospitals: --source-column "".' in text
    assert "A class that no mask of a hospital shows is taken for one that it does not outline" in text
    settings = read_experiment(experiment).experiment
    partition: Any = settings.partition
    assert partition.images == "source"
    assert partition.lists == {site: tuple(sorted(OWN_ORGANS[site])) for site in OWN_ORGANS}
    # Also the hospital of two patients trains: the split has one of them at least in the training part.
    options = ("--set", "run.rounds=1", "--backend", "inline")
    ended = flwr_sim("run", experiment, "--out", tmp_path / "run", *options)
    assert ended.code == 0, ended.err
    assert "3 of 3 sites" in " ".join((ended.out + ended.err).split())


def test_a_hospital_whose_patients_all_go_to_other_parts_is_named_in_run_and_report(tmp_path: Path) -> None:
    counts = {"north": 12, "south": 12, "St. Mary": 2}
    experiment, _ = made(write_hospitals(tmp_path / "data", counts), *NO_PATIENTS, *ORGANS_NAMED)
    lists = 'partition.lists={"north" = ["Kidney", "Liver", "Spleen"], "south" = ["Pancreas"], "St. Mary" = ["Spleen"]}'
    spec: Any = read_experiment(experiment).experiment.data
    seeds = (seed for seed in range(200) if not trains(spec, seed, experiment.parent))
    more = ("--set", lists, "--set", f"data.split_seed={next(seeds)}", "--set", "run.rounds=1", "--backend", "inline")
    ended = flwr_sim("run", experiment, "--out", tmp_path / "run", *more)
    assert ended.code == 0, ended.err
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    for text in (ended.out + ended.err, page):
        assert "not in the training: St. Mary (" in " ".join(text.split())
        assert "data.split_seed" in text


def trains(spec: FolderDatasetSpec, seed: int, base: Path) -> bool:
    """Return True if St. Mary has a training image with this seed."""
    spec = spec.model_copy(update={"split_seed": seed})
    table = assign_split_parts(open_folder_label_table(spec, base), spec)
    return "train" in table.parts[table.sources == "St. Mary"]


def test_the_users_word_settles_which_folders_are_hospitals(tmp_path: Path) -> None:
    root = write_hospitals(tmp_path / "data", {"north": 8, "south": 8})
    experiment, _ = made(root, *NO_PATIENTS, *ORGANS_NAMED[:6], "--source-column", "")
    assert read_experiment(experiment).experiment.data.source_column is None  # type: ignore[union-attr]
    found = find_mask_folders(root, "")
    assert found is not None
    assert found.sources is None
    for name, numbered in {"north": "A1", "south": "A2"}.items():
        (root / name).rename(root / numbered)
    unsaid, said = find_mask_folders(root), find_mask_folders(root, "/1")
    assert unsaid is not None
    assert unsaid.sources is None  # numbered, as patients are
    assert said is not None
    assert said.sources is not None
    assert set(said.sources.hospitals.values()) == {"A1", "A2"}
    assert "--source-column /9" in fault_of(root, "/3").replace("/3", "/9")


def test_patients_that_two_hospitals_number_alike_are_two(tmp_path: Path) -> None:
    for hospital in ("north", "south"):
        layouts.write_cases(tmp_path / hospital, 3, VALUES)
    found = find_mask_folders(tmp_path)
    assert found is not None
    assert len(set(found.patients.values())) == 6


def test_descriptions_of_hospitals_that_contradict_one_another_are_refused(tmp_path: Path) -> None:
    layouts.write_nnunet(tmp_path / "north", 3, {"Liver": 1})
    layouts.write_nnunet(tmp_path / "south", 3, {"Spleen": 2})
    found = find_mask_folders(tmp_path)
    assert found is not None
    assert found.values == {1: "Liver", 2: "Spleen"}
    (tmp_path / "south" / "dataset.json").write_text(json.dumps({"labels": {"background": 0, "Spleen": 1}}))
    assert "1 = Liver at north and 1 = Spleen at south" in fault_of(tmp_path)


def test_unlike_voxels_get_a_spacing_that_the_file_names(tmp_path: Path) -> None:
    root = write_hospitals(tmp_path / "data", {"north": 12, "south": 12}, unlike=True)
    experiment, text = made(root, *NO_PATIENTS, *ORGANS_NAMED[:6])
    spec = read_experiment(experiment).experiment.data
    assert isinstance(spec, FolderDatasetSpec)
    # Half have voxels of 6 x 3 x 3 mm, half of 12 x 2 x 2 mm: the medians are 9 and 2.5 mm. The longest volumes are
    # 10 x 12 mm = 120 mm high, 24 x 3 mm = 72 mm wide: 13.3 and 28.8 voxels.
    assert spec.spacing == (9.0, 2.5, 2.5)
    assert spec.image_size == (14, 29, 29)
    assert "voxels of the files are unlike in size" in text
    assert "each volume is resized as a whole" not in text


def test_a_spacing_of_fine_voxels_is_made_coarser_from_the_finest_axis_on() -> None:
    volumes = [
        VolumeHeader((100, 512, 512), (5.0, 0.8, 0.8), "NIfTI"),
        VolumeHeader((300, 256, 256), (1.0, 0.6, 0.6), "NIfTI"),
    ]
    # 500 mm high in 48 voxels: none is smaller than 10.4 mm.
    assert choose_volume_spacing(volumes) == (10.4, 10.4, 10.4)
    assert choose_volume_size(volumes) == (48, 40, 40)
    assert choose_volume_spacing(volumes[:1] * 2) is None


def test_a_run_of_the_written_experiment_ends_with_a_report(tmp_path: Path) -> None:
    experiment, _ = made(layouts.write_nnunet(tmp_path / "data", COUNT, VALUES), *NO_PATIENTS)
    more = ("--set", "run.rounds=1")
    ended = flwr_sim("run", experiment, "--out", tmp_path / "run", "--backend", "inline", *more)
    assert ended.code == 0, ended.err
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert all(name in page for name in (*VALUES, "Dice"))


def test_a_second_call_with_the_answer_goes_on(tmp_path: Path) -> None:
    source = layouts.write_nnunet(tmp_path / "data", COUNT, VALUES)
    _, text = made(source, code=2)
    assert "--patient-column" in text
    made(source, *NO_PATIENTS)


# ---------------------------------------------------------------------- folders that do not fit


def fault_of(folder: Path, statement: str | None = None) -> str:
    with pytest.raises(BadInput) as refused:
        find_mask_folders(folder, statement)
    return str(refused.value)


def test_two_channels_of_one_image_are_refused_with_what_to_do(tmp_path: Path) -> None:
    layouts.write_nnunet(tmp_path, 3, VALUES)
    for number in range(3):
        layouts.write(tmp_path / "imagesTr" / f"case_{number:03}_0001.nii.gz", layouts.draw(1)[0][0])
    assert "_0000" in fault_of(tmp_path)


def test_a_mask_without_an_image_is_refused_by_name(tmp_path: Path) -> None:
    layouts.write_nnunet(tmp_path, 3, VALUES)
    (tmp_path / "imagesTr" / "case_001_0000.nii.gz").unlink()
    assert "labelsTr/case_001.nii.gz" in fault_of(tmp_path)


def test_links_to_folders_are_followed(tmp_path: Path) -> None:
    layouts.write_nnunet(tmp_path / "disk", 3, VALUES)
    (tmp_path / "data").mkdir()
    for name in ("imagesTr", "labelsTr", "dataset.json"):
        (tmp_path / "data" / name).symlink_to(tmp_path / "disk" / name)
    found = find_mask_folders(tmp_path / "data")
    assert found is not None
    assert len(found.images) == 3
    assert len(found.values) == 3


@pytest.mark.parametrize("stems", ["あいう", ("März 1", "März 2", "Mörz 1"), ("a b", "A.b", "ab")])
def test_names_of_any_letters_lead_from_image_to_mask(tmp_path: Path, stems: Sequence[str]) -> None:
    for stem in stems:
        layouts.write(tmp_path / "images" / f"{stem}.NII.GZ", layouts.draw(1)[0][0])
        layouts.write(tmp_path / "masks" / f"{stem}.NII.GZ", layouts.draw(1)[0][0])
    found = find_mask_folders(tmp_path)
    assert found is not None
    assert found.images == {f"images/{stem}.NII.GZ": {"": f"masks/{stem}.NII.GZ"} for stem in sorted(stems)}


def test_two_masks_of_one_image_are_refused_with_both_names(tmp_path: Path) -> None:
    layouts.write_nnunet(tmp_path, 3, VALUES)
    layouts.write(tmp_path / "segTr" / "case_001.nii.gz", layouts.draw(1)[0][0])
    fault = fault_of(tmp_path)
    assert (
        '"segTr/case_001.nii.gz" ("imagesTr/case_001_0000.nii.gz" has another mask, "labelsTr/case_001.nii.gz"' in fault
    )


def test_folders_of_images_and_masks_of_which_no_names_fit_are_no_classes(tmp_path: Path) -> None:
    for number in range(3):
        layouts.write(tmp_path / "images" / f"c{number:02}.nii.gz", layouts.draw(1)[0][0])
        layouts.write(tmp_path / "masks" / f"c{number}.nii.gz", layouts.draw(1)[0][0])
    assert "3 masks belong to no image" in fault_of(tmp_path)


def test_a_picture_beside_a_volume_of_its_name_is_refused(tmp_path: Path) -> None:
    layouts.write_nnunet(tmp_path, 3, VALUES)
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "imagesTr" / "case_001.png")
    assert "imagesTr/case_001.png and imagesTr/case_001_0000.nii.gz" in fault_of(tmp_path)


def test_masks_of_a_kind_that_is_not_read_are_refused(tmp_path: Path) -> None:
    layouts.write_nnunet(tmp_path, 2, VALUES)
    (tmp_path / "labelsTr" / "case_001.nrrd").write_bytes(b"NRRD0004")
    assert "NIfTI" in fault_of(tmp_path)


@pytest.mark.parametrize("labels", [{"background": 0, "whole tumour": [1, 2]}, {"background": 0, "ignore": 3}, ["a"]])
def test_labels_of_a_description_that_are_no_classes_are_refused(tmp_path: Path, labels: Any) -> None:
    layouts.write_nnunet(tmp_path, 2, VALUES)
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": labels}))
    assert "dataset.json" in fault_of(tmp_path)


def test_a_folder_without_masks_is_none_of_masks(tmp_path: Path) -> None:
    for name in ("ill", "well"):
        layouts.write(tmp_path / name / "1.nii.gz", layouts.draw(1)[0][0])
    assert find_mask_folders(tmp_path) is None


def test_parts_in_the_names_of_folders_are_the_split(tmp_path: Path) -> None:
    for part, seed in (("Tr", 1), ("Ts", 2)):
        for number, (voxels, areas) in enumerate(layouts.draw(3, seed)):
            layouts.write(tmp_path / f"images{part}" / f"{part}_{number}.nii.gz", voxels)
            layouts.write(tmp_path / f"labels{part}" / f"{part}_{number}.nii.gz", layouts.label_map(areas, VALUES))
    found = find_mask_folders(tmp_path)
    assert found is not None
    parts: Mapping[str, str] = found.parts
    assert sorted(parts.values()) == ["test"] * 3 + ["train"] * 3


def test_each_mask_of_a_table_is_read_once_to_recognise_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyclinic.studies.init import masks

    layouts.write_nnunet(tmp_path, 4, {"Liver": 1})
    pairs = [
        (tmp_path / "imagesTr" / f"case_{number:03}_0000.nii.gz", tmp_path / "labelsTr" / f"case_{number:03}.nii.gz")
        for number in range(4)
    ]
    files, read = list[Path](), masks.read_mask_values

    def counting(file: Path, *arguments: Any) -> Any:
        files.append(file)
        return read(file, *arguments)

    monkeypatch.setattr(masks, "read_mask_values", counting)
    assert all(masks.has_few_values(mask) for _, mask in pairs)
    survey = masks.survey_mask_column("mask", pairs)
    assert survey is not None
    assert list(survey.values) == [1]
    assert sorted(files) == [mask for _, mask in pairs]
    shifted = [(pairs[0][0], pairs[0][0].parent / "other.nii.gz")]
    layouts.write(shifted[0][1], np.zeros((10, 24, 23), np.uint8))
    assert masks.survey_mask_column("mask", shifted) is None  # it lies on another grid
