"""From a template to one HTML file."""

import re
from pathlib import Path

from markupsafe import Markup

from common.system.files import write_atomically
from common.system.plain_text import page_environment
from server.reporting import wording

CONTENTS = "<!-- contents -->"
TEMPLATES = Path(__file__).parent / "templates"


def write_page(template: str, destination: Path, folder: Path = TEMPLATES, **content: object) -> Path:
    """Render a template and write the page whole; return ``destination``.

    What comes from a run or a site is escaped; only the style sheet and our own figures are ``Markup``. The page's
    headings are numbered, and listed where the template has its ``contents``.

    Args:
        folder: Folder of the template, which may extend one of ours.
        content: What the template asks for beside ``say`` (:mod:`server.reporting.wording`) and the style.
    """
    style = Markup((TEMPLATES / "report.css").read_text(encoding="utf-8"))
    environment = page_environment(folder, TEMPLATES)
    page = environment.get_template(template).render(say=wording, style=style, contents=Markup(CONTENTS), **content)
    titles: list[str] = []

    def numbered(heading: re.Match[str]) -> str:
        titles.append(heading[1])
        return f'<h2 id="section-{len(titles)}">{heading[1]}</h2>'

    page = re.sub(r"<h2>(.*?)</h2>", numbered, page)
    links = "".join(f'<li><a href="#section-{n}">{title}</a></li>\n' for n, title in enumerate(titles, start=1))
    page = page.replace(CONTENTS, f'<nav aria-label="Contents"><ul class="contents">\n{links}</ul></nav>')
    write_atomically(destination, page.encode())
    return destination
