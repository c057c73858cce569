"""A record as it leaves, in one fixed form of bytes: what audits hash, previews write and receipts are checked by.

The form does not depend on the order in which Flower keeps things, nor on how it cuts them for the wire: one line of
JSON, its keys sorted, says what the records hold and names the BLAKE3 hash of every run of bytes; those bytes follow in
the same order. A record's hash is the SHA-256 of that first line (``head -n 1 FILE | sha256sum``), so the site, before
anything leaves, and the coordinator, after it came, find the same one, and an array that is sent to many sites or
looked at several times is hashed once. BLAKE3, because every update is hashed at the site and at the coordinator: it
takes 0.4 times as long as SHA-256, on a processor with AVX-512 and with instructions for SHA.
"""

import hashlib
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from blake3 import blake3
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

FIELDS = "fields"
"""The ConfigRecord that holds everything small of one of our records."""
SIGNATURE = "signature."
"""What begins so in it is about the record and no part of it, see :mod:`common.security.signatures`."""
WIDTH = "width"
"""What the field is called, behind a field's name and a slash, that says how many bytes each of its counts takes."""
_BYTES, _BLAKE3 = "bytes", "blake3"
_KEPT = "_polyclinic_blake3"


def pieces(content: RecordDict) -> Iterator[bytes]:
    """The form, piece by piece: an array of a model is not copied."""
    line, held = _first_line(content)
    yield line
    yield from held


def record_sha256(content: RecordDict, but: Collection[str] = ()) -> str:
    """SHA-256 of the first line of :func:`pieces`, in hexadecimal digits.

    Args:
        but: How the names of records and small fields begin that do not count.
    """
    return hashlib.sha256(_first_line(content, but)[0]).hexdigest()


def of_bytes(data: bytes) -> RecordDict:
    """The inverse of :func:`pieces`.

    Raises:
        ValueError: If the bytes are not in this form, or are not those that the first line names.
    """
    head, newline, rest = data.partition(b"\n")
    described = json.loads(head)
    if not newline or not isinstance(described, dict):
        raise ValueError("these are no records: the first line must be an object of JSON")
    content, reader = RecordDict(), _Reader(rest)
    for name, entries in described.items():
        content[name] = reader.record(entries)
    if reader.left:
        raise ValueError(f"{reader.left} bytes more than the first line announces")
    if _first_line(content)[0] != head + newline:
        raise ValueError("the bytes are not those that the first line names")
    return content


def small_fields(content: RecordDict) -> dict[str, Any]:
    """The small fields of one of our records, unchecked; none where it is no record of ours."""
    record = content.get(FIELDS)
    return dict(record) if isinstance(record, ConfigRecord) else {}


def _counts(name: str, key: str) -> bool:
    """Whether a field is a part of the record."""
    return name != FIELDS or not key.startswith(SIGNATURE)


def _first_line(content: RecordDict, but: Collection[str] = ()) -> tuple[bytes, list[bytes]]:
    """The line of JSON, and the bytes that it announces."""
    described: dict[str, dict[str, Any]] = {}
    held: list[bytes] = []
    for name in sorted(one for one in content if not one.startswith(tuple(but))):
        record = content[name]
        keys = [key for key in sorted(record) if _counts(name, key) and not key.startswith(tuple(but))]
        described[name] = {key: _described(record[key], held) for key in keys}
    return json.dumps(described, sort_keys=True, separators=(",", ":")).encode() + b"\n", held


def _described(value: Any, held: list[bytes]) -> Any:
    if isinstance(value, Array):
        held.append(value.data)
        facts = {"dtype": value.dtype, "shape": list(value.shape), "stype": value.stype}
        return {**facts, _BYTES: len(value.data), _BLAKE3: _array_hash(value)}
    if isinstance(value, bytes):
        held.append(value)
        return {_BYTES: len(value), _BLAKE3: blake3(value).hexdigest()}
    if _of_bytes(value):
        held.extend(value)
        return {_BYTES: [len(one) for one in value], _BLAKE3: [blake3(one).hexdigest() for one in value]}
    return value


def _array_hash(array: Array) -> str:
    """BLAKE3 of an array's bytes, kept on the array itself: it lives as long, and other bytes are hashed anew."""
    kept = vars(array).get(_KEPT)
    if kept is None or kept[0] is not array.data:
        kept = vars(array)[_KEPT] = array.data, blake3(array.data).hexdigest()
    return str(kept[1])


def kept_hash(array: Array) -> str:
    """The hash that is kept on an array; empty where there is none, or the bytes are others now."""
    data, known = vars(array).get(_KEPT, (None, ""))
    return str(known) if data is array.data else ""


def keep_hash(array: Array, known: str) -> None:
    """Keep the hash of its bytes on an array that this process did not hash itself, but one of the same run did."""
    vars(array)[_KEPT] = array.data, known


def _of_bytes(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], bytes)


class _Reader:
    """Takes announced bytes off the front of what is left."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def record(self, entries: dict[str, Any]) -> ArrayRecord | ConfigRecord:
        values = {key: self._value(entry) for key, entry in entries.items()}
        if values and all(isinstance(value, Array) for value in values.values()):
            record = ArrayRecord()
            for key, value in values.items():
                record[key] = value
            return record
        return ConfigRecord(values)

    def _value(self, entry: Any) -> Any:
        if not isinstance(entry, dict):
            return entry
        if isinstance(entry[_BYTES], list):
            return [self._taken(size) for size in entry[_BYTES]]
        taken = self._taken(entry[_BYTES])
        if "stype" not in entry:
            return taken
        return Array(dtype=entry["dtype"], shape=tuple(entry["shape"]), stype=entry["stype"], data=taken)

    def _taken(self, size: int) -> bytes:
        if not 0 <= size <= self.left:
            raise ValueError(f"{size} bytes are announced, {self.left} are left")
        self._at += size
        return self._data[self._at - size : self._at]


@dataclass(frozen=True)
class RecordField:
    """One field of a record: its name, the shape of its numbers, its bytes; no value.

    Attributes:
        shape: Of an array; ``(n,)`` of a list; None of a single value.
    """

    name: str
    shape: tuple[int, ...] | None
    size: int


def parts(content: RecordDict) -> list[RecordField]:
    """What a record holds, field by field, by the names it has on the wire; a field of an array is ``record/name``."""
    found = [
        RecordField(f"{name}/{key}", tuple(array.shape), len(array.data))
        for name, record in sorted(content.array_records.items())
        for key, array in sorted(record.items())
    ]
    for record in content.config_records.values():
        found += [_part(key, value, record) for key, value in sorted(record.items()) if not key.startswith(SIGNATURE)]
    return found


def _part(name: str, value: Any, record: ConfigRecord) -> RecordField:
    if isinstance(value, bytes):
        shape, width = record.get(f"{name}/shape"), record.get(f"{name}/{WIDTH}")
        flat = (len(value) // (width if type(width) is int and width > 0 else 4),)
        return RecordField(name, tuple(shape) if isinstance(shape, list) else flat, len(value))  # type: ignore[arg-type]
    if _of_bytes(value):
        return RecordField(name, (len(value),), sum(map(len, value)))
    return RecordField(name, (len(value),) if isinstance(value, list) else None, len(json.dumps(value)))
