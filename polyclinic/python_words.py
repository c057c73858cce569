"""Rewrite errors of the command line for Python callers: ``out=`` for ``--out``, ``resume=True`` for ``--resume``."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from polyclinic.common.errors import BadInput

_LOCATION_PATTERNS = (
    (r"^--resume (?=\S)", "resume=True, out="),
    (r"^--out (?=\S)", "out="),
    (r"^--set ", "settings: "),
)
"""Regular expression -> Python words, for ``Fault.where``."""
_SENTENCE_PATTERNS = (
    (r"--set model\.weights=(\S+)", r'settings={"model.weights": "\1"}'),
    (r"--out NEW\b", 'out="NEW"'),
    (r"--backend inline\b", 'settings={"simulation.backend": "inline"}'),
    (r"the same file and --set\b", "the same experiment and settings="),
    (r"--resume\b", "resume=True"),
    (r"--out\b", "out="),
    (r"--set\b", "settings="),
    (r"--seeds\b", "seeds="),
)
"""Regular expression -> Python words, for problems and remedies of faults; longer patterns come first."""


@contextmanager
def use_python_words() -> Iterator[None]:
    """Rewrite a :class:`BadInput` that is raised inside the ``with`` block, so that it names arguments, not options.

    Raises:
        BadInput: With the same faults in other words.
    """
    try:
        yield
    except BadInput as error:
        faults = [
            replace(
                fault,
                where=_replace_words(fault.where, _LOCATION_PATTERNS),
                problem=_replace_words(fault.problem, _SENTENCE_PATTERNS),
                remedy=_replace_words(fault.remedy, _SENTENCE_PATTERNS),
            )
            for fault in error.faults
        ]
        raise BadInput(faults) from error


def _replace_words(text: str, words: tuple[tuple[str, str], ...]) -> str:
    for pattern, argument in words:
        text = re.sub(pattern, argument, text)
    return text
