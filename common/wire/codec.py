"""Translate our typed records to and from Flower's ``RecordDict``, and pack numbers in fewer bytes.

:func:`encode_record` puts all small fields into the ConfigRecord ``fields``, and a model's trunk into an ArrayRecord
named after the field. :func:`decode_record` reads one expected record, of each wire version that this release speaks.
It rejects other versions, other records, missing or unknown fields, and wrong types. Fields are read by name, never by
position, and nothing is pickled.

Small arrays are in ``fields``, because Flower sends each record, array and chunk of an array by a separate call.

Compression has two steps: rounding float32 numbers, then packing the rounded numbers without loss. So a site knows
exactly which update the coordinator will add, and can carry the rounding error into its next update. int8: in blocks of
:data:`INT8_BLOCK_LENGTH`, each number is an integer from -127 to 127 times the block's scale, a power of two. Packed
int8 arrays contain the exponent of each block's scale as one int8, then the integers.
"""

import dataclasses
import functools
import json
import math
import types
import typing
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from polyclinic.common.errors import WireError
from polyclinic.common.metrics.score_histograms import ScoreCounts, make_empty_score_counts
from polyclinic.common.models.network import Head
from polyclinic.common.wire.bounds import (
    MAX_IMAGES,
    MAX_SITES,
    MAX_STATISTIC,
    check_field_bounds,
    escape_free_text_fields,
    refuse_unprintable_names,
)
from polyclinic.common.wire.canonical_bytes import COUNT_WIDTH_FIELD, FIELDS_RECORD, SIGNATURE_PREFIX, read_small_fields
from polyclinic.common.wire.flower_messages import (
    make_array_of_view,
    select_array_records,
    select_config_records,
)
from polyclinic.common.wire.records import (
    NUMBER_FORMATS,
    Arrays,
    ModelGroups,
    NumberFormat,
    Record,
)
from polyclinic.common.wire.secure_aggregation import Integers
from polyclinic.common.wire.versions import RECORD_FIELD, VERSION_FIELD, WIRE_VERSION, read_in_present_version

MAX_DIMENSIONS = 64
"""Maximum number of dimensions of an array, as in numpy."""

AnyRecord = TypeVar("AnyRecord", bound=Record)

RAW_FORMAT = "raw-little-endian"
_TRUNK = "trunk"
_VECTOR = "vector"
_ITEM_TYPE_BY_LIST: dict[Any, type] = {
    tuple[str, ...]: str,
    tuple[float, ...]: float,
    tuple[int, ...]: int,
    tuple[bytes, ...]: bytes,
}


WrittenArrays = dict[int, tuple[NDArray[np.float32], Array]]
"""``id`` of a numpy array -> the array, and its Flower array. The numpy array is kept so that its ``id`` stays
unique.
"""


def list_record_field_names(record: type[Record]) -> tuple[str, ...]:
    """Return the names of a record class's fields."""
    return tuple(field.name for field in dataclasses.fields(record))


def encode_record(record: Record, written: WrittenArrays | None = None) -> RecordDict:
    """Translate a typed record into a Flower ``RecordDict``.

    Args:
        record: The record.
        written: Cache of Flower arrays that this function reads and extends, so that an array in the messages to many
            sites is packed and hashed only once.
    """
    content = RecordDict()
    fields = ConfigRecord({VERSION_FIELD: WIRE_VERSION, RECORD_FIELD: type(record).__name__})
    for name, kind in _make_record_schema(typing.cast(type, type(record))).items():
        kind.encode_field(content, fields, name, getattr(record, name), {} if written is None else written)
    content[FIELDS_RECORD] = fields
    return content


