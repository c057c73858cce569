"""What coordinator and hospital say to one another: typed records, and the one translation to and from Flower's.

Every record is a frozen dataclass checked when built. ``encode`` writes it into a ``RecordDict``: scalars and lists of
scalars into the ConfigRecord ``fields``, a model's groups into one ArrayRecord named after the field. ``decode`` reads
one expected record and refuses what it does not know: another wire version, another record, a missing or unknown field,
a wrong type. Nothing goes by position or prefix, and nothing is pickled.
"""

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from common.models.state import Head

WIRE_VERSION = 2
"""Raised whenever a record gains, loses or changes a field; the two sides must agree."""


class WireError(ValueError):
    """A record that this side does not accept, with the reason."""


class WireVersionError(WireError):
    """The other side speaks another version of these records."""


@dataclass(frozen=True)
class Groups:
    """A model, or an update of one, as named groups; None where a group does not travel.

    Attributes:
        trunk: float32 ``(t,)``, everything before the head but batch normalisation, flat.
        norm: float32 ``(m,)``, batch normalisation's four tensors per layer, flat.
        head: The head's rows with their class names.
    """

    trunk: NDArray[np.float32] | None = None
    norm: NDArray[np.float32] | None = None
    head: Head | None = None

    def __post_init__(self) -> None:
        for name, array in (("trunk", self.trunk), ("norm", self.norm)):
            if array is not None and (array.ndim != 1 or array.dtype != np.float32):
                raise WireError(f"{name} must be float32 of one dimension, not {array.dtype} of {array.ndim}.")

    def named(self) -> dict[str, NDArray[np.float32]]:
        """The arrays that are there, by the names they have on the wire and on a site's disk."""
        arrays = {"trunk": self.trunk, "norm": self.norm}
        if self.head:
            arrays |= {"head.weight": self.head.weight, "head.bias": self.head.bias}
        return {name: array for name, array in arrays.items() if array is not None}

    @classmethod
    def of_named(cls, arrays: Mapping[str, NDArray[np.float32]], class_names: Sequence[str]) -> "Groups":
        """The inverse of :meth:`named`; without class names there is no head."""
        head = Head(tuple(class_names), arrays["head.weight"], arrays["head.bias"]) if class_names else None
        return cls(arrays.get("trunk"), arrays.get("norm"), head)


def _check_run(run: str) -> None:
    """A site keeps its memory in a folder of this name: it must not lead anywhere else."""
    if not re.fullmatch(r"\w[\w-]{0,63}", run):
        raise WireError(f"run must be letters, digits, dashes and underscores, not {run[:80]!r}.")


@dataclass(frozen=True)
class RollCall:
    """Coordinator asks: who are you, what do you annotate, how much do you have?"""

    run: str
    plan: str

    def __post_init__(self) -> None:
        _check_run(self.run)


@dataclass(frozen=True)
class RollCallAnswer:
    """Site answers. ``class_names`` are canonical, in the site's own order; ``names`` its own words for them."""

    run: str
    site: str
    names: tuple[str, ...]
    class_names: tuple[str, ...]
    train_samples: int
    validation_samples: int
    patients: int
    layout: str
    version: str

    def __post_init__(self) -> None:
        if len(self.names) != len(self.class_names):
            raise WireError("names and class_names must have one entry a label.")


@dataclass(frozen=True)
class Refusal:
    """Coordinator tells a site that it cannot take part in this run, and why; there is no second try.

    Attributes:
        kind: ``name``, ``version`` or ``labels``: what has to be mended.
    """

    run: str
    kind: str
    reason: str

    def __post_init__(self) -> None:
        if self.kind not in REFUSALS:
            raise WireError(f"a refusal is of kind {', '.join(REFUSALS)}, not {self.kind!r}.")


@dataclass(frozen=True)
class RefusalNoted:
    """Site has read why."""

    run: str
    site: str


@dataclass(frozen=True)
class Request:
    """What every request to a site says.

    Attributes:
        class_names: The head rows the site holds in this run, in the order its head has them.
        counted: Last round in which this site's reply counted, 0 for none: its memory of that round becomes final.
        best: Round after which the model was best so far, -1 for none yet: the site keeps its own parts of that model.
    """

    run: str
    round: int
    plan: str
    contract: str
    class_names: tuple[str, ...]
    counted: int
    best: int
    model: Groups

    def __post_init__(self) -> None:
        _check_run(self.run)


