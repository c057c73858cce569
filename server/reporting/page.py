"""Write the coordinator's HTML pages from templates, with terms and formatting that several pages share."""

from dataclasses import dataclass
from pathlib import Path

from polyclinic.common.metrics.auroc import MIN_POSITIVES, FinalTestSummary
from polyclinic.common.reporting.page import TEMPLATE_VARIABLES, write_html_page
from polyclinic.common.system.plain_text import format_count
from polyclinic.server.runs.schema import RunSummary

TEMPLATES_FOLDER = Path(__file__).parent / "templates"
GROUP_TITLES = {  # kind of a group of classes -> its heading
    "shared": "annotated by every site",
    "some": "annotated by some sites",
    "unique": "annotated by one site only",
    "varies": "shared or unique depending on the seed",
}


def write_template_page(
    template: str, destination: Path, folder: Path = TEMPLATES_FOLDER, *, private: bool = False, **content: object
) -> Path:
    """Write a page from a template with the variables :data:`SHARED_VARIABLES`; return ``destination``.

    Args:
        folder: Folder of the template, which may extend a template of this package.
        private: True to let only the owner read the page.
        content: More variables of the template.
    """
    return write_html_page(
        template, destination, (folder, TEMPLATES_FOLDER), private=private, **{**SHARED_VARIABLES, **content}
    )


@dataclass(frozen=True)
class AnnotatedClassGroup:
    """A group of classes that are annotated by every site, by some sites, or by one site.

    Attributes:
        kind: Kind of the group, a key of :data:`GROUP_TITLES`.
        classes: Class names, in the order of the run's classes.
    """

    kind: str
    classes: tuple[str, ...]

    @property
    def title(self) -> str:
        """The heading of the group in tables and figures."""
        return GROUP_TITLES[self.kind]


def group_classes_by_annotation(summary: RunSummary) -> list[AnnotatedClassGroup]:
    """Group all classes by the number of sites that annotate them: every site, some sites, one site.

    Empty groups are left out. The groups come from the test results, because a method that pools all data has only one
    site.
    """
    kinds = dict.fromkeys(summary.classes, "some")
    kinds |= dict.fromkeys(summary.test.unique_classes.classes, "unique")
    kinds |= dict.fromkeys(summary.test.shared_classes.classes, "shared")
    groups = {kind: tuple(name for name in summary.classes if kinds[name] == kind) for kind in GROUP_TITLES}
    return [AnnotatedClassGroup(kind, names) for kind, names in groups.items() if names]


def format_count_or_bound(value: int | None, smallest: int | None) -> str:
    """Format a count of a site; for a hidden count, state that it is below the policy's smallest count.

    Args:
        value: The count; None if hidden or unknown.
        smallest: Smallest number of patients whose count the site's policy discloses; None without such a limit.
    """
    if value is None and smallest:
        return f"hidden (fewer than {smallest} patients)"
    return format_count(value)


def describe_averaged_classes(test: FinalTestSummary) -> str:
    """Describe the classes that the means cover: ``"all classes"``, or ``"4 of 8 classes"`` if others have no AUROC.

    The mean AUROC also leaves out classes with too few positive test images.
    """
    scored = sum(result.auroc is not None for result in test.per_class.values())
    classes = "all classes" if scored == len(test.per_class) else f"{scored} of {len(test.per_class)} classes"
    headline = test.compute_headline_auroc()
    if not headline.left_out:
        return classes
    return f"{classes}; of AUROC, the {len(headline.classes)} that {MIN_POSITIVES} test images or more show"


SHARED_VARIABLES: dict[str, object] = {
    **TEMPLATE_VARIABLES,
    "count_or_hidden": format_count_or_bound,
    "classes_averaged": describe_averaged_classes,
}
"""Variables of all templates of pages and of the model card."""
