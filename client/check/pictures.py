"""Facts about single pictures: file format, size, colour mode, and a test if black and white look exchanged."""

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyclinic.client.check.source import SiteImageSource
from polyclinic.common.system.resources import READING_THREADS
from polyclinic.data.base.spec import DEFAULT_RENDERING
from polyclinic.data.images.file_kinds import is_dicom_file, is_nifti_file, read_first_bytes
from polyclinic.data.images.headers import (
    EMPTY_DICOM_HEADER,
    DicomHeader,
    convert_dicom_keywords_to_tags,
    read_dicom_elements,
    read_dicom_header,
)
from polyclinic.data.images.reading import (
    BLANK_KEY,
    decode_picture,
    explain_decoding_error,
    fit_picture_to_format,
    has_color,
    has_unequal_density,
    is_16_bit_png,
    open_png_or_jpeg,
)
from polyclinic.data.images.volume_header import VolumeHeader
from polyclinic.data.images.volume_notes import describe_grids

BORDER_SHARE = 1 / 16
"""Width of an image's border as a share of its shorter side."""
BLACK_BELOW = 64
"""A uint8 pixel below this value counts as black."""
WHITE_ABOVE = 191
"""A uint8 pixel above this value counts as white."""
INVERTED_SHARE_FOR_WARNING = 0.8
"""The check warns if at least this share of the decided pictures looks inverted."""
MIN_DECIDED_PICTURES = 10
"""Minimum number of pictures for which inversion can be decided, for a warning."""
MAX_PICTURES_IN_MEMORY = 512
"""Maximum number of pictures whose pixels stay in memory for the check's training step."""


@dataclass(frozen=True)
class PictureFacts:
    """Facts about one picture that the check read.

    Attributes:
        row: Number of the image in the site's data.
        kind: ``PNG``, ``JPEG``, ``DICOM``, ``NIfTI`` or ``npz``.
        mode: ``grey``, ``colour`` or ``16 bit`` as in the file, or a DICOM file's photometric interpretation.
        inverted: True if air looks white, False if it looks black; None if this cannot be decided.
        pixels: uint8 ``(height, width[, 3])`` as the network receives them, of a volume ``(depth, height, width, 1)``;
            None if the picture cannot be read, or :data:`MAX_PICTURES_IN_MEMORY` pictures are in memory already.
        head: DICOM header of a file that came from an archive; else empty.
        blank: True if all pixels are equal, because the display window misses all of the file's values.
        unequal_density: True for a PNG or JPEG file that states pixels that are not square.
        reason: Reason why the picture cannot be read; empty if it can.
        colored: True if the file's picture has a pixel that is not grey.
        volume: The grid of a volume's file; None for a picture.
    """

    row: int
    kind: str = ""
    width: int = 0
    height: int = 0
    mode: str = ""
    inverted: bool | None = None
    pixels: NDArray[np.uint8] | None = None
    head: DicomHeader = EMPTY_DICOM_HEADER
    blank: bool = False
    unequal_density: bool = False
    reason: str = ""
    colored: bool = False
    volume: VolumeHeader | None = None


def read_picture_facts(source: SiteImageSource, rows: Iterable[int]) -> list[PictureFacts]:
    """Read and decode images on several threads; a fault in one image does not stop the others.

    Args:
        rows: Numbers of the images in ``source``.
    """
    form = source.form

    def read_facts(row: int) -> PictureFacts:
        dicom = EMPTY_DICOM_HEADER
        try:
            content = source.read(row)
            if isinstance(content, np.ndarray):
                height, width = content.shape[-3:-1] if content.ndim == 4 else content.shape[:2]
                mode = "colour" if content.ndim == 3 else "grey"
                return PictureFacts(row, "npz", width, height, mode, picture_looks_inverted(content), content)
            if isinstance(content, bytes):
                dicom = read_dicom_header(content)
            if form is not None and isinstance(form.size, tuple):
                from polyclinic.data.images.volume_pixels import render_volume  # late: the import takes a second

                rendered = render_volume(content, form.size, form.resize, form.rendering)
                header = rendered.header
                facts = PictureFacts(row, header.kind, header.shape[2], header.shape[1], "grey", volume=header)
                return replace(facts, pixels=rendered.voxels, head=dicom, blank=rendered.is_blank)
            image = decode_picture(content, form.rendering if form else DEFAULT_RENDERING)
            kind, mode, unequal = _read_picture_format_and_mode(content)
            decoded = np.asarray(image)
            pixels = fit_picture_to_format(image, form) if form else decoded
            blank = image.info.get(BLANK_KEY, False)
            inverted = picture_looks_inverted(decoded)
            facts = PictureFacts(row, kind, *image.size, mode, inverted, pixels, dicom, blank, unequal)
            return replace(facts, colored=has_color(image))
        except Exception as error:  # a decoder may raise anything on a broken file
            return PictureFacts(row, head=dicom, reason=explain_decoding_error(error))

    with ThreadPoolExecutor(READING_THREADS) as pool, source.opened():
        pictures = enumerate(pool.map(read_facts, map(int, rows)))
        return [facts if index < MAX_PICTURES_IN_MEMORY else replace(facts, pixels=None) for index, facts in pictures]


