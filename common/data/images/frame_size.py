"""What a packed frame says of its own size, read before anything is unpacked: decoders believe it and take memory."""

import struct

_SIZ = b"\xff\x4f\xff\x51"
_STANDS_ALONE = {0x01, *range(0xD0, 0xD9)}
_TABLES = {0xC4, 0xC8, 0xCC}
_JPEG_LS = 0xF7


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
