"""Write predicted masks as DICOM segmentations: one object (SEG) for each DICOM series, volume or picture.

A segmentation (DICOM part 3, A.51) has a binary segment for each class, on the frames of its source image: same rows,
columns and positions in the patient. Patient, study and references are copied from the source's header; missing
elements stay empty. Each segment states that an algorithm made it, because no person has checked it. highdicom writes
the object (Bridge et al., Journal of Digital Imaging 2022).
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from numpy.typing import NDArray

from polyclinic.common import __version__
from polyclinic.common.errors import Fault, quote_names, raise_faults, suggest_nearest_name
from polyclinic.common.prediction.dicom_text import (
    MANUFACTURER,
    PRIVATE_CODING_SCHEME,
    UTF_8_CHARACTER_SET,
    make_model_uid,
    shorten_to_dicom_text,
)
from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.packages import refuse_missing_packages
from polyclinic.data.base.decoded_size import DEFAULT_LARGEST_MB
from polyclinic.data.images.file_kinds import is_dicom_file, read_first_bytes
from polyclinic.data.images.masks import Grid, PictureGrid

SEGMENTATION_OPTION = "--dicom-seg"
CODE_OPTION = "--code"
SEGMENTATION_SUFFIX = ".seg.dcm"
SERIES_NUMBER = 9901
MASK_REMEDY = "Take its mask in NIfTI or PNG, which is written all the same."
_TYPE_2_ELEMENTS = (
    *("PatientID", "PatientName", "PatientBirthDate", "PatientSex"),
    *("AccessionNumber", "StudyID", "StudyDate", "StudyTime"),
)
"""Elements that a segmentation must contain but that may be empty (type 2)."""
_PRIVATE_CATEGORY = ("CLASS", "Class of a study")
"""Private category of all classes, because it is unknown if a class is an organ or a finding."""


@dataclass(frozen=True)
class SegmentCode:
    """A coded concept, such as ``SCT 10200004 "Liver"``.

    Attributes:
        scheme: Designator of the coding scheme, such as SCT for SNOMED CT.
        value: Code within the scheme.
        meaning: Words for people.
    """

    scheme: str
    value: str
    meaning: str


def parse_segment_codes(texts: Iterable[str], class_names: Sequence[str]) -> dict[str, SegmentCode]:
    """Return class -> code, from options such as ``Liver=SCT:10200004:Liver``.

    Args:
        texts: The values of the option.
        class_names: The classes of the model.

    Raises:
        BadInput: With each text that is not a code, or has an unknown class.
    """
    codes = dict[str, SegmentCode]()
    faults = list[Fault]()
    for text in texts:
        name, _, code = text.partition("=")
        scheme, value, meaning = [part.strip() for part in [*code.split(":", 2), "", ""][:3]]
        if name not in class_names:
            problem = f'"{name}" is no class of the model, which has {quote_names(class_names)}.'
            faults.append(Fault(CODE_OPTION, problem, suggest_nearest_name(name, class_names)))
        elif not (scheme and value and meaning) or max(len(scheme), len(value)) > 16:
            problem = f'"{text}" is no code: expected CLASS=SCHEME:VALUE:MEANING, scheme and value of 16 characters.'
            faults.append(Fault(CODE_OPTION, problem, 'Such as "Liver=SCT:10200004:Liver".'))
        else:
            codes[name] = SegmentCode(scheme, value, shorten_to_dicom_text(meaning))
    raise_faults(faults)
    return codes


@dataclass(frozen=True)
class SegmentationWriter:
    """Writes a DICOM segmentation for each image whose masks a model predicts.

    Attributes:
        title: Name of the model.
        model_sha256: Hash of the model.
        class_names: The classes, in the order of the masks.
        codes: Class -> its code; a class without an entry gets a private code, made from its name.
        largest_mb: Size limit of a decoded volume, in MB.
        refusals: Name of each image without a segmentation -> reason.
    """

    title: str
    model_sha256: str
    class_names: Sequence[str]
    codes: Mapping[str, SegmentCode] = field(default_factory=dict)
    largest_mb: int = DEFAULT_LARGEST_MB
    refusals: dict[str, str] = field(default_factory=dict)

    def write(self, place: Path, name: str, source: Path, areas: NDArray[np.bool_], grid: Grid) -> None:
        """Write the segmentation of one image, or add the reason to ``refusals`` if this is impossible.

        Args:
            place: Path of the image's masks without their suffixes.
            name: Name of the image.
            source: The image: a file, or the folder of a series.
            areas: ``(classes, *spatial)``, on the grid of the image.
            grid: The grid of the image.
        """
        if not source.is_dir() and not is_dicom_file(read_first_bytes(source)):
            self.refusals[name] = f"no segmentation: it is no DICOM file. {MASK_REMEDY}"
            return
        try:
            headers, frames = _arrange_as_frames(areas, source, grid, self.largest_mb)
            segmentation = self._make_segmentation(headers, frames)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self.refusals[name] = f"no segmentation: its DICOM header lacks what one needs ({error}). {MASK_REMEDY}"
            return
        content = BytesIO()
        segmentation.save_as(content)
        write_atomically(place.with_name(f"{place.name}{SEGMENTATION_SUFFIX}"), content.getvalue(), private=True)

    def _make_segmentation(self, headers: Sequence[pydicom.Dataset], frames: NDArray[np.bool_]) -> Any:
        """Return the segmentation of the frames of one image, ``(frames, rows, columns, classes)``."""
        import highdicom
        from highdicom import seg
        from pydicom.sr.codedict import codes

        algorithm = highdicom.AlgorithmIdentificationSequence(
            name=shorten_to_dicom_text(self.title),
            family=codes.DCM.ArtificialIntelligence,
            version=__version__,
            source=MANUFACTURER,
            parameters={"model SHA-256": self.model_sha256},
        )
        segments = [
            seg.SegmentDescription(
                segment_number=number,
                segment_label=shorten_to_dicom_text(name),
                segmented_property_category=_make_code(SegmentCode(PRIVATE_CODING_SCHEME, *_PRIVATE_CATEGORY)),
                segmented_property_type=_make_code(self.codes.get(name) or make_private_code(name)),
                algorithm_type=seg.SegmentAlgorithmTypeValues.AUTOMATIC,
                algorithm_identification=algorithm,
            )
            for number, name in enumerate(self.class_names, start=1)
        ]
        segmentation = seg.Segmentation(
            source_images=headers,
            pixel_array=frames.astype(np.uint8),
            segmentation_type=seg.SegmentationTypeValues.BINARY,
            segment_descriptions=segments,
            series_instance_uid=highdicom.UID(),
            series_number=SERIES_NUMBER,
            sop_instance_uid=highdicom.UID(),
            instance_number=1,
            manufacturer=MANUFACTURER,
            manufacturer_model_name=shorten_to_dicom_text(self.title),
            software_versions=__version__,
            device_serial_number=make_model_uid(self.model_sha256),
            content_label="PREDICTION",
            series_description=shorten_to_dicom_text(f"Segmentation by {self.title}"),
        )
        # DICOM's default is ASCII, but names of classes and patients may have any letters.
        segmentation.SpecificCharacterSet = UTF_8_CHARACTER_SET
        return segmentation


def make_segmentation_writer(
    title: str, model_sha256: str, class_names: Sequence[str], codes: Iterable[str], largest_mb: int
) -> SegmentationWriter:
    """Return a writer of segmentations for a model.

    Args:
        title: Name of the model.
        model_sha256: Hash of the model.
        class_names: The classes, in the order of the masks.
        codes: Codes of classes as in :func:`parse_segment_codes`.
        largest_mb: Size limit of a decoded volume, in MB.

    Raises:
        BadInput: If highdicom is not installed, or a code is wrong.
    """
    otherwise = f"Leave {SEGMENTATION_OPTION} out: masks are PNG or NIfTI files"
    refuse_missing_packages(SEGMENTATION_OPTION, "highdicom", otherwise=otherwise)
    parsed = parse_segment_codes(codes, class_names)
    return SegmentationWriter(title, model_sha256, class_names, parsed, largest_mb)


def make_private_code(class_name: str) -> SegmentCode:
    """Return a private code for a class; it depends only on the class's name."""
    value = f"C{hashlib.sha256(class_name.encode()).hexdigest()[:12].upper()}"
    return SegmentCode(PRIVATE_CODING_SCHEME, value, shorten_to_dicom_text(class_name))


