"""A message's content as bytes of which a fuzzer can change any, and the reverse; no length or hash guards them."""

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from polyclinic.common.wire.fleet_protocol import make_protobuf_message_classes
from polyclinic.common.wire.message_objects import decode_record_values, encode_record_values

_Content = make_protobuf_message_classes(
    "tests.fuzz",
    """
ArrayFields: 1 string key, 2 string dtype, 3 int64* shape, 4 string stype, 5 bytes data
RecordFields: 1 string name, 2 string kind, 3 ArrayFields* arrays, 4 bytes values
Content: 1 RecordFields* records
""",
)["tests.fuzz.Content"]
_KINDS = {"config": ConfigRecord, "metrics": MetricRecord}


def content_as_bytes(content: RecordDict) -> bytes:
    """Write down all records of a content."""
    written = _Content()
    for name, record in content.items():
        fields = written.records.add(name=name)
        if isinstance(record, ArrayRecord):
            for key, array in record.items():
                fields.arrays.add(
                    key=key, dtype=array.dtype, shape=array.shape, stype=array.stype, data=bytes(array.data)
                )
        else:
            fields.kind = "config" if isinstance(record, ConfigRecord) else "metrics"
            fields.values = encode_record_values(record)
    return bytes(written.SerializeToString())


def content_of_bytes(data: bytes) -> RecordDict:
    """Make a content of what :func:`content_as_bytes` wrote down, or of any bytes; Flower refuses some."""
    content = RecordDict()
    for fields in _Content.FromString(data).records:
        if kind := _KINDS.get(fields.kind):
            content[fields.name] = kind(decode_record_values(fields.values))
            continue
        content[fields.name] = ArrayRecord(
            {
                each.key: Array(dtype=each.dtype, shape=tuple(each.shape), stype=each.stype, data=each.data)
                for each in fields.arrays
            }
        )
    return content
