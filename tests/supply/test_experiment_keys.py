"""The reference of experiment files is what the schemas say: docs/experiments.md and its tables of keys."""

from typing import Annotated, Literal, get_args

import pytest
from pydantic import BaseModel, Field

from polyclinic.common.plugins import OrPlugin
from polyclinic.data.base.spec import DataSpec
from polyclinic.data.partition.spec import PartitionSpec
from polyclinic.strategies.registry import STRATEGIES
from supply.experiment_keys import DATA_KINDS, PARTITION_KINDS, SECTIONS
from supply.key_tables import KeyRow, find_key_meaning, list_key_rows


class Lamp(BaseModel):
    """A lamp.

    Attributes:
        colour: Colour of the light; None for white (:mod:`lamps`).
        watts, lumens: Power | brightness.
    """

    kind: Literal["lamp"] = "lamp"
    colour: Annotated[Literal["red", "blue"], OrPlugin] | None = None
    watts: int = Field(gt=0, le=2000)
    lumens: float = Field(1e-5, ge=0, lt=1)


class Torch(Lamp):
    """A lamp to carry.

    Attributes:
        lumens: As in :class:`Lamp`, at night.
    """

    sizes: tuple[float, float] = (1.0, 2.5)
    on: bool = False
    strides: tuple[tuple[int, ...], ...] = ()


def members(union: object) -> set[type]:
    """The classes of a union that is told apart by ``kind``."""
    return set(get_args(get_args(union)[0]))


def test_every_kind_of_data_and_of_partition_is_on_the_page() -> None:
    assert set(DATA_KINDS.values()) == members(DataSpec)
    assert set(PARTITION_KINDS.values()) == members(PartitionSpec)
    for kind, model in {**DATA_KINDS, **PARTITION_KINDS}.items():
        assert get_args(model.model_fields["kind"].annotation) == (kind,)


@pytest.mark.parametrize(
    "model",
    dict.fromkeys(
        [
            *SECTIONS.values(),
            *DATA_KINDS.values(),
            *PARTITION_KINDS.values(),
            *(method.site_class.traits.parameters_class for method in STRATEGIES.values()),
        ]
    ),
)
def test_every_key_is_explained_in_words_without_names_of_code(model: type[BaseModel]) -> None:
    rows = list_key_rows(model)
    assert [row.name for row in rows if not row.meaning] == [], "a line under Attributes: of the class for each"
    assert [row.name for row in rows if ":`" in row.meaning or "``" in row.meaning] == []


def test_a_row_has_values_default_and_the_text_of_the_nearest_class_that_explains_the_key() -> None:
    colour, watts, lumens, sizes, on, strides = list_key_rows(Torch)
    assert colour == KeyRow("colour", "`red`, `blue` or `plugin:NAME`", "none", "Colour of the light; none for white.")
    assert watts == KeyRow("watts", "whole number from 1 to 2,000", "–", "Power \\| brightness.")
    assert lumens == KeyRow("lumens", "number from 0 and below 1", "`1e-5`", "Power \\| brightness. At night.")
    assert (sizes.values, sizes.default, sizes.meaning) == ("list of 2 numbers", "`[1, 2.5]`", "")
    assert (on.values, on.default) == ("`true` or `false`", "`false`")
    assert (strides.values, strides.default) == ("list of lists of whole numbers", "none")
    assert find_key_meaning(Torch, "kind") == ""