def decode_record(content: RecordDict, expected: type[AnyRecord]) -> AnyRecord:
    """Translate a Flower ``RecordDict`` into a typed record and validate it.

    Control characters in text that people will read are escaped.

    Raises:
        WireError: If the content is not a valid record of the class ``expected``.
    """
    name = expected.__name__
    schema = _make_record_schema(typing.cast(type, expected))
    fields = {key: value for key, value in read_small_fields(content).items() if not key.startswith(SIGNATURE_PREFIX)}
    if VERSION_FIELD not in fields:
        raise WireError(f"expected {name}, got records {sorted(content)} without a wire version.")
    fields = read_in_present_version(fields)
    del fields[VERSION_FIELD]
    if (actual := fields.pop(RECORD_FIELD, None)) != name:
        raise WireError(f"expected {name}, got {actual!r}.")
    if unknown := sorted(
        key for key in content if key != FIELDS_RECORD and not isinstance(schema.get(key), _SEPARATE_RECORD_FIELDS)
    ):
        raise WireError(f"{name} does not have {', '.join(unknown)}.")
    values = dict[str, Any]()
    for key, kind in schema.items():
        values[key] = kind.decode_field(content, fields, key, name)
    if fields:
        raise WireError(f"{name} does not have {', '.join(sorted(fields))}.")
    record = expected(**escape_free_text_fields(expected, values))
    check_field_bounds(record)
    return record


# One class for each kind of field in our records. It writes the field's value into the Flower record ``fields`` or into
# a separate record. It reads the value, removes it from ``fields``, and raises WireError if it is missing or invalid.


@dataclasses.dataclass(frozen=True)
class _ScalarOrListField:
    """A field with one value or a list of values; a single float must be finite, a list may contain NaN (undefined)."""

    kind: type
    is_list: bool
    optional: bool

    def encode_field(
        self, content: RecordDict, fields: ConfigRecord, name: str, value: Any, written: WrittenArrays
    ) -> None:
        if value is not None:
            fields[name] = list(value) if self.is_list else value

    def decode_field(self, content: RecordDict, fields: dict[str, Any], name: str, record: str) -> Any:
        if name not in fields and self.optional:
            return None
        if name not in fields:
            raise WireError(f"{record} lacks {name}.")
        value = fields.pop(name)
        where = f"{record}.{name}"
        items = value if self.is_list else [value]
        if not isinstance(items, list) or not set(map(type, items)) <= {self.kind}:
            raise WireError(f"{where} must be {'a list of ' if self.is_list else ''}{self.kind.__name__}.")
        if self.kind is float:
            if self.optional and math.isnan(value):
                raise WireError(f"{where} is not a number; leave it out where it is not defined.")
            if any(map(math.isinf, items)) or (not self.is_list and math.isnan(value)):
                raise WireError(f"{where} must be finite.")
        return tuple(items) if self.is_list else value