@dataclass(frozen=True)
class TrainRequest(Request):
    """Train one round from this model."""


@dataclass(frozen=True)
class EvaluateRequest(Request):
    """Evaluate this model on the site's validation part and, for a ``test``, the best model on its test part too."""

    test: bool


@dataclass(frozen=True)
class TrainReply:
    """New minus received, and what the round was like.

    Attributes:
        validation_loss: Of the model as received, on the site's validation part; None without validation images.
        validation_auroc: Likewise, mean over the site's classes for which it is defined.
        train_loss: Mean over the batches of the last local epoch.
    """

    run: str
    round: int
    site: str
    train_samples: int
    train_loss: float
    validation_loss: float | None
    validation_auroc: float | None
    seconds: float
    update: Groups

    def __post_init__(self) -> None:
        if self.train_samples < 1:
            raise WireError(f"train_samples must be positive, not {self.train_samples}.")


@dataclass(frozen=True)
class EvaluateReply:
    """Losses and, for a test, one entry a class the site annotates; NaN stands for "not defined"."""

    run: str
    round: int
    site: str
    validation_loss: float | None
    validation_auroc: float | None
    class_names: tuple[str, ...]
    auroc: tuple[float, ...]
    average_precision: tuple[float, ...]
    balanced_accuracy: tuple[float, ...]
    positives: tuple[int, ...]
    negatives: tuple[int, ...]
    model_sha256: str

    def __post_init__(self) -> None:
        columns = (self.auroc, self.average_precision, self.balanced_accuracy, self.positives, self.negatives)
        if any(len(column) != len(self.class_names) for column in columns):
            raise WireError("each metric must have one entry a class.")


Record = (
    RollCall | RollCallAnswer | Refusal | RefusalNoted | TrainRequest | TrainReply | EvaluateRequest | EvaluateReply
)
R = TypeVar(
    "R",
    RollCall,
    RollCallAnswer,
    Refusal,
    RefusalNoted,
    TrainRequest,
    TrainReply,
    EvaluateRequest,
    EvaluateReply,
)

REFUSALS = ("name", "version", "labels")

RAW = "raw-little-endian"
_ENVELOPE, _FIELDS = "envelope", "fields"
_LISTS: dict[Any, type] = {tuple[str, ...]: str, tuple[float, ...]: float, tuple[int, ...]: int}


Written = dict[int, tuple[NDArray[np.float32], Array]]
"""Arrays as they travel, by the ``id`` of the numpy array, which is kept so that nothing else gets its ``id``."""


def encode(record: Record, written: Written | None = None) -> RecordDict:
    """Translate a typed record into Flower's.

    Args:
        written: What other records of the same exchange share; filled and read here, so that a trunk that goes to a
            hundred sites is written and hashed once.
    """
    content = RecordDict({_ENVELOPE: ConfigRecord({"version": WIRE_VERSION, "record": type(record).__name__})})
    fields = ConfigRecord()
    for name, kind in typing.get_type_hints(type(record)).items():
        value = getattr(record, name)
        if kind is Groups:
            content[name] = _arrays(value, {} if written is None else written)
            fields[f"{name}.classes"] = list(value.head.class_names) if value.head else []
        elif kind in _LISTS:
            fields[name] = list(value)
        elif value is not None:
            fields[name] = value
    content[_FIELDS] = fields
    return content


def decode(content: RecordDict, expected: type[R]) -> R:
    """Translate Flower's records into the one typed record expected here.

    Raises:
        WireError: Naming what came and what was expected.
    """
    _check_envelope(content, expected.__name__)
    hints = typing.get_type_hints(expected)
    grouped: list[str] = [name for name, kind in hints.items() if kind is Groups]
    _refuse_unknown(content, {_ENVELOPE, _FIELDS, *grouped}, expected.__name__)
    fields = dict(content[_FIELDS])
    values: dict[str, Any] = {name: _groups(content, fields, name) for name in grouped}
    values |= {
        name: _value(fields, name, kind, expected.__name__) for name, kind in hints.items() if kind is not Groups
    }
    _refuse_unknown(fields, set(), expected.__name__)
    return expected(**values)


