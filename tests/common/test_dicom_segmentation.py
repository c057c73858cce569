"""DICOM segmentations of predicted masks, read back by highdicom and pydicom."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pydicom
import pytest
import torch
from PIL import Image
from pydicom.uid import generate_uid

from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import build_network
from polyclinic.common.models.saved import load_model, save_model
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.prediction.dicom_segmentation import make_private_code, parse_segment_codes
from polyclinic.common.prediction.masks import MaskOptions, map_values_to_classes, number_classes, predict_masks
from polyclinic.common.vocabulary import VocabularyEntry
from polyclinic.data.base.spec import PictureRenderingOptions
from polyclinic.data.images.reading import DecodedImageFormat
from polyclinic.data.images.volumes import read_volume
from polyclinic.server.export.prediction import predict_to_csv
from tests.data.dicom_files import dicom
from tests.data.volume_files import multi_frame_file, write_nifti, write_series
from tests.missing_packages import hide_packages

CLASSES = ("Left kidney", "Léver \\ 肝")
SHAPE, SPACING = (9, 10, 8), (3.0, 2.0, 1.0)
SEGMENTATION_STORAGE = "1.2.840.10008.5.1.4.1.1.66.4"
OBLIQUE = [0.96, 0.28, 0.0, 0.0, 0.0, -1.0]
"""Directions of rows and columns of a coronal slice that lies 16 degrees askew."""


def facts(**more: Any) -> dict[str, Any]:
    """Elements that scanners write, of one patient, study and series."""
    return {
        "StudyInstanceUID": generate_uid(), "SeriesInstanceUID": generate_uid(), "FrameOfReferenceUID": generate_uid(),
        "PatientName": "Müller^Ä", "PatientID": "P-7", "PatientBirthDate": "19600101", "PatientSex": "F",
        "StudyID": "1", "StudyDate": "20260101", "StudyTime": "120000", "AccessionNumber": "A1", "Modality": "CT",
        "SpecificCharacterSet": "ISO_IR 192", "SOPClassUID": "1.2.840.10008.5.1.4.1.1.2", **more,
    }  # fmt: skip


def series(folder: Path, spacing: tuple[float, float, float] = SPACING, **more: Any) -> Path:
    """Write a series whose files have UIDs of their own, as those of a scanner do."""
    voxels = np.random.default_rng(0).integers(-500, 500, SHAPE, dtype=np.int16)
    for file in write_series(folder, voxels, spacing=spacing, **facts(**more)):
        header = pydicom.dcmread(file)
        header.SOPInstanceUID = header.file_meta.MediaStorageSOPInstanceUID = generate_uid()
        header.save_as(file)
    return folder


def model(folder: Path, task: str = "exclusive_segmentation", size: Any = SHAPE) -> Path:
    """A model of two classes, each of which it predicts in about half of all voxels of noise."""
    spec = {"architecture": "tiny_unet", "channels": 1, "image_size": size, "task": task}
    network = build_network(ModelSpec.model_validate(spec), CLASSES, seed=6).eval()
    sides = size if isinstance(size, tuple) else (size, size)
    noise = np.random.default_rng(1).integers(0, 255, (1, 1, *sides)).astype(np.float32)
    with torch.no_grad():
        network.head.weight[1] = -network.head.weight[0]
        network.head.bias.zero_()
        middle = network(torch.from_numpy(noise))[0, 0].median()
        network.head.bias[:] = torch.stack([-middle, middle])
    folder.mkdir()
    save_model(folder, network, label_contract_sha256="0" * 64)
    return folder


def segmented(tmp_path: Path, data: Path, codes: tuple[str, ...] = (), **of_model: Any) -> Path:
    out = tmp_path / "masks"
    pictures = predict_to_csv(model(tmp_path / "model", **of_model), data, out, None, codes)
    assert not pictures.without_segmentation
    return out


def read_places(file: Path) -> dict[int, np.ndarray]:
    """Segment number -> the places in mm (LPS) of all its pixels, sorted, from the object's own geometry alone."""
    found: dict[int, list[np.ndarray]] = {}
    image = pydicom.dcmread(file)
    pixels = image.pixel_array.reshape(-1, image.Rows, image.Columns)
    shared = image.SharedFunctionalGroupsSequence[0]
    across, down = np.array(shared.PlaneOrientationSequence[0].ImageOrientationPatient, float).reshape(2, 3)
    height, width = map(float, shared.PixelMeasuresSequence[0].PixelSpacing)
    for frame, own in zip(pixels, image.PerFrameFunctionalGroupsSequence, strict=True):
        start = np.array(own.PlanePositionSequence[0].ImagePositionPatient, float)
        rows, columns = np.nonzero(frame)
        places = start + rows[:, None] * height * down + columns[:, None] * width * across
        found.setdefault(int(own.SegmentIdentificationSequence[0].ReferencedSegmentNumber), []).append(places)
    return {number: order(np.concatenate(places)) for number, places in found.items()}