class _ModelGroupsField:
    def encode_field(
        self, content: RecordDict, fields: ConfigRecord, name: str, value: ModelGroups, written: WrittenArrays
    ) -> None:
        if (trunk := value.trunk) is not None:
            if id(trunk) not in written:
                written[id(trunk)] = (trunk, make_packed_array(trunk, value.form))
            content[name] = trunk_record = ArrayRecord()  # which would copy an array that it is made from
            trunk_record[_TRUNK] = written[id(trunk)][1]
        if value.norm is not None:
            fields[f"{name}.norm"] = pack_numbers(value.norm, "float32")
        fields[f"{name}.classes"] = list(value.head.class_names) if value.head else []
        if value.head:
            fields[f"{name}.weight"] = pack_numbers(value.head.weight, "float32")
            fields[f"{name}.bias"] = pack_numbers(value.head.bias, "float32")

    def decode_field(self, content: RecordDict, fields: dict[str, Any], name: str, record: str) -> ModelGroups:
        class_names = fields.pop(f"{name}.classes", None)
        if not isinstance(class_names, list) or not set(map(type, class_names)) <= {str}:
            raise WireError(f"class names of {name} must be a list of str.")
        refuse_unprintable_names(class_names, f"class names of {name}")
        norm = _decode_float32_bytes(fields.pop(f"{name}.norm", None), f"norm of {name}")
        weight = _decode_float32_bytes(fields.pop(f"{name}.weight", None), f"weight of {name}")
        bias = _decode_float32_bytes(fields.pop(f"{name}.bias", None), f"bias of {name}")
        if (weight is not None) != bool(class_names) or (bias is not None) != bool(class_names):
            raise WireError(f"{name} has head rows without class names, or class names without head rows.")
        head = None
        if weight is not None and bias is not None:
            if not len(weight) or len(weight) % len(class_names):
                raise WireError(f"head of {name}: {len(weight)} weights cannot be those of {len(class_names)} classes.")
            try:
                head = Head(tuple(class_names), weight.reshape(len(class_names), -1), bias)
            except (ValueError, AssertionError) as error:
                raise WireError(f"head of {name}: {error}.") from error
        if name not in content:
            return ModelGroups(None, norm, head, "float32")
        groups = content[name]
        if not isinstance(groups, ArrayRecord) or list(groups) != [_TRUNK]:
            raise WireError(f"the record {name} must hold one array, {_TRUNK}.")
        array = groups[_TRUNK]
        where = f"{_TRUNK} of {name}"
        if array.stype != RAW_FORMAT or array.dtype not in NUMBER_FORMATS:
            raise WireError(
                f"{where} must be {', '.join(NUMBER_FORMATS)} as {RAW_FORMAT}, not {array.dtype} as {array.stype}."
            )
        form = array.dtype
        one_length = len(array.shape) == 1 and type(array.shape[0]) is int
        if not one_length or len(array.data) != count_packed_bytes(array.shape[0], form):
            raise WireError(f"{where} announces shape {tuple(array.shape)} and has {len(array.data)} bytes.")
        try:
            return ModelGroups(unpack_numbers(array.data, array.shape[0], form), norm, head, form)
        except ValueError as error:
            raise WireError(f"{where}: {error}.") from error


class _NamedArraysField:
    def encode_field(
        self, content: RecordDict, fields: ConfigRecord, name: str, value: Arrays, written: WrittenArrays
    ) -> None:
        fields[f"{name}.names"] = sorted(value)
        for key, array in value.items():
            fields[f"{name}/{key}"] = pack_numbers(array.astype(np.float32, copy=False), "float32")
            fields[f"{name}/{key}/shape"] = list(array.shape)

    def decode_field(self, content: RecordDict, fields: dict[str, Any], name: str, record: str) -> Arrays:
        keys = fields.pop(f"{name}.names", None)
        if not isinstance(keys, list) or not set(map(type, keys)) <= {str} or "/" in "".join(keys):
            raise WireError(f"{name} must name its arrays.")
        refuse_unprintable_names(keys, f"names of {name}", MAX_SITES)
        arrays = dict[str, NDArray[np.float32]]()
        for key in keys:
            where = f"{name}/{key}"
            values = _decode_float32_bytes(fields.pop(where, None), where)
            shape = fields.pop(f"{where}/shape", None)
            has_shape = isinstance(shape, list) and all(type(side) is int and side >= 0 for side in shape)
            if values is None or not has_shape:
                raise WireError(f"{where} must be float32 numbers with a shape.")
            # Check this before multiplying the sides, because a million of them would take minutes.
            if len(shape) > MAX_DIMENSIONS:
                raise WireError(f"{where} announces {len(shape)} dimensions; no array has more than {MAX_DIMENSIONS}.")
            if math.prod(shape) != len(values):
                raise WireError(f"{where} announces shape {tuple(shape)} and has {len(values)} numbers.")
            if np.isinf(values).any():
                raise WireError(f"{where} holds infinite values.")
            if (np.abs(values) > MAX_STATISTIC).any():  # False for NaN, which is allowed
                reach = "which nothing that a method tells can reach"
                raise WireError(f"{where} holds values beyond {MAX_STATISTIC:g}, {reach}.")
            try:
                arrays[key] = values.reshape(shape)
            except ValueError as error:
                raise WireError(f"{where} announces a shape that no array has: {tuple(shape)}.") from error
        return arrays


