"""Decode a DICOM image to 8 bits as a viewer would show it: rescaled, windowed, high densities white."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom.encaps import get_frame
from pydicom.pixels.utils import get_expected_length, pixel_array
from pydicom.tag import Tag
from pydicom.uid import UID, RLELossless

from polyclinic.data.base.decoded_size import refuse_oversized_file
from polyclinic.data.base.spec import Frame, PictureRenderingOptions
from polyclinic.data.images.bands import convert_row_bands_to_8_bits, scale_samples_to_8_bits
from polyclinic.data.images.float_pixels import (
    find_float_pixel_element,
    read_float_frame,
    render_floats_as_8_bit_grey,
)
from polyclinic.data.images.grey import (
    GreyscalePipeline,
    StoredPixelBits,
    guess_lookup_table_bit_depth,
    read_dicom_element_value,
    read_dicom_number,
    read_dicom_unsigned_integer,
    read_lookup_table_entries,
    render_dicom_as_8_bit_grey,
)
from polyclinic.data.images.headers import (
    compute_rle_plane_sizes,
    convert_dicom_keywords_to_tags,
    estimate_jpeg_2000_decoder_memory,
    is_jpeg_2000_signed,
    read_dicom_elements,
    read_encoded_frame_shape,
    refuse_large_dicom_elements,
)
from polyclinic.data.images.rendered import RenderedPicture, find_dicom_pixel_aspect
from polyclinic.data.images.syntaxes import (
    DECODER_BY_SYNTAX,
    LOSSY_SYNTAXES,
    get_transfer_syntax_name,
    is_transfer_syntax_readable,
)

_FRAME_KEYWORDS = {
    "PixelValueTransformationSequence": ("RescaleSlope", "RescaleIntercept", "ModalityLUTSequence"),
    "FrameVOILUTSequence": ("WindowCenter", "WindowWidth", "VOILUTFunction", "VOILUTSequence"),
    "PixelMeasuresSequence": ("PixelSpacing",),
}
_PIXEL_SIZE_KEYWORDS = ("PixelSpacing", "ImagerPixelSpacing", "NominalScannedPixelSpacing", "PixelAspectRatio")


def choose_frame_index(frame: Frame | None, count: int, subject: str) -> int:
    """Return the index, from 0, of the frame or slice that the user chose.

    Args:
        frame: Frame number from 1; "middle", which is the later frame if the number is even; None for no choice.
        count: Number of frames in the file.
        subject: Beginning of the error message, such as "the DICOM file has 4 frames".

    Raises:
        ValueError: If there are several frames and none is chosen, or there is no such frame.
    """
    if frame == "middle":
        return count // 2
    if frame is None and count > 1:
        raise ValueError(f'{subject}; choose one by data.frame, 1 to {count} or "middle"')
    if frame is not None and frame > count:
        raise ValueError(f"{subject}; data.frame = {frame} is none of them")
    return (frame or 1) - 1


def apply_frame_functional_groups(dataset: Any, index: int) -> None:
    """Copy the rescaling, window, VOI LUT and pixel size of one frame to the top level of a multi-frame data set.

    Later code then treats single-frame and multi-frame files alike. A value of the frame takes precedence over a value
    that all frames share, and this over the top level, unless it is blank (DICOM PS3.3 C.7.6.16.2.9 and
    C.7.6.16.2.10).

    Raises:
        ValueError: If there are functional groups for some frames, but not for this frame.
    """
    shared = read_dicom_element_value(dataset, "SharedFunctionalGroupsSequence")
    per_frame = read_dicom_element_value(dataset, "PerFrameFunctionalGroupsSequence")
    if per_frame and len(per_frame) <= index:
        raise ValueError(f"PerFrameFunctionalGroupsSequence ends at frame {len(per_frame)}")
    groups = [*(shared or [])[:1], *(per_frame or [])[index : index + 1]]
    for group in groups:
        for sequence, keywords in _FRAME_KEYWORDS.items():
            for item in (group.get(sequence) or [])[:1]:
                values = (item.get(keyword) for keyword in keywords if keyword != "VOILUTFunction")
                for keyword in keywords if any(value or value == 0 for value in values) else ():
                    dataset.pop(keyword, None)
                    if keyword in item:
                        dataset[keyword] = item[keyword]


_GREY_KINDS = ("MONOCHROME1", "MONOCHROME2")
_COLOR_KINDS = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
_PALETTE_KIND = "PALETTE COLOR"
_PALETTE_COLORS = ("Red", "Green", "Blue")
_PIXEL_DATA_TAG = Tag("PixelData")
_ANY_WINDOW = (0.0, 1.0)
"""Placeholder window for slices of a volume: it keeps the file's window from being read. The window of a volume is
applied later."""
_BYTES_PER_FLOAT = 8
"""Bytes of memory for each pixel during the conversion of floats."""
_MAX_RLE_PADDING_BYTES = 16
"""An unpacked segment of an RLE frame may be longer than the frame by fewer bytes than this, because encoders pad it
with zeros."""
_PHOTOMETRIC_KEYWORD = "PhotometricInterpretation"
_INTEGER_KEYWORDS = ("Rows", "Columns", "SamplesPerPixel", "BitsAllocated", "BitsStored", "PixelRepresentation")
_READ_TAGS = convert_dicom_keywords_to_tags(
    *(_PHOTOMETRIC_KEYWORD, *_INTEGER_KEYWORDS),
    *("NumberOfFrames", "HighBit", "PlanarConfiguration", "PixelPaddingValue", "PixelPaddingRangeLimit"),
    *("RescaleSlope", "RescaleIntercept", "WindowCenter", "WindowWidth", "VOILUTFunction", "PresentationLUTShape"),
    *("VOILUTSequence", "ModalityLUTSequence", "PresentationLUTSequence"),
    *_PIXEL_SIZE_KEYWORDS,
    *(f"{kind}PixelPadding{end}" for kind in ("Float", "DoubleFloat") for end in ("Value", "RangeLimit")),
    *("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"),
    *(f"{color}PaletteColorLookupTableDescriptor" for color in _PALETTE_COLORS),
)


def render_dicom_file(data: bytes, rendering: PictureRenderingOptions) -> RenderedPicture:
    """Decode a DICOM file to an 8-bit picture.

    Raises:
        ValueError: If the file has no grey or colour picture, lacks the chosen frame, or is too large. Exceptions
            of pydicom are not caught.
    """
    dataset = read_dicom_elements(data, largest_mb=rendering.largest_mb)
    refuse_large_dicom_elements(dataset, _READ_TAGS, rendering.largest_mb)
    if not read_dicom_element_value(dataset, "PixelData") and (keyword := find_float_pixel_element(dataset)):
        return _render_float_pixels(dataset, keyword, rendering)
    layout = _read_dicom_pixel_layout(dataset)
    index = choose_frame_index(rendering.frame, layout.frames, f"the DICOM file has {layout.frames} frames")
    apply_frame_functional_groups(dataset, index)
    numbers, bits = _decode_stored_values(dataset, layout, index, rendering.largest_mb)
    extract_values = bits.extract_pixel_values
    aspect = _read_pixel_aspect(dataset)
    if layout.photometric in _COLOR_KINDS:
        colors = convert_row_bands_to_8_bits(
            lambda band: scale_samples_to_8_bits(extract_values(band), layout.bits_stored, "BitsStored"), numbers
        )
        return RenderedPicture(colors, False, aspect)
    if layout.photometric == _PALETTE_KIND:
        colors = convert_row_bands_to_8_bits(
            lambda band: _convert_palette_to_rgb(extract_values(band), dataset), numbers
        )
        return RenderedPicture(colors, False, aspect)
    grey = render_dicom_as_8_bit_grey(numbers, GreyscalePipeline(dataset, bits, 8 * numbers.itemsize, rendering.window))
    is_blank = bool(grey.min() == grey.max() and numbers.min() < numbers.max())
    return RenderedPicture(grey, is_blank, aspect)


def _decode_stored_values(
    dataset: Any, layout: "DicomPixelLayout", index: int, largest_mb: int
) -> tuple[NDArray[Any], StoredPixelBits]:
    """Decode a frame; return the stored numbers ``(rows, columns[, samples])`` and which of their bits are the value.

    Raises:
        ValueError: If the pixels are damaged, too large, or do not fit the header.
    """
    limit = largest_mb << 20
    refuse_oversized_file(layout.frame_byte_size, limit)
    stored, allocated = layout.bits_stored, layout.bits_allocated
    # Only uncompressed and RLE pixels can have unused bits below the value. Unused bits above it, such as those of an
    # overlay, are in the decoded pixels unless compression was lossy. Lossy pixels may exceed the range a little.
    as_stored = not layout.transfer_syntax.is_encapsulated or layout.transfer_syntax == RLELossless
    high = read_dicom_unsigned_integer(dataset, "HighBit")
    high = stored - 1 if high is None or not as_stored else high
    if not 0 < stored <= high + 1 <= allocated:
        raise ValueError(f"the file says {stored} bits up to bit {high} of {allocated} for a pixel, which cannot be")
    bits = StoredPixelBits(stored, high + 1 - stored, layout.signed, layout.transfer_syntax not in LOSSY_SYNTAXES)
    return _decode_dicom_frame(dataset, layout, index, limit), bits


def read_dicom_frame_values(dataset: Any, index: int, largest_mb: int) -> NDArray[np.float32]:
    """Return a grey frame's values after the modality transform, ``(rows, columns)``; padding is NaN.

    Args:
        dataset: All elements of the file; :func:`apply_frame_functional_groups` changes them.
        index: Number of the frame, from 0.

    Raises:
        ValueError: If the frame is damaged, too large, in colour, or MONOCHROME1, where low values are white.
    """
    refuse_large_dicom_elements(dataset, _READ_TAGS, largest_mb)
    if not read_dicom_element_value(dataset, "PixelData") and find_float_pixel_element(dataset):
        raise ValueError("its pixels are floats, of which no volume is made here")
    layout = _read_dicom_pixel_layout(dataset)
    apply_frame_functional_groups(dataset, index)
    if layout.photometric != "MONOCHROME2":
        raise ValueError(f"its pixels are of the kind {layout.photometric}; a volume needs grey values, MONOCHROME2")
    numbers, bits = _decode_stored_values(dataset, layout, index, largest_mb)
    pipeline = GreyscalePipeline(dataset, bits, 8 * numbers.itemsize, _ANY_WINDOW)
    values = pipeline.apply_modality_transform(numbers).astype(np.float32)
    values[pipeline.find_padding_pixels(numbers)] = np.nan
    return values


def _render_float_pixels(dataset: Any, keyword: str, rendering: PictureRenderingOptions) -> RenderedPicture:
    """Decode a file whose pixels are floats.

    Args:
        keyword: Name of the element that holds the pixels.

    Raises:
        ValueError: If an element is missing, or the picture is too large, damaged or not grey.
    """
    stated = [read_dicom_unsigned_integer(dataset, name) for name in ("Rows", "Columns")]
    kind = str(read_dicom_element_value(dataset, _PHOTOMETRIC_KEYWORD) or "")[:20]
    if not all(stated) or not kind:
        raise ValueError(f"the DICOM file does not give Rows, Columns or {_PHOTOMETRIC_KEYWORD}")
    if kind not in _GREY_KINDS:
        raise ValueError(f"its pixels are of the kind {kind}, which floats cannot be")
    rows, columns = (int(side or 0) for side in stated)
    frames = int(read_dicom_number(dataset, "NumberOfFrames") or 1)
    index = choose_frame_index(rendering.frame, frames, f"the DICOM file has {frames} frames")
    apply_frame_functional_groups(dataset, index)
    refuse_oversized_file(rows * columns * _BYTES_PER_FLOAT, rendering.largest_mb << 20)
    numbers = read_float_frame(dataset, keyword, (rows, columns), frames, index)
    grey = render_floats_as_8_bit_grey(numbers, dataset, keyword, rendering.window)
    is_blank = bool(grey.min() == grey.max() and np.nanmin(numbers) < np.nanmax(numbers))
    return RenderedPicture(grey, is_blank, _read_pixel_aspect(dataset))


def _read_pixel_aspect(dataset: Any) -> float:
    """Return the height of a pixel divided by its width, after :func:`apply_frame_functional_groups`."""
    return find_dicom_pixel_aspect([read_dicom_element_value(dataset, keyword) for keyword in _PIXEL_SIZE_KEYWORDS])


@dataclass(frozen=True)
class DicomPixelLayout:
    """The pixel format that a DICOM header states.

    Attributes:
        photometric: Photometric interpretation, such as ``MONOCHROME2``.
        frames: Number of frames.
        bits_allocated: Bits allocated per sample.
        bits_stored: Bits of a sample that hold its value.
        signed: True if samples are signed.
    """

    transfer_syntax: UID
    photometric: str
    frames: int
    rows: int
    columns: int
    samples_per_pixel: int
    bits_allocated: int
    bits_stored: int
    signed: bool

    @property
    def frame_byte_size(self) -> int:
        """The number of bytes of one frame's pixels."""
        bytes_per_sample = -(-self.bits_allocated // 8)
        return self.rows * self.columns * self.samples_per_pixel * bytes_per_sample


def _read_dicom_pixel_layout(dataset: Any) -> DicomPixelLayout:
    """Read the pixel format from the header.

    Raises:
        ValueError: If the file has no pixels, or an element is missing or not supported.
    """
    if not read_dicom_element_value(dataset, "PixelData"):
        raise ValueError("the DICOM file holds no pixels")
    syntax = dataset.file_meta.get("TransferSyntaxUID")
    if not syntax:
        raise ValueError("the DICOM file does not give TransferSyntaxUID")
    if not is_transfer_syntax_readable(syntax):
        raise ValueError(f"its pixels are packed as {get_transfer_syntax_name(syntax)}, which cannot be decoded here")
    photometric = read_dicom_element_value(dataset, _PHOTOMETRIC_KEYWORD) or None
    numbers = [read_dicom_unsigned_integer(dataset, name) for name in _INTEGER_KEYWORDS]
    if None in numbers or photometric is None:
        values = zip((_PHOTOMETRIC_KEYWORD, *_INTEGER_KEYWORDS), (photometric, *numbers), strict=True)
        missing = ", ".join(name for name, value in values if value is None)
        raise ValueError(f"the DICOM file does not give {missing}")
    rows, columns, samples, allocated, stored, signed = (int(number or 0) for number in numbers)
    kind = str(photometric)[:20]
    if kind not in (*_GREY_KINDS, *_COLOR_KINDS, _PALETTE_KIND):
        raise ValueError(f"its pixels are of the kind {kind}, which is neither grey, palette, RGB nor YBR")
    if samples != (3 if kind in _COLOR_KINDS else 1):
        raise ValueError(f"SamplesPerPixel {samples} contradicts PhotometricInterpretation {kind}")
    if kind in _COLOR_KINDS and signed:
        raise ValueError("PixelRepresentation says that its colours are signed, which is not read here")
    if samples > 1 and dataset.get("PlanarConfiguration") is None:
        if not syntax.is_encapsulated:
            raise ValueError("the DICOM file does not give PlanarConfiguration")
        dataset.PlanarConfiguration = 0  # compressed frames define their own order
    if kind == _PALETTE_KIND:
        _refuse_unsupported_palette(dataset)
    frames = int(read_dicom_number(dataset, "NumberOfFrames") or 1)
    return DicomPixelLayout(syntax, kind, frames, rows, columns, samples, allocated, stored, bool(signed))


def _refuse_unsupported_palette(dataset: Any) -> None:
    """Raise a ``ValueError`` if the palette of a palette-colour image is missing, segmented or contradictory."""
    if "SegmentedRedPaletteColorLookupTableData" in dataset:  # a few bytes may expand to any number of entries
        raise ValueError("its palette is segmented, which is not read here")
    for keyword in (
        f"{color}PaletteColorLookupTable{part}" for color in _PALETTE_COLORS for part in ("Descriptor", "Data")
    ):
        if not read_dicom_element_value(dataset, keyword):
            raise ValueError(f"its pixels are numbers in a palette, and the file does not give {keyword}")
    descriptors = [
        read_dicom_element_value(dataset, f"{color}PaletteColorLookupTableDescriptor") for color in _PALETTE_COLORS
    ]
    if any(descriptor != descriptors[0] for descriptor in descriptors):  # C.7.6.3.1.5: they must be equal
        raise ValueError("the descriptors of its red, green and blue palette differ, which is not read here")


def _decode_dicom_frame(dataset: Any, layout: DicomPixelLayout, index: int, limit: int) -> NDArray[Any]:
    """Decode a frame to stored values ``(rows, columns[, samples])``; uncompressed and RLE pixels keep unused bits.

    Args:
        index: Number of the frame, from 0.
        limit: Bytes of memory that decoding may take.

    Raises:
        ValueError: If the pixels are damaged, or do not fit the header.
    """
    _refuse_pixel_size_mismatch(dataset, layout, index, limit)
    syntax = layout.transfer_syntax
    size = layout.bits_allocated // 8
    is_grey = layout.samples_per_pixel == 1
    bits_stored = dataset.BitsStored
    if is_grey and not syntax.is_encapsulated and syntax.is_little_endian and size in (1, 2, 4):  # faster than pydicom
        kind, shape = f"<{'i' if layout.signed else 'u'}{size}", (layout.rows, layout.columns)
        count = math.prod(shape)
        return np.frombuffer(dataset[_PIXEL_DATA_TAG].value, kind, count, index * count * size).reshape(shape)
    if not syntax.is_encapsulated or syntax == RLELossless:
        dataset.BitsStored = dataset.BitsAllocated  # else pydicom clears the unused bits
    try:
        pixels = pixel_array(dataset, index=index, decoding_plugin=DECODER_BY_SYNTAX[syntax])
        return np.ascontiguousarray(pixels, pixels.dtype.newbyteorder("=")) if is_grey else pixels
    except (RuntimeError, NotImplementedError):
        raise ValueError(f"its pixels, packed as {get_transfer_syntax_name(syntax)}, are damaged or cut off") from None
    except AttributeError as error:  # pydicom names the element that is missing
        raise ValueError(str(error)) from None
    finally:
        dataset.BitsStored = bits_stored


def _refuse_pixel_size_mismatch(dataset: Any, layout: DicomPixelLayout, index: int, limit: int) -> None:
    """Refuse pixel data whose size or sign contradicts the header, or that need too much memory.

    With a wrong number of columns the picture would be sheared.

    Args:
        index: Number of the frame, from 0.
        limit: Bytes of memory that decoding may take.

    Raises:
        ValueError: If the pixel data are refused.
    """
    rows, columns, pixels = layout.rows, layout.columns, dataset[_PIXEL_DATA_TAG].value
    if not layout.transfer_syntax.is_encapsulated:
        subsampled = layout.bits_allocated % 8 or layout.photometric == "YBR_FULL_422"
        expected = get_expected_length(dataset) if subsampled else layout.frames * layout.frame_byte_size
        actual = len(pixels)
        row = expected // (rows * layout.frames)
        if actual - expected >= max(row, 1) or actual < expected:  # a few bytes more are padding
            size = f"{rows} rows and {columns} columns"
            raise ValueError(f"the file says {size}, which are {expected} bytes of pixels, and holds {actual}")
        return
    packed = get_frame(pixels, index, number_of_frames=layout.frames)
    if layout.transfer_syntax == RLELossless:
        for count in compute_rle_plane_sizes(packed):
            if not 0 <= count - rows * columns < min(columns, _MAX_RLE_PADDING_BYTES):
                raise ValueError(f"the file says {rows} rows and {columns} columns, its packed pixels are {count}")
        return
    stated = (rows, columns, layout.samples_per_pixel)
    if (inside := read_encoded_frame_shape(packed)) != stated:
        sizes = (" × ".join(map(str, size)) for size in (stated, inside))
        raise ValueError("the file says {} for rows, columns and samples, its packed pixels {}".format(*sizes))
    if is_jpeg_2000_signed(packed) and not layout.signed:
        raise ValueError("PixelRepresentation says unsigned, its packed pixels say signed")
    refuse_oversized_file(layout.frame_byte_size + estimate_jpeg_2000_decoder_memory(packed), limit)


def _convert_palette_to_rgb(pixels: NDArray[Any], dataset: Any) -> NDArray[np.uint8]:
    """Convert palette indices to 8-bit colours ``(height, width, 3)`` (DICOM PS3.3 C.7.6.3.1.5 and C.7.6.3.1.6)."""
    entries, first, bits = (int(value) for value in dataset.RedPaletteColorLookupTableDescriptor)
    entries = entries or 2**16
    order = "<" if dataset.file_meta.TransferSyntaxUID.is_little_endian else ">"
    data = [dataset[f"{name}PaletteColorLookupTableData"].value for name in _PALETTE_COLORS]
    tables = [read_lookup_table_entries(entry, entries, bits, order, "its palette") for entry in data]
    top = max(int(table.max()) for table in tables)
    # A table of zeros has no depth: a palette may lack a colour.
    if len(set(map(len, data))) > 1 or any(0 < table.max() <= 255 < top for table in tables):
        raise ValueError("the red, green and blue table of its palette have entries of unlike depths")
    depth = 8 if top <= 255 else guess_lookup_table_bit_depth(top, bits, 16, "palette")
    indices = np.clip(pixels.astype(np.int64) - first, 0, entries - 1)
    return np.stack([scale_samples_to_8_bits(table, depth, "the palette")[indices] for table in tables], axis=-1)
