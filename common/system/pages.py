"""Templates of the pages: what a run or a site says is escaped, and a name that a template lacks is an error."""

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from common.system.plain_text import in_page


@cache
def page_environment(folder: Path) -> Environment:
    """Read HTML templates from a folder.

    Args:
        folder: Of the templates.
    """
    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        finalize=in_page,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
