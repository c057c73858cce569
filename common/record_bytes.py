"""A record as it leaves, in one fixed form of bytes: what audits hash, previews write and receipts are checked by.

The form does not depend on the order in which Flower keeps things, nor on how it cuts them for the wire: one line of
JSON, its keys sorted, says what the records hold; the bytes that it announces follow in the same order. So the site,
before anything leaves, and the coordinator, after it came, find the same SHA-256, and ``sha256sum`` finds it too.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

FIELDS = "fields"
"""The ConfigRecord that holds everything small of one of our records."""
SIGNATURE = "signature."
"""What begins so in it is about the record and no part of it, see :mod:`common.signatures`."""
_BYTES = "bytes"


def pieces(content: RecordDict) -> Iterator[bytes]:
    """The form, piece by piece: an array of a model is not copied."""
    described: dict[str, dict[str, Any]] = {}
    held: list[bytes] = []
    for name in sorted(content):
        record = content[name]
        described[name] = {key: _described(record[key], held) for key in sorted(record) if _counts(name, key)}
    yield json.dumps(described, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    yield from held


def record_sha256(content: RecordDict) -> str:
    """SHA-256 of :func:`pieces`, in hexadecimal digits."""
    digest = hashlib.sha256()
    for piece in pieces(content):
        digest.update(piece)
    return digest.hexdigest()


def of_bytes(data: bytes) -> RecordDict:
    """The inverse of :func:`pieces`.

    Raises:
        ValueError: If the bytes are not in this form.
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
    return content


def small_fields(content: RecordDict) -> dict[str, Any]:
    """The small fields of one of our records, unchecked; none where it is no record of ours."""
    record = content.get(FIELDS)
    return dict(record) if isinstance(record, ConfigRecord) else {}


def _counts(name: str, key: str) -> bool:
    """Whether a field is a part of the record."""
    return name != FIELDS or not key.startswith(SIGNATURE)


def _described(value: Any, held: list[bytes]) -> Any:
    if isinstance(value, Array):
        held.append(value.data)
        facts = {"dtype": value.dtype, "shape": list(value.shape), "stype": value.stype}
        return {**facts, _BYTES: len(value.data)}
    if isinstance(value, bytes):
        held.append(value)
        return {_BYTES: len(value)}
    if _of_bytes(value):
        held.extend(value)
        return {_BYTES: [len(one) for one in value]}
    return value


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
class Part:
    """One field of a record: its name, the shape of its numbers, its bytes; no value.

    Attributes:
        shape: Of an array; ``(n,)`` of a list; None of a single value.
    """

    name: str
    shape: tuple[int, ...] | None
    size: int


def parts(content: RecordDict) -> list[Part]:
    """What a record holds, field by field, by the names it has on the wire; a field of an array is ``record/name``."""
    found = [
        Part(f"{name}/{key}", tuple(array.shape), len(array.data))
        for name, record in sorted(content.array_records.items())
        for key, array in sorted(record.items())
    ]
    for record in content.config_records.values():
        found += [_part(key, value, record) for key, value in sorted(record.items()) if not key.startswith(SIGNATURE)]
    return found


def _part(name: str, value: Any, record: ConfigRecord) -> Part:
    if isinstance(value, bytes):
        shape = record.get(f"{name}/shape")
        return Part(name, tuple(shape) if isinstance(shape, list) else (len(value) // 4,), len(value))  # type: ignore[arg-type]
    if _of_bytes(value):
        return Part(name, (len(value),), sum(map(len, value)))
    return Part(name, (len(value),) if isinstance(value, list) else None, len(json.dumps(value)))
