"""Heads of DICOM files: how their pixels are packed, and whose they are; nothing is unpacked."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from common.data.base.decoded_size import LARGEST_MB
from common.data.base.image_set import UNKNOWN_PATIENT
from common.data.images.dataset import dataset_of, refuse_large_elements, tags_of
from common.data.images.reading import IN_MEMORY, is_dicom

_WANTED = tags_of("PatientID", "SpecificCharacterSet")


@dataclass(frozen=True)
class DicomHead:
    """What is read of a file; both are empty where it is no DICOM file, or is damaged."""

    syntax: str = ""
    patient: str = ""


def dicom_heads(files: Sequence[Path]) -> list[DicomHead]:
    """Read the heads of these files on several threads, in order."""
    with ThreadPoolExecutor(IN_MEMORY.workers) as pool:
        return list(pool.map(_head, files))


def _head(file: Path) -> DicomHead:
    # Any error on a broken file ends here: reading its pixels tells what is wrong with it.
    try:
        with file.open("rb") as opened:
            if not is_dicom(opened.read(132)):
                return DicomHead()
            opened.seek(0)
            head = dataset_of(opened, _WANTED)
        refuse_large_elements(head, _WANTED, LARGEST_MB)
        return DicomHead(str(head.file_meta.get("TransferSyntaxUID", "")), str(head.get("PatientID") or "").strip())
    except Exception:
        return DicomHead()


def dicom_patients(heads: Sequence[DicomHead]) -> list[str] | None:
    """PatientID of each DICOM file; a file of another kind, or a missing one, is a patient of its own.

    None where a DICOM file has none, or where all have the same: that stands for a name that was taken out.
    """
    told = [head.patient for head in heads if head.syntax]
    if not all(told) or len(set(told)) < min(2, len(heads)):
        return None
    return [head.patient or f"{UNKNOWN_PATIENT}{place}" for place, head in enumerate(heads)]
