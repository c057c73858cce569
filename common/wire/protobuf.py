"""One large field of a protobuf message in protobuf's wire format, without protobuf's copies of it.

Both ends of the wire use it for the contents of objects, which are nearly all bytes that travel.
"""

from common.wire.fleet_protocol import PullObjectResponse, PushObjectRequest

VARINT, LENGTH_DELIMITED = 0, 2  # the two kinds of field that these messages have
CONTENT_OF_PUSH = PushObjectRequest.DESCRIPTOR.fields_by_name["object_content"].number
CONTENT_OF_PULL = PullObjectResponse.DESCRIPTOR.fields_by_name["object_content"].number


def cut_out(data: bytes, field: int) -> tuple[bytes, memoryview]:
    """Take one length-delimited field of the outermost message out of protobuf's wire format.

    Returns:
        The message without the field, and the field's content, empty where there is none.

    Raises:
        ValueError: If the bytes are no such message.
    """
    view, place, kept, content = memoryview(data), 0, list[memoryview](), memoryview(b"")
    while place < len(data):
        begin = place
        tag, place = _varint(data, place)
        size, place = _varint(data, place)
        kind = tag & 7
        if kind not in (VARINT, LENGTH_DELIMITED):
            raise ValueError(f"field {tag >> 3} is of an unexpected kind")
        end = place + size if kind == LENGTH_DELIMITED else place
        if end > len(data):
            raise ValueError("the message is cut off")
        if tag == field << 3 | LENGTH_DELIMITED:
            content = view[place:end]
        else:
            kept.append(view[begin:end])
        place = end
    return b"".join(kept), content


def with_field(message: bytes, field: int, content: bytes | memoryview) -> bytes:
    """A message as it travels, with a field of bytes added that it does not have yet."""
    return b"".join((message, _as_varint(field << 3 | LENGTH_DELIMITED), _as_varint(len(content)), content))


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if place >= len(data) or shift > 63:
            raise ValueError("the message is cut off")
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return value, place
        shift += 7


def _as_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
