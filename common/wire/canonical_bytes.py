"""The canonical bytes of a record, which audits hash, previews write and receipts are checked by.

The form does not depend on the order in which Flower keeps things, nor on how it cuts them for the wire: one line of
JSON, its keys sorted, says what the records hold and names the BLAKE3 hash of every run of bytes; those bytes follow in
the same order. A record's hash is the SHA-256 of that first line (``head -n 1 FILE | sha256sum``), so the site before
it sends, and the coordinator after it receives, compute the same hash, and an array that goes to many sites is hashed
once. BLAKE3, because every update is hashed at both ends: it takes 0.4 times as long as SHA-256, on a processor with
AVX-512 and with instructions for SHA.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from blake3 import blake3
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

FIELDS = "fields"
"""Name of the ConfigRecord that holds all small fields of a record."""
SIGNATURE = "signature."
"""Prefix of fields that are about the record and no part of it, see :mod:`common.security.signatures`."""
WIDTH = "width"
"""``NAME/width`` is the field with the number of bytes that each count in the field ``NAME`` takes."""
_BYTES, _BLAKE3 = "bytes", "blake3"
_CACHED = "_polyclinic_blake3"


def canonical_pieces(content: RecordDict) -> Iterator[bytes]:
    """Yield the canonical bytes in pieces, so that no array of a model is copied."""
    line, runs = _canonical_header_line(content)
    yield line
    yield from runs


def record_sha256(content: RecordDict) -> str:
    """Return the SHA-256 of the first line of the canonical bytes, in hexadecimal digits."""
    return hashlib.sha256(_canonical_header_line(content)[0]).hexdigest()


def parse_canonical_record(data: bytes) -> RecordDict:
    """Read a record from its canonical bytes.

    Raises:
        ValueError: If the bytes are not in this form, or do not match the sizes and hashes in their first line.
    """
    head, newline, rest = data.partition(b"\n")
    described = json.loads(head)
    if not newline or not isinstance(described, dict):
        raise ValueError("these are no records: the first line must be an object of JSON")
    start = 0

    def take(size: int) -> bytes:
        nonlocal start
        if not 0 <= size <= len(rest) - start:
            raise ValueError(f"{size} bytes are announced, {len(rest) - start} are left")
        start += size
        return rest[start - size : start]

    content = RecordDict()
    for name, entries in described.items():
        values = {key: _read_value(entry, take) for key, entry in entries.items()}
        if values and all(isinstance(value, Array) for value in values.values()):
            content[name] = record = ArrayRecord()  # which would copy arrays that it is made from
            for key, value in values.items():
                record[key] = value
        else:
            content[name] = ConfigRecord(values)
    if start < len(rest):
        raise ValueError(f"{len(rest) - start} bytes more than the first line announces")
    if _canonical_header_line(content)[0] != head + newline:
        raise ValueError("the bytes are not those that the first line names")
    return content


def _read_value(entry: Any, take: Callable[[int], bytes]) -> Any:
    """Return a value that the first line describes; ``take`` returns the next bytes of those that follow the line."""
    if not isinstance(entry, dict):
        return entry
    if isinstance(entry[_BYTES], list):
        return [take(size) for size in entry[_BYTES]]
    data = take(entry[_BYTES])
    if "stype" not in entry:
        return data
    return Array(dtype=entry["dtype"], shape=tuple(entry["shape"]), stype=entry["stype"], data=data)


def read_small_fields(content: RecordDict) -> dict[str, Any]:
    """Return the fields of one of our records except its large arrays, unchecked; empty for any other record."""
    record = content.get(FIELDS)
    return dict(record) if isinstance(record, ConfigRecord) else {}


def _canonical_header_line(content: RecordDict) -> tuple[bytes, list[bytes]]:
    """Return the line of JSON, and the runs of bytes that it announces."""
    described: dict[str, dict[str, Any]] = {}
    runs: list[bytes] = []
    for name in sorted(content):
        record, entries = content[name], described.setdefault(name, {})
        for key in sorted(record):
            if name == FIELDS and key.startswith(SIGNATURE):
                continue
            value = record[key]
            if isinstance(value, Array):
                runs.append(value.data)
                cached = vars(value).get(_CACHED)  # the hash, on the array itself as long as it holds these bytes
                if cached is None or cached[0] is not value.data:
                    cached = vars(value)[_CACHED] = value.data, blake3(value.data).hexdigest()
                facts = {"dtype": value.dtype, "shape": list(value.shape), "stype": value.stype}
                entries[key] = {**facts, _BYTES: len(value.data), _BLAKE3: str(cached[1])}
            elif isinstance(value, bytes):
                runs.append(value)
                entries[key] = {_BYTES: len(value), _BLAKE3: blake3(value).hexdigest()}
            elif isinstance(value, list) and value and isinstance(value[0], bytes):
                runs.extend(value)
                hashes = [blake3(part).hexdigest() for part in value]
                entries[key] = {_BYTES: list(map(len, value)), _BLAKE3: hashes}
            else:
                entries[key] = value
    return json.dumps(described, sort_keys=True, separators=(",", ":")).encode() + b"\n", runs


@dataclass(frozen=True)
class RecordField:
    """The name, shape and number of bytes of one field of a record, without its value.

    Attributes:
        shape: The shape of an array; ``(n,)`` for a list; None for a single value.
    """

    name: str
    shape: tuple[int, ...] | None
    size: int


def list_fields(content: RecordDict) -> list[RecordField]:
    """List the fields of a record by their names on the wire; an array is ``record/name``."""
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
