"""Words in the cells of tables that name nobody, nothing, or a part of the split.

Patterns are matched with text in lower case.
"""

import re

PART_NAMES = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "validate": "validation",
    "valid": "validation",
    "validation": "validation",
    "validierung": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}
NOBODY = (
    r"(?:unknown|unk|anon(?:ym\w*)?|unnamed|unidentified|no name|nobody|noname|redact(?:ed)?|removed|deleted|withheld"
    r"|hidden|masked|blinded|confidential|private|de ?identified|deident|pseudonymi\w+|test|dummy|phantom)"
)
"""A word or two, joined by a space, for a person whose name is not known or was removed, or for no person."""
NOT_ASSESSED = (
    r"(?:not |un)(?:yet )?(?:read|reported|known|clear|available|applicable|assess(?:ed|able)|gradable|graded|readable"
    r"|evaluat(?:ed|able)|done|given|specified|certain|labell?ed|annotated|reviewed|diagnosed"
    r"|interpret(?:ed|able))(?: yet)?"
)
NO_NAMES = re.compile(
    rf"{NOT_ASSESSED}|nil|missing|pending|tb[acd]|todo|unk|x{{2,}}|n\.? ?a\.?"
    r"|(?:no|without|missing|see) ?(?:report|label|value|data|reading|result|grade|view)s?"
)
"""Cells that mean either that nobody looked or that nothing was seen; which of both is unclear."""
