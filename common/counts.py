"""The fixed menu of count tables, and the question file of ``flwr-server count``.

This program fixes tables, age bands and bins. A question only chooses tables and classes. It has no filter and no cut
points, so no question can single out a patient.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

from pydantic import Field, field_validator

from polyclinic.common.errors import suggest_nearest_name
from polyclinic.common.system.plain_text import is_plain_text
from polyclinic.common.system.toml import TomlSection, parse_json_section, read_toml, validate_tables
from polyclinic.common.vocabulary import MAX_CLASS_NAME_CHARACTERS, VocabularyTable
from polyclinic.data.base.names import Name

Attribute = Literal["sex", "age", "year", "device", "intensity", "size"]
ATTRIBUTES: tuple[Attribute, ...] = get_args(Attribute)
CROSSED_ATTRIBUTES: tuple[Attribute, ...] = ("sex", "age", "year", "device")
"""Attributes by which each class is counted, too, in the tables ``class_by_ATTRIBUTE``."""
CLASS_TABLE = "class"
COMBINATIONS_TABLE = "combinations"
TABLE_MENU: Mapping[str, str] = MappingProxyType(
    {
        CLASS_TABLE: "images and patients that show each class",
        **{f"class_by_{name}": f"each class by {name}" for name in CROSSED_ATTRIBUTES},
        COMBINATIONS_TABLE: "which classes occur together, of those that each hospital annotates",
        "sex": "images and patients by sex",
        "age": "images and patients by age, in bands of ten years",
        "year": "images and patients by year of the image",
        "device": "images and patients by device",
        "intensity": "images and patients by mean grey value, in eight bins",
        "size": "images and patients by the shorter side of the picture in its file, in pixels",
    }
)
"""Table -> description of the counts in it."""
COUNT_TABLES = tuple(TABLE_MENU)

NOT_STATED = "not stated"
AGE_BANDS = (*(f"{low}-{low + 9}" for low in range(0, 90, 10)), "90+", NOT_STATED)
SEXES = ("female", "male", NOT_STATED)
INTENSITY_BINS = tuple(f"{low}-{low + 31}" for low in range(0, 256, 32))
"""Bins of an image's mean grey value, from 0, black, to 255, white, as the network receives the image."""
SIZE_LIMITS = (256, 512, 1024)
"""Cut points of image sizes: shorter side in pixels."""
SIZES = ("below 256", "256-511", "512-1023", "1024 and more", NOT_STATED)
"""Groups of image sizes, divided at :data:`SIZE_LIMITS`."""
FIRST_COUNTED_YEAR = 1990
LAST_COUNTED_YEAR = 2049
YEARS = (
    f"before {FIRST_COUNTED_YEAR}",
    *map(str, range(FIRST_COUNTED_YEAR, LAST_COUNTED_YEAR + 1)),
    NOT_STATED,
)
FIXED_VALUES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"sex": SEXES, "age": AGE_BANDS, "year": YEARS, "intensity": INTENSITY_BINS, "size": SIZES}
)
"""Attribute -> its values, in order. Devices have no entry, because each hospital has other names for them."""
NO_CLASS = "no class"
"""Value of the table ``combinations`` for images and patients that show none of the classes."""
COMBINATION_SEPARATOR = " + "
"""Separator between the classes of a combination."""

PRESENT, ABSENT, UNKNOWN, ALL = "present", "absent", "not annotated", "all"
STATES = (PRESENT, ABSENT, UNKNOWN)
"""States of a class in an image or a patient. Tables without classes have the one state :data:`ALL`."""

MAX_QUESTION_CHARACTERS = 2**17
"""Maximum length of a question as JSON."""


def list_states(table: str) -> tuple[str, ...]:
    """Return the states that a table of the menu counts."""
    return STATES if table == CLASS_TABLE or table.startswith("class_by_") else (ALL,)


def get_attribute(table: str) -> str:
    """Return the attribute of a table, such as ``age`` for ``class_by_age`` and for ``age``; empty if it has none."""
    name = table.removeprefix("class_by_")
    return name if name in ATTRIBUTES else ""


