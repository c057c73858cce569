"""Whether two records are equal."""

from collections.abc import Mapping

from common.wire.codec import field_names
from common.wire.records import Record


def same(left: Record, right: Record) -> bool:
    """Equality that looks into arrays and takes NaN for equal to itself."""
    return type(left) is type(right) and all(
        shown(getattr(left, name)) == shown(getattr(right, name)) for name in field_names(type(left))
    )


def shown(value: object) -> str:
    return repr(sorted(value.items()) if isinstance(value, Mapping) else value)
