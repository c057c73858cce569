"""The label columns of a hospital that mean the same class, from ``data.annotates`` and ``[data.synonyms]``.

Several columns may mean one class; an image shows the class if one of these columns is positive.
"""

from collections.abc import Mapping, Sequence

from polyclinic.common.errors import Fault, quote_names, suggest_nearest_name
from polyclinic.common.patients.opt_out import SITE_FILE
from polyclinic.data.base.image_set import ImageSet


def list_annotated_columns(
    columns: Sequence[str], annotates: Sequence[str], synonyms: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the label columns that a site annotates: the columns of ``data.annotates``, or all columns if it is empty.

    Args:
        columns: The label columns of the site's data.
        annotates: Columns, or classes that synonyms give to columns. Any other name stays in the result.
        synonyms: Column -> its class, where the class has another name.
    """
    annotated = list[str]()
    for name in annotates or columns:
        class_columns = [column for column in columns if synonyms.get(column) == name]
        annotated += [name] if name in columns or not class_columns else class_columns
    return tuple(annotated)


def group_columns_by_class(
    columns: Sequence[str], annotates: Sequence[str], synonyms: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Return class -> the annotated columns that mean it; classes are in the order of the site's columns.

    Args:
        columns, annotates, synonyms: As in :func:`list_annotated_columns`.
    """
    columns_by_class = dict[str, dict[str, None]]()
    for column in list_annotated_columns(columns, annotates, synonyms):
        columns_by_class.setdefault(synonyms.get(column, column), {})[column] = None
    return {name: tuple(members) for name, members in columns_by_class.items()}


def find_foreign_column_faults(annotated: Sequence[str], columns: Sequence[str]) -> list[Fault]:
    """Return a fault for each annotated name that is neither a label column nor the class of one.

    Args:
        annotated: The result of :func:`list_annotated_columns`.
        columns: The label columns of the site's data.
    """
    return [
        Fault(
            f"{SITE_FILE}: data.annotates",
            f'"{name}" is not a class of the data. Classes: {quote_names(columns)}.',
            suggest_nearest_name(name, columns),
            cause="column",
        )
        for name in annotated
        if name not in columns
    ]


def select_annotated_classes(images: ImageSet, annotates: Sequence[str], synonyms: Mapping[str, str]) -> ImageSet:
    """Return the images with one label column for each class that the site annotates, named after the class.

    Args:
        images: The images with the site's label columns.
        annotates, synonyms: As in :func:`list_annotated_columns`; each name is a column or the class of one.
    """
    columns_by_class = group_columns_by_class(images.class_names, annotates, synonyms)
    merged = images.merge_label_columns(columns_by_class.values())
    first_columns = tuple(columns[0] for columns in columns_by_class.values())
    return merged.select_label_columns(first_columns).rename_classes(tuple(columns_by_class))
