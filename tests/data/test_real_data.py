"""Every data set of ../shared/data is read as its README says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from polyclinic.data.base.image_set import DatasetSplits
from polyclinic.data.base.spec import DataSpec, NihDatasetSpec
from polyclinic.data.images.reading import DecodedImageFormat, decode_picture, fit_picture_to_format
from polyclinic.data.load import find_dataset_faults, load_dataset, open_label_table
from tests.data.conftest import check_disjoint, long
from tests.data.dicom_files import decode_dicom_pixels

ADAPTER: TypeAdapter[DataSpec] = TypeAdapter(DataSpec)

NIH = ["Atelectasis", "Cardiomegaly", "Effusion", "Infiltration", "Mass", "Nodule", "Pneumonia", "Pneumothorax"]
NIH += ["Consolidation", "Edema", "Emphysema", "Fibrosis", "Pleural_Thickening", "Hernia"]
ICH = ["Intraventricular", "Intraparenchymal", "Subarachnoid", "Epidural", "Subdural"]
HAM = ["akiec", "bcc", "bkl", "df", "mel", "nv", "vasc"]
MEDNIST = ["AbdomenCT", "BreastMRI", "CXR", "ChestCT", "Hand", "HeadCT"]
BUSI = ["benign", "malignant", "normal"]
NPZ: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "nih_cxr14/nih_cxr14_28.npz": ({"classes": NIH, "patient_key": "patient", "source_key": "source"}, 1362, 266, 365),
    "nih_cxr14/nih_cxr14_64.npz": ({"classes": NIH, "patient_key": "patient"}, 1362, 266, 365),
    "kermany_28.npz": ({"classes": ["normal", "bacterial", "viral"], "patient_key": "patient"}, 4634, 582, 624),
    "pneumoniamnist.npz": ({}, 4708, 524, 624),
    "ct_ich_brain_64.npz": ({"classes": ICH, "patient_key": "patient"}, 1774, 209, 488),
    "ham10000_28.npz": ({"classes": HAM, "patient_key": "lesion", "source_key": "center"}, 4189, 599, 1196),
    "busi_28.npz": ({"classes": BUSI}, 547, 78, 155),
    "mednist_28.npz": ({"classes": MEDNIST}, 8400, 1200, 2400),
    "mnist.npz": ({}, 54000, 6000, 10000),
    "cifar10_jpeg.npz": ({"train_limit": 300, "validation_fraction": 0.01}, 300, 250, 5000),
}


def read(base: Path, **spec: Any) -> DatasetSplits:
    return load_dataset(ADAPTER.validate_python(spec), base)


def sizes(splits: DatasetSplits) -> list[int]:
    return [len(part) for part in splits.parts]


LARGE = ("nih_cxr14/nih_cxr14_64.npz", "kermany_28.npz", "mednist_28.npz", "mnist.npz", "cifar10_jpeg.npz")


@pytest.mark.parametrize("path", [*(path for path in NPZ if path not in LARGE), *long(LARGE)])
def test_each_npz_file_has_the_images_its_readme_counts(real_data: Path, path: str) -> None:
    settings, *counts = NPZ[path]
    splits = read(real_data, kind="npz", path=path, **settings)
    assert sizes(splits) == counts
    check_disjoint(part.patients.tolist() for part in splits.parts)
    assert splits.train.images.std() > 10
    assert set(np.unique(splits.train.labels)) == {0.0, 1.0}


def test_ham10000_comes_from_four_centres_in_colour(real_data: Path) -> None:
    train = read(real_data, kind="npz", path="ham10000_28.npz", **NPZ["ham10000_28.npz"][0]).train
    assert (len(set(train.sources.tolist())), train.channels) == (4, 3)


def test_cifar10_pictures_are_decoded_in_colour(real_data: Path) -> None:
    splits = read(real_data, kind="npz", path="cifar10_jpeg.npz", train_limit=40, test_limit=40, image_size=16)
    assert splits.train.images.shape == (40, 16, 16, 3)
    assert splits.train.labels.sum(axis=0).tolist() == [4.0] * 10  # CIFAR-10 is balanced, so is its subset


NIH_FOLDER = {
    "kind": "nih",
    "images": "nih_cxr14/images",
    "labels": "nih_cxr14/Data_Entry_2017_v2020.csv.gz",
    "image_size": 32,
}


def test_the_nih_folder_is_read_with_the_official_table(real_data: Path) -> None:
    splits = read(real_data, **NIH_FOLDER)
    assert sizes(splits) == [667, 151, 182]
    assert splits.train.missing == 112_120 - 1000
    check_disjoint(part.patients.tolist() for part in splits.parts)
    # 00000001_002.png is "Cardiomegaly|Effusion"; patient 1 has three images, all on one side.
    part = next(part for part in splits.parts if "1" in part.patients)
    third = part.labels[np.flatnonzero(part.patients == "1")[2]]
    assert [part.class_names[place] for place in np.flatnonzero(third)] == ["Cardiomegaly", "Pleural Effusion"]


@pytest.mark.long
def test_one_view_of_nih_is_kept_without_moving_patients_between_parts(real_data: Path) -> None:
    every = open_label_table(NihDatasetSpec.model_validate(NIH_FOLDER), real_data)
    frontal = open_label_table(NihDatasetSpec.model_validate({**NIH_FOLDER, "view": "PA"}), real_data)
    part_of = dict(zip(every.files, every.parts, strict=True))
    assert 0 < len(frontal.files) < len(every.files)
    assert all(part_of[file] == part for file, part in zip(frontal.files, frontal.parts, strict=True))


@pytest.mark.long
def test_full_size_nih_radiographs_are_read_from_their_own_folder(real_data: Path) -> None:
    splits = read(real_data, **{**NIH_FOLDER, "images": "nih_cxr14/images_1024"})
    assert sum(sizes(splits)) == 14


@pytest.mark.long
def test_the_kermany_folder_keeps_its_official_test_part(real_data: Path) -> None:
    settings = {
        "kind": "folder",
        "images": "kermany_cxr_224/images",
        "labels": "kermany_cxr_224/labels.csv",
        "image_column": "image",
        "label_columns": ["Normal", "Bacterial pneumonia", "Viral pneumonia"],
        "patient_column": "patient",
        "split_column": "split",
        "image_size": 28,
    }
    assert find_dataset_faults(ADAPTER.validate_python(settings), real_data) == []
    splits = read(real_data, **settings)
    assert sizes(splits) == [4634, 582, 624]
    assert splits.train.labels.sum(axis=1).tolist() == [1.0] * 4634


DICOM_SHAPES = {
    "CT1_rle.dcm": (512, 512),
    "CT_abdomen_explicit_be.dcm": (512, 512),
    "CT_small.dcm": (128, 128),
    "chest_CR_RG1_j2k_lossy.dcm": (1955, 1841),
}


@pytest.mark.parametrize("name", DICOM_SHAPES)
def test_each_dicom_file_is_decoded(real_data: Path, name: str) -> None:
    pixels = decode_dicom_pixels((real_data / "dicom" / name).read_bytes())
    assert pixels.shape == DICOM_SHAPES[name]
    assert pixels.max() - pixels.min() > 200


def test_lungs_are_darker_than_the_spine_in_the_inverted_chest_radiograph(real_data: Path) -> None:
    data = (real_data / "dicom" / "chest_CR_RG1_j2k_lossy.dcm").read_bytes()
    image = fit_picture_to_format(decode_picture(data), DecodedImageFormat(64, color=False, resize="stretch"))
    assert image[10:25, 18:24].mean() < image[10:25, 30:34].mean() - 30


def test_air_is_black_in_the_windowed_ct(real_data: Path) -> None:
    pixels = decode_dicom_pixels((real_data / "dicom" / "CT_abdomen_explicit_be.dcm").read_bytes())
    assert pixels[:40].max() == 0
    assert pixels.max() == 255
