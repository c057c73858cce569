"""The one part of a ``multipart/related`` answer (RFC 2046 and 2387), as WADO-RS sends an instance."""

from email.message import Message

from common.data.dicomweb.refusals import NotGiven

LONGEST_HEAD = 8192
LONGEST_BOUNDARY = 200
DICOM = "application/dicom"


def instance_in(content: bytearray, kind: str) -> bytes:
    """Return the DICOM file in an answer.

    Args:
        kind: The answer's content type.

    Raises:
        NotGiven: If it is of another kind, cut off, or not of one part.
    """
    said = Message()
    said["content-type"] = kind.replace("\n", " ").replace("\r", " ")
    found = said.get_content_type()
    if found == DICOM:  # some servers leave the envelope out
        return bytes(content)
    if found != "multipart/related":
        raise NotGiven(f"the answer is {_plain(kind)}, where multipart/related with a DICOM file was expected")
    boundary = said.get_boundary() or ""
    if not 0 < len(boundary) <= LONGEST_BOUNDARY or not boundary.isascii():
        raise NotGiven("the answer does not say where its parts end (boundary)")
    return _only_part(content, b"--" + boundary.encode())


def _only_part(content: bytearray, mark: bytes) -> bytes:
    start = 0 if content.startswith(mark) else content.find(b"\r\n" + mark, 0, LONGEST_HEAD) + 2
    head_end = content.find(b"\r\n\r\n", start, start + len(mark) + LONGEST_HEAD)
    if content[start : start + len(mark)] != mark or head_end < 0:
        raise NotGiven("the answer holds no part")
    if content[start + len(mark) : start + len(mark) + 2] == b"--":
        raise NotGiven("the answer holds no part")
    _refuse_other_kind(bytes(content[start + len(mark) : head_end]))
    begin, end = head_end + 4, content.rfind(b"\r\n" + mark)
    if end < begin:
        raise NotGiven("the answer is cut off")
    if content[end + 2 + len(mark) : end + 4 + len(mark)] != b"--":
        raise NotGiven("the answer is cut off")
    # The search from the end is fast; a second part would have to begin with the mark as well.
    if content.find(b"\r\n" + mark, begin, end) >= 0:
        raise NotGiven("the answer holds several parts, where one image was asked for")
    return bytes(memoryview(content)[begin:end])


def _refuse_other_kind(head: bytes) -> None:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-type" and not value.strip().lower().startswith(DICOM.encode()):
            raise NotGiven(f"the part is {_plain(value.decode('ascii', errors='replace'))}, not a DICOM file")


def _plain(kind: str) -> str:
    """A content type of a stranger's, short and printable."""
    shown = "".join(letter for letter in kind.strip() if letter.isprintable())[:60]
    return f'"{shown}"' if shown else "of no kind"