class CountQuestion(TomlSection):
    """The part of a question that the hospitals receive.

    Attributes:
        title: The question in words, for people.
        tables: Tables of :data:`TABLE_MENU`; all if empty.
        classes: Classes to count, by the study's names; all if empty.
        vocabulary: The study's classes with their synonyms; a hospital's word that is a synonym counts as the class.
    """

    title: str = Field("", max_length=200)
    tables: tuple[str, ...] = ()
    classes: tuple[Name, ...] = ()
    vocabulary: VocabularyTable | None = None

    @field_validator("title")
    @classmethod
    def _check_title(cls, title: str) -> str:
        if not is_plain_text(title):
            raise ValueError("has characters that cannot be printed")
        return title

    @field_validator("tables")
    @classmethod
    def _check_tables(cls, tables: tuple[str, ...]) -> tuple[str, ...]:
        return check_table_names(tables)

    @field_validator("classes")
    @classmethod
    def _check_classes(cls, classes: tuple[str, ...]) -> tuple[str, ...]:
        if too_long := [name for name in classes if not name or len(name) > MAX_CLASS_NAME_CHARACTERS]:
            start = too_long[0][:MAX_CLASS_NAME_CHARACTERS]
            raise ValueError(f"{start!r} cannot be a class: it has 1 to {MAX_CLASS_NAME_CHARACTERS} characters")
        return classes

    @property
    def asked_tables(self) -> tuple[str, ...]:
        """The tables of the question, in the order of the menu."""
        return tuple(table for table in COUNT_TABLES if not self.tables or table in self.tables)


def check_table_names(tables: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of tables unchanged if each is in :data:`TABLE_MENU`.

    Raises:
        ValueError: If one is not.
    """
    for name in tables:
        if name not in TABLE_MENU:
            hint = suggest_nearest_name(name, COUNT_TABLES) or f"the tables are {', '.join(COUNT_TABLES)}"
            raise ValueError(f'"{name}" is no table of counts: {hint}')
    return tables


class CountQuestionFile(CountQuestion):
    """A question file, ``QUESTION.toml``.

    Attributes:
        sites: Hospitals to ask; all that are admitted if empty.
        deadline_s: Seconds that the hospitals have to answer. A hospital that counts for the first time needs longest.
    """

    sites: tuple[str, ...] = ()
    deadline_s: float = Field(600.0, gt=0, le=86_400)

    @property
    def sent_part(self) -> CountQuestion:
        """The part of the question that the hospitals receive."""
        return CountQuestion(**{name: getattr(self, name) for name in CountQuestion.model_fields})


def read_count_question(path: Path) -> CountQuestionFile:
    """Read a question file.

    Raises:
        BadInput: With every fault.
    """
    return validate_tables(CountQuestionFile, read_toml(path), path.name)


def parse_count_question(text: str) -> CountQuestion:
    """Parse a question from the JSON text of a coordinator.

    Raises:
        ValueError: With a short reason, if the text is not a valid question.
    """
    return parse_json_section(CountQuestion, text, "the question")


# ---------------------------------------------------------------------- rows of a masked sum

MASKED_TABLES = tuple(table for table in COUNT_TABLES if table != COMBINATIONS_TABLE and not table.endswith("device"))
"""Tables that can be summed under secure aggregation, because their rows are the same at all hospitals."""
_CLASS_SEPARATOR = ": "


def list_row_values(table: str) -> tuple[str, ...]:
    """Return the values of a table that can be summed; a single empty text for the table of classes."""
    attribute = get_attribute(table)
    return FIXED_VALUES[attribute] if attribute else ("",)


def count_numbers_of_value(table: str) -> int:
    """Return the number of integers that a row has for each value.

    These are patients and images of each state, and a 1 if the hospital hides them.
    """
    return 2 * len(list_states(table)) + 1


MASKED_ROW_LENGTH = max(len(list_row_values(table)) * count_numbers_of_value(table) for table in MASKED_TABLES)
"""Length of each row of a masked sum; shorter rows are padded with zeros."""


def make_row_name(table: str, class_name: str) -> str:
    """Return table and class as one name, which :func:`split_row_name` splits again."""
    return f"{table}{_CLASS_SEPARATOR}{class_name}" if class_name else table


def split_row_name(name: str) -> tuple[str, str]:
    """Return table and class from the name of a row."""
    table, _, class_name = name.partition(_CLASS_SEPARATOR)
    return table, class_name
