"""What coordinator and hospital say to one another: typed records, and the one translation to and from Flower's.

Every record is a frozen dataclass checked when built. ``encode`` writes it into a ``RecordDict``: everything small into
the ConfigRecord ``fields``, a model's trunk into one ArrayRecord named after the model's field. ``decode`` reads one
expected record and refuses what it does not know: another wire version, another record, a missing or unknown field, a
wrong type. Nothing goes by position or prefix, and nothing is pickled.

Flower sends each record, each array and each chunk of an array by a call of its own, and its SuperLink asks its
database several times for each: hence the small groups among the fields.
"""

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from common.compact import FORMS, Form, packed, packed_bytes, unpacked
from common.errors import quoted
from common.masking_records import (
    Integers,
    KeysAnswer,
    KeysRequest,
    MaskedAnswer,
    MaskedRequest,
    MaskingRecord,
    RevealAnswer,
    RevealRequest,
    SharesAnswer,
    SharesRequest,
)
from common.models.state import Head, ModelState
from common.score_histograms import BINS, ScoreHistogram
from common.wire_errors import WireError as WireError
from common.wire_errors import WireVersionError as WireVersionError

WIRE_VERSION = 7
"""Raised whenever a record gains, loses or changes a field; the two sides must agree."""


Arrays = Mapping[str, NDArray[np.float32]]
"""A method's statistics by name, small arrays of any shape; NaN where there is nothing to say."""

NO_ARRAYS: Arrays = MappingProxyType({})


def no_arrays() -> Arrays:
    """:data:`NO_ARRAYS`, for dataclass fields."""
    return NO_ARRAYS


MOST_DIMENSIONS = 64
"""Of an array, as numpy has it."""

UNKNOWN_COUNT = -1
"""Stands for a label count that a site's policy keeps at home: unknown, not 0."""


@dataclass(frozen=True)
class Groups:
    """A model, or an update of one, as named groups; None where a group does not travel.

    Attributes:
        trunk: float32 ``(t,)``, everything before the head but batch normalisation, flat.
        norm: float32 ``(m,)``, batch normalisation's four tensors per layer, flat.
        head: The head's rows with their class names.
        form: How the trunk travels; its numbers have been rounded to what that form can hold.
    """

    trunk: NDArray[np.float32] | None = None
    norm: NDArray[np.float32] | None = None
    head: Head | None = None
    form: Form = "float32"

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

    @classmethod
    def of_model(cls, model: ModelState) -> "Groups":
        """All three groups of a whole model."""
        return cls(model.trunk, model.norm, model.head)

    def model(self) -> ModelState:
        """The inverse of :meth:`of_model`.

        Raises:
            WireError: If a group is missing.
        """
        if self.trunk is None or self.norm is None or self.head is None:
            lacking = [name for name in ("trunk", "norm", "head") if getattr(self, name) is None]
            raise WireError(f"a whole model has trunk, norm and head; there is no {quoted(lacking)}.")
        return ModelState(self.trunk, self.norm, self.head)

    def over(self, others: "Groups") -> "Groups":
        """These groups, and those of ``others`` in the place of missing ones."""
        pairs = ((getattr(self, name), getattr(others, name)) for name in ("trunk", "norm", "head"))
        return Groups(*(theirs if own is None else own for own, theirs in pairs))


