"""Write HTML pages from templates, with terms and formatting that several pages share."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from markupsafe import Markup

from polyclinic.common.metrics.auroc import FEWEST_POSITIVES, FinalTestSummary
from polyclinic.common.metrics.calibration import compute_wilson_interval
from polyclinic.common.metrics.measured import format_value_with_error
from polyclinic.common.system import plain_text
from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.plain_text import NOT_APPLICABLE, format_count, make_jinja_environment
from polyclinic.server.runs.reader import RunSummary

CONTENTS = "<!-- contents -->"
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
    """Render a template to an HTML file atomically; return ``destination``.

    All texts are escaped except the style sheet and our own figures (``Markup``). Headings are numbered, and listed at
    the template's ``contents``.

    Args:
        folder: Folder of the template, which may extend a template of this package.
        private: Let only the owner read the page.
        content: Variables of the template, in addition to style, contents and :data:`SHARED`.
    """
    style = Markup((TEMPLATES / "report.css").read_text(encoding="utf-8"))
    source = make_jinja_environment(folder, TEMPLATES).get_template(template)
    page = source.render(style=style, contents=Markup(CONTENTS), **SHARED, **content)
    titles: list[str] = []

    def number_html_heading(heading: re.Match[str]) -> str:
        titles.append(heading[1])
        return f'<h2 id="section-{len(titles)}">{heading[1]}</h2>'

    page = re.sub(r"<h2>(.*?)</h2>", number_html_heading, page)
    links = "".join(f'<li><a href="#section-{n}">{title}</a></li>\n' for n, title in enumerate(titles, start=1))
    page = page.replace(CONTENTS, f'<nav aria-label="Contents"><ul class="contents">\n{links}</ul></nav>')
    write_atomically(destination, page.encode(), private=private)
    return destination


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
        """Return the title of the group."""
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


def format_share_with_interval(part: int, whole: int) -> str:
    """Format a share of images in per cent with its 95 % Wilson score interval: ``"91 % (87–94)"``."""
    if not whole:
        return NOT_APPLICABLE
    (low,), (high,) = compute_wilson_interval(np.array([part]), np.array([whole]))
    return f"{part / whole:.0%} ({100 * low:.0f}–{100 * high:.0f})".replace("%", "\N{NO-BREAK SPACE}%")


SHARED = {
    "say": plain_text,
    "figure": format_value_with_error,
    "share": format_share_with_interval,
    "count_or_hidden": format_count_or_bound,
    "classes_averaged": describe_averaged_classes,
}
"""Variables of every template of a page or a model card."""