def _read_picture_format_and_mode(content: bytes | Path) -> tuple[str, str, bool]:
    """Return a decodable file's format and colour mode, and True if a PNG or JPEG states pixels that are not square."""
    if isinstance(content, Path):
        if is_nifti_file(read_first_bytes(content)):
            return "NIfTI", "grey", False
        content = content.read_bytes()
    if is_dicom_file(content):
        header = read_dicom_elements(content, convert_dicom_keywords_to_tags("PhotometricInterpretation"))
        return "DICOM", str(header.PhotometricInterpretation), False
    with open_png_or_jpeg(content) as image:
        mode = "grey" if image.mode in ("1", "L", "LA") else "colour"
        if is_16_bit_png(content):
            mode = "16 bit"
        return str(image.format), mode, has_unequal_density(image)


def picture_looks_inverted(pixels: NDArray[np.uint8]) -> bool | None:
    """Return True if air looks white in a radiograph, a CT or an ultrasound image, and False if it looks black.

    Air, and regions that the beam did not reach, are black and lie at the border; the body is bright and lies in the
    middle. A picture counts as inverted if its border is brighter than its middle and has more white than black pixels,
    and as correct if its border is darker than its middle and has more black than white pixels. For any other picture,
    and for colour and volumes, return None.
    """
    if pixels.ndim == 4:  # a volume
        return None
    if pixels.ndim == 3:
        if not (pixels[..., 0] == pixels[..., 1]).all() or not (pixels[..., 1] == pixels[..., 2]).all():
            return None
        pixels = pixels[..., 0]
    height, width = pixels.shape
    border_width = max(1, round(min(height, width) * BORDER_SHARE))
    inside = np.zeros(pixels.shape, dtype=np.bool_)
    inside[border_width : height - border_width, border_width : width - border_width] = True
    border = pixels[~inside]
    middle = pixels[height // 4 : height - height // 4, width // 4 : width - width // 4]
    border_brightness = border.mean() - middle.mean()  # above 0: the border is brighter than the middle
    border_whiteness = (border > WHITE_ABOVE).mean() - (border < BLACK_BELOW).mean()  # above 0: more white than black
    if border_brightness == 0 or border_whiteness == 0 or (border_brightness > 0) != (border_whiteness > 0):
        return None
    return bool(border_brightness > 0)


@dataclass(frozen=True)
class InvertedPictureCounts:
    """Counts of pictures in which black and white look exchanged.

    Attributes:
        inverted: Number of pictures that look inverted.
        decided: Number of pictures for which it can be decided if they are inverted.
        modes: Colour modes in which most of the decided pictures look inverted.
    """

    inverted: int
    decided: int
    modes: tuple[str, ...]

    @classmethod
    def from_pictures(cls, pictures: Sequence[PictureFacts]) -> "InvertedPictureCounts":
        """Count the pictures for which inversion can be decided, and the inverted ones; find the affected modes."""
        total = Counter(facts.mode for facts in pictures if facts.inverted is not None)
        inverted = Counter(facts.mode for facts in pictures if facts.inverted)
        modes = tuple(
            sorted(mode for mode, count in inverted.items() if count >= INVERTED_SHARE_FOR_WARNING * total[mode])
        )
        return cls(inverted.total(), total.total(), modes)

    @property
    def is_majority_of_pictures_inverted(self) -> bool:
        """True if so many of the decided pictures look inverted that all pictures probably are."""
        return self.decided >= MIN_DECIDED_PICTURES and self.inverted >= INVERTED_SHARE_FOR_WARNING * self.decided

    @property
    def inversion_confidence_in_words(self) -> str:
        """Confidence that the pictures are inverted, as "likely" or "nearly sure"."""
        share = self.inverted / self.decided
        return "nearly sure" if share >= 0.95 and self.decided >= 5 * MIN_DECIDED_PICTURES else "likely"


def describe_pictures(pictures: Sequence[PictureFacts]) -> str:
    """Describe pictures in one line: formats and modes, the most frequent first, and the range of sizes."""
    modes = Counter(f"{facts.kind} {facts.mode}" for facts in pictures)
    listed = ", ".join(f"{count} {mode}" for mode, count in modes.most_common())
    if volumes := [facts.volume for facts in pictures if facts.volume is not None]:
        return f"{listed}; {describe_grids(volumes)}"
    widths = {facts.width for facts in pictures}
    heights = {facts.height for facts in pictures}
    smallest = f"{min(widths)} × {min(heights)}"
    largest = f"{max(widths)} × {max(heights)}"
    return f"{listed}; {smallest}{'' if smallest == largest else f' to {largest}'} pixels"
