"""Pictures one by one: what kind of file, how large, how grey, and whether black and white look exchanged."""

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from client.check.source import Source
from common.data.base.spec import AS_IN_FILE
from common.data.images.headers import dataset_of, tags_of
from common.data.images.reading import (
    IN_MEMORY,
    head_of,
    is_dicom,
    is_nifti,
    opened_picture,
    picture,
    shaped,
    why_unreadable,
)

BORDER = 1 / 16
"""Of an image's side: what counts as its border."""
DARK, BRIGHT = 64, 191
MAJORITY = 0.8
"""Of the images that look like radiographs at all: so many must look inverted before it is said."""
FEWEST = 10
"""Images without which nothing is said."""
KEPT = 512
"""Pictures of which the pixels stay in memory, to train a step on."""


@dataclass(frozen=True)
class PictureFacts:
    """One picture, looked at.

    Attributes:
        kind: ``PNG``, ``JPEG``, ``DICOM``, ``NIfTI`` or ``npz``.
        mode: As in the file: ``grey``, ``colour``, ``16 bit``, or a DICOM file's photometric interpretation.
        inverted: Whether air looks white; None where this picture does not tell.
        pixels: As the network is given it, uint8 ``(height, width[, 3])``; None where it cannot be read, or of the
            many were not kept.
        syntax: Transfer syntax of a DICOM file from an archive; empty of others, and where it cannot be found out.
        reason: Why it cannot be read.
    """

    row: int
    kind: str = ""
    width: int = 0
    height: int = 0
    mode: str = ""
    inverted: bool | None = None
    pixels: NDArray[np.uint8] | None = None
    syntax: str = ""
    reason: str = ""


def look_at(source: Source, rows: Iterable[int]) -> list[PictureFacts]:
    """Read and decode these images on several threads; what is wrong with one is its own."""
    with ThreadPoolExecutor(IN_MEMORY.workers) as pool, source.opened():
        looks = pool.map(lambda row: _looked(source, int(row)), rows)
        return [look if place < KEPT else replace(look, pixels=None) for place, look in enumerate(looks)]


def _looked(source: Source, row: int) -> PictureFacts:
    syntax = ""
    # Any error of a decoder on a broken file ends here, as it does when a run reads the images.
    try:
        data = source.read(row)
        if isinstance(data, np.ndarray):
            return _of_pixels(row, "npz", "colour" if data.ndim == 3 else "grey", data)
        syntax = _syntax_of(data)
        shown = picture(data, source.form.rendering if source.form else AS_IN_FILE)
        kind, mode = _form_of(data)
        grey = np.asarray(shown)
        form = source.form
        pixels = shaped(shown, form) if form else grey
        return PictureFacts(row, kind, *shown.size, mode, looks_inverted(grey), pixels, syntax=syntax)
    except Exception as error:
        return PictureFacts(row, syntax=syntax, reason=why_unreadable(error))


def _of_pixels(row: int, kind: str, mode: str, pixels: NDArray[np.uint8]) -> PictureFacts:
    return PictureFacts(row, kind, pixels.shape[1], pixels.shape[0], mode, looks_inverted(pixels), pixels)


def _syntax_of(content: bytes | Path) -> str:
    """Transfer syntax of a DICOM file from an archive; those of files in a folder are known already."""
    if isinstance(content, Path) or not is_dicom(content):
        return ""
    return str(dataset_of(content, []).file_meta.TransferSyntaxUID)


def _form_of(content: bytes | Path) -> tuple[str, str]:
    """Kind and mode of a file that could be decoded."""
    if isinstance(content, Path) and is_nifti(head_of(content)):
        return "NIfTI", "grey"
    data = content.read_bytes() if isinstance(content, Path) else content
    if is_dicom(data):
        header = dataset_of(data, tags_of("PhotometricInterpretation"))
        return "DICOM", str(header.PhotometricInterpretation)
    with opened_picture(data) as image:
        mode = "16 bit" if image.mode.startswith("I") else "grey" if image.mode in ("1", "L", "LA") else "colour"
        return str(image.format), mode


def looks_inverted(pixels: NDArray[np.uint8]) -> bool | None:
    """Whether air looks white in a radiograph, a CT or an ultrasound image.

    Air, and what the beam did not reach, is black and lies at the border; the body is bright and lies in the middle.
    A picture is taken for inverted where its border is brighter than its middle, and more of the border is nearly white
    than nearly black; for right where both are the other way round; else, and in colour, it does not tell.
    """
    if pixels.ndim == 3:
        if not (pixels[..., 0] == pixels[..., 1]).all() or not (pixels[..., 1] == pixels[..., 2]).all():
            return None
        pixels = pixels[..., 0]
    border, middle = _border(pixels)
    brighter = border.mean() - middle.mean()
    whiter = (border > BRIGHT).mean() - (border < DARK).mean()
    if brighter == 0 or whiter == 0 or (brighter > 0) != (whiter > 0):
        return None
    return bool(brighter > 0)


def _border(pixels: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The pixels of the frame, and those of the middle half."""
    height, width = pixels.shape
    wide = max(1, round(min(height, width) * BORDER))
    inside = np.zeros(pixels.shape, dtype=np.bool_)
    inside[wide : height - wide, wide : width - wide] = True
    middle = pixels[height // 4 : height - height // 4, width // 4 : width - width // 4]
    return pixels[~inside], middle


@dataclass(frozen=True)
class Inverted:
    """How many of the pictures that can tell are inverted."""

    inverted: int
    telling: int
    modes: tuple[str, ...]

    @property
    def majority(self) -> bool:
        return self.telling >= FEWEST and self.inverted >= MAJORITY * self.telling

    @property
    def sure(self) -> str:
        """How sure that is, in words, by the share of pictures that agree and by their number."""
        share = self.inverted / self.telling
        return "nearly sure" if share >= 0.95 and self.telling >= 5 * FEWEST else "likely"


def inverted_by_mode(looks: Sequence[PictureFacts]) -> Inverted:
    """Count; name the modes most of whose pictures look inverted."""
    telling = [look for look in looks if look.inverted is not None]
    inverted = Counter(look.mode for look in telling if look.inverted)
    total = Counter(look.mode for look in telling)
    modes = tuple(sorted(mode for mode, count in inverted.items() if count >= MAJORITY * total[mode]))
    return Inverted(sum(inverted.values()), len(telling), modes)


def in_words(looks: Sequence[PictureFacts]) -> str:
    """Kinds, modes and sizes, the most frequent first."""
    modes = Counter(f"{look.kind} {look.mode}" for look in looks)
    sizes = Counter((look.width, look.height) for look in looks)
    listed = ", ".join(f"{count} {mode}" for mode, count in modes.most_common())
    if len(sizes) == 1:
        ((width, height),) = sizes
        return f"{listed}; {width} × {height} pixels"
    widths, heights = [width for width, _ in sizes], [height for _, height in sizes]
    return f"{listed}; {min(widths)} × {min(heights)} to {max(widths)} × {max(heights)} pixels"