def order(places: np.ndarray) -> np.ndarray:
    rounded = np.round(places, 3) + 0.0
    return rounded[np.lexsort(rounded.T)]


def read_nifti_places(file: Path, value: int) -> np.ndarray:
    image: Any = nibabel.load(file)
    index = np.argwhere(np.asarray(image.dataobj) == value)
    return order((np.c_[index, np.ones(len(index))] @ image.affine.T)[:, :3] * [-1, -1, 1])


@pytest.mark.parametrize("directions", [[1, 0, 0, 0, 1, 0], [0, 1, 0, 0, 0, -1], OBLIQUE])
def test_a_segmentation_has_the_masks_voxels_in_the_same_places_of_the_patient(
    tmp_path: Path, directions: list[float]
) -> None:
    pytest.importorskip("highdicom", reason="the sr extra is not installed")
    normal = np.cross(directions[:3], directions[3:])
    data = series(tmp_path / "series" / "ct", ImageOrientationPatient=directions)
    for number, file in enumerate(sorted(data.iterdir())):
        header = pydicom.dcmread(file)
        header.ImagePositionPatient = list(np.round(normal * 3.0 * number, 6))
        header.save_as(file)
    out = segmented(tmp_path, tmp_path / "series")
    places = read_places(out / "ct.seg.dcm")
    assert sorted(places) == [1, 2]
    for number, of_segment in places.items():
        np.testing.assert_allclose(of_segment, read_nifti_places(out / "ct.nii.gz", number), atol=2e-3)


def test_highdicom_reads_the_mask_back_on_the_slices_of_the_series(tmp_path: Path) -> None:
    seg = pytest.importorskip("highdicom.seg", reason="the sr extra is not installed")
    data = series(tmp_path / "ct")
    out = segmented(tmp_path, data)
    files = sorted((pydicom.dcmread(file) for file in data.iterdir()), key=lambda f: float(f.ImagePositionPatient[2]))
    read = seg.segread(out / "ct.seg.dcm").get_pixels_by_source_instance(
        [file.SOPInstanceUID for file in files],
        combine_segments=True,
        ignore_spatial_locations=True,
        assert_missing_frames_are_empty=True,
    )
    image: Any = nibabel.load(out / "ct.nii.gz")
    assert image.shape == SHAPE[::-1]  # columns, rows, slices, as ITK writes a series
    assert np.array_equal(read, np.asarray(image.dataobj).transpose(2, 1, 0))
    assert read.max() == 2


def test_frames_of_one_file_are_segmented_in_their_order(tmp_path: Path) -> None:
    pytest.importorskip("highdicom", reason="the sr extra is not installed")
    voxels = np.random.default_rng(0).integers(-500, 500, SHAPE, dtype=np.int16)
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "it.dcm"
    file.write_bytes(multi_frame_file(voxels, [3, 0, 5, 8, 1, 2, 7, 4, 6], SPACING))
    header = pydicom.dcmread(file)
    for name, value in facts(SOPClassUID="1.2.840.10008.5.1.4.1.1.2.1").items():
        setattr(header, name, value)
    header.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].SliceThickness = SPACING[0]
    header.save_as(file)
    out = segmented(tmp_path, tmp_path / "data")
    for number, places in read_places(out / "it.seg.dcm").items():
        np.testing.assert_allclose(places, read_nifti_places(out / "it.nii.gz", number), atol=1e-3)


