"""Which frame of a DICOM file is the picture, and what the file says of that frame alone."""

from typing import Any

from common.data.base.spec_base import Frame

_OF_A_FRAME = {
    "PixelValueTransformationSequence": ("RescaleSlope", "RescaleIntercept"),
    "FrameVOILUTSequence": ("WindowCenter", "WindowWidth", "VOILUTFunction"),
}


def frame_count(dataset: Any) -> int:
    """Frames of a file; one where it does not say."""
    return int(dataset.get("NumberOfFrames") or 1)


def frame_index(dataset: Any, frame: Frame | None) -> int:
    """Place of the chosen frame, from 0; the middle one of an even number is the later of the two.

    Raises:
        ValueError: If there are several and none is chosen, or there is no such frame.
    """
    count = frame_count(dataset)
    if frame == "middle":
        return count // 2
    if frame is None and count > 1:
        raise ValueError(f'the DICOM file has {count} frames; choose one by data.frame, 1 to {count} or "middle"')
    if frame is not None and frame > count:
        raise ValueError(f"the DICOM file has {count} frames; data.frame = {frame} is none of them")
    return (frame or 1) - 1


def take_over_groups(dataset: Any, index: int) -> None:
    """Put a frame's own rescaling and window, of an enhanced multi-frame file, where single pictures have theirs.

    Source: DICOM PS3.3 C.7.6.16.2.9 and C.7.6.16.2.10; what stands with the frame goes before what all share.
    """
    shared, own = dataset.get("SharedFunctionalGroupsSequence"), dataset.get("PerFrameFunctionalGroupsSequence")
    groups = [*(shared or [])[:1], *(own or [])[index : index + 1]]
    for group in groups:
        for sequence, keywords in _OF_A_FRAME.items():
            for item in (group.get(sequence) or [])[:1]:
                for keyword in keywords:
                    if keyword in item:
                        setattr(dataset, keyword, item[keyword].value)
