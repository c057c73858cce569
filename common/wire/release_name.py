"""Names of releases that the other side states: one type, which is too narrow for an instruction.

A person reads such a name inside a sentence of our own program, such as ``Install release 0.2.0 here.`` Free text there
could tell the person to install something else.
"""

import re
from typing import Annotated

from pydantic import AfterValidator

LONGEST_RELEASE = 64
"""Most characters of a release's name."""
UNKNOWN_RELEASE = "unknown"
"""Stands for a stated text that is no name of a release."""
_NAME = re.compile(rf"[0-9A-Za-z.+!_-]{{1,{LONGEST_RELEASE}}}")
"""The characters of a version of a Python package (PEP 440), with those of its older spellings."""


def parse_release_name(text: str) -> str:
    """Return a stated name of a release; :data:`UNKNOWN_RELEASE` for text that is no such name."""
    return text if _NAME.fullmatch(text) else UNKNOWN_RELEASE


ReleaseName = Annotated[str, AfterValidator(parse_release_name)]
