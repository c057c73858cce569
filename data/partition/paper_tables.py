"""The classes of each site in the experiments of Kulkarni et al., "Surgical Aggregation", ML4H 2024.

The authors published the randomly drawn class lists, but not the code that draws them. Numbers are indices into the
alphabetical class names of NIH ChestX-ray14 (:data:`polyclinic.data.tables.class_names.NIH_CLASSES`).
"""

from typing import Literal

from polyclinic.data.tables.class_names import NIH_CLASSES

SiteClassIndices = tuple[tuple[int, ...], ...]


def _parse_class_lists(text: str) -> SiteClassIndices:
    return tuple(tuple(map(int, site.split())) for site in text.split("|"))


_CLASSES_BY_SITE_COUNT = {
    2: "1 2 3 4 5 6 7 8 10 11 12 | 0 1 4 8 9 10 13",
    3: "0 1 2 3 4 5 6 8 9 11 12 13 | 1 2 4 6 8 10 11 12 | 2 4 6 7 8 11 12 13",
    4: "0 1 2 3 4 8 12 | 1 3 4 5 6 10 11 12 13 | 1 2 3 4 7 8 12 13 | 1 2 3 4 6 8 9 11 12 13",
    5: "0 1 2 4 6 8 9 12 | 1 2 5 8 10 11 13 | 1 2 3 6 7 8 12 | 0 2 5 8 9 11 13 | 2 3 8 9 12 13",
    6: "0 1 5 6 11 13 | 2 3 4 10 13 | 1 6 7 12 | 3 4 6 9 11 12 | 1 3 5 6 8 11 13 | 2 7 12",
    8: "0 1 5 6 13 | 2 3 4 10 13 | 6 7 12 | 3 4 6 9 11 12 | 1 3 5 6 8 | 1 11 13 | 4 5 6 8 | 2 7 12",
    10: ("0 1 5 6 13 | 2 3 4 10 13 | 6 7 12 | 3 4 6 9 11 12 | 1 3 5 6 8 | 1 11 13 | 4 5 8 | 2 7 12 | 6 8 9 | 2 7 12"),
}
"""Number of sites -> the classes of each site; a bar separates two sites."""
_UNSHARED_CLASSES = _parse_class_lists("2 3 4 | 0 5 10 | 1 9 11 12 | 6 7 8 13")
_SHARED_CLASSES_BY_RUN = {
    1: (),
    2: (13,),
    3: (1, 13),
    4: (1, 3, 7, 13),
    5: (0, 1, 3, 6, 7, 10, 12, 13),
    6: (0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13),
    7: tuple(range(14)),
}
"""Number of the experiment -> the classes that all four sites annotate, beside their classes in
:data:`_UNSHARED_CLASSES`."""

PAPER_TABLES: dict[Literal["clients", "shared"], dict[int, SiteClassIndices]] = {
    "clients": {sites: _parse_class_lists(text) for sites, text in _CLASSES_BY_SITE_COUNT.items()},
    "shared": {
        run: tuple(tuple(sorted({*unshared, *shared})) for unshared in _UNSHARED_CLASSES)
        for run, shared in _SHARED_CLASSES_BY_RUN.items()
    },
}


def read_paper_class_lists(table: Literal["clients", "shared"], row: int) -> tuple[tuple[str, ...], ...]:
    """Return the sorted class names of each site in one experiment of the surgical aggregation paper.

    Args:
        table: "clients" for the experiments with 2 to 10 sites, "shared" for the experiments in which four sites share
            some classes.
        row: For "clients" the number of sites, for "shared" the number of the experiment.
    """
    return tuple(tuple(NIH_CLASSES[index] for index in indices) for indices in PAPER_TABLES[table][row])
