"""The columns of a hospital's labels that mean one class, by ``data.annotates`` and ``[data.synonyms]``.

Several columns of one class are one class: an image shows it if one of the columns says so.
"""

from collections.abc import Mapping, Sequence

from polyclinic.common.errors import Fault, quote_names, suggest_nearest_name
from polyclinic.common.patients.opt_out import SITE_FILE
from polyclinic.data.base.image_set import ImageSet


def list_annotated_columns(
    columns: Sequence[str], annotates: Sequence[str], synonyms: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the label columns that a site annotates, as ``data.annotates`` lists them; all without such a list.

    Args:
        columns: The label columns of the site's data.
        annotates: Columns, or classes that synonyms give to columns. A name that is neither stays in the result.
        synonyms: Column -> the class that it means, where that has another name.
    """
    annotated = list[str]()
    for name in annotates or columns:
        of_class = [column for column in columns if synonyms.get(column) == name]
        annotated += [name] if name in columns or not of_class else of_class
    return tuple(annotated)


def find_columns_of_classes(
    columns: Sequence[str], annotates: Sequence[str], synonyms: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Return class -> the annotated columns that mean it, in the order of the columns that the site annotates.

    Args:
        columns, annotates, synonyms: As in :func:`list_annotated_columns`.
    """
    of_class = dict[str, dict[str, None]]()
    for column in list_annotated_columns(columns, annotates, synonyms):
        of_class.setdefault(synonyms.get(column, column), {})[column] = None
    return {name: tuple(members) for name, members in of_class.items()}


def find_foreign_column_faults(annotated: Sequence[str], columns: Sequence[str]) -> list[Fault]:
    """Return a fault for each name of :func:`list_annotated_columns` that is neither a column nor the class of one."""
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
    """Return images with one label column for each class that the site annotates, by the class's name.

    Args:
        annotates, synonyms: As in :func:`list_annotated_columns`; each name is a column or the class of one.
    """
    of_class = find_columns_of_classes(images.class_names, annotates, synonyms)
    merged = images.merge_label_columns(of_class.values())
    firsts = tuple(columns[0] for columns in of_class.values())
    return merged.select_label_columns(firsts).rename_classes(tuple(of_class))
