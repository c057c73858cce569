"""Pool the hospitals' counts. A sum is exact if no hospital hid its own count, else it is a lower bound."""

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

Z_95 = 1.959964
"""0.975 quantile of the standard normal distribution: half the width of a 95 % interval in standard deviations."""
CellKey = tuple[str, str, str, str]
"""Key of a count: its table; its class; ``present``, ``absent`` or ``unknown``; and the attribute's value or ``""``."""


@dataclass(frozen=True)
class Count:
    """A number of patients and a number of images, as far as hospitals disclose them.

    Attributes:
        patients: Number of patients; None if hidden.
        images: Number of images; None if hidden, and for a noisy count.
        is_bound: True if the numbers are lower bounds, because some hospitals hide their counts.
        deviation: Standard deviation of the noise on the number of patients.
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
        half_width = Z_95 * self.deviation
        return max(math.floor(self.patients - half_width), 0), max(math.ceil(self.patients + half_width), 0)


HIDDEN_COUNT = Count(is_bound=True)
"""A count of which hospitals disclose nothing."""


@dataclass(frozen=True)
class MaskedSum:
    """The counts of hospitals that disclose them only as a sum over hospitals (secure aggregation).

    Attributes:
        sites: The hospitals in the sum.
        cells: Key of a count -> sum over the hospitals.
        hidden: Key of a count -> number of hospitals that hid their own count from the sum.
        fault: Reason why secure aggregation failed; empty if it succeeded.
    """

    sites: tuple[str, ...] = ()
    cells: Mapping[CellKey, Count] = field(default_factory=dict)
    hidden: Mapping[CellKey, int] = field(default_factory=dict)
    fault: str = ""


def read_masked_rows(
    rows: Mapping[str, Sequence[int]], sites_of_row: Mapping[str, Sequence[str]], sites: Sequence[str]
) -> MaskedSum:
    """Return the counts in the rows of numbers that secure aggregation summed.

    Args:
        rows: Name of a row -> sums over the hospitals.
        sites_of_row: Name of a row -> hospitals whose numbers are in the sums.
        sites: All hospitals in the sum.
    """
    cells = dict[CellKey, Count]()
    hidden = dict[CellKey, int]()
    for name, numbers in rows.items():
        table, class_name = split_row_name(name)
        width = count_numbers_of_value(table)
        for value_index, value in enumerate(list_row_values(table)):
            # Patients and images of each state, then the number of hospitals that hid their count.
            value_numbers = [int(number) for number in numbers[value_index * width : (value_index + 1) * width]]
            hiding_sites = value_numbers[-1]
            for state_index, state in enumerate(list_states(table)):
                key = (table, class_name, state, value)
                hidden[key] = hiding_sites
                if hiding_sites < len(sites_of_row[name]):
                    patients, images = value_numbers[2 * state_index : 2 * state_index + 2]
                    cells[key] = Count(patients, images, is_bound=hiding_sites > 0)
    return MaskedSum(tuple(sites), cells, hidden)


@dataclass(frozen=True)
class SiteCounts:
    """One hospital's counts under the class names of the study.

    Attributes:
        reply: The hospital's answer, with its own names of classes.
        words: Class of the study -> the hospital's names for the class.
    """

    reply: CountReply
    words: Mapping[str, tuple[str, ...]]

    @classmethod
    def from_reply(cls, reply: CountReply, question: CountQuestion) -> "SiteCounts":
        return cls(reply, group_words_by_class(reply.class_names, question.vocabulary or {}))

    @property
    def is_masked(self) -> bool:
        """True if the hospital discloses its counts only as part of a sum."""
        return bool(self.reply.masked_rows)

    @cached_property
    def cells(self) -> dict[CellKey, Count]:
        """The disclosed counts by key; without classes for which the hospital has several names.

        The counts under several names of one class cannot be added, because an image may be counted under each.
        """
        reply = self.reply
        cells = dict[CellKey, Count]()
        study_names = {word: name for name, words in self.words.items() for word in words}
        for (table, word, state, value), index in reply.cells.items():
            images = reply.images[index] if reply.images else None
            count = Count(reply.patients[index], images, deviation=reply.noise)
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
        """The numbers of all patients and all images; None if no class has disclosed counts of all its states."""
        for name in self.words:
            parts = [self.cells.get((CLASS_TABLE, name, state, "")) for state in STATES]
            if all(part is not None and part.patients is not None and part.images is not None for part in parts):
                patients = sum(part.patients or 0 for part in parts if part)
                return patients, sum(part.images or 0 for part in parts if part)
        return None

    def get_count(self, key: CellKey) -> Count | None:
        """Return the count with this key, which may be hidden; None if the answer has no such table or class.

        A missing count is 0 if the disclosed values of the same table, class and state add up to the total. Otherwise
        it is hidden.
        """
        table, name, state, _ = key
        if table not in self.reply.allowed or (name and name not in self.words):
            return None
        if key in self.cells:
            return self.cells[key]
        return Count(0, 0) if self._is_line_complete(table, name, state) else HIDDEN_COUNT

    def _is_line_complete(self, table: str, name: str, state: str) -> bool:
        """Return True if the disclosed values of a table, class and state add up to its total patients and images."""
        line = [count for key, count in self.cells.items() if key[:3] == (table, name, state)]
        total: tuple[int | None, int | None] | None = self.totals
        if name:
            class_count = self.cells.get((CLASS_TABLE, name, state, ""))
            total = (class_count.patients, class_count.images) if class_count else None
        if total is None or self.reply.noise or table == CLASS_TABLE:
            return False
        patients = sum(count.patients or 0 for count in line)
        images = sum(count.images or 0 for count in line)
        return (patients, images) == total


def add_counts(parts: Iterable[Count]) -> Count:
    """Return the sum of counts; a lower bound if a count is hidden or itself a lower bound."""
    counts = list(parts)
    disclosed = [count for count in counts if count.patients is not None]
    if not disclosed:
        return HIDDEN_COUNT
    images = [count.images for count in disclosed if count.images is not None]
    return Count(
        sum(count.patients or 0 for count in disclosed),
        sum(images) if images else None,
        is_bound=len(disclosed) < len(counts) or any(count.is_bound for count in disclosed),
        deviation=math.sqrt(sum(count.deviation**2 for count in disclosed)),  # independent noise
    )


@dataclass(frozen=True)
class CountResult:
    """The hospitals' answers to a question for counts.

    Attributes:
        run: Run name under which the question was asked.
        time: Time of the question (ISO 8601, UTC).
        sites: Hospital -> its counts.
        silent: Hospital -> reason why it did not answer.
        masked: Sum over the hospitals that disclose their counts only in a sum.
    """

    question: CountQuestion
    run: str
    time: str
    sites: Mapping[str, SiteCounts]
    silent: Mapping[str, str]
    masked: MaskedSum = field(default_factory=MaskedSum)

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The study's classes for which at least one hospital answered, sorted."""
        return tuple(sorted({name for site in self.sites.values() for name in site.words}))

    @cached_property
    def tables(self) -> tuple[str, ...]:
        """The tables that at least one hospital's answer has."""
        answered = {table for site in self.sites.values() for table in site.reply.allowed}
        return tuple(table for table in COUNT_TABLES if table in answered)

    def list_values(self, table: str) -> tuple[str, ...]:
        """Return a table's values with a disclosed count: values of the fixed list in its order, then others sorted."""
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
        """Return (class, value) of each line of a table; the class is empty in a table that is not by class."""
        values = self.list_values(table)
        names = self.classes if PRESENT in list_states(table) else ("",)
        return [(name, value) for name in names for value in values]

    def list_keys(self, table: str) -> list[CellKey]:
        """Return the keys of a table's counts, line by line."""
        return [(table, name, state, value) for name, value in self.list_lines(table) for state in list_states(table)]

    def get_site_count(self, site: str, key: CellKey) -> Count | None:
        """Return one hospital's count; None if its answer has no such table or class, or it discloses only sums."""
        counts = self.sites[site]
        return None if counts.is_masked else counts.get_count(key)

    def pool_count(self, key: CellKey) -> Count:
        """Return the sum of a count over all hospitals whose answers have its table and class."""
        parts = [count for site in self.sites if (count := self.get_site_count(site, key)) is not None]
        if any(site.is_masked and site.get_count(key) is not None for site in self.sites.values()):
            parts.append(self.masked.cells.get(key, HIDDEN_COUNT))
        return add_counts(parts) if parts else HIDDEN_COUNT

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
