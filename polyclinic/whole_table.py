"""A pandas table that prints all its columns; pandas replaces those beyond the terminal's width by three dots."""

from typing import Any

import pandas as pd


class WholeTable(pd.DataFrame):  # type: ignore[misc]  # pandas has no types here
    """A DataFrame whose text has all columns; what is computed from it is such a table too."""

    @property
    def _constructor(self) -> Any:
        return WholeTable

    def __repr__(self) -> str:
        with pd.option_context("display.max_columns", None, "display.width", 80, "display.max_colwidth", None):
            return str(super().__repr__())
