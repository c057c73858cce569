"""A pandas table that prints all its columns; pandas itself hides columns beyond the terminal's width."""

from typing import Any

import pandas as pd


class WholeTable(pd.DataFrame):  # type: ignore[misc]  # pandas has no types here
    """A DataFrame that prints all its columns; a table computed from it, such as a selection, does the same."""

    @property
    def _constructor(self) -> Any:
        return WholeTable

    def __repr__(self) -> str:
        with pd.option_context("display.max_columns", None, "display.width", 80, "display.max_colwidth", None):
            return str(super().__repr__())
