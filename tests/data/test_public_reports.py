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
from tests.data.volume_files import multi_frame_file, write_nifti, write_series

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


def with_ignored(value: int, kind: type[np.integer]) -> Callable[[Path], None]:
    """Write a value for voxels to ignore, which is no class, into one corner."""

    def spoil(root: Path) -> None:
        values = label_map().astype(kind)
        values[0, 0, 0] = value
        save(mask_file(root), values)

    return spoil


def in_colours(root: Path) -> None:
    values = np.zeros(stored(label_map()).shape, [(name, "u1") for name in "RGB"])
    values["R"] = stored(label_map())
    nibabel.save(nibabel.Nifti1Image(values, AFFINE), mask_file(root))


def in_64_bits(plus: int) -> Callable[[Path], None]:
    """Write whole numbers of 64 bits; that of the spleen is 7 in its lower bits alone if ``plus`` is not 0."""

    def spoil(root: Path) -> None:
        values = label_map().astype(np.int64)
        values[values == 7] += plus
        nibabel.save(nibabel.Nifti1Image(stored(values), AFFINE, dtype=np.int64), mask_file(root))

    return spoil


def big_endian(root: Path) -> None:
    image: Any = nibabel.Nifti1Image(stored(label_map()).astype(">i2"), AFFINE)
    nibabel.save(nibabel.Nifti1Image(image.dataobj, AFFINE, image.header.as_byteswapped(">")), mask_file(root))


def with_more_axes(count: int) -> Callable[[Path], None]:
    def spoil(root: Path) -> None:
        values = stored(label_map()).reshape(*stored(label_map()).shape, *[1] * count)
        nibabel.save(nibabel.Nifti1Image(values, AFFINE), mask_file(root))

    return spoil


def linked(root: Path) -> None:
    for file in (volume_file(root), mask_file(root)):
        (root / "elsewhere").mkdir(exist_ok=True)
        target = file.rename(root / "elsewhere" / f"of_{file.stem}")
        file.symlink_to(target)


def linked_to_nothing(root: Path) -> None:
    mask_file(root).unlink()
    mask_file(root).symlink_to("nowhere")


def cut_off(root: Path) -> None:
    mask_file(root).write_bytes(mask_file(root).read_bytes()[:-9])


def unpacked(root: Path) -> None:
    """Not packed, and still called .gz."""
    for file in (volume_file(root), mask_file(root)):
        file.write_bytes(gzip.decompress(file.read_bytes()))


def in_two_parts(root: Path) -> None:
    """Packed in two parts, as programs that pack in several threads write it."""
    content = gzip.decompress(mask_file(root).read_bytes())
    mask_file(root).write_bytes(gzip.compress(content[:400]) + gzip.compress(content[400:]))