class _IntegerVectorField:
    def encode_field(
        self, content: RecordDict, fields: ConfigRecord, name: str, value: Integers, written: WrittenArrays
    ) -> None:
        content[name] = vector = ArrayRecord()
        vector[_VECTOR] = Array("uint32", value.shape, RAW_FORMAT, value.astype("<u4", copy=False).tobytes())

    def decode_field(self, content: RecordDict, fields: dict[str, Any], name: str, record: str) -> Integers:
        vector = content.get(name)
        if not isinstance(vector, ArrayRecord) or list(vector) != [_VECTOR]:
            raise WireError(f"the record {name} must hold one array, {_VECTOR}.")
        array = vector[_VECTOR]
        if array.stype != RAW_FORMAT or array.dtype != "uint32" or len(array.shape) != 1:
            raise WireError(f"{name} must be flat uint32 as {RAW_FORMAT}, not {array.dtype} as {array.stype}.")
        if len(array.data) != 4 * array.shape[0]:
            raise WireError(f"{name} announces shape {tuple(array.shape)} and has {len(array.data)} bytes.")
        return np.frombuffer(array.data, "<u4")


class _ScoreCountsField:
    def encode_field(
        self, content: RecordDict, fields: ConfigRecord, name: str, value: ScoreCounts, written: WrittenArrays
    ) -> None:
        fields[name], width = pack_counts(value)
        if len(value):
            fields[f"{name}/{COUNT_WIDTH_FIELD}"] = width

    def decode_field(self, content: RecordDict, fields: dict[str, Any], name: str, record: str) -> ScoreCounts:
        data = fields.pop(name, None)
        width = fields.pop(f"{name}/{COUNT_WIDTH_FIELD}", None)
        if data == b"" and width is None:
            return make_empty_score_counts()
        if not isinstance(data, bytes) or type(width) is not int:
            raise WireError(f"{record}.{name} must be the bytes of counts, with how many bytes each takes.")
        try:
            counts = unpack_counts(data, width)
        except ValueError as error:
            raise WireError(f"{record}.{name}: {error}.") from error
        if counts.max(initial=0) > MAX_IMAGES:
            raise WireError(f"{record}.{name} holds counts of more than {MAX_IMAGES:,} images.")
        return counts


_FieldKind = _ScalarOrListField | _ModelGroupsField | _NamedArraysField | _IntegerVectorField | _ScoreCountsField
_SEPARATE_RECORD_FIELDS = (_ModelGroupsField, _IntegerVectorField)
_ARRAY_FIELD_KINDS: dict[Any, _FieldKind] = {
    ModelGroups: _ModelGroupsField(),
    Arrays: _NamedArraysField(),
    Integers: _IntegerVectorField(),
    ScoreCounts: _ScoreCountsField(),
}


@functools.cache
def _make_record_schema(record: type) -> dict[str, _FieldKind]:
    """Return field name -> kind of field, for a record class."""
    schema: dict[str, _FieldKind] = {}
    for name, kind in typing.get_type_hints(record).items():
        optional = isinstance(kind, types.UnionType)
        inner = typing.get_args(kind)[0] if optional else _ITEM_TYPE_BY_LIST.get(kind, kind)
        schema[name] = _ARRAY_FIELD_KINDS.get(kind) or _ScalarOrListField(inner, kind in _ITEM_TYPE_BY_LIST, optional)
    return schema


def _decode_float32_bytes(data: Any, where: str) -> NDArray[np.float32] | None:
    """Return bytes as a read-only float32 array, without a copy; None for a missing field.

    Raises:
        WireError: If the value is not the bytes of float32 numbers.
    """
    if data is None:
        return None
    if not isinstance(data, bytes) or len(data) % 4:
        raise WireError(f"{where} must be the bytes of float32 numbers.")
    return np.frombuffer(data, "<f4")


