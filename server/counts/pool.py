"""Pool the hospitals' counts: a sum is exact only where no hospital hid its part, else it is a lower bound."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from polyclinic.common.counts import (
    CLASS_TABLE,
    COMBINATION_SEPARATOR,
    COMBINATIONS_TABLE,
    COUNT_TABLES,
    FIXED_VALUES,
    NO_CLASS,
    PRESENT,
    STATES,
    CountQuestion,
    count_numbers_of_value,
    get_attribute,
    list_row_values,
    list_states,
    split_row_name,
)
from polyclinic.common.vocabulary import group_words_by_class
from polyclinic.common.wire.counts import CountReply

INTERVAL = 1.959964
"""Standard deviations on each side of a noisy count in its 95 % interval."""
CellKey = tuple[str, str, str, str]
"""Table, class of the study, state and value."""


@dataclass(frozen=True)
class Count:
    """A number of patients and of images, as far as hospitals disclose it.

    Attributes:
        patients, images: The numbers; None if hidden. A noisy count has no number of images.
        is_bound: True if the numbers are lower bounds, because a part is hidden.
        deviation: Standard deviation of the noise on the patients.
    """

    patients: int | None = None
    images: int | None = None
    is_bound: bool = False
    deviation: float = 0.0

    @property
    def interval(self) -> tuple[int, int] | None:
        """Return the 95 % interval of a noisy number of patients, not below 0; None without noise."""
        if not self.deviation or self.patients is None:
            return None
        reach = INTERVAL * self.deviation
        return max(math.floor(self.patients - reach), 0), max(math.ceil(self.patients + reach), 0)


HIDDEN = Count(is_bound=True)


@dataclass(frozen=True)
class MaskedSum:
    """The counts that hospitals disclose only in a sum.

    Attributes:
        sites: The hospitals in the sum.
        cells: Count -> sum; ``hidden`` counts the hospitals that hid their part.
        fault: Why there is no sum; empty if there is one.
    """

    sites: tuple[str, ...] = ()
    cells: Mapping[CellKey, Count] = field(default_factory=dict)
    hidden: Mapping[CellKey, int] = field(default_factory=dict)
    fault: str = ""


def read_masked_rows(
    rows: Mapping[str, Sequence[int]], sites_of_row: Mapping[str, Sequence[str]], sites: Sequence[str]
) -> MaskedSum:
    """Return the sum that the unmasked rows contain.

    Args:
        rows: Name of a row -> its numbers.
        sites_of_row: Name of a row -> the hospitals in it.
        sites: All hospitals in the sum.
    """
    cells = dict[CellKey, Count]()
    hidden = dict[CellKey, int]()
    for name, numbers in rows.items():
        table, class_name = split_row_name(name)
        width = count_numbers_of_value(table)
        for place, value in enumerate(list_row_values(table)):
            # Patients and images of each state, then the number of hospitals that hid their part.
            part = [int(number) for number in numbers[place * width : (place + 1) * width]]
            hidden_at = part[-1]
            for number, state in enumerate(list_states(table)):
                key = (table, class_name, state, value)
                hidden[key] = hidden_at
                if hidden_at < len(sites_of_row[name]):
                    patients, images = part[2 * number : 2 * number + 2]
                    cells[key] = Count(patients, images, is_bound=hidden_at > 0)
    return MaskedSum(tuple(sites), cells, hidden)


@dataclass(frozen=True)
class SiteCounts:
    """One hospital's answer, by the study's classes.

    Attributes:
        words: Class of the study -> the hospital's words for it.
    """

    reply: CountReply
    words: Mapping[str, tuple[str, ...]]

    @classmethod
    def from_reply(cls, reply: CountReply, question: CountQuestion) -> "SiteCounts":
        return cls(reply, group_words_by_class(reply.class_names, question.vocabulary or {}))

    @property
    def is_masked(self) -> bool:
        """True if the hospital's counts leave only in a sum."""
        return bool(self.reply.masked_rows)

    @cached_property
    def cells(self) -> dict[CellKey, Count]:
        """The disclosed counts. Of a class for which the hospital has several words, each word's numbers stay apart."""
        reply = self.reply
        cells = dict[CellKey, Count]()
        study_names = {word: name for name, words in self.words.items() for word in words}
        for (table, word, state, value), place in reply.cells.items():
            images = reply.images[place] if reply.images else None
            count = Count(reply.patients[place], images, deviation=reply.noise)
            if table == COMBINATIONS_TABLE:
                classes = set(value.split(COMBINATION_SEPARATOR)) - {NO_CLASS}
                value = (
                    COMBINATION_SEPARATOR.join(sorted({study_names.get(name, name) for name in classes})) or NO_CLASS
                )
            name = study_names.get(word, word)
            if word and len(self.words[name]) > 1:
                continue
            key = (table, name, state, value)
            cells[key] = add_counts([cells[key], count]) if key in cells else count
        return cells

    @cached_property
    def totals(self) -> tuple[int, int] | None:
        """The numbers of all patients and images, if the states of a class say them."""
        for name in self.words:
            parts = [self.cells.get((CLASS_TABLE, name, state, "")) for state in STATES]
            if all(part is not None and part.patients is not None and part.images is not None for part in parts):
                patients = sum(part.patients or 0 for part in parts if part)
                return patients, sum(part.images or 0 for part in parts if part)
        return None

    def get_count(self, key: CellKey) -> Count | None:
        """Return a count, which may be hidden; None if the hospital does not have this table or class.

        A value without a count has 0 images if the other values of its line add up to all images.
        """
        table, name, state, _ = key
        if table not in self.reply.allowed or (name and name not in self.words):
            return None
        if key in self.cells:
            return self.cells[key]
        return Count(0, 0) if self._is_line_complete(table, name, state) else HIDDEN

    def _is_line_complete(self, table: str, name: str, state: str) -> bool:
        """Return True if the disclosed values of a line add up to all its patients and images."""
        line = [count for (of, by, at, _), count in self.cells.items() if (of, by, at) == (table, name, state)]
        total: tuple[int | None, int | None] | None = self.totals
        if name:
            whole = self.cells.get((CLASS_TABLE, name, state, ""))
            total = (whole.patients, whole.images) if whole else None
        if total is None or self.reply.noise or table == CLASS_TABLE:
            return False
        patients = sum(count.patients or 0 for count in line)
        images = sum(count.images or 0 for count in line)
        return (patients, images) == total


