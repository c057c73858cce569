"""A type for the name of a release that another machine states; it is too narrow to contain an instruction.

A person reads such a name inside a sentence of our program, such as ``Install release 0.2.0 here.`` Free text there
could tell the person to install something else.
"""

import re
from typing import Annotated

from pydantic import AfterValidator

MAX_RELEASE_CHARACTERS = 64
"""Maximum length of a release's name."""
UNKNOWN_RELEASE = "unknown"
"""Replaces text that is not the name of a release."""
_RELEASE_NAME = re.compile(rf"[0-9A-Za-z.+!_-]{{1,{MAX_RELEASE_CHARACTERS}}}")
"""Pattern with the characters of a Python package's version (PEP 440), including its older spellings."""


def parse_release_name(text: str) -> str:
    """Return the name of a release unchanged; :data:`UNKNOWN_RELEASE` for text that is not such a name."""
    return text if _RELEASE_NAME.fullmatch(text) else UNKNOWN_RELEASE


ReleaseName = Annotated[str, AfterValidator(parse_release_name)]
