"""What a site may send that cannot count, each with words of the reason that both sides must hear."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict

from polyclinic.common.wire import message_objects
from polyclinic.common.wire.codec import RAW_FORMAT
from polyclinic.common.wire.message_objects import split_array_into_chunks

Spoil = Callable[[RecordDict], None]


@dataclass(frozen=True)
class Harm:
    """One way to spoil a training reply, as the records that are about to leave.

    Attributes:
        kind: As the table of ``make torture`` counts it.
        reason: Words of the coordinator's reason.
    """

    kind: str
    spoil: Spoil
    reason: str


def raw(values: np.ndarray, dtype: str = "float32") -> Array:
    """An array as our records hold it."""
    return Array(
        dtype=dtype, shape=values.shape, stype=RAW_FORMAT, data=values.astype(f"<{values.dtype.str[1:]}").tobytes()
    )


def trunk(change: Callable[[np.ndarray], np.ndarray], dtype: str = "float32") -> Spoil:
    """Send another trunk in the place of the trained one."""

    def spoil(content: RecordDict) -> None:
        values = np.frombuffer(content["update"]["trunk"].data, "<f4").copy()
        content["update"] = ArrayRecord({"trunk": raw(change(values), dtype)})

    return spoil


def says(**fields: object) -> Spoil:
    """Say something else in small fields; ``__`` stands for a dot."""

    def spoil(content: RecordDict) -> None:
        for name, value in fields.items():
            content["fields"][name.replace("__", ".")] = value

    return spoil


def another_class(content: RecordDict) -> None:
    own = list(content["fields"]["update.classes"])
    content["fields"]["update.classes"] = ["of nobody", *own[1:]]


FORMS = (
    Harm("NaN in an update", trunk(lambda values: np.r_[np.nan, values[1:]]), "values that are not finite"),
    Harm("infinity in an update", trunk(lambda values: np.r_[-np.inf, values[1:]]), "values that are not finite"),
    Harm("wrong shape", trunk(lambda values: values[1:]), "trunk has shape"),
    Harm("two dimensions", trunk(lambda values: values[None]), "trunk of update announces shape (1, "),
    Harm("wrong dtype", trunk(lambda values: values.astype(np.float64), "float64"), "not float64 as raw-little-endian"),
    Harm("fewer bits than asked for", trunk(lambda values: values.astype(np.float16), "float16"), "expected float32"),
    Harm(
        "unknown group",
        lambda content: content.update({"extra": ArrayRecord({"trunk": raw(np.ones(3, np.float32))})}),
        "TrainReply does not have extra",
    ),
    Harm("missing group", lambda content: content.pop("update"), "trunk was expected"),  # type: ignore[arg-type, return-value]
    Harm("class of another site", another_class, "head rows are ['of nobody'"),
    Harm("reply of another round", says(round=77), "reply belongs to run, round, site"),
    Harm("reply of another run", says(run="another"), "reply belongs to run, round, site ('another'"),
    Harm("reply in another's name", says(site="somebody"), "'somebody')"),
    Harm("absurd number of images", says(train_samples=10**12), "train_samples must be from 1 to 1,000,000,000, not"),
    Harm("another number of images", says(train_samples=10**6), "trained on 1000000 images, said"),
    Harm("statistics nobody asked for", says(statistics__names=["prior"]), "statistics/prior must be float32 numbers"),
    Harm("a loss that is no number", says(train_loss=float("nan")), "TrainReply.train_loss is not a number"),
    Harm("no record of ours", lambda content: [content.pop(name) for name in list(content)], "without a wire version"),
)
"""What is wrong with a reply by itself."""

OVERSIZED = Harm(
    "oversized reply", trunk(lambda values: np.zeros(12_000_000, np.float32)), "its reply weighs more than"
)
"""Refused while it comes, or before it is put together, for its parts are equal: over the network only."""


def _many_times(content: RecordDict) -> None:
    """Say of each array that it is its only part 3,000 times: the part travels once."""
    for record in content.array_records.values():
        for array in record.values():
            vars(array)[message_objects._CHUNKS_ATTRIBUTE] = array.data, [*split_array_into_chunks(array)] * 3000


REPEATED = Harm("one part of an array 3,000 times", _many_times, "its reply weighs more than")
"""Refused before it is put together: over the network only."""
