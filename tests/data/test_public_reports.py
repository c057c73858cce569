"""Messy volumes and masks of public issue reports: each is read rightly, or refused by name; none passes in silence.

A report is named by its repository and issue. The files are drawn: what the report says is wrong with its own.
"""

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pydicom
import pytest
from nibabel.orientations import axcodes2ornt, io_orientation, ornt_transform

from polyclinic.common.errors import BadInput
from polyclinic.data.base.image_set import ImageSet, concatenate_image_sets
from polyclinic.data.base.spec import FolderDatasetSpec
from polyclinic.data.images.volumes import read_volume
from polyclinic.data.load import load_dataset
from tests.data.volume_files import write_nifti, write_series

SHAPE, SPACING = (6, 10, 8), (3.0, 2.0, 1.0)
AFFINE = np.diag([1.0, 2.0, 3.0, 1.0])


def voxels() -> np.ndarray:
    return np.random.default_rng(4).integers(-500, 500, SHAPE, dtype=np.int16)


def label_map() -> np.ndarray:
    """A liver in one corner of an image without any symmetry, and a spleen of two voxels."""
    values = np.zeros(SHAPE, np.uint8)
    values[1:3, 2:6, 1:3] = 1
    values[4, 7, 5:7] = 7
    return values


def stored(values: np.ndarray) -> np.ndarray:
    """Voxels ``(depth, height, width)`` in the order of a NIfTI file in RAS+."""
    return values[:, ::-1, ::-1].transpose(2, 1, 0)


def save(path: Path, values: np.ndarray, affine: np.ndarray = AFFINE) -> Any:
    image: Any = nibabel.Nifti1Image(stored(values), affine)
    nibabel.save(image, path)
    return image


def patch(path: Path, place: int, content: bytes) -> None:
    """Overwrite bytes of the header of an uncompressed or compressed file."""
    packed = path.read_bytes()
    data = bytearray(gzip.decompress(packed) if packed[:2] == b"\x1f\x8b" else packed)
    data[place : place + len(content)] = content
    path.write_bytes(gzip.compress(bytes(data)) if packed[:2] == b"\x1f\x8b" else bytes(data))


def turn(path: Path, codes: str) -> None:
    image: Any = nibabel.load(path)
    image = image.as_reoriented(ornt_transform(io_orientation(image.affine), axcodes2ornt(tuple(codes))))
    nibabel.save(nibabel.Nifti1Image(np.array(image.dataobj), image.affine), path)


@dataclass(frozen=True)
class Report:
    """A public report, what is wrong with its file, and the words of the refusal; empty if the file is read."""

    source: str
    spoil: Callable[[Path], object]
    refusal: str = ""


def volume_file(root: Path) -> Path:
    return root / "v.nii.gz"


def mask_file(root: Path) -> Path:
    return root / "m.nii.gz"


# ---------------------------------------------------------------------- masks


def beside(root: Path) -> None:
    affine = AFFINE.copy()
    affine[:3, 3] = [1.5, 90.8, 345.6]
    save(mask_file(root), label_map(), affine)


def mirrored_direction(root: Path) -> None:
    affine = AFFINE.copy()
    affine[1, 1] = -2.0
    save(mask_file(root), label_map(), affine)


def rounded_direction(root: Path) -> None:
    affine = AFFINE.copy()
    affine[:3, :3] += 2e-8 * np.ones((3, 3))
    save(mask_file(root), label_map(), affine)


def scaled_by_slope(slope: float) -> Callable[[Path], None]:
    def spoil(root: Path) -> None:
        patch(mask_file(root), 112, np.array([slope, 0.0], "<f4").tobytes())

    return spoil


