"""Tables of configuration keys in Markdown, from pydantic models and the ``Attributes:`` of their docstrings."""

import inspect
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, WrapValidator
from pydantic.fields import FieldInfo

from polyclinic.common.plugins import OrPlugin
from polyclinic.common.system.docstrings import read_attribute_texts
from supply.blocks import format_table

_SAME_AS = re.compile(r"(?:See|As in) :class:`(\w+)`")
_REFERENCE = re.compile(r" \(:\w+:`[^`]+`\)")
"""A reference to code at the end of a statement, which the reader of a page does not need."""
_NONE = re.compile(r"(?<=[;,] )None\b")
_BOUNDS = ("ge", "gt", "le", "lt")
_KINDS = {bool: "`true` or `false`", int: "whole number", float: "number", str: "text"}


@dataclass(frozen=True)
class KeyRow:
    """One key of a table of a configuration file.

    Attributes:
        name: The key.
        values: The values that it may have, in words.
        default: Its value where the file gives none, as the file would write it; ``–`` if the file must give it.
        meaning: The text of the docstring, in Markdown.
    """

    name: str
    values: str
    default: str
    meaning: str


def list_key_rows(model: type[BaseModel], skip: Sequence[str] = ()) -> list[KeyRow]:
    """Return a row for each key of a table's schema, in the order of the class.

    A key with only one value, which names the kind of the table, is left out.

    Args:
        skip: Keys to leave out, too.
    """
    names = [name for name in model.model_fields if name not in skip]
    return [make_key_row(model, name) for name in names if not _has_one_value(model.model_fields[name])]


def _has_one_value(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1


def make_key_row(model: type[BaseModel], name: str) -> KeyRow:
    """Return the row of one key."""
    field = model.model_fields[name]
    values = describe_values(field.annotation, field.metadata)
    return KeyRow(name, values, describe_default(field), find_key_meaning(model, name))


def find_key_meaning(model: type, name: str) -> str:
    """Return a key's text from the docstring of the class, or of its nearest base class that explains the key.

    A text that begins with "See" or "As in" and a class of the same module continues that class's text. The result is
    empty if no docstring explains the key.
    """
    for owner in model.__mro__:
        text = read_attribute_texts(owner).get(name)
        if text is None:
            continue
        if reference := _SAME_AS.match(text):
            referred = getattr(sys.modules[owner.__module__], reference[1])
            rest = text[reference.end() :].lstrip(",;. ")
            return " ".join(part for part in (find_key_meaning(referred, name), _capitalize(rest)) if part)
        return _as_markdown(text)
    return ""


def describe_summary(model: type) -> str:
    """Return a class's docstring without its list of attributes, as one paragraph of Markdown."""
    text = inspect.getdoc(model) or ""
    text = re.split(r"^(?:Attributes|Raises|Args):$", text, flags=re.MULTILINE)[0]
    return _as_markdown(" ".join(text.split()))


def _as_markdown(text: str) -> str:
    """Return a docstring's text with one backtick around code, and with bars that do not end a cell."""
    text = _NONE.sub("none", _REFERENCE.sub("", text))
    return text.replace("``", "`").replace("|", "\\|")


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


# ---------------------------------------------------------------------- values


def describe_values(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Return in words which values a type allows: ``whole number from 1``, or "`best` or `last`".

    Args:
        annotation: A type of a pydantic field; None in a union means "not set" and is left out.
        metadata: Bounds and validators of the field.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe_values(arguments[0], (*arguments[1:], *metadata))
    if origin in (Union, UnionType):
        kinds = [describe_values(each, metadata) for each in arguments if each is not NoneType]
        return " or ".join(dict.fromkeys(kinds))
    if origin is Literal:
        return _list_choices([_as_code(each) for each in arguments], metadata)
    if origin is tuple:
        return _describe_list(arguments)
    if isinstance(annotation, type) and annotation in _KINDS:
        return f"{_KINDS[annotation]}{_describe_bounds(metadata, is_whole=annotation is int)}"
    return "table"


def _list_choices(names: Sequence[str], metadata: Sequence[Any]) -> str:
    """Return the names of a choice, with that of plug-ins or of other libraries where the field takes them."""
    if OrPlugin in metadata:
        names = (*names, "`plugin:NAME`")
    elif any(isinstance(each, WrapValidator) for each in metadata):
        names = (*names, "`LIBRARY:NAME`")
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]


def _describe_list(entries: Sequence[Any]) -> str:
    """Return the values of a list: ``list of texts``, or ``list of 2 numbers from 0 to 1``."""
    kinds = list(dict.fromkeys(describe_values(each) for each in entries if each is not Ellipsis))
    if len(kinds) > 1:
        return f"list: {', '.join(kinds)}"
    plural = re.sub(r"^(whole number|number|text|table|list)", r"\1s", kinds[0])
    number = "" if entries[-1] is Ellipsis else f"{len(entries)} "
    return f"list of {number}{plural}"


def _describe_bounds(metadata: Sequence[Any], *, is_whole: bool) -> str:
    """Return " from 0 to 20", " above 0" and the like; empty without bounds."""
    bounds = dict[str, Any]()
    for each in metadata:
        parts = each.metadata if isinstance(each, FieldInfo) else [each]
        bounds |= {key: getattr(part, key) for part in parts for key in _BOUNDS if hasattr(part, key)}
    if isinstance(bounds.get("gt"), int) and is_whole:
        bounds["ge"] = bounds.pop("gt") + 1
    low = f" from {_number(bounds['ge'])}" if "ge" in bounds else ""
    low = f" above {_number(bounds['gt'])}" if "gt" in bounds else low
    if "lt" in bounds:
        return f"{low}{' and' if low else ''} below {_number(bounds['lt'])}"
    if "le" in bounds:
        return f"{low}{' to' if low.startswith(' from') else ', at most'} {_number(bounds['le'])}"
    return low


def _number(value: float) -> str:
    """Return a bound; a power of two that no human reads as digits is written as a power."""
    power = int(value).bit_length() - 1
    if isinstance(value, int) and power > 20 and value == 2**power:
        return f"2^{power}"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}".replace("e+0", "e").replace("e-0", "e-")


def describe_default(field: FieldInfo) -> str:
    """Return a field's default as a configuration file would write it; ``–`` if there is none."""
    if field.is_required():
        return "–"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ((), {}, ""):
        return "none"
    return _as_code(value)


def _as_code(value: Any) -> str:
    if isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, tuple | list):
        text = f"[{', '.join(_as_code(each).strip('`') for each in value)}]"
    elif isinstance(value, float):
        text = f"{value:g}".replace("e-0", "e-")
    elif isinstance(value, BaseModel):
        entries = [f"{key} = {_as_code(each)}" for key, each in value.model_dump(exclude_unset=True).items()]
        text = f"{{{', '.join(entries)}}}".replace("`", "")
    else:
        text = (str(value) if value != "" else '""').replace("|", "\\|")
    return f"`{text}`"


# ---------------------------------------------------------------------- Markdown


def format_key_table(rows: Sequence[KeyRow]) -> str:
    """Return keys as a table in Markdown."""
    cells = [(f"`{row.name}`", row.values, row.default, row.meaning) for row in rows]
    return format_table(("key", "values", "default", "what it does"), cells)
