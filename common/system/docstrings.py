"""Read the texts of a class's attributes from its docstring, for programs and pages that explain them to people."""

import inspect
import re

_ENTRY = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)


def read_attribute_texts(documented: type) -> dict[str, str]:
    """Return attribute -> text from the section ``Attributes:`` of a class's docstring, each text on one line."""
    _, _, attributes = (inspect.getdoc(documented) or "").partition("Attributes:\n")
    return {name: re.sub(r"\s+", " ", text) for name, text in _ENTRY.findall(attributes)}
