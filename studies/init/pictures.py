"""For ``flwr-sim init``: which pictures of a table are looked at, and folders that are one picture."""

from pathlib import Path

import numpy as np

LOOKED_AT = 50
"""Number of pictures, spread over the table, that are read to guess the settings."""


def spread_over_rows(count: int) -> list[int]:
    """Return at most :data:`LOOKED_AT` numbers below ``count``, evenly spread."""
    return [int(row) for row in np.unique(np.linspace(0, max(count - 1, 0), LOOKED_AT).round())] if count else []


def name_series(folder: Path, name: str) -> list[str]:
    """Return the name of a folder with the slices of one DICOM series; empty if there is no such folder."""
    from polyclinic.data.images.dicom_series import is_series_folder  # takes a second

    return [name] if name and is_series_folder(folder / name) else []
