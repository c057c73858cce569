"""Errors of the command line in the words of Python: ``out=`` for ``--out``, ``resume=True`` for ``--resume``."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from polyclinic.common.errors import BadInput

_WHERE = (
    (r"^--resume (?=\S)", "resume=True, out="),
    (r"^--out (?=\S)", "out="),
    (r"^--set ", "settings: "),
)
"""Patterns of a fault's place, which names an option and its value."""
_TEXT = (
    (r"--set model\.weights=(\S+)", r'settings={"model.weights": "\1"}'),
    (r"--out NEW\b", 'out="NEW"'),
    (r"--backend inline\b", 'settings={"simulation.backend": "inline"}'),
    (r"the same file and --set\b", "the same experiment and settings="),
    (r"--resume\b", "resume=True"),
    (r"--out\b", "out="),
    (r"--set\b", "settings="),
    (r"--seeds\b", "seeds="),
)
"""Patterns in a problem or remedy, the longer ones first."""


@contextmanager
def use_python_words() -> Iterator[None]:
    """Let :class:`BadInput` that is raised inside the ``with`` block name arguments instead of options.

    Raises:
        BadInput: The same faults in other words.
    """
    try:
        yield
    except BadInput as error:
        faults = [
            replace(
                fault,
                where=_replace_words(fault.where, _WHERE),
                problem=_replace_words(fault.problem, _TEXT),
                remedy=_replace_words(fault.remedy, _TEXT),
            )
            for fault in error.faults
        ]
        raise BadInput(faults) from error


def _replace_words(text: str, words: tuple[tuple[str, str], ...]) -> str:
    for pattern, argument in words:
        text = re.sub(pattern, argument, text)
    return text
