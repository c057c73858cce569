"""TOML files that people write: read, checked by pydantic, every fault of them in our words and all at once."""

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from common.errors import BadInput, Fault, did_you_mean, quoted


class Section(BaseModel):
    """A table of a file; keys it does not know are faults."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


M = TypeVar("M", bound=BaseModel)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        BadInput: If there is none, or it is no TOML.
    """
    if not path.is_file():
        near = (p.name for p in path.parent.glob(f"*{path.suffix}")) if path.parent.is_dir() else ()
        raise BadInput([Fault(str(path), "there is no such file.", did_you_mean(path.name, near))])
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except PermissionError:
        raise BadInput([Fault(str(path), "cannot be read by this user.", "Change its owner or mode.")]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput([Fault(path.name, f"is not valid TOML: {error}.")]) from None


def validated(model: type[M], tree: Mapping[str, Any], file_name: str) -> M:
    """Check what was read.

    Raises:
        BadInput: With all faults.
    """
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise BadInput(explained(error, model, file_name)) from None


def explained(error: ValidationError, root: type[BaseModel], file_name: str, extra: Sequence[str] = ()) -> list[Fault]:
    """Say pydantic's faults in our words: file, key, what came, what was expected.

    Args:
        root: The model that the whole file must fit.
        extra: Keys that the file may have beside those of ``root``.
    """
    return [_explain(dict(one), root, file_name, extra) for one in error.errors(include_url=False)]


def toml_text(value: str | int | float | bool | Sequence[str]) -> str:
    """A value as TOML: JSON's strings, numbers and lists are TOML's too, but for one character."""
    text = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")


def _explain(one: dict[str, Any], root: type[BaseModel], file_name: str, extra: Sequence[str]) -> Fault:
    steps = [str(step) for step in one["loc"]]
    table, keys, kinds = _followed(root, steps)
    where, came = f"{file_name}: {'.'.join(keys)}", json.dumps(one.get("input"), default=str)
    if one["type"] == "extra_forbidden":
        known = (*table, *(extra if len(steps) == 1 else ()))
        remedy = did_you_mean(steps[-1], known) or f"Known: {quoted(known)}."
        return Fault(where, "is not a known key.", remedy)
    if one["type"] == "missing":
        return Fault(where, "is missing.", "")
    if one["type"].startswith("union_tag"):
        return Fault(f"{where}.kind", f"is {_tag(one)}.", f"Expected one of {quoted(sorted(kinds))}.")
    return Fault(where, f"{one['msg'].removeprefix('Value error, ').rstrip('.')}; got {came}.")


def _tag(one: Mapping[str, Any]) -> str:
    value = one.get("input")
    return json.dumps(value.get("kind")) if isinstance(value, dict) and "kind" in value else "missing"


def _followed(root: type[BaseModel], steps: Sequence[str]) -> tuple[tuple[str, ...], list[str], set[str]]:
    """Walk a fault's location through the models.

    Returns:
        The keys of the table that the last step stands in, the steps without the kinds that pydantic puts between,
        and the kinds that the last step could have, where it is a choice of tables.
    """
    members: tuple[type[BaseModel], ...] = (root,)
    keys: list[str] = []
    table: tuple[str, ...] = tuple(root.model_fields)
    for step in steps:
        by_kind = {_kind(member): member for member in members if "kind" in member.model_fields}
        if step in by_kind and len(members) > 1:
            members = (by_kind[step],)
            continue
        keys.append(step)
        table = tuple(name for member in members for name in member.model_fields)
        fields = [member.model_fields[step] for member in members if step in member.model_fields]
        members = tuple(m for field in fields for m in _models((field.annotation, *field.metadata)))
    return table, keys, {_kind(member) for member in members if "kind" in member.model_fields}


def _models(annotations: Iterable[Any]) -> Iterable[type[BaseModel]]:
    """The models in an annotation, also inside unions and optional values."""
    for annotation in annotations:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
        else:
            yield from _models(get_args(annotation))


def _kind(member: type[BaseModel]) -> str:
    return str(get_args(member.model_fields["kind"].annotation)[0])
