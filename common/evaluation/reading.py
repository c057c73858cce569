"""Read the images to score in the pixel form that a model needs, and read columns of their label table."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from polyclinic.common.errors import BadInput, Fault, quote_names, suggest_nearest_name
from polyclinic.common.evaluation.evaluation import DataToScore
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.base.pixel_form import PixelForm, read_as_trained
from polyclinic.data.base.spec import DataSpec, PictureTableSpec
from polyclinic.data.base.splits import StringArray
from polyclinic.data.tables.csv import read_csv_table


def make_data_to_score(
    name: str,
    spec: DataSpec,
    base: Path,
    load: Callable[[DataSpec], ImageSet],
    *,
    about: str,
    caution: str = "",
) -> DataToScore:
    """Return a data set that is ready to be scored.

    Args:
        name: Name of the data in tables.
        spec: The settings with which the data is read.
        base: The folder to which paths in ``spec`` are relative.
        load: Reads the images to score with other settings.
        about: A sentence that describes the images.
        caution: A sentence for the top of the page; empty for none.

    Raises:
        BadInput: If the data cannot be read.
    """
    images = load(spec)
    images_by_spec = {spec.model_dump_json(): images}

    def read(form: PixelForm) -> ImageSet:
        as_trained = read_as_trained(spec, form)
        key = as_trained.model_dump_json()
        if key not in images_by_spec:
            images_by_spec[key] = load(as_trained)
        return images_by_spec[key]

    def read_cells(column: str) -> StringArray:
        return read_cells_of_images(spec, base, images, column)

    return DataToScore(name, images, read, read_cells, about, caution)


def read_cells_of_images(spec: DataSpec, base: Path, images: ImageSet, column: str) -> StringArray:
    """Return the cell of each image in a column of the label table, ``(n,)``.

    Raises:
        BadInput: If the data has no table, or the table lacks the column.
    """
    if images.lines is None or not isinstance(spec, PictureTableSpec):
        problem = "names a column of a label table, and this data has none."
        raise BadInput([Fault(f"--by {column}", problem, "Leave it out.")])
    table = read_csv_table(base / spec.labels, spec.labels, spec.largest_mb)
    if column not in table:
        problem = f"{spec.labels} has no such column. Columns: {quote_names(table)}."
        raise BadInput([Fault(f"--by {column}", problem, suggest_nearest_name(column, table))])
    cells = table.get_column(column)
    cell_rows = np.searchsorted(cells.lines, images.lines)  # lines ascend
    return cells.expand_to_row_cells()[cell_rows]
