"""Read TOML files that people write, validate them with pydantic, and translate all errors into plain messages."""

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from polyclinic.common.errors import (
    PICTURE_PROBLEM,
    UTF8_REMEDY,
    BadInput,
    Fault,
    describe_non_utf8_file,
    quote_names,
    suggest_nearest_name,
)
from polyclinic.common.system.files import is_file, make_missing_input_fault
from polyclinic.common.system.plain_text import PLAIN_NAME


class TomlSection(BaseModel):
    """Base class of pydantic models for TOML tables; frozen, and unknown keys are faults."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


SectionModel = TypeVar("SectionModel", bound=BaseModel)

SHA256_PATTERN = "^[0-9a-f]{64}$"
_MAX_VALUE_CHARACTERS = 120
_MAX_LISTED_OPTIONS = 4
_TABLE_PROBLEM = "must be a table"
_LIST_PROBLEM = "must be a list"
_TEXT_PROBLEM = "must be text in quotes"
_PROBLEM_BY_ERROR_TYPE = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type", "mapping_type"), _TABLE_PROBLEM),
    **dict.fromkeys(("tuple_type", "list_type"), _LIST_PROBLEM),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    "string_type": _TEXT_PROBLEM,
    "too_short": "must have at least one entry",
    "string_too_short": "must not be empty",
}
_PATH_REMEDY = "Within double quotes \\ begins a sign of its own. Write a path in 'single quotes', or with / for \\."
_TOML_REMEDIES = {
    "Invalid value": 'Text stands in quotes: "text".',
    **dict.fromkeys(("Unescaped", "Invalid hex value"), _PATH_REMEDY),
    "Illegal character": "Is a quote or a bracket missing before?",
    "Cannot overwrite": "A key stands there once.",
    "Cannot declare": "A table stands there once: put its keys under the first.",
    "Unclosed array": "A list that begins above has no ] at its end.",
    "Expected ']' at the end of a table": "A table's name stands alone on its line, between [ and ].",
    "Expected '=' after a key": "A line is a key, = and a value: rounds = 3.",
}
_LINE_REMEDIES = {
    "[\u201c\u201d\u201e\u2018\u2019\u00ab\u00bb]": 'Quotes are straight: "text".',
    r"=\s*[-+]?\.\d": "A number begins with a digit: 0.003.",
    r"=\s*[-+]?\d+,\d+\s*(#.*)?$": "A number has a point: 0.003.",
    r"=\s*[-+]?0\d": "A number has no 0 before its first digit: 2, 0.003.",
    r"=\s*(True|False|TRUE|FALSE|yes|no)\b": "Yes and no are written true and false.",
    r"=\s*(None|null|nil)\b": "A key without a value is left out.",
}
"""Pattern of a line with a habit from other languages -> its remedy in TOML."""
_PROBLEM_WITHOUT_VALUE = {"missing": "is missing.", "extra_forbidden": "is not a known key."}
_PROBLEM_BY_PATTERN = {
    SHA256_PATTERN: "must be a SHA-256: 64 digits 0-9 and a-f",
    f"^{PLAIN_NAME.pattern}$": "must be of letters, digits, spaces, dots, dashes and underscores",
}


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        BadInput: If the file is missing, cannot be read, or is not valid TOML.
    """
    if not is_file(path):
        raise BadInput([make_missing_input_fault(path)])
    try:
        content = path.read_bytes()
    except PermissionError:
        raise BadInput([Fault(str(path), "cannot be read by this user.", "Change its owner or mode.")]) from None
    except OSError as error:
        raise BadInput([Fault(str(path), f"cannot be read: {(error.strerror or str(error)).lower()}.")]) from None
    try:
        return parse_toml(content.decode("utf-8-sig"))  # editors on Windows write a byte order mark
    except UnicodeDecodeError as error:
        problem = describe_non_utf8_file(content, content.count(b"\n", 0, error.start) + 1)
        remedy = "Name a TOML file." if problem == PICTURE_PROBLEM else UTF8_REMEDY
        raise BadInput([Fault(path.name, problem, remedy)]) from None
    except ValueError as error:
        # Choose a remedy by the line where the parser stopped, or else by the parser's message.
        place = re.search(r"at line (\d+)", str(error))
        lines = content.decode("utf-8-sig").splitlines()
        line = lines[int(place[1]) - 1] if place and int(place[1]) <= len(lines) else ""
        by_line = [remedy for pattern, remedy in _LINE_REMEDIES.items() if re.search(pattern, line)]
        by_error = [remedy for begin, remedy in _TOML_REMEDIES.items() if str(error).startswith(begin)]
        remedy = next(iter(by_line + by_error), "")
        raise BadInput([Fault(path.name, f"is not valid TOML: {error}.", remedy)]) from None


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML like ``tomllib.loads``, but raise ValueError for every failure.

    Raises:
        ValueError: If the text is not valid TOML, is nested too deeply, or has a number of thousands of digits.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:
        raise ValueError("a number has too many digits") from None


def validate_tables(model: type[SectionModel], tree: Mapping[str, Any], file_name: str) -> SectionModel:
    """Validate the tables of a TOML file with a pydantic model; return the model's instance.

    Raises:
        BadInput: With all faults of the tables.
    """
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise BadInput(translate_validation_errors(error, model, file_name)) from None