def _make_code(code: SegmentCode) -> Any:
    from highdicom import sr

    return sr.CodedConcept(code.value, code.scheme, code.meaning)


def _arrange_as_frames(
    areas: NDArray[np.bool_], source: Path, grid: Grid, largest_mb: int
) -> tuple[list[pydicom.Dataset], NDArray[np.bool_]]:
    """Return the headers of an image, and the areas in the order of its files or frames.

    Returns:
        A header for each file of a series, or of the single file; and the areas, bool
        ``(frames, rows, columns, classes)``.

    Raises:
        ValueError: If the frame of an area is ambiguous.
    """
    if isinstance(grid, PictureGrid):
        header = _read_header(source)
        if int(header.get("NumberOfFrames") or 1) > 1:
            raise ValueError("it has several frames, and the mask is that of one")
        return [header], np.moveaxis(areas, 0, -1)[None]
    from polyclinic.data.images.dicom_series import list_series_files, open_dicom_series  # takes a second
    from polyclinic.data.images.volume_masks import turn_to_file_order

    series = open_dicom_series(source, largest_mb)
    slices = series.slices
    frames = np.stack([turn_to_file_order(area, grid) for area in areas], axis=-1)
    if slices[0].file is not None:
        headers = [_read_header(each.file) for each in slices if each.file is not None]
        for header in headers:
            # Converters leave the thickness out, but a segmentation of slices must have it.
            if not header.get("SliceThickness"):
                header.SliceThickness = float(np.linalg.norm(series.affine[:3, 0]))
        return headers, frames
    file = list_series_files(source)[0] if source.is_dir() else source
    ordered = np.empty_like(frames)
    ordered[[each.frame for each in slices]] = frames
    return [_read_header(file)], ordered


def _read_header(file: Path) -> pydicom.Dataset:
    """Return the header of a file, with empty values for missing elements that a segmentation must contain."""
    header = pydicom.dcmread(file, stop_before_pixels=True)
    for keyword in _TYPE_2_ELEMENTS:
        if keyword not in header:
            setattr(header, keyword, "")
    return header
