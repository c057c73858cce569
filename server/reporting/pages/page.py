"""From templates to one HTML file."""

import re
from pathlib import Path

from markupsafe import Markup

from common.system.files import write_atomically
from common.system.pages import page_environment
from server.reporting import comparison_claims, run_claims, wording

CONTENTS = "<!-- contents -->"
_HERE = Path(__file__).parent / "templates"


def write_page(template: str, destination: Path, **content: object) -> Path:
    """Render ``template`` with everything it asks for and write it whole; returns ``destination``.

    What comes from a run or a site is escaped; only the style sheet and our own figures are ``Markup``.
    """
    environment = page_environment(_HERE)
    style = Markup((_HERE / "report.css").read_text(encoding="utf-8"))
    text = environment.get_template(template).render(
        say=wording,
        run_claims=run_claims,
        comparison_claims=comparison_claims,
        style=style,
        contents=Markup(CONTENTS),
        **content,
    )
    write_atomically(destination, _with_contents(text).encode())
    return destination


def _with_contents(page: str) -> str:
    """Number the page's headings, and list them where the template wants its contents."""
    titles: list[str] = []

    def numbered(heading: re.Match[str]) -> str:
        titles.append(heading[1])
        return f'<h2 id="section-{len(titles)}">{heading[1]}</h2>'

    page = re.sub(r"<h2>(.*?)</h2>", numbered, page)
    links = "".join(f'<li><a href="#section-{n}">{title}</a></li>\n' for n, title in enumerate(titles, start=1))
    return page.replace(CONTENTS, f'<nav aria-label="Contents"><ul class="contents">\n{links}</ul></nav>')
