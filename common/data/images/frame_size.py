"""What a packed frame says of its own size, read before anything is unpacked: decoders believe it and take memory."""

import struct
from collections.abc import Iterator

_SIZ = b"\xff\x4f\xff\x51"
_STANDS_ALONE = {0x01, *range(0xD0, 0xD9)}
_TABLES = {0xC4, 0xC8, 0xCC}
_JPEG_LS = 0xF7
_CODING_STYLE, _COMPONENT_STYLE, _TILE_PART, _DATA = 0xFF52, 0xFF53, 0xFF90, 0xFF93
_OF_A_TILE, _OF_A_BLOCK = 9 << 10, 768
"""Bytes that OpenJPEG takes for each tile, and for each code block with its precinct (measured with version 2.5)."""


def frame_size(frame: bytes) -> tuple[int, int, int]:
    """Rows, columns and samples a pixel of a frame of JPEG, JPEG-LS or JPEG 2000.

    Raises:
        ValueError: If its head is damaged, or does not say one size.
    """
    try:
        return _of_jpeg(frame) if frame.startswith(b"\xff\xd8") else _of_jpeg_2000(frame)
    except (struct.error, IndexError):
        raise ValueError("the head of its packed pixels is damaged") from None


def _of_jpeg(frame: bytes) -> tuple[int, int, int]:
    """Walk from marker to marker to the frame header (ITU-T T.81, B.2.2; T.87, C.2.2)."""
    place = 2
    while frame[place] == 0xFF:
        marker = frame[place + 1]
        if (0xC0 <= marker <= 0xCF and marker not in _TABLES) or marker == _JPEG_LS:
            rows, columns, samples = struct.unpack_from(">HHB", frame, place + 5)
            return rows, columns, samples
        if marker == 0xFF:  # a fill byte
            place += 1
        else:
            place += 2 if marker in _STANDS_ALONE else 2 + struct.unpack_from(">H", frame, place + 2)[0]
    raise ValueError("the head of its packed pixels is damaged")


def _of_jpeg_2000(frame: bytes) -> tuple[int, int, int]:
    """Read the one image and tile size marker (ITU-T T.800, A.5.1); no packed data hold these four bytes."""
    if frame.count(_SIZ) != 1:
        raise ValueError("the head of its packed pixels is damaged")
    width, height, left, top = struct.unpack_from(">IIII", frame, frame.index(_SIZ) + 8)
    (samples,) = struct.unpack_from(">H", frame, frame.index(_SIZ) + 40)
    return height - top, width - left, samples


def decoder_tables(frame: bytes) -> int:
    """Bytes that a decoder of JPEG 2000 takes beside the pixels: a head may name tiles and blocks of one pixel.

    Of another kind of frame there are none.

    Raises:
        ValueError: If its head is damaged.
    """
    if frame.startswith(b"\xff\xd8"):
        return 0
    try:
        place = frame.index(_SIZ)
        *corner, tile_width, tile_height = struct.unpack_from(">IIIIII", frame, place + 8)
        (samples,) = struct.unpack_from(">H", frame, place + 40)
        width, height = corner[0] - corner[2], corner[1] - corner[3]
        tiles = -(-width // tile_width) * -(-height // tile_height) if min(tile_width, tile_height) else 2**32
        sides = min(width, tile_width), min(height, tile_height)
        # A tile has more layers and blocks only if its own head says so: the largest of all heads stands for each.
        styles: list[tuple[int, bytes]] = list(_coding_styles(frame, place + 4, wide=samples > 256))
        blocks = max((_blocks(*sides, style) for _, style in styles), default=0)
        visits = max((2 * layers * (style[0] + 1) for layers, style in styles), default=0)
        return int(tiles * _OF_A_TILE + samples * blocks * (tiles * _OF_A_BLOCK + visits))
    except (struct.error, IndexError, ValueError):
        raise ValueError("the head of its packed pixels is damaged") from None


def _coding_styles(frame: bytes, place: int, *, wide: bool) -> Iterator[tuple[int, bytes]]:
    """Layers and style of every coding style (ITU-T T.800, A.6.1 and A.6.2), of the main head and those of tile parts.

    Args:
        place: Of the length behind the marker of sizes.
        wide: Whether components are counted in two bytes.
    """
    layers, part, marker = 1, 0, 0
    while place + 2 <= len(frame) and marker != 0xFFD9:
        (length,) = struct.unpack_from(">H", frame, place)
        content = frame[place + 2 : place + length]
        if marker == _CODING_STYLE:
            layers = struct.unpack_from(">H", content, 2)[0]
            yield layers, content[5:]
        elif marker == _COMPONENT_STYLE:
            yield layers, content[3 if wide else 2 :]
        elif marker == _TILE_PART:
            size = struct.unpack_from(">I", content, 2)[0]
            part = place - 2 + size if size else len(frame)
        place += length
        (marker,) = struct.unpack_from(">H", frame, place) if place + 2 <= len(frame) else (0xFFD9,)
        place += 2
        if marker == _DATA:  # the next part begins where this one said that it ends
            place = max(part, place)
            (marker,) = struct.unpack_from(">H", frame, place) if place + 2 <= len(frame) else (0xFFD9,)
            place += 2


def _blocks(width: int, height: int, style: bytes) -> int:
    """Code blocks of one component of a tile, over all its resolutions; a precinct holds one of each band or more."""
    levels, exponents = style[0], (style[1] + 2, style[2] + 2)
    precincts, total = style[5:], 0
    for level in range(levels + 1):
        own = precincts[level] if level < len(precincts) else 0xFF
        halved = int(level > 0)
        across, down = (
            min(block, max(size - halved, 0)) for block, size in zip(exponents, (own & 15, own >> 4), strict=True)
        )
        shrunk = levels - level + halved
        total += (3 if halved else 1) * -(-width >> shrunk >> across) * -(-height >> shrunk >> down)
    return total


def plane_size(frame: bytes) -> int:
    """Bytes that the first segment of an RLE frame unpacks to: one of each pixel (DICOM PS3.5, annex G).

    Raises:
        ValueError: If its head is damaged.
    """
    try:
        segments, place, after = struct.unpack_from("<3I", frame)
    except struct.error:
        raise ValueError("the head of its packed pixels is damaged") from None
    end, size = min(after if segments > 1 else len(frame), len(frame)), 0
    while place < end:
        control, place = frame[place], place + 1
        if control < 128:  # so many bytes and one, as they are
            size += min(control + 1, end - place)
            place += control + 1
        elif control > 128:  # one byte, repeated
            size += 257 - control
            place += 1
    return size
