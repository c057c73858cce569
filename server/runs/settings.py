"""An experiment's settings as text, one line each."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def flattened(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as pairs of dotted key and value, as one would write them on the command line."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _setting(value)


def _setting(value: object) -> str:
    if value is None or value in ("", [], {}):
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(_setting, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