def translate_validation_errors(
    error: ValidationError, root: type[BaseModel], file_name: str, extra: Sequence[str] = ()
) -> list[Fault]:
    """Translate pydantic's errors into faults with file, key, actual value and expected value.

    Args:
        error: The error of pydantic.
        root: The pydantic model of the whole file.
        file_name: Name of the file in faults.
        extra: Top-level keys that the file may have in addition to those of ``root``.
    """
    faults = []
    for details in error.errors(include_url=False):
        steps = [str(step) for step in details["loc"]]
        table, keys, kinds = _locate_validation_error(root, steps)
        where = f"{file_name}: {'.'.join(keys)}" if keys else file_name
        problem = describe_validation_error(details)
        remedy = suggest_nearest_literal(details)
        if details["type"] == "extra_forbidden":
            allowed = (*table, *(extra if len(steps) == 1 else ()))
            remedy = suggest_nearest_name(steps[-1], allowed) or f"Known: {quote_names(allowed)}."
        elif details["type"].startswith("union_tag"):
            value = details.get("input")
            near = suggest_nearest_name(str(value.get("kind", "")), kinds) if isinstance(value, dict) else ""
            kind = json.dumps(value["kind"]) if isinstance(value, dict) and "kind" in value else "missing"
            where = f"{where}.kind"
            problem = f"is {kind}."
            remedy = f"{near} Expected one of {quote_names(sorted(kinds))}.".strip()
        faults.append(Fault(where, problem, remedy))
    return faults


def to_toml_text(value: str | int | float | bool | Sequence[str]) -> str:
    """Format a string, number, boolean or list as TOML."""
    text = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")


def describe_validation_error(error: Mapping[str, Any]) -> str:
    """Translate one error of pydantic into a sentence for the person who wrote the file."""
    kind = error["type"]
    context = error.get("ctx", {})
    if kind in _PROBLEM_WITHOUT_VALUE:
        return _PROBLEM_WITHOUT_VALUE[kind]
    if kind == "json_invalid":
        return f"is not valid JSON: {context['error']}."
    if kind == "string_pattern_mismatch":
        problem = _PROBLEM_BY_PATTERN.get(context["pattern"], f"must match {context['pattern']}")
    elif kind in _PROBLEM_BY_ERROR_TYPE:
        problem = _PROBLEM_BY_ERROR_TYPE[kind]
    else:
        problem = error["msg"].removeprefix("Value error, ").rstrip(".")
        problem = re.sub("^Input should ", "must ", problem)
        if kind == "value_error" and (isinstance(error.get("input"), Mapping) or "got " in problem or '"' in problem):
            return f"{problem}."  # it is about a whole table, or already quotes the value
    value = json.dumps(error.get("input"), default=str, ensure_ascii=False)  # similar to its text in the file
    return f"{problem}; got {value if len(value) <= _MAX_VALUE_CHARACTERS else f'{value[:_MAX_VALUE_CHARACTERS]}...'}."


def suggest_nearest_literal(error: Mapping[str, Any]) -> str:
    """Suggest the allowed value nearest to a wrong one; empty if the error already lists all allowed values."""
    if error["type"] != "literal_error" or not isinstance(error.get("input"), str):
        return ""
    options = re.findall("'([^']*)'", str(error["ctx"]["expected"]))
    return suggest_nearest_name(error["input"], options) if len(options) > _MAX_LISTED_OPTIONS else ""


def _locate_validation_error(
    root: type[BaseModel], steps: Sequence[str]
) -> tuple[tuple[str, ...], list[str], set[str]]:
    """Translate the location of a pydantic error into keys of the TOML file.

    Args:
        root: The pydantic model of the whole file.
        steps: The location: keys from the top of the file, with tags that pydantic inserts for tables of several kinds.

    Returns:
        The valid keys of the innermost table; the location without these tags; and the kinds that are allowed at the
        location, if the table can have several.
    """
    members: tuple[type[BaseModel], ...] = (root,)
    keys: list[str] = []
    table: tuple[str, ...] = tuple(root.model_fields)
    for step in steps:
        by_kind = {_get_kind_literal(member): member for member in members if "kind" in member.model_fields}
        if step in by_kind and len(members) > 1:
            members = (by_kind[step],)
            continue
        keys.append(step)
        table = tuple(name for member in members for name in member.model_fields)
        fields = [member.model_fields[step] for member in members if step in member.model_fields]
        if not fields and len(keys) > 1 and len(keys) < len(steps):
            continue  # a key of a mapping, such as a class in [vocabulary], whose value has the same models
        members = tuple(m for field in fields for m in _find_models_in_annotations((field.annotation, *field.metadata)))
    return table, keys, {_get_kind_literal(member) for member in members if "kind" in member.model_fields}


def _find_models_in_annotations(annotations: Iterable[Any]) -> Iterable[type[BaseModel]]:
    """Yield the pydantic models in type annotations, also those inside unions and optional types."""
    for annotation in annotations:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
        else:
            yield from _find_models_in_annotations(get_args(annotation))


def _get_kind_literal(member: type[BaseModel]) -> str:
    return str(get_args(member.model_fields["kind"].annotation)[0])


def parse_json_section(kind: type[SectionModel], text: str, name: str) -> SectionModel:
    """Parse a section from the JSON text of another machine.

    Args:
        kind: Pydantic model of the section.
        text: The JSON text.
        name: Description of the text, for a fault of the whole text.

    Raises:
        ValueError: With a short reason, if the text is not a valid section.
    """
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place or name}: {first['msg']}"[:300]) from None