def test_patient_study_and_references_are_those_of_the_source(tmp_path: Path) -> None:
    pytest.importorskip("highdicom", reason="the sr extra is not installed")
    data = series(tmp_path / "ct")
    out = segmented(tmp_path, data, ("Left kidney=SCT:18639004:Left kidney",))
    image, source = pydicom.dcmread(out / "ct.seg.dcm"), pydicom.dcmread(next(data.iterdir()))
    assert (image.SOPClassUID, image.Modality, image.SegmentationType) == (SEGMENTATION_STORAGE, "SEG", "BINARY")
    for name in ("PatientID", "PatientName", "PatientBirthDate", "PatientSex", "StudyInstanceUID"):
        assert image[name].value == source[name].value
    assert image.FrameOfReferenceUID == source.FrameOfReferenceUID
    (referenced,) = image.ReferencedSeriesSequence
    assert referenced.SeriesInstanceUID == source.SeriesInstanceUID != image.SeriesInstanceUID
    assert {each.ReferencedSOPInstanceUID for each in referenced.ReferencedInstanceSequence} == {
        pydicom.dcmread(file).SOPInstanceUID for file in data.iterdir()
    }
    first, second = image.SegmentSequence
    assert (first.SegmentLabel, second.SegmentLabel) == ("Left kidney", "Léver / 肝")
    codes = [each.SegmentedPropertyTypeCodeSequence[0] for each in (first, second)]
    assert (codes[0].CodingSchemeDesignator, codes[0].CodeValue) == ("SCT", "18639004")
    assert (codes[1].CodingSchemeDesignator, codes[1].CodeValue) == (
        "99POLYCLINIC",
        make_private_code(CLASSES[1]).value,
    )
    assert {each.SegmentAlgorithmType for each in (first, second)} == {"AUTOMATIC"}
    assert not image.get("ContentCreatorName")
    assert (out / "ct.seg.dcm").stat().st_mode & 0o077 == 0


def test_what_the_source_does_not_say_of_the_patient_stays_empty(tmp_path: Path) -> None:
    pytest.importorskip("highdicom", reason="the sr extra is not installed")
    names = ("PatientName", "PatientID", "PatientBirthDate", "PatientSex", "StudyID", "AccessionNumber", "StudyDate")
    data = series(tmp_path / "ct", **dict.fromkeys(names))
    image = pydicom.dcmread(segmented(tmp_path, data) / "ct.seg.dcm")
    assert [image[name].value or "" for name in names] == [""] * len(names)
    patient = [element.keyword for element in image if element.tag.group == 0x0010 and element.value]
    assert patient == []


def test_classes_that_overlap_are_segments_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("highdicom", reason="the sr extra is not installed")
    out = segmented(tmp_path, series(tmp_path / "ct"), task="segmentation")
    places = read_places(out / "ct.seg.dcm")
    for number, name in enumerate(("Left kidney", "Léver _ 肝"), start=1):
        np.testing.assert_allclose(places[number], read_nifti_places(out / f"ct.{name}.nii.gz", 255), atol=1e-3)


def test_a_single_dicom_picture_is_segmented(tmp_path: Path) -> None:
    pytest.importorskip("highdicom", reason="the sr extra is not installed")
    pixels = np.random.default_rng(2).integers(0, 4000, (20, 30), dtype=np.uint16)
    more = {"FrameOfReferenceUID": None, "Modality": "CR", "SOPClassUID": "1.2.840.10008.5.1.4.1.1.1"}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.dcm").write_bytes(dicom(pixels, **facts(**more)))
    out = segmented(tmp_path, tmp_path / "data", size=16)
    image = pydicom.dcmread(out / "a.seg.dcm")
    assert (image.Rows, image.Columns) == (20, 30)

    with Image.open(out / "a.png") as mask:
        values = np.asarray(mask)
    frames = image.pixel_array.reshape(-1, 20, 30)
    numbers = [
        int(each.SegmentIdentificationSequence[0].ReferencedSegmentNumber)
        for each in image.PerFrameFunctionalGroupsSequence
    ]
    for number, frame in zip(numbers, frames, strict=True):
        assert np.array_equal(frame == 1, values == number)


