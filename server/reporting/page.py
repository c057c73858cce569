"""Write the coordinator's HTML pages from templates, with terms and formatting that several pages share."""

from dataclasses import dataclass
from pathlib import Path

from polyclinic.common.metrics.auroc import FEWEST_POSITIVES, FinalTestSummary
from polyclinic.common.reporting.page import TERMS, write_html_page
from polyclinic.common.system.plain_text import format_count
from polyclinic.server.runs.schema import RunSummary

TEMPLATES = Path(__file__).parent / "templates"
GROUP_TITLES = {
    "shared": "annotated by every site",
    "some": "annotated by some sites",
    "unique": "annotated by one site only",
    "varies": "shared or unique depending on the seed",
}


def write_template_page(
    template: str, destination: Path, folder: Path = TEMPLATES, *, private: bool = False, **content: object
) -> Path:
    """Render a template as :func:`write_html_page` does, with the variables :data:`SHARED`; return ``destination``.

    Args:
        folder: Folder of the template, which may extend a template of this package.
        private: Let only the owner read the page.
        content: Further variables of the template.
    """
    return write_html_page(template, destination, (folder, TEMPLATES), private=private, **{**SHARED, **content})


@dataclass(frozen=True)
class AnnotatedClassGroup:
    """The classes that are annotated by every site, by some sites, or by exactly one.

    Attributes:
        kind: Kind of the group, a key of ``GROUP_TITLES``.
        classes: Class names, in the order of the run's classes.
    """

    kind: str
    classes: tuple[str, ...]

    @property
    def title(self) -> str:
        return GROUP_TITLES[self.kind]


def group_classes_by_annotation(summary: RunSummary) -> list[AnnotatedClassGroup]:
    """Group all classes into shared, partly shared and unique ones; leave out empty groups.

    The groups come from the test results, because a method that pools all data has only one site.
    """
    shared, unique = summary.test.shared_classes.classes, summary.test.unique_classes.classes
    kinds = {name: "shared" if name in shared else "unique" if name in unique else "some" for name in summary.classes}
    groups = {kind: tuple(name for name in summary.classes if kinds[name] == kind) for kind in GROUP_TITLES}
    return [AnnotatedClassGroup(kind, names) for kind, names in groups.items() if names]


def format_count_or_bound(value: int | None, smallest: int | None) -> str:
    """Format a count of a site; if the site's policy hides the count, state the bound that it lies below."""
    return f"hidden (fewer than {smallest} patients)" if value is None and smallest else format_count(value)


def describe_averaged_classes(test: FinalTestSummary) -> str:
    """Return which classes the means cover: ``"all classes"``, or ``"4 of 8 classes"`` if others have no AUROC.

    Of AUROC, classes that too few test images show are left out, too.
    """
    scored = sum(result.auroc is not None for result in test.per_class.values())
    classes = "all classes" if scored == len(test.per_class) else f"{scored} of {len(test.per_class)} classes"
    headline = test.compute_headline_auroc()
    if not headline.left_out:
        return classes
    return f"{classes}; of AUROC, the {len(headline.classes)} that {FEWEST_POSITIVES} test images or more show"


SHARED: dict[str, object] = {
    **TERMS,
    "count_or_hidden": format_count_or_bound,
    "classes_averaged": describe_averaged_classes,
}
"""Variables of every template of a page or a model card."""