def below(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The arrays called ``prefix/name``, by that name: groups of arrays lie so on disk."""
    return {name.removeprefix(f"{prefix}/"): a for name, a in arrays.items() if name.startswith(f"{prefix}/")}


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
    """Site answers. ``class_names`` are canonical, in the site's own order; ``names`` its own words for them.

    Attributes:
        train_samples: As the site's policy rounds it; it weighs by this number too.
        validation_samples: :data:`UNKNOWN_COUNT` where they are of few patients.
        positives, negatives: Training images known to show each class, and known not to; empty where the method does
            not ask or the site's policy does not tell, :data:`UNKNOWN_COUNT` where it keeps one class's count.
        smallest_count: It tells no count of fewer patients than this.
    """

    run: str
    site: str
    names: tuple[str, ...]
    class_names: tuple[str, ...]
    train_samples: int
    validation_samples: int
    patients: int
    layout: str
    version: str
    positives: tuple[int, ...] = ()
    negatives: tuple[int, ...] = ()
    smallest_count: int = 0

    def __post_init__(self) -> None:
        if len(self.names) != len(self.class_names):
            raise WireError("names and class_names must have one entry a label.")
        pairs = list(zip(self.positives, self.negatives, strict=False))
        if len(self.positives) != len(self.negatives) or len(pairs) not in (0, len(self.class_names)):
            raise WireError("label counts must be one a class, of both kinds.")
        if any(min(pair) < UNKNOWN_COUNT or sum(pair) > self.train_samples for pair in pairs):
            raise WireError("label counts must be from 0 to the training images together, or -1 for unknown.")


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
        left_out: Why this site's last reply did not count, with the round; empty where it did.
    """

    run: str
    round: int
    plan: str
    contract: str
    class_names: tuple[str, ...]
    counted: int
    best: int
    left_out: str
    model: Groups

    def __post_init__(self) -> None:
        _check_run(self.run)


@dataclass(frozen=True)
class TrainRequest(Request):
    """Train one round from this model; round 0 is one epoch that only shows how hard the site's task is.

    Attributes:
        statistics: What the method's coordinator tells this site besides.
    """

    statistics: Arrays = field(default_factory=no_arrays)

    @property
    def ranks(self) -> bool:
        """Whether the site answers with statistics only, and remembers nothing of it."""
        return self.round == 0


@dataclass(frozen=True)
class EvaluateRequest(Request):
    """Evaluate this model on the site's validation part and, for a ``test``, the best model on its test part too."""

    test: bool


def _check_correct(images: int | None, correct: int | None) -> None:
    if (images is None) != (correct is None) or (images or 0) < (correct or 0) or min(images or 0, correct or 0) < 0:
        told = ["an unknown number of" if number is None else number for number in (images, correct)]
        raise WireError(f"of {told[0]} test images {told[1]} cannot be right.")


@dataclass(frozen=True)
class TrainReply:
    """New minus received, and what the round was like.

    Attributes:
        validation_loss: Of the model as received, on the site's validation part; None without validation images.
        validation_auroc: Likewise, mean over the site's classes for which it is defined.
        train_loss: Mean over the batches of the last local epoch; None where the run's privacy does not cover it.
        epochs: Local epochs trained.
        statistics: What the method tells of this site besides.
        test_images, test_correct: Images of the site's test part, and how many of them the model as received puts into
            the right class; None unless the plan asks for it every round.
        epsilon: What the run has cost this site so far, where the plan asks for privacy.
    """

    run: str
    round: int
    site: str
    train_samples: int
    train_loss: float | None
    validation_loss: float | None
    validation_auroc: float | None
    seconds: float
    update: Groups
    epochs: int = 1
    statistics: Arrays = field(default_factory=no_arrays)
    test_images: int | None = None
    test_correct: int | None = None
    epsilon: float | None = None

    def __post_init__(self) -> None:
        if self.train_samples < 1:
            raise WireError(f"train_samples must be positive, not {self.train_samples}.")
        _check_correct(self.test_images, self.test_correct)


@dataclass(frozen=True)
class EvaluateReply:
    """Losses and, for a test, one entry a class the site annotates; NaN stands for "not defined".

    Attributes:
        positives, negatives: :data:`UNKNOWN_COUNT` for a class of which the site tells nothing.
        told_classes: Those whose scores the site tells of, where the plan asks for it and the site's policy allows it.
        positive_scores, negative_scores: Of each of these ``BINS`` counts, one class after the other.
    """

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
    test_images: int | None = None
    test_correct: int | None = None
    told_classes: tuple[str, ...] = ()
    positive_scores: tuple[int, ...] = ()
    negative_scores: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_correct(self.test_images, self.test_correct)
        self._check_columns()
        self._check_scores()

    @property
    def histograms(self) -> dict[str, ScoreHistogram]:
        """Of the classes that the site tells of."""
        counts = (np.array(told, np.int64).reshape(-1, BINS) for told in (self.positive_scores, self.negative_scores))
        return dict(zip(self.told_classes, map(ScoreHistogram, *counts), strict=True))

    def _check_columns(self) -> None:
        columns = (self.auroc, self.average_precision, self.balanced_accuracy, self.positives, self.negatives)
        if any(len(column) != len(self.class_names) for column in columns):
            raise WireError("each metric must have one entry a class.")

    def _check_scores(self) -> None:
        told = self.told_classes
        if len(set(told)) < len(told) or not set(told) <= set(self.class_names):
            raise WireError("scores must be told of tested classes, once each.")
        for kind, scores in (("positives", self.positive_scores), ("negatives", self.negative_scores)):
            if len(scores) != len(told) * BINS or min(scores, default=0) < 0:
                raise WireError(f"scores of {kind} must be {BINS} counts for each class told of.")
            tested = dict(zip(self.class_names, getattr(self, kind), strict=True))
            sums = [sum(scores[row * BINS : (row + 1) * BINS]) for row in range(len(told))]
            if sums != [tested[name] for name in told]:
                raise WireError(f"scores of {kind} must be as many as there are {kind}.")


Record = (
    RollCall
    | RollCallAnswer
    | Refusal
    | RefusalNoted
    | TrainRequest
    | TrainReply
    | EvaluateRequest
    | EvaluateReply
    | MaskingRecord
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
    KeysRequest,
    KeysAnswer,
    SharesRequest,
    SharesAnswer,
    MaskedRequest,
    MaskedAnswer,
    RevealRequest,
    RevealAnswer,
)

REFUSALS = ("name", "version", "labels")

RAW = "raw-little-endian"
_FIELDS, _VERSION, _RECORD, _TRUNK = "fields", "wire.version", "wire.record", "trunk"
_VECTOR = "vector"
_SMALL = ("norm", "weight", "bias")
_LISTS: dict[Any, type] = {
    tuple[str, ...]: str,
    tuple[float, ...]: float,
    tuple[int, ...]: int,
    tuple[bytes, ...]: bytes,
}


Written = dict[int, tuple[NDArray[np.float32], Array]]
"""Arrays as they travel, by the ``id`` of the numpy array, which is kept so that nothing else gets its ``id``."""


def encode(record: Record, written: Written | None = None) -> RecordDict:
    """Translate a typed record into Flower's.

    Args:
        written: What other records of the same exchange share; filled and read here, so that a trunk that goes to a
            hundred sites is written and hashed once.
    """
    content, fields = RecordDict(), ConfigRecord({_VERSION: WIRE_VERSION, _RECORD: type(record).__name__})
    for name, kind in typing.get_type_hints(type(record)).items():
        value = getattr(record, name)
        if kind is Groups:
            _write_groups(content, fields, name, value, {} if written is None else written)
        elif kind == Arrays:
            _write_arrays(fields, name, value)
        elif kind == Integers:
            _write_integers(content, name, value)
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
    fields = _checked_fields(content, expected.__name__)
    hints = typing.get_type_hints(expected)
    grouped: list[str] = [name for name, kind in hints.items() if kind is Groups]
    integers: list[str] = [name for name, kind in hints.items() if kind == Integers]
    _refuse_unknown(content, {_FIELDS, *grouped, *integers}, expected.__name__)
    values: dict[str, Any] = {name: _groups(content, fields, name) for name in grouped}
    values |= {name: _arrays(fields, name) for name, kind in hints.items() if kind == Arrays}
    values |= {name: _integers(content, name) for name in integers}
    plain = {name: kind for name, kind in hints.items() if kind not in (Groups, Arrays, Integers)}
    values |= {name: _value(fields, name, kind, expected.__name__) for name, kind in plain.items()}
    _refuse_unknown(fields, set(), expected.__name__)
    return expected(**values)


def _checked_fields(content: RecordDict, expected: str) -> dict[str, Any]:
    """The fields of a record of this version and name."""
    record = content.get(_FIELDS)
    fields = dict(record) if isinstance(record, ConfigRecord) else {}
    if _VERSION not in fields:
        raise WireError(f"expected {expected}, got records {sorted(content)} without a wire version.")
    if (version := fields.pop(_VERSION)) != WIRE_VERSION:
        spoken = f"the other side speaks wire version {version!r}, this one {WIRE_VERSION}."
        raise WireVersionError(f"{spoken} Install the same release on both.")
    if (name := fields.pop(_RECORD, None)) != expected:
        raise WireError(f"expected {expected}, got {name!r}.")
    return fields


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


def _write_groups(content: RecordDict, fields: ConfigRecord, name: str, groups: Groups, written: Written) -> None:
    if (trunk := groups.trunk) is not None:
        if id(trunk) not in written:
            array = Array(dtype=groups.form, shape=trunk.shape, stype=RAW, data=packed(trunk, groups.form))
            written[id(trunk)] = (trunk, array)
        content[name] = record = ArrayRecord()  # which would copy an array that it is made from
        record[_TRUNK] = written[id(trunk)][1]
    if groups.norm is not None:
        fields[f"{name}.norm"] = packed(groups.norm, "float32")
    fields[f"{name}.classes"] = list(groups.head.class_names) if groups.head else []
    if groups.head:
        fields[f"{name}.weight"] = packed(groups.head.weight, "float32")
        fields[f"{name}.bias"] = packed(groups.head.bias, "float32")


def _write_arrays(fields: ConfigRecord, name: str, arrays: Arrays) -> None:
    fields[f"{name}.names"] = sorted(arrays)
    for key, array in arrays.items():
        fields[f"{name}/{key}"] = packed(array.astype(np.float32, copy=False), "float32")
        fields[f"{name}/{key}/shape"] = list(array.shape)


def _arrays(fields: dict[str, Any], name: str) -> Arrays:
    keys = fields.pop(f"{name}.names", None)
    if not isinstance(keys, list) or any(type(key) is not str or "/" in key for key in keys):
        raise WireError(f"{name} must name its arrays.")
    return {key: _array(fields, f"{name}/{key}") for key in keys}


def _array(fields: dict[str, Any], where: str) -> NDArray[np.float32]:
    values, shape = _numbers(fields.pop(where, None), where), fields.pop(f"{where}/shape", None)
    if values is None or not isinstance(shape, list) or any(type(side) is not int or side < 0 for side in shape):
        raise WireError(f"{where} must be float32 numbers with a shape.")
    if len(shape) > MOST_DIMENSIONS:  # before they are multiplied: a million of them would take minutes
        raise WireError(f"{where} announces {len(shape)} dimensions; no array has more than {MOST_DIMENSIONS}.")
    if math.prod(shape) != len(values):
        raise WireError(f"{where} announces shape {tuple(shape)} and has {len(values)} numbers.")
    if np.isinf(values).any():
        raise WireError(f"{where} holds infinite values.")
    try:
        return values.reshape(shape)
    except ValueError as error:
        raise WireError(f"{where} announces a shape that no array has: {tuple(shape)}.") from error


def _groups(content: RecordDict, fields: dict[str, Any], name: str) -> Groups:
    class_names = fields.pop(f"{name}.classes", None)
    if not isinstance(class_names, list) or any(type(class_name) is not str for class_name in class_names):
        raise WireError(f"class names of {name} must be a list of str.")
    norm, weight, bias = (_numbers(fields.pop(f"{name}.{key}", None), f"{key} of {name}") for key in _SMALL)
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
    trunk, form = _trunk(content, name)
    return Groups(trunk, norm, head, form)


def _trunk(content: RecordDict, name: str) -> tuple[NDArray[np.float32] | None, Form]:
    if name not in content:
        return None, "float32"
    record = content[name]
    if not isinstance(record, ArrayRecord) or list(record) != [_TRUNK]:
        raise WireError(f"the record {name} must hold one array, {_TRUNK}.")
    array, where = record[_TRUNK], f"{_TRUNK} of {name}"
    form = next((form for form in FORMS if form == array.dtype), None)
    if array.stype != RAW or form is None:
        raise WireError(f"{where} must be {', '.join(FORMS)} as {RAW}, not {array.dtype} as {array.stype}.")
    one_length = len(array.shape) == 1 and type(array.shape[0]) is int
    if not one_length or len(array.data) != packed_bytes(array.shape[0], form):
        raise WireError(f"{where} announces shape {tuple(array.shape)} and has {len(array.data)} bytes.")
    try:
        return unpacked(array.data, array.shape[0], form), form
    except ValueError as error:
        raise WireError(f"{where}: {error}.") from error


def _write_integers(content: RecordDict, name: str, vector: Integers) -> None:
    content[name] = record = ArrayRecord()
    record[_VECTOR] = Array("uint32", vector.shape, RAW, vector.astype("<u4", copy=False).tobytes())


def _integers(content: RecordDict, name: str) -> Integers:
    record = content.get(name)
    if not isinstance(record, ArrayRecord) or list(record) != [_VECTOR]:
        raise WireError(f"the record {name} must hold one array, {_VECTOR}.")
    array = record[_VECTOR]
    if array.stype != RAW or array.dtype != "uint32" or len(array.shape) != 1:
        raise WireError(f"{name} must be flat uint32 as {RAW}, not {array.dtype} as {array.stype}.")
    if len(array.data) != 4 * array.shape[0]:
        raise WireError(f"{name} announces shape {tuple(array.shape)} and has {len(array.data)} bytes.")
    return np.frombuffer(array.data, "<u4")


def _numbers(data: Any, where: str) -> NDArray[np.float32] | None:
    """Float32 numbers, without a copy; read-only."""
    if data is None:
        return None
    if not isinstance(data, bytes) or len(data) % 4:
        raise WireError(f"{where} must be the bytes of float32 numbers.")
    return np.frombuffer(data, "<f4")


def payload_bytes(content: RecordDict) -> int:
    """Size in bytes of what the records hold: arrays as they travel, other fields as JSON; without Flower's framing.

    Flower's ``count_bytes`` fails on an empty list (1.39).
    """
    arrays = sum(len(array.data) for record in content.array_records.values() for array in record.values())
    fields = [field for record in content.config_records.values() for field in record.items()]
    raw = {name: value for name, value in fields if isinstance(value, bytes)}
    raws = {name: value for name, value in fields if isinstance(value, list) and value and isinstance(value[0], bytes)}
    small = sum(map(len, raw.values())) + sum(len(one) for value in raws.values() for one in value)
    words = {name: value for name, value in fields if name not in raw and name not in raws}
    return arrays + small + len(json.dumps(words))


def field_names(record: type[Record]) -> tuple[str, ...]:
    """The declared fields of a record, for tests and for the site's audit."""
    return tuple(field.name for field in dataclasses.fields(record))
