"""Read the texts of a class's attributes from its docstring, for programs and pages that explain them to people."""

import inspect
import re

_ENTRY = re.compile(r"^    (\w+(?:, \w+)*): (.+(?:\n {8}.+)*)", re.MULTILINE)


def read_attribute_texts(documented: type) -> dict[str, str]:
    """Return attribute -> text from the section ``Attributes:`` of a class's docstring, each text on one line.

    Several attributes may share a text: ``low, high: Bounds of the interval.``
    """
    _, _, attributes = inspect.cleandoc(documented.__doc__ or "").partition("Attributes:\n")
    texts = dict[str, str]()
    for names, text in _ENTRY.findall(attributes):
        for name in names.split(", "):
            texts[name] = re.sub(r"\s+", " ", text)
    return texts