def count_payload_bytes(content: RecordDict) -> int:
    """Return the payload size of a record in bytes: arrays as sent, other fields as JSON, without Flower's framing.

    Flower's ``count_bytes`` fails on an empty list (1.39).
    """
    size = 0
    words = dict[str, Any]()
    for record in select_array_records(content).values():
        for array in record.values():
            size += len(array.data)
    for fields in select_config_records(content).values():
        for name, value in fields.items():
            if name.startswith(SIGNATURE_PREFIX):
                continue
            if isinstance(value, bytes):
                size += len(value)
            elif isinstance(value, list) and value and isinstance(value[0], bytes):
                size += sum(map(len, value))
            else:
                words[name] = value
    return size + len(json.dumps(words))


# ---------------------------------------------------------------------- numbers in fewer bytes

Float32 = NDArray[np.float32]

Counts = NDArray[np.int64]
COUNT_WIDTHS = (1, 2, 4)
"""Possible numbers of bytes of a packed count."""

INT8_BLOCK_LENGTH = 1024
_MAX_INT8 = 127
_MIN_EXPONENT = -126  # 2**-126 is float32's smallest normal number


def round_to_number_format(values: Float32, form: NumberFormat) -> Float32:
    """Round numbers ``(n,)`` to values that a number format can represent; the result is float32."""
    if form == "float16":
        largest = np.finfo(np.float16).max
        return np.clip(values, -largest, largest).astype(np.float16).astype(np.float32)
    if form == "int8":
        exponents = _compute_block_exponents(values)
        return _dequantise_int8(_quantise_to_int8(values, exponents), exponents)
    return values


def compute_largest_rounding_errors(rounded: Float32, form: NumberFormat) -> Float32:
    """Return for each rounded number its largest possible distance from the number before
    :func:`round_to_number_format`.

    The result is too small for a number that exceeded the format's largest value.
    """
    if form == "float16":
        spacing = np.spacing(np.abs(round_to_number_format(rounded, form)).astype(np.float16))
        return spacing.astype(np.float32) * np.float32(0.5)
    if form == "int8":
        exponents = _repeat_block_exponents(_compute_block_exponents(rounded), len(rounded))
        halves = np.full(len(rounded), 0.5, np.float32)
        np.ldexp(halves, exponents, out=halves)
        return halves
    return np.zeros_like(rounded)


def pack_numbers(values: Float32, form: NumberFormat) -> bytes:
    """Pack numbers that :func:`round_to_number_format` has rounded into little-endian bytes of a number format."""
    if form == "float16":
        return values.astype("<f2").tobytes()
    if form == "int8":
        exponents = _compute_block_exponents(values)
        return exponents.tobytes() + _quantise_to_int8(values, exponents).tobytes()
    return np.ascontiguousarray(values, "<f4").tobytes()


def make_packed_array(values: Float32, form: NumberFormat) -> Array:
    """Return a Flower array of numbers in a number format; only in float32 may they have several dimensions.

    A float32 array is a read-only view of the numbers, because copying a large model takes time and memory for each
    message. The numbers must not be changed while the view is in use.
    """
    if form != "float32":
        return Array(dtype=form, shape=values.shape, stype=RAW_FORMAT, data=pack_numbers(values, form))
    data = np.ascontiguousarray(values, "<f4").reshape(-1).view(np.uint8).data.toreadonly()
    return make_array_of_view(form, values.shape, RAW_FORMAT, data)