def test_a_source_that_is_no_dicom_file_is_named_with_what_to_take_instead(tmp_path: Path) -> None:
    pytest.importorskip("highdicom", reason="the sr extra is not installed")
    (tmp_path / "data").mkdir()
    write_nifti(tmp_path / "data" / "v.nii.gz", np.zeros(SHAPE, np.int16) + np.arange(8, dtype=np.int16), SPACING)
    series(tmp_path / "data" / "ct")
    out = tmp_path / "masks"
    pictures = predict_to_csv(model(tmp_path / "model"), tmp_path / "data", out, None, ())
    assert list(pictures.without_segmentation) == ["v.nii.gz"]
    assert "NIfTI" in pictures.without_segmentation["v.nii.gz"]
    assert (out / "v.nii.gz").is_file()
    assert (out / "ct.seg.dcm").is_file()


def test_a_header_without_what_a_segmentation_needs_is_named(tmp_path: Path) -> None:
    pytest.importorskip("highdicom", reason="the sr extra is not installed")
    data = series(tmp_path / "ct", StudyInstanceUID=None)
    pictures = predict_to_csv(model(tmp_path / "model"), data, tmp_path / "masks", None, ())
    assert "StudyInstanceUID" in pictures.without_segmentation["ct"]


@pytest.mark.parametrize(
    "text", ["Liver=SCT:1:Liver", "Left kidney=SCT:1", "Left kidney", "Left kidney=SCT:12345678901234567:Kidney"]
)
def test_what_is_no_code_of_a_class_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        parse_segment_codes([text], CLASSES)


def test_without_highdicom_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, data = model(tmp_path / "model"), series(tmp_path / "ct")
    hide_packages(monkeypatch, "highdicom")
    with pytest.raises(BadInput) as refused:
        predict_to_csv(folder, data, tmp_path / "masks", None, ())
    assert "install 'polyclinic[sr]'" in str(refused.value)
    assert not (tmp_path / "masks").exists()


def test_segmentations_of_a_classifier_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    network = build_network(ModelSpec(architecture="tiny_cnn", image_size=16, channels=1), CLASSES, seed=0)
    save_model(folder, network, label_contract_sha256="")
    with pytest.raises(BadInput, match="masks"):
        predict_to_csv(folder, series(tmp_path / "ct"), tmp_path / "out", None, ())


# ---------------------------------------------------------------------- numbers of classes


@pytest.mark.parametrize(
    ("values", "numbers"),
    [
        ({}, {"Kidney": 1, "Liver": 2, "Spleen": 3}),
        ({"Spleen": 1, "Liver": 6}, {"Kidney": 7, "Liver": 6, "Spleen": 1}),
        ({"Aorta": 9, "Liver": 4}, {"Kidney": 10, "Liver": 4, "Spleen": 11}),
    ],
)
def test_a_class_has_the_number_of_the_users_masks_and_others_the_next(
    values: Mapping[str, int], numbers: Mapping[str, int]
) -> None:
    assert number_classes(("Kidney", "Liver", "Spleen"), values) == numbers


def test_words_of_a_hospital_are_followed_to_the_class_and_two_of_one_class_have_no_value() -> None:
    vocabulary = {"Kidney": VocabularyEntry(synonyms=("Left kidney", "Right kidney")), "Liver": VocabularyEntry()}
    values = {"Leber": 4, "Left kidney": 2, "Right kidney": 3}
    assert map_values_to_classes(values, vocabulary, {"Leber": "Liver"}) == {"Liver": 4}


def test_label_maps_have_the_values_of_the_runs_own_masks(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    values = {CLASSES[1]: 3, "Aorta": 8}
    network = load_model(folder)

    form = DecodedImageFormat(SHAPE, False, "pad", PictureRenderingOptions(spacing=SPACING))
    data = series(tmp_path / "ct")
    predict_masks(network, CLASSES, data, form, tmp_path / "masks", MaskOptions(values))
    assert json.loads((tmp_path / "masks" / "classes.json").read_text()) == {CLASSES[0]: 9, CLASSES[1]: 3}
    assert set(np.unique(read_volume(tmp_path / "masks" / "ct.nii.gz").voxels)) <= {0, 3, 9}