def _check_envelope(content: RecordDict, expected: str) -> None:
    envelope = content.get(_ENVELOPE)
    if not isinstance(envelope, ConfigRecord) or not isinstance(content.get(_FIELDS), ConfigRecord):
        raise WireError(f"expected {expected}, got records {sorted(content)} without an envelope.")
    if (version := envelope.get("version")) != WIRE_VERSION:
        spoken = f"the other side speaks wire version {version!r}, this one {WIRE_VERSION}."
        raise WireVersionError(f"{spoken} Install the same release on both.")
    if envelope.get("record") != expected:
        raise WireError(f"expected {expected}, got {envelope.get('record')!r}.")


def _refuse_unknown(present: typing.Iterable[str], known: set[str], record: str) -> None:
    if unknown := sorted(set(present) - known):
        raise WireError(f"{record} does not have {', '.join(unknown)}.")


def _value(fields: dict[str, Any], name: str, kind: Any, record: str) -> Any:
    """Take one scalar or list out of ``fields``, checked against the annotation."""
    optional = isinstance(kind, types.UnionType)
    if name not in fields:
        if optional:
            return None
        raise WireError(f"{record} lacks {name}.")
    value = fields.pop(name)
    wanted = typing.get_args(kind)[0] if optional else _LISTS.get(kind, kind)
    items = value if kind in _LISTS else [value]
    if not isinstance(items, list) or any(type(item) is not wanted for item in items):
        raise WireError(f"{record}.{name} must be {'a list of ' if kind in _LISTS else ''}{wanted.__name__}.")
    if optional and isinstance(value, float) and math.isnan(value):
        raise WireError(f"{record}.{name} is not a number; leave it out where it is not defined.")
    if wanted is float and not all(math.isfinite(item) or (kind in _LISTS and math.isnan(item)) for item in items):
        raise WireError(f"{record}.{name} must be finite.")
    return tuple(items) if kind in _LISTS else value


def _arrays(groups: Groups, written: Written) -> ArrayRecord:
    record = ArrayRecord()
    for name, array in groups.named().items():
        if id(array) not in written:
            written[id(array)] = (array, _write(array))
        record[name] = written[id(array)][1]
    return record


def _write(array: NDArray[np.float32]) -> Array:
    """Plain little-endian bytes: nothing to parse, nothing to unpickle, and no copy on the way back."""
    return Array(
        dtype=str(array.dtype), shape=array.shape, stype=RAW, data=array.astype(array.dtype.newbyteorder("<")).tobytes()
    )


def _groups(content: RecordDict, fields: dict[str, Any], name: str) -> Groups:
    record, class_names = content.get(name), fields.pop(f"{name}.classes", None)
    if not isinstance(record, ArrayRecord) or not isinstance(class_names, list):
        raise WireError(f"the arrays of {name} are missing.")
    _refuse_unknown(record, {"trunk", "norm", "head.weight", "head.bias"}, name)
    if any(type(class_name) is not str for class_name in class_names):
        raise WireError(f"class names of {name} must be a list of str.")
    arrays = {key: _read(array, f"{key} of {name}") for key, array in record.items()}
    if ("head.weight" in arrays) != bool(class_names) or ("head.bias" in arrays) != bool(class_names):
        raise WireError(f"{name} has head rows without class names, or class names without head rows.")
    try:
        return Groups.of_named(arrays, class_names)
    except WireError:
        raise
    except (ValueError, AssertionError) as error:
        raise WireError(f"head of {name}: {error}") from error


def _read(array: Array, where: str) -> NDArray[np.float32]:
    """The numbers, without a copy; read-only."""
    if (array.stype, array.dtype) != (RAW, "float32"):
        raise WireError(f"{where} must be float32 as {RAW}, not {array.dtype} as {array.stype}.")
    shape = tuple(array.shape)
    if any(type(size) is not int or size < 0 for size in shape) or math.prod(shape) * 4 != len(array.data):
        raise WireError(f"{where} announces shape {shape} and has {len(array.data)} bytes.")
    return np.frombuffer(array.data, "<f4").reshape(shape)


def payload_bytes(content: RecordDict) -> int:
    """Size in bytes of what the records hold: arrays as they travel, fields as JSON; without Flower's own framing.

    Flower's ``count_bytes`` fails on an empty list (1.39).
    """
    arrays = sum(len(array.data) for record in content.array_records.values() for array in record.values())
    return arrays + sum(len(json.dumps(dict(record))) for record in content.config_records.values())


def field_names(record: type[Record]) -> tuple[str, ...]:
    """The declared fields of a record, for tests and for the site's audit."""
    return tuple(field.name for field in dataclasses.fields(record))