def unpack_numbers(data: bytes, n: int, form: NumberFormat) -> Float32:
    """Return ``n`` float32 numbers from the bytes of :func:`pack_numbers`.

    Raises:
        ValueError: If the bytes are too few or too many for ``n`` numbers, or the scale of an int8 block is invalid.
    """
    if len(data) != (expected := count_packed_bytes(n, form)):
        raise ValueError(f"{n} numbers as {form} take {expected} bytes, not {len(data)}")
    if form == "float16":
        return np.frombuffer(data, "<f2").astype(np.float32)
    if form == "int8":
        blocks = _count_scale_blocks(n)
        exponents = np.frombuffer(data, np.int8, blocks)
        if (exponents < _MIN_EXPONENT).any() or (exponents > 127 - 7).any():
            raise ValueError(f"the scale of a block is 2**{_MIN_EXPONENT} to 2**120")
        return _dequantise_int8(np.frombuffer(data, np.int8, n, blocks), exponents)
    return np.frombuffer(data, "<f4")


def count_packed_bytes(n: int, form: NumberFormat) -> int:
    """Return the number of bytes of ``n`` numbers packed in a number format."""
    return n + _count_scale_blocks(n) if form == "int8" else n * (4 if form == "float32" else 2)


def pack_counts(counts: Counts) -> tuple[bytes, int]:
    """Pack counts from 0 to 2**32 - 1 into little-endian bytes; return them with the number of bytes per count."""
    largest = int(counts.max(initial=0))
    width = next(width for width in COUNT_WIDTHS if largest < 256**width)
    return counts.astype(f"<u{width}").tobytes(), width


def unpack_counts(data: bytes, width: int) -> Counts:
    """Return the counts from the bytes of :func:`pack_counts`, with ``width`` bytes per count.

    Raises:
        ValueError: If ``width`` is not allowed, or does not divide the number of bytes.
    """
    if width not in COUNT_WIDTHS or len(data) % width:
        raise ValueError(f"{len(data)} bytes are no counts of {width} bytes each")
    return np.frombuffer(data, f"<u{width}").astype(np.int64)


def _count_scale_blocks(n: int) -> int:
    return -(-n // INT8_BLOCK_LENGTH)


def _compute_block_exponents(values: Float32) -> NDArray[np.int8]:
    """Return for each block of ``INT8_BLOCK_LENGTH`` numbers the power of two by which int8 numbers are scaled.

    It is the smallest exponent e, from -126 to 120, for which ``127 * 2**e`` reaches the block's largest absolute
    value.
    """
    if not len(values):
        return np.zeros(0, np.int8)
    largest = np.maximum.reduceat(np.abs(values), np.arange(0, len(values), INT8_BLOCK_LENGTH)).astype(np.float64)
    with np.errstate(divide="ignore"):
        exponents = np.ceil(np.log2(largest / _MAX_INT8))
    return np.clip(exponents, _MIN_EXPONENT, 120).astype(np.int8)


def _quantise_to_int8(values: Float32, exponents: NDArray[np.int8]) -> NDArray[np.int8]:
    integers = np.rint(np.ldexp(values, -_repeat_block_exponents(exponents, len(values))))
    return np.clip(integers, -_MAX_INT8, _MAX_INT8).astype(np.int8)


def _dequantise_int8(integers: NDArray[np.int8], exponents: NDArray[np.int8]) -> Float32:
    """Return the numbers of int8 blocks; computed in place, because the result is four times as large as the bytes."""
    values = integers.astype(np.float32)
    full = len(values) // INT8_BLOCK_LENGTH
    blocks = values[: full * INT8_BLOCK_LENGTH].reshape(full, INT8_BLOCK_LENGTH)
    rest = values[full * INT8_BLOCK_LENGTH :]
    np.ldexp(blocks, exponents[:full, np.newaxis].astype(np.int32), out=blocks)
    if len(rest):
        np.ldexp(rest, np.int32(exponents[full]), out=rest)
    return values


def _repeat_block_exponents(exponents: NDArray[np.int8], n: int) -> NDArray[np.int32]:
    return np.repeat(exponents.astype(np.int32), INT8_BLOCK_LENGTH)[:n]
