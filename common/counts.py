"""The fixed menu of count tables, and the question file of ``flwr-server count``.

Bands, bins and tables are the product's. A question chooses tables and classes, and nothing else: it has no filter and
no cut points, so no question can single out a patient.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

from pydantic import Field, field_validator

from polyclinic.common.errors import suggest_nearest_name
from polyclinic.common.system.plain_text import is_plain_text
from polyclinic.common.system.toml import TomlSection, parse_json_section, read_toml, validate_tables
from polyclinic.common.vocabulary import LONGEST_NAME, VocabularyTable
from polyclinic.data.base.names import Name

Attribute = Literal["sex", "age", "year", "device", "intensity", "size"]
ATTRIBUTES: tuple[Attribute, ...] = get_args(Attribute)
CROSSED: tuple[Attribute, ...] = ("sex", "age", "year", "device")
"""Attributes by which classes are counted, too."""
CLASS, COMBINATIONS = "class", "combinations"
MENU: Mapping[str, str] = MappingProxyType(
    {
        CLASS: "images and patients that show each class",
        **{f"class_by_{name}": f"each class by {name}" for name in CROSSED},
        COMBINATIONS: "which classes occur together, of those that each hospital annotates",
        "sex": "images and patients by sex",
        "age": "images and patients by age, in bands of ten years",
        "year": "images and patients by year of the image",
        "device": "images and patients by device",
        "intensity": "images and patients by mean grey value, in eight bins",
        "size": "images and patients by the shorter side of the picture in its file, in pixels",
    }
)
"""Name of each table -> what it counts."""
COUNT_TABLES = tuple(MENU)

NOT_STATED = "not stated"
AGE_BANDS = (*(f"{low}-{low + 9}" for low in range(0, 90, 10)), "90+", NOT_STATED)
SEXES = ("female", "male", NOT_STATED)
INTENSITY_BINS = tuple(f"{low}-{low + 31}" for low in range(0, 256, 32))
"""Mean grey value of the image as the network receives it, 0 black to 255 white."""
SIZE_LIMITS = (256, 512, 1024)
SIZES = ("below 256", "256-511", "512-1023", "1024 and more", NOT_STATED)
"""Pixels of the shorter side, divided at :data:`SIZE_LIMITS`."""
FIRST_COUNTED_YEAR, LAST_COUNTED_YEAR = 1990, 2049
YEARS = (
    f"before {FIRST_COUNTED_YEAR}",
    *map(str, range(FIRST_COUNTED_YEAR, LAST_COUNTED_YEAR + 1)),
    NOT_STATED,
)
FIXED_VALUES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"sex": SEXES, "age": AGE_BANDS, "year": YEARS, "intensity": INTENSITY_BINS, "size": SIZES}
)
"""Attribute -> its values, in order. The names of devices are each hospital's own."""
NO_CLASS = "no class"
"""Value of the table ``combinations`` for images and patients that show none of the classes."""
TOGETHER = " + "
"""Between the classes of a combination."""

PRESENT, ABSENT, UNKNOWN, ALL = "present", "absent", "not annotated", "all"
STATES = (PRESENT, ABSENT, UNKNOWN)
"""States of a class in an image or a patient. Tables without classes have the one state :data:`ALL`."""

LONGEST_QUESTION = 2**17
"""Characters of a question as JSON."""


def list_states(table: str) -> tuple[str, ...]:
    """Return the states that a table of the menu counts."""
    return STATES if table == CLASS or table.startswith("class_by_") else (ALL,)


def get_attribute(table: str) -> str:
    """Return the attribute of a table: ``age`` of ``class_by_age`` and of ``age``; empty if it has none."""
    name = table.removeprefix("class_by_")
    return name if name in ATTRIBUTES else ""


class CountQuestion(TomlSection):
    """The part of a question that the hospitals receive.

    Attributes:
        title: The question in words, for people.
        tables: Tables of :data:`MENU`; all if empty.
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
        if too_long := [name for name in classes if not name or len(name) > LONGEST_NAME]:
            raise ValueError(f"{too_long[0][:LONGEST_NAME]!r} cannot be a class: it has 1 to {LONGEST_NAME} characters")
        return classes

    @property
    def asked_tables(self) -> tuple[str, ...]:
        """Return the tables of the question, in the order of the menu."""
        return tuple(table for table in COUNT_TABLES if not self.tables or table in self.tables)


def check_table_names(tables: tuple[str, ...]) -> tuple[str, ...]:
    """Return names of tables unchanged, if each is in :data:`MENU`.

    Raises:
        ValueError: If one is not.
    """
    for name in tables:
        if name not in MENU:
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
        """Return the part that the hospitals receive."""
        return CountQuestion(**{name: getattr(self, name) for name in CountQuestion.model_fields})


def read_count_question(path: Path) -> CountQuestionFile:
    """Read a question file.

    Raises:
        BadInput: With every fault.
    """
    return validate_tables(CountQuestionFile, read_toml(path), path.name)


def parse_count_question(text: str) -> CountQuestion:
    """Parse a question that came from a coordinator.

    Raises:
        ValueError: If it is no question, with a short reason.
    """
    return parse_json_section(CountQuestion, text, "the question")


# ---------------------------------------------------------------------- rows of a masked sum

MASKED_TABLES = tuple(table for table in COUNT_TABLES if table != COMBINATIONS and not table.endswith("device"))
"""Tables that can be summed under masks: their values are the same at all hospitals."""
_CLASS_SEPARATOR = ": "


def list_row_values(table: str) -> tuple[str, ...]:
    """Return the values of a table that can be summed; one empty text for the table of classes."""
    attribute = get_attribute(table)
    return FIXED_VALUES[attribute] if attribute else ("",)


def count_numbers_of_value(table: str) -> int:
    """Return how many numbers a row has for a value: patients and images of each state, and 1 if they are hidden."""
    return 2 * len(list_states(table)) + 1


MASKED_ROW_NUMBERS = max(len(list_row_values(table)) * count_numbers_of_value(table) for table in MASKED_TABLES)
"""Length of each row of a masked sum; shorter ones end with zeros."""


def make_row_name(table: str, class_name: str) -> str:
    """Return table and class as one name, as :func:`split_row_name` reads it."""
    return f"{table}{_CLASS_SEPARATOR}{class_name}" if class_name else table


def split_row_name(name: str) -> tuple[str, str]:
    """Return table and class of a row's name."""
    table, _, class_name = name.partition(_CLASS_SEPARATOR)
    return table, class_name