UNREPORTED = "no report that we know"
MASKS = {
    "colours": Report(UNREPORTED, in_colours, "no single numbers"),
    "255 for voxels to ignore": Report(UNREPORTED, with_ignored(255, np.uint8), '"255"'),
    "-1 for voxels to ignore": Report(UNREPORTED, with_ignored(-1, np.int8), '"-1"'),
    "a value that is another in 8 bits": Report(UNREPORTED, with_ignored(256 + 7, np.int16), '"263"'),
    "a value that is another in 32 bits": Report(UNREPORTED, in_64_bits(1 << 32), "data.mask_values"),
    "whole numbers of 64 bits": Report(UNREPORTED, in_64_bits(0)),
    "big-endian numbers": Report(UNREPORTED, big_endian),
    "two more axes of one": Report(UNREPORTED, with_more_axes(2)),
    "an axis of no voxel": Report(UNREPORTED, lambda root: patch(mask_file(root), 44, b"\0\0"), "an axis has no voxel"),
    "an empty file": Report(UNREPORTED, lambda root: mask_file(root).write_bytes(b""), "empty"),
    "a packed file that is cut off": Report(UNREPORTED, cut_off, "damaged or cut off"),
    "a packed file in two parts": Report(UNREPORTED, in_two_parts),
    "a file that is not packed, and called .gz": Report(UNREPORTED, unpacked),
    "links to files of other names": Report(UNREPORTED, linked),
    "the image in the place of its mask": Report(
        UNREPORTED,
        lambda root: mask_file(root).write_bytes(volume_file(root).read_bytes()),
        "data.mask_values does not name",
    ),
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


def read(root: Path, volume: str = "v.nii.gz", mask: str = "m.nii.gz") -> ImageSet:
    names = f"{volume},{mask}"
    (root / "t.csv").write_text(f"volume,mask,patient,part\n{names},P,train\n", encoding="utf-8")
    settings = {
        "kind": "folder", "labels": "t.csv", "images": ".", "image_column": "volume", "patient_column": "patient",
        "split_column": "part", "image_size": SHAPE, "spacing": SPACING, "mask_column": "mask",
        "mask_values": {"Liver": 1, "Spleen": 7}, "validation_fraction": 0,
    }  # fmt: skip
    return concatenate_image_sets(load_dataset(FolderDatasetSpec.model_validate(settings), root).parts)


def check_right(root: Path, *names: str) -> None:
    images = read(root, *names)
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


@pytest.mark.parametrize(
    ("volume", "mask"), [("V.NII.GZ", "M.NII.GZ"), ("Bäuche 1.nii.gz", "マスク.nii.gz"), ("scan", "a.b.c")]
)
def test_a_file_is_known_by_its_content_whatever_its_name(tmp_path: Path, volume: str, mask: str) -> None:
    save(volume_file(tmp_path), voxels())
    save(mask_file(tmp_path), label_map())
    volume_file(tmp_path).rename(tmp_path / volume)
    mask_file(tmp_path).rename(tmp_path / mask)
    check_right(tmp_path, volume, mask)


def test_a_link_to_no_mask_is_refused_by_name(tmp_path: Path) -> None:
    save(volume_file(tmp_path), voxels())
    save(mask_file(tmp_path), label_map())
    linked_to_nothing(tmp_path)
    with pytest.raises(BadInput, match=r'1 mask named in t\.csv not in .*"m\.nii\.gz"'):
        read(tmp_path)


MIRRORED = AFFINE @ np.diag([-1.0, 1.0, 1.0, 1.0])
VOLUMES = {
    "an axis of no voxel": Report(UNREPORTED, lambda root: as_header_says(root, 42, b"\0\0"), "an axis has no voxel"),
    "a negative number of voxels": Report(
        UNREPORTED, lambda root: as_header_says(root, 42, b"\xf8\xff"), "an axis has no voxel"
    ),
    "NRRD, called .nii.gz": Report(
        UNREPORTED, lambda root: volume_file(root).write_bytes(b"NRRD0004\n" + bytes(400)), "no volume"
    ),
    "MHA, called .nii.gz": Report(
        UNREPORTED, lambda root: volume_file(root).write_bytes(b"ObjectType = Image\n" + bytes(400)), "no volume"
    ),
    "packed twice": Report(
        UNREPORTED,
        lambda root: volume_file(root).write_bytes(gzip.compress(volume_file(root).read_bytes())),
        "no volume",
    ),
    "a slice among volumes": Report(
        UNREPORTED,
        lambda root: nibabel.save(nibabel.Nifti1Image(np.zeros((8, 10), np.int16), AFFINE), volume_file(root)),
        "one slice",
    ),
    "a slope that is infinite, which counts as none": Report(
        UNREPORTED, lambda root: as_header_says(root, 112, np.array([np.inf, 0], "<f4").tobytes())
    ),
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


FRAMES: dict[str, tuple[Callable[[pydicom.Dataset], None], str]] = {
    "no size of pixels": (
        lambda image: delattr(image.SharedFunctionalGroupsSequence[0], "PixelMeasuresSequence"),
        "does not say the size of its pixels",
    ),
    "pixels of no size": (
        lambda image: setattr(image.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0], "PixelSpacing", [0, 0]),
        "gives its plane in a wrong number of values",
    ),
    "no direction": (
        lambda image: delattr(image.SharedFunctionalGroupsSequence[0], "PlaneOrientationSequence"),
        "does not say the direction of its slices",
    ),
    "two frames at one place": (
        lambda image: setattr(
            image.PerFrameFunctionalGroupsSequence[2].PlanePositionSequence[0], "ImagePositionPatient", [0, 0, 3]
        ),
        "are at one place",
    ),
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_file_of_several_frames_without_a_grid_is_refused_by_name(tmp_path: Path, name: str) -> None:
    spoil, refusal = FRAMES[name]
    (tmp_path / "it.dcm").write_bytes(multi_frame_file(voxels(), range(len(voxels()))))
    image = pydicom.dcmread(tmp_path / "it.dcm")
    spoil(image)
    image.save_as(tmp_path / "it.dcm")
    with pytest.raises(ValueError, match=refusal):
        read_volume(tmp_path / "it.dcm")


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
