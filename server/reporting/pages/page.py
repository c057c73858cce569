"""From templates to one HTML file."""

from pathlib import Path

from markupsafe import Markup

from common.system.files import write_atomically
from common.system.pages import page_environment
from server.reporting import comparison_claims, run_claims, wording

_HERE = Path(__file__).parent / "templates"


def write_page(template: str, destination: Path, **content: object) -> Path:
    """Render ``template`` with everything it asks for and write it whole; returns ``destination``.

    What comes from a run or a site is escaped; only the style sheet and our own figures are ``Markup``.
    """
    environment = page_environment(_HERE)
    style = Markup((_HERE / "report.css").read_text(encoding="utf-8"))
    text = environment.get_template(template).render(
        say=wording, run_claims=run_claims, comparison_claims=comparison_claims, style=style, **content
    )
    write_atomically(destination, text.encode())
    return destination