def write_values(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    return lambda root: save(mask_file(root), change(label_map()))


def one_slice_more(root: Path) -> None:
    save(mask_file(root), np.concatenate([label_map(), np.zeros((1, 10, 8), np.uint8)]))


def other_spacing(root: Path) -> None:
    save(mask_file(root), label_map()[::2], np.diag([1.0, 2.0, 6.0, 1.0]))


def transposed(root: Path) -> None:
    image: Any = nibabel.Nifti1Image(stored(label_map()).transpose(1, 0, 2), np.diag([2.0, 1.0, 3.0, 1.0]))
    nibabel.save(image, mask_file(root))


def in_four_dimensions(root: Path) -> None:
    channels = np.stack([stored(label_map()) == value for value in (1, 7)], axis=-1).astype(np.uint8)
    nibabel.save(nibabel.Nifti1Image(channels, AFFINE), mask_file(root))


def as_dicom(root: Path) -> None:
    first = write_series(root / "rt", label_map().astype(np.int16))[0]
    mask_file(root).write_bytes(first.read_bytes())


MASKS = {
    "origin mismatch": Report("MIC-DKFZ/nnUNet#2551", beside, "mm beside its volume"),
    "direction mismatch": Report("MIC-DKFZ/nnUNet#1669", mirrored_direction, "mm beside its volume"),
    "directions that differ in the eighth digit": Report("MIC-DKFZ/nnUNet#1287", rounded_direction),
    "mask in LPS, image in RAS": Report("TorchIO-project/torchio#1300", lambda root: turn(mask_file(root), "LPS")),
    "axes permuted in the mask": Report("frankkramer-lab/MIScnn#104", lambda root: turn(mask_file(root), "SPL")),
    "axes permuted without the affine": Report("bowang-lab/MedSAM#295", transposed, "voxels, and its volume"),
    "one slice more": Report("TorchIO-project/torchio#949", one_slice_more, "7 x 10 x 8 voxels, and its volume"),
    "other spacing": Report("TorchIO-project/torchio#354", other_spacing, "3 x 10 x 8 voxels, and its volume"),
    "a channel for each class": Report("MIC-DKFZ/nnUNet#2925", in_four_dimensions, "only three axes are read"),
    "255 where 1 is named": Report(
        "MIC-DKFZ/nnUNet#1247", write_values(lambda values: values * np.uint8(255)), "data.mask_values"
    ),
    "numbers with gaps": Report(
        "MIC-DKFZ/nnUNet#2500", write_values(lambda values: np.where(values == 7, 5, values).astype(np.uint8)), '"5"'
    ),
    "Hounsfield units in place of labels": Report(
        "MIC-DKFZ/nnUNet#1007", write_values(lambda values: values.astype(np.int16) - 1024), "data.mask_values"
    ),
    "soft borders": Report(
        "spinalcordtoolbox/spinalcordtoolbox#4507",
        write_values(lambda values: values * np.float32(0.93)),
        "whole numbers",
    ),
    "values mixed by interpolation": Report(
        "voxelmorph/voxelmorph#160",
        write_values(lambda values: np.where(values == 7, 3.5, values).astype(np.float32)),
        "3.5",
    ),
    "no number": Report(
        "MIC-DKFZ/nnUNet#1678",
        write_values(lambda values: np.where(values == 7, np.nan, values).astype(np.float32)),
        "nan",
    ),
    "slope of NaN": Report("nipreps/fmriprep#2507", scaled_by_slope(float("nan"))),
    "slope of 0": Report("JuliaNeuroscience/NIfTI.jl#66", scaled_by_slope(0.0)),
    "slope of 1 / 255": Report("nipy/nibabel#480", scaled_by_slope(1 / 255), "whole numbers"),
    "a DICOM object": Report("MIC-DKFZ/nnUNet#1669", as_dicom, "DICOM file"),
}


def read(root: Path) -> ImageSet:
    names = f"{volume_file(root).name},{mask_file(root).name}"
    (root / "t.csv").write_text(f"volume,mask,patient,part\n{names},P,train\n")
    settings = {
        "kind": "folder", "labels": "t.csv", "images": ".", "image_column": "volume", "patient_column": "patient",
        "split_column": "part", "image_size": SHAPE, "spacing": SPACING, "mask_column": "mask",
        "mask_values": {"Liver": 1, "Spleen": 7}, "validation_fraction": 0,
    }  # fmt: skip
    return concatenate_image_sets(load_dataset(FolderDatasetSpec.model_validate(settings), root).parts)


def check_right(root: Path) -> None:
    images = read(root)
    assert images.masks is not None
    areas = images.masks.read_class_areas(np.array([0]), ("Liver", "Spleen"))[0]
    assert np.array_equal(areas, np.stack([label_map() == 1, label_map() == 7]))


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_a_public_report_is_right_or_refused_by_name(tmp_path: Path, name: str) -> None:
    save(volume_file(tmp_path), voxels())
    save(mask_file(tmp_path), label_map())
    check_right(tmp_path)
    MASKS[name].spoil(tmp_path)
    if not MASKS[name].refusal:
        check_right(tmp_path)
        return
    with pytest.raises(BadInput) as refused:
        read(tmp_path)
    (fault,) = refused.value.faults
    assert fault.where == "data.mask_column"
    assert '"v.nii.gz"' in fault.problem
    assert MASKS[name].refusal in fault.problem


def test_an_empty_mask_is_a_patient_without_the_organs_and_is_counted(tmp_path: Path) -> None:
    save(volume_file(tmp_path), voxels())
    save(mask_file(tmp_path), np.zeros(SHAPE, np.uint8))
    images = read(tmp_path)
    assert images.labels.tolist() == [[0, 0]]
    assert any("1 image has an empty mask" in note for note in images.notes)


# ---------------------------------------------------------------------- volumes


def set_forms(path: Path, sform: np.ndarray | None, qform: np.ndarray | None) -> None:
    image: Any = nibabel.Nifti1Image(stored(voxels()), AFFINE)
    for form, place in ((sform, image.set_sform), (qform, image.set_qform)):
        place(form, code=0 if form is None else 1)
    nibabel.save(image, path)


def forms(sform: np.ndarray | None, qform: np.ndarray | None) -> Callable[[Path], None]:
    return lambda root: set_forms(volume_file(root), sform, qform)


def slightly_sheared(root: Path) -> None:
    affine = AFFINE.copy()
    affine[0, 1] = 1e-3
    save(volume_file(root), voxels(), affine)


def as_header_says(root: Path, place: int, content: bytes) -> None:
    patch(volume_file(root), place, content)


def sheared(root: Path) -> None:
    affine = AFFINE.copy()
    affine[0, 1] = 0.7
    save(volume_file(root), voxels(), affine)


MIRRORED = AFFINE @ np.diag([-1.0, 1.0, 1.0, 1.0])
VOLUMES = {
    "axes in the order of slices": Report("neheller/kits19#9", lambda root: turn(volume_file(root), "SAR")),
    "slices first, as KiTS has them": Report("neheller/kits21#57", lambda root: turn(volume_file(root), "IPL")),
    "some volumes turned": Report("kaiko-ai/eva#658", lambda root: turn(volume_file(root), "LPS")),
    "orientation that differs between volumes": Report(
        "MIC-DKFZ/nnUNet#2897", lambda root: turn(volume_file(root), "RSP")
    ),
    "qform alone": Report("simnibs/simnibs#448", forms(None, AFFINE)),
    "sform alone": Report("nipy/nibabel#863", forms(AFFINE, None)),
    "qform and sform that mirror one another": Report(
        "nipreps/fmriprep#2281", forms(AFFINE, MIRRORED), "qform and sform give its axes other directions"
    ),
    "qform and sform nearly alike": Report(
        "spinalcordtoolbox/spinalcordtoolbox#4689", forms(AFFINE, AFFINE + np.diag([1e-5, 0, 0, 0]))
    ),
    "qfac of 0": Report("nipy/nibabel#1394", lambda root: as_header_says(root, 76, np.array([0.0], "<f4").tobytes())),
    "directions that are not quite orthonormal": Report("SimpleITK/SimpleITK#1433", slightly_sheared),
    "sheared directions": Report("InsightSoftwareConsortium/ITK#3994", sheared, "sheared affine"),
    "lengths in micrometres": Report(
        "nipreps/fmriprep#786", lambda root: as_header_says(root, 123, b"\x03"), "micrometres"
    ),
    "lengths in metres": Report(
        "MagneticResonanceImaging/MRIReco.jl#126", lambda root: as_header_says(root, 123, b"\x01"), "metres"
    ),
    "unknown unit": Report("icometrix/dicom2nifti#82", lambda root: as_header_says(root, 123, b"\x00")),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", VOLUMES)
def test_a_volume_of_a_public_report_is_right_or_refused_by_name(tmp_path: Path, name: str) -> None:
    save(volume_file(tmp_path), voxels())
    VOLUMES[name].spoil(tmp_path)
    if VOLUMES[name].refusal:
        with pytest.raises(ValueError, match=VOLUMES[name].refusal):
            read_volume(volume_file(tmp_path))
        return
    volume = read_volume(volume_file(tmp_path))
    assert np.array_equal(volume.voxels, voxels())
    np.testing.assert_allclose(volume.spacing, SPACING, rtol=1e-4)


# ---------------------------------------------------------------------- series


def numbered_against_position(files: list[Path]) -> None:
    for number, file in enumerate(files):
        header = pydicom.dcmread(file)
        header.InstanceNumber = len(files) - number
        header.save_as(file)


def without_numbers(files: list[Path]) -> None:
    for file in files:
        header = pydicom.dcmread(file)
        if "InstanceNumber" in header:
            del header.InstanceNumber
        header.save_as(file)


def thinner_above(files: list[Path]) -> None:
    """Slices of 3 mm below, and of 7.5 mm above, as a head CT of two parts has them."""
    for number, file in enumerate(files):
        header = pydicom.dcmread(file)
        header.ImagePositionPatient = [0, 0, 3.0 * min(number, 3) + 7.5 * max(number - 3, 0)]
        header.save_as(file)


SERIES: dict[str, tuple[str, Callable[[list[Path]], None], str]] = {
    "instance numbers against the positions": ("rordenlab/dcm2niix#786", numbered_against_position, ""),
    "no instance numbers": ("icometrix/dicom2nifti#7", without_numbers, ""),
    "names without an order": ("Slicer/Slicer#7730", lambda files: None, ""),
    "a slice that is missing": ("rordenlab/dcm2niix#539", lambda files: files[2].unlink(), "slices are missing"),
    "two slice distances": ("rordenlab/dcm2niix#22", thinner_above, "slices are missing"),
}


@pytest.mark.parametrize("name", SERIES)
def test_a_series_of_a_public_report_is_right_or_refused_by_name(tmp_path: Path, name: str) -> None:
    _, spoil, refusal = SERIES[name]
    spoil(write_series(tmp_path / "s", voxels(), spacing=SPACING))
    if refusal:
        with pytest.raises(ValueError, match=refusal):
            read_volume(tmp_path / "s")
        return
    assert np.array_equal(read_volume(tmp_path / "s").voxels, voxels())


def test_more_than_thirty_public_reports_are_tried() -> None:
    sources = [report.source for report in (*MASKS.values(), *VOLUMES.values())]
    sources += [source for source, _, _ in SERIES.values()]
    assert len(set(sources)) > 30


def test_a_mask_fits_a_volume_that_was_written_in_any_order(tmp_path: Path) -> None:
    write_nifti(volume_file(tmp_path), voxels(), SPACING)
    write_nifti(mask_file(tmp_path), label_map(), SPACING)
    turn(volume_file(tmp_path), "PIR")
    check_right(tmp_path)
