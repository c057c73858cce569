"""Write HTML pages from templates, with the style and the formatting functions that the pages of all programs share."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
from markupsafe import Markup

from polyclinic.common.metrics.calibration import compute_wilson_interval
from polyclinic.common.metrics.measured import format_value_with_error
from polyclinic.common.system import plain_text
from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.plain_text import NOT_APPLICABLE, make_jinja_environment

CONTENTS_MARK = "<!-- contents -->"
TEMPLATE_FOLDER = Path(__file__).parent / "templates"


def format_share_with_interval(part: int, whole: int) -> str:
    """Format a share of images in per cent with its 95 % Wilson score interval: ``"91 % (87–94)"``."""
    if not whole:
        return NOT_APPLICABLE
    (low,), (high,) = compute_wilson_interval(np.array([part]), np.array([whole]))
    return f"{part / whole:.0%} ({100 * low:.0f}–{100 * high:.0f})".replace("%", "\N{NO-BREAK SPACE}%")


TEMPLATE_VARIABLES: Mapping[str, object] = MappingProxyType(
    {"say": plain_text, "figure": format_value_with_error, "share": format_share_with_interval}
)
"""Variables of every page template."""


def write_html_page(
    template: str,
    destination: Path,
    folders: tuple[Path, ...] = (),
    *,
    private: bool = False,
    **content: object,
) -> Path:
    """Render a template to an HTML file atomically; return ``destination``.

    All texts are escaped, except the style sheet and our figures (``Markup``). Headings are numbered, and listed at the
    template's ``contents``.

    Args:
        template: File name of the template.
        destination: The HTML file.
        folders: Folders of the template and of those that it extends, besides the templates of this package.
        private: True if only the owner may read the page.
        content: Variables of the template, in addition to style, contents and :data:`TEMPLATE_VARIABLES`.
    """
    style = Markup((TEMPLATE_FOLDER / "report.css").read_text(encoding="utf-8"))
    source = make_jinja_environment(*folders, TEMPLATE_FOLDER).get_template(template)
    page = source.render(**{**TEMPLATE_VARIABLES, "style": style, "contents": Markup(CONTENTS_MARK), **content})
    titles: list[str] = []

    def number_html_heading(heading: re.Match[str]) -> str:
        titles.append(heading[1])
        return f'<h2 id="section-{len(titles)}">{heading[1]}</h2>'

    page = re.sub(r"<h2>(.*?)</h2>", number_html_heading, page)
    links = "".join(f'<li><a href="#section-{n}">{title}</a></li>\n' for n, title in enumerate(titles, start=1))
    page = page.replace(CONTENTS_MARK, f'<nav aria-label="Contents"><ul class="contents">\n{links}</ul></nav>')
    write_atomically(destination, page.encode(), private=private)
    return destination
