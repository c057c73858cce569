"""The declaration of a hospital's classes to the coordinator.

If several columns are one class (:mod:`polyclinic.common.class_columns`), it names only the first column.
"""

from collections.abc import Mapping, Sequence

from polyclinic.client.site.site_file import SiteSettings
from polyclinic.common.class_columns import (
    find_foreign_column_faults,
    group_columns_by_class,
    list_annotated_columns,
)
from polyclinic.common.contract import LabelDeclaration, merge_label_declarations
from polyclinic.common.errors import quote_names, raise_faults


def make_label_declaration(settings: SiteSettings, columns: Sequence[str]) -> LabelDeclaration:
    """Make the declaration of the site's class names, which the coordinator receives at the roll call.

    Args:
        columns: The label columns of the site's data.

    Raises:
        BadInput: If class names have faults; it lists all.
    """
    annotated = list_annotated_columns(columns, settings.labels, settings.synonyms)
    raise_faults(find_foreign_column_faults(annotated, columns))
    merged = _list_merged_columns(group_columns_by_class(columns, settings.labels, settings.synonyms))
    names = tuple(column for column in annotated if column not in merged)
    synonyms = {column: name for column, name in settings.synonyms.items() if column not in merged}
    declaration = LabelDeclaration(settings.file.name, names, synonyms)
    merge_label_declarations([declaration])  # raises the faults of a single declaration
    return declaration


def _list_merged_columns(of_class: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """Return the columns that are merged into the first column of their class."""
    return frozenset(column for members in of_class.values() for column in members[1:])


def describe_merged_columns(of_class: Mapping[str, Sequence[str]]) -> str:
    """Return a sentence for the hospital's staff about columns that are one class; empty if there are none."""
    merged = [f"{quote_names(members)} as {quote_names([name])}" for name, members in of_class.items() if members[1:]]
    return f"one class each, present where one of its columns says so: {'; '.join(merged)}" if merged else ""
