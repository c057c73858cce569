"""Messages with arrays, and the comparison of two records."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from polyclinic.common.wire.codec import list_record_field_names
from polyclinic.common.wire.flower_messages import make_message
from polyclinic.common.wire.records import Record as WireRecord

Record = dict[str, NDArray[Any]]
CHUNK = 1000
"""Bytes; in life some million."""
records = st.dictionaries(
    st.text(max_size=5),
    st.dictionaries(
        st.text(max_size=5),
        hnp.arrays(
            st.sampled_from([np.float32, np.int64, np.bool_]), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0)
        ),
        max_size=3,
    ),
    max_size=3,
)
INTEGERS = st.integers(-(2**63), 2**64 - 1)
WIDE = [st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3), st.lists(st.integers(0, 2**64 - 1), max_size=3)]
FLOATS = st.floats(allow_nan=False)
NUMBERS = st.one_of(INTEGERS, FLOATS, *WIDE, st.lists(FLOATS, max_size=3))
ANYTHING = st.one_of(
    NUMBERS,
    st.booleans(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.lists(st.booleans(), max_size=3),
    st.lists(st.text(max_size=3), max_size=3),
    st.lists(st.binary(max_size=3), max_size=3),
)


def of_arrays(sent: dict[str, Record]) -> RecordDict:
    return RecordDict(
        {
            name: ArrayRecord({key: Array(np.asarray(array)) for key, array in record.items()})
            for name, record in sent.items()
        }
    )


def instruction(content: RecordDict | None, error: Error | None = None) -> Message:
    """A message that says of itself all that a message can say, with content, with an error, or with neither."""
    metadata = {
        "run_id": 7,
        "message_id": "",
        "src_node_id": 1,
        "dst_node_id": 2,
        "reply_to_message_id": "request",
        "group_id": "3",
        "created_at": 5.0,
        "ttl": 60.0,
        "message_type": "train",
    }
    return make_message(RecordDict() if content is None and error is None else error or content, metadata)


def message(**arrays: NDArray[Any]) -> Message:
    fields = ConfigRecord({"round": 3, "site": "north"})
    return instruction(RecordDict({**of_arrays({"update": arrays}), "fields": fields}))


def same(left: WireRecord, right: WireRecord) -> bool:
    """Compare two records, arrays included, with NaN equal to itself."""
    pairs = ((getattr(left, name), getattr(right, name)) for name in list_record_field_names(type(left)))
    return type(left) is type(right) and all(text_of(value) == text_of(other) for value, other in pairs)


def text_of(value: object) -> str:
    return repr(sorted(value.items()) if isinstance(value, Mapping) else value)
