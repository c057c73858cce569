"""Facts about single pictures: kind of file, size, mode, and if black and white look exchanged."""

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from client.check.source import ImageSource
from common.data.base.spec import AS_IN_FILE
from common.data.images.headers import NO_DICOM, DicomHead, read_dicom_elements, read_dicom_head, tags_by_keyword
from common.data.images.reading import (
    BLANK,
    decode_picture,
    fit_to_form,
    is_16_bit_png,
    is_dicom,
    is_nifti,
    open_png_or_jpeg,
    read_head,
    unreadable_reason,
)
from common.data.images.store import IN_MEMORY

BORDER = 1 / 16
"""Width of an image's border as a share of its side."""
DARK, BRIGHT = 64, 191
MAJORITY = 0.8
"""Share of the telling images that must look inverted for a warning."""
FEWEST = 10
"""Number of telling images below which there is no warning."""
MOST_PIXELS_KEPT = 512
"""Number of pictures whose pixels stay in memory, to train a step on."""


@dataclass(frozen=True)
class PictureFacts:
    """One picture that was read.

    Attributes:
        kind: ``PNG``, ``JPEG``, ``DICOM``, ``NIfTI`` or ``npz``.
        mode: ``grey``, ``colour`` or ``16 bit`` as in the file, or a DICOM file's photometric interpretation.
        inverted: True if air looks white; None where the picture does not tell.
        pixels: uint8 ``(height, width[, 3])`` as the network receives it; None where the picture cannot be read, or
            :data:`MOST_PIXELS_KEPT` others are in memory.
        head: Of a DICOM file from an archive; else empty. Of files in a folder the source has it.
        blank: True if a DICOM file is one grey because its window misses all of its values.
        reason: Why the picture cannot be read; empty where it can.
    """

    row: int
    kind: str = ""
    width: int = 0
    height: int = 0
    mode: str = ""
    inverted: bool | None = None
    pixels: NDArray[np.uint8] | None = None
    head: DicomHead = NO_DICOM
    blank: bool = False
    reason: str = ""


def read_picture_facts(source: ImageSource, rows: Iterable[int]) -> list[PictureFacts]:
    """Read and decode the images of these rows on several threads; a fault in one image does not stop the others."""
    with ThreadPoolExecutor(IN_MEMORY.workers) as pool, source.opened():
        pictures = pool.map(lambda row: _read_picture(source, int(row)), rows)
        return [
            facts if place < MOST_PIXELS_KEPT else replace(facts, pixels=None) for place, facts in enumerate(pictures)
        ]


def _read_picture(source: ImageSource, row: int) -> PictureFacts:
    dicom = NO_DICOM
    # Any error of a decoder on a broken file ends here, as it does when a run reads the images.
    try:
        content = source.read(row)
        if isinstance(content, np.ndarray):
            height, width = content.shape[:2]
            mode = "colour" if content.ndim == 3 else "grey"
            return PictureFacts(row, "npz", width, height, mode, looks_inverted(content), content)
        if isinstance(content, bytes):
            dicom = read_dicom_head(content)
        form = source.form
        image = decode_picture(content, form.rendering if form else AS_IN_FILE)
        kind, mode = _kind_and_mode(content)
        decoded = np.asarray(image)
        pixels = fit_to_form(image, form) if form else decoded
        return PictureFacts(
            row, kind, *image.size, mode, looks_inverted(decoded), pixels, dicom, image.info.get(BLANK, False)
        )
    except Exception as error:
        return PictureFacts(row, head=dicom, reason=unreadable_reason(error))


def _kind_and_mode(content: bytes | Path) -> tuple[str, str]:
    """Return kind and mode of a file that could be decoded."""
    if isinstance(content, Path):
        if is_nifti(read_head(content)):
            return "NIfTI", "grey"
        content = content.read_bytes()
    if is_dicom(content):
        header = read_dicom_elements(content, tags_by_keyword("PhotometricInterpretation"))
        return "DICOM", str(header.PhotometricInterpretation)
    with open_png_or_jpeg(content) as image:
        mode = "16 bit" if is_16_bit_png(content) else "grey" if image.mode in ("1", "L", "LA") else "colour"
        return str(image.format), mode


def looks_inverted(pixels: NDArray[np.uint8]) -> bool | None:
    """Return True if air looks white in a radiograph, a CT or an ultrasound image.

    Air, and regions that the beam did not reach, are black and lie at the border; the body is bright and lies in the
    middle. A picture counts as inverted where its border is brighter than its middle, and more of the border is nearly
    white than nearly black; as right where both are the other way round. Other pictures, and those in colour, do not
    tell: None.
    """
    if pixels.ndim == 3:
        if not (pixels[..., 0] == pixels[..., 1]).all() or not (pixels[..., 1] == pixels[..., 2]).all():
            return None
        pixels = pixels[..., 0]
    height, width = pixels.shape
    wide = max(1, round(min(height, width) * BORDER))
    inside = np.zeros(pixels.shape, dtype=np.bool_)
    inside[wide : height - wide, wide : width - wide] = True
    border = pixels[~inside]
    middle = pixels[height // 4 : height - height // 4, width // 4 : width - width // 4]
    brighter = border.mean() - middle.mean()
    whiter = (border > BRIGHT).mean() - (border < DARK).mean()
    if brighter == 0 or whiter == 0 or (brighter > 0) != (whiter > 0):
        return None
    return bool(brighter > 0)


@dataclass(frozen=True)
class InversionCounts:
    """How many pictures look inverted, of how many in which that can be seen, and the modes in which most do."""

    inverted: int
    telling: int
    modes: tuple[str, ...]

    @classmethod
    def of(cls, pictures: Sequence[PictureFacts]) -> "InversionCounts":
        """Count, by mode, the pictures in which an inversion can be seen."""
        total = Counter(facts.mode for facts in pictures if facts.inverted is not None)
        inverted = Counter(facts.mode for facts in pictures if facts.inverted)
        modes = tuple(sorted(mode for mode, count in inverted.items() if count >= MAJORITY * total[mode]))
        return cls(inverted.total(), total.total(), modes)

    @property
    def is_majority_inverted(self) -> bool:
        """True if so many of the pictures look inverted that probably all are."""
        return self.telling >= FEWEST and self.inverted >= MAJORITY * self.telling

    @property
    def confidence(self) -> str:
        """Confidence in words, by the share of pictures that agree and by their number."""
        share = self.inverted / self.telling
        return "nearly sure" if share >= 0.95 and self.telling >= 5 * FEWEST else "likely"


def describe_pictures(pictures: Sequence[PictureFacts]) -> str:
    """List kinds and modes, the most frequent first, and the range of sizes."""
    modes = Counter(f"{facts.kind} {facts.mode}" for facts in pictures)
    listed = ", ".join(f"{count} {mode}" for mode, count in modes.most_common())
    widths, heights = {facts.width for facts in pictures}, {facts.height for facts in pictures}
    smallest, largest = f"{min(widths)} × {min(heights)}", f"{max(widths)} × {max(heights)}"
    return f"{listed}; {smallest}{'' if smallest == largest else f' to {largest}'} pixels"
