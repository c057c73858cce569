"""Command-line options for DICOM segmentations, shared by ``predict`` of both programs."""

from collections.abc import Sequence
from typing import Annotated

import typer

from polyclinic.common.errors import Fault, raise_faults

DicomSegmentations = Annotated[
    bool, typer.Option("--dicom-seg", help="Of masks: also a DICOM segmentation for each DICOM series.")
]
SegmentCodes = Annotated[
    list[str] | None,
    typer.Option("--code", help='Code of a class in DICOM segmentations: "Liver=SCT:10200004:Liver". Repeatable.'),
]


def refuse_codes_without_segmentations(codes: Sequence[str] | None, *, segments: bool) -> None:
    """Refuse codes of classes if no DICOM segmentation is written.

    Raises:
        BadInput: If there are codes.
    """
    if codes and not segments:
        raise_faults([Fault("--code", "is for DICOM segmentations.", "Add --dicom-seg.")])