def add_counts(parts: Iterable[Count]) -> Count:
    """Return the sum of counts, of which hidden ones make the sum a lower bound."""
    every = list(parts)
    disclosed = [part for part in every if part.patients is not None]
    if not disclosed:
        return HIDDEN
    images = [part.images for part in disclosed if part.images is not None]
    return Count(
        sum(part.patients or 0 for part in disclosed),
        sum(images) if images else None,
        is_bound=len(disclosed) < len(every) or any(part.is_bound for part in disclosed),
        deviation=math.sqrt(sum(part.deviation**2 for part in disclosed)),
    )


@dataclass(frozen=True)
class CountResult:
    """The answers to a question.

    Attributes:
        run: Name of the run of the question.
        time: When it was asked, ISO format.
        sites: Hospital -> its counts.
        silent: Hospital -> why it did not answer.
        masked: The sum of the hospitals that disclose only a sum.
    """

    question: CountQuestion
    run: str
    time: str
    sites: Mapping[str, SiteCounts]
    silent: Mapping[str, str]
    masked: MaskedSum = field(default_factory=MaskedSum)

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The classes of the study, of all answers."""
        return tuple(sorted({name for site in self.sites.values() for name in site.words}))

    @cached_property
    def tables(self) -> tuple[str, ...]:
        """The tables that at least one hospital answers."""
        answered = {table for site in self.sites.values() for table in site.reply.allowed}
        return tuple(table for table in COUNT_TABLES if table in answered)

    def list_values(self, table: str) -> tuple[str, ...]:
        """Return the values of a table for which a hospital discloses a count: fixed values first, others sorted."""
        if table == CLASS_TABLE:
            return ("",)
        disclosed = {key[3] for key in self._disclosed_keys if key[0] == table}
        fixed = FIXED_VALUES.get(get_attribute(table), ())
        return (*(value for value in fixed if value in disclosed), *sorted(disclosed - set(fixed)))

    @cached_property
    def _disclosed_keys(self) -> set[CellKey]:
        keys = {key for site in self.sites.values() for key in site.cells}
        return keys | self.masked.cells.keys()

    def list_lines(self, table: str) -> list[tuple[str, str]]:
        """Return class and value of each line of a table."""
        values = self.list_values(table)
        names = self.classes if PRESENT in list_states(table) else ("",)
        return [(name, value) for name in names for value in values]

    def list_keys(self, table: str) -> list[CellKey]:
        """Return the keys of a table's counts, line by line."""
        return [(table, name, state, value) for name, value in self.list_lines(table) for state in list_states(table)]

    def get_site_count(self, site: str, key: CellKey) -> Count | None:
        """Return one hospital's count; None if it does not concern the hospital, or is disclosed only in a sum."""
        counts = self.sites[site]
        return None if counts.is_masked else counts.get_count(key)

    def pool_count(self, key: CellKey) -> Count:
        """Return the sum over all hospitals that the count concerns."""
        parts = [count for site in self.sites if (count := self.get_site_count(site, key)) is not None]
        if any(site.is_masked and site.get_count(key) is not None for site in self.sites.values()):
            parts.append(self.masked.cells.get(key, HIDDEN))
        return add_counts(parts) if parts else HIDDEN

    def describe_site(self, site: str) -> str:
        """Describe the limits of a hospital's answer: level and date, masks, noise, hidden counts, missing tables."""
        reply = self.sites[site].reply
        texts = [f"level {reply.level}, as of {reply.as_of}"]
        if reply.masked_rows:
            is_in_sum = site in self.masked.sites
            texts.append("in the sum under masks only" if is_in_sum else "under masks, and in no sum")
        if reply.noise:
            texts.append(f"patients with noise of standard deviation {reply.noise:.1f}")
        elif reply.smallest_count:
            texts.append(f"counts of fewer than {reply.smallest_count} patients hidden")
        if reply.refused:
            texts.append(f"does not allow {', '.join(reply.refused)}")
        if reply.missing:
            texts.append(f"has no data for {', '.join(reply.missing)}")
        several = [name for name, words in self.sites[site].words.items() if len(words) > 1]
        if several:
            texts.append(f"has several words for {', '.join(several)}, whose counts cannot be added")
        return "; ".join(texts)
