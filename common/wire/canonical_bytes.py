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


def canonical_pieces(content: RecordDict) -> Iterator[bytes]:
    """Yield the form, piece by piece: an array of a model is not copied."""
    line, held = _first_line(content)
    yield line
    yield from held


def record_sha256(content: RecordDict, but: Collection[str] = ()) -> str:
    """SHA-256 of the first line of :func:`canonical_pieces`, in hexadecimal digits.

    Args:
        but: How the names of records and small fields begin that do not count.
    """
    return hashlib.sha256(_first_line(content, but)[0]).hexdigest()


def parse_canonical(data: bytes) -> RecordDict:
    """Invert :func:`canonical_pieces`.

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
    """Return the small fields of one of our records, unchecked; none where it is no record of ours."""
    record = content.get(FIELDS)
    return dict(record) if isinstance(record, ConfigRecord) else {}


def _first_line(content: RecordDict, but: Collection[str] = ()) -> tuple[bytes, list[bytes]]:
    """Return the line of JSON, and the bytes that it announces."""
    described: dict[str, dict[str, Any]] = {}
    held: list[bytes] = []
    skipped = tuple(but)
    for name in sorted(content):
        if name.startswith(skipped):
            continue
        record, entries = content[name], described.setdefault(name, {})
        for key in sorted(record):
            if key.startswith(skipped) or (name == FIELDS and key.startswith(SIGNATURE)):
                continue
            value = record[key]
            if isinstance(value, Array):
                held.append(value.data)
                facts = {"dtype": value.dtype, "shape": list(value.shape), "stype": value.stype}
                entries[key] = {**facts, _BYTES: len(value.data), _BLAKE3: _array_hash(value)}
            elif isinstance(value, bytes):
                held.append(value)
                entries[key] = {_BYTES: len(value), _BLAKE3: blake3(value).hexdigest()}
            elif isinstance(value, list) and value and isinstance(value[0], bytes):
                held.extend(value)
                hashes = [blake3(part).hexdigest() for part in value]
                entries[key] = {_BYTES: list(map(len, value)), _BLAKE3: hashes}
            else:
                entries[key] = value
    return json.dumps(described, sort_keys=True, separators=(",", ":")).encode() + b"\n", held


def _array_hash(array: Array) -> str:
    """Return the BLAKE3 hash of an array's bytes, kept on the array itself; other bytes are hashed anew."""
    cached = vars(array).get(_KEPT)
    if cached is None or cached[0] is not array.data:
        cached = vars(array)[_KEPT] = array.data, blake3(array.data).hexdigest()
    return str(cached[1])


def cached_hash(array: Array) -> str:
    """Return the hash that is kept on an array; empty where there is none, or the bytes are others now."""
    data, known = vars(array).get(_KEPT, (None, ""))
    return str(known) if data is array.data else ""


def cache_hash(array: Array, known: str) -> None:
    """Keep the hash of its bytes on an array that this process did not hash itself, but one of the same run did."""
    vars(array)[_KEPT] = array.data, known


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


def fields_of(content: RecordDict) -> list[RecordField]:
    """List what a record holds by the names it has on the wire; a field of an array is ``record/name``."""
    fields = [
        RecordField(f"{name}/{key}", tuple(array.shape), len(array.data))
        for name, record in sorted(content.array_records.items())
        for key, array in sorted(record.items())
    ]
    for record in content.config_records.values():
        for key, value in sorted(record.items()):
            if key.startswith(SIGNATURE):
                continue
            shape: Any = (len(value),) if isinstance(value, list) else None
            if isinstance(value, bytes):
                announced, width = record.get(f"{key}/shape"), record.get(f"{key}/{WIDTH}")
                flat = len(value) // (width if type(width) is int and width > 0 else 4)
                shape, size = tuple(announced) if isinstance(announced, list) else (flat,), len(value)
            elif isinstance(value, list) and value and isinstance(value[0], bytes):
                size = sum(map(len, value))
            else:
                size = len(json.dumps(value))
            fields.append(RecordField(key, shape, size))
    return fields
