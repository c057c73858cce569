"""The meaning of each field that leaves a hospital, for ``flwr-client preview`` and ``docs/what-leaves.md``.

The words stand in the docstrings of the records. A test holds that every field of every record that a site sends is
explained there, and that the page says the same.
"""

import inspect
import re
from collections.abc import Mapping

from common.wire.codec import field_names
from common.wire.records import BenefitReply, EvaluateReply, Record, RefusalNoted, RollCallAnswer, TrainReply
from common.wire.secure_aggregation import KeysAnswer, MaskedAnswer, RevealAnswer, SharesAnswer
from strategies.registry import describe_statistics

SENT = (
    RollCallAnswer,
    TrainReply,
    EvaluateReply,
    BenefitReply,
    RefusalNoted,
    KeysAnswer,
    SharesAnswer,
    MaskedAnswer,
    RevealAnswer,
)
"""The records that a site sends; besides, errors: a reason in words."""

OF_EACH = {
    "run": "the run's identifier, as the coordinator gave it",
    "round": "the round's number, as the coordinator gave it",
    "site": "this site's name",
}
"""Fields of each record, which the page explains once."""


def field_meanings(record: type[Record]) -> dict[str, str]:
    """Return the explanation of each field in a record's docstring, without a capital and a full stop."""
    _, _, attributes = (inspect.getdoc(record) or "").partition("Attributes:\n")
    entries = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", attributes, re.MULTILINE)
    texts = {name: re.sub(r"\s+", " ", text).removesuffix(".") for name, text in entries}
    own = {name: text[0].lower() + text[1:] for name, text in texts.items()}
    return {name: OF_EACH.get(name) or own[name] for name in field_names(record)}


MEANING: Mapping[str, Mapping[str, str]] = {record.__name__: field_meanings(record) for record in SENT}
STATISTICS: Mapping[str, str] = describe_statistics()


def meaning_of_field(record: str, field: str) -> str:
    """Return the meaning of a field; an array has that of the field it belongs to, a statistic its own."""
    name, _, rest = field.partition("/")
    if name == "statistics" and rest.removesuffix("/shape") in STATISTICS:
        return STATISTICS[rest.removesuffix("/shape")]
    return MEANING[record].get(name.partition(".")[0], "how the program packs its records")
