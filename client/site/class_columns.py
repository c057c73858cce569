"""The columns of a hospital's labels that mean one class, and the class that each of them means.

Several columns of one class are one class: an image shows it if one of the columns says so. The declaration to the
coordinator then has the first column's name alone.
"""

from collections.abc import Mapping, Sequence

from polyclinic.client.site.site_file import FILE, SiteSettings
from polyclinic.common.contract import LabelDeclaration, merge_label_declarations
from polyclinic.common.errors import Fault, quote_names, raise_faults, suggest_nearest_name


def list_annotated_columns(settings: SiteSettings, columns: Sequence[str]) -> tuple[str, ...]:
    """Return the label columns that the site annotates, as ``data.annotates`` lists them; all without such a list.

    The list has columns, or classes that ``[data.synonyms]`` gives to columns. A name that is neither stays.
    """
    annotated = list[str]()
    for name in settings.labels or columns:
        of_class = [column for column in columns if settings.synonyms.get(column) == name]
        annotated += [name] if name in columns or not of_class else of_class
    return tuple(annotated)


def find_columns_of_classes(settings: SiteSettings, columns: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return class -> the annotated columns that mean it, in the order of the columns that the site annotates."""
    of_class = dict[str, dict[str, None]]()
    for column in list_annotated_columns(settings, columns):
        of_class.setdefault(settings.synonyms.get(column, column), {})[column] = None
    return {name: tuple(members) for name, members in of_class.items()}


def make_label_declaration(settings: SiteSettings, columns: Sequence[str]) -> LabelDeclaration:
    """Make the declaration of the site's class names, which the coordinator receives at the roll call.

    Args:
        columns: The label columns of the site's data.

    Raises:
        BadInput: With every fault.
    """
    annotated = list_annotated_columns(settings, columns)
    raise_faults(
        [
            Fault(
                f"{FILE}: data.annotates",
                f'"{name}" is not a class of the data. Classes: {quote_names(columns)}.',
                suggest_nearest_name(name, columns),
                cause="column",
            )
            for name in annotated
            if name not in columns
        ]
    )
    merged = _list_merged_columns(find_columns_of_classes(settings, columns))
    names = tuple(column for column in annotated if column not in merged)
    synonyms = {own: name for own, name in settings.synonyms.items() if own not in merged}
    declaration = LabelDeclaration(settings.file.name, names, synonyms)
    merge_label_declarations([declaration])  # raises the faults of a single declaration
    return declaration


def _list_merged_columns(of_class: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """Return the columns that are merged into the first column of their class."""
    return frozenset(column for members in of_class.values() for column in members[1:])


def describe_merged_columns(of_class: Mapping[str, Sequence[str]]) -> str:
    """Return a sentence for the hospital's staff on columns that are one class; empty if there are none."""
    merged = [f"{quote_names(members)} as {quote_names([name])}" for name, members in of_class.items() if members[1:]]
    return f"one class each, present where one of its columns says so: {'; '.join(merged)}" if merged else ""
