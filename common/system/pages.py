"""Templates of the pages: what a run or a site says is escaped, and a name that a template lacks is an error."""

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from common.system.plain_text import in_page


@cache
def page_environment(*folders: Path) -> Environment:
    """Read HTML templates from folders; of two templates of one name the first folder's counts."""
    return Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        finalize=in_page,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
