"""The meaning of each record field that leaves a hospital, for ``flwr-client preview`` and ``docs/what-leaves.md``.

The text comes from the docstrings of the record classes. A test checks that these explain every field of every record
that a site sends, and that the page has the same text.
"""

from collections.abc import Mapping

from polyclinic.common.system.docstrings import read_attribute_texts
from polyclinic.common.wire.codec import list_record_field_names
from polyclinic.common.wire.counts import CountReply
from polyclinic.common.wire.evaluation import ScoringReply
from polyclinic.common.wire.records import BenefitReply, EvaluateReply, Record, RefusalNoted, RollCallAnswer, TrainReply
from polyclinic.common.wire.secure_aggregation import KeysAnswer, MaskedAnswer, RevealAnswer, SharesAnswer
from polyclinic.strategies.registry import list_statistic_meanings

SENT_RECORD_CLASSES = (
    RollCallAnswer,
    TrainReply,
    EvaluateReply,
    BenefitReply,
    RefusalNoted,
    CountReply,
    ScoringReply,
    KeysAnswer,
    SharesAnswer,
    MaskedAnswer,
    RevealAnswer,
)
"""The record classes that a site sends; it also sends errors, each with a reason in words."""

COMMON_FIELD_MEANINGS = {
    "run": "the run's identifier, as the coordinator gave it",
    "round": "the round's number, as the coordinator gave it",
    "site": "this site's name",
}
"""Field that every record has -> meaning; the page explains these fields once."""


def read_field_meanings(record: type[Record]) -> dict[str, str]:
    """Return the meaning of each field of a record class, from its docstring.

    Each meaning begins with a small letter and has no full stop.
    """
    texts = {name: text.removesuffix(".") for name, text in read_attribute_texts(record).items()}
    meanings = {name: text[0].lower() + text[1:] for name, text in texts.items()}
    return {name: COMMON_FIELD_MEANINGS.get(name) or meanings[name] for name in list_record_field_names(record)}


FIELD_MEANINGS: Mapping[str, Mapping[str, str]] = {
    record.__name__: read_field_meanings(record) for record in SENT_RECORD_CLASSES
}
"""Record class -> field -> meaning."""
STATISTIC_MEANINGS: Mapping[str, str] = list_statistic_meanings()
"""Statistic of a method -> meaning."""


def find_field_meaning(record: str, field: str) -> str:
    """Return the meaning of a record's field; a field that only encodes the record has a general text.

    An array has the meaning of its group of arrays, such as ``update``. A statistic has the meaning that its method
    declares.
    """
    name, _, rest = field.partition("/")
    if name == "statistics" and rest.removesuffix("/shape") in STATISTIC_MEANINGS:
        return STATISTIC_MEANINGS[rest.removesuffix("/shape")]
    return FIELD_MEANINGS[record].get(name.partition(".")[0], "how the program packs its records")
