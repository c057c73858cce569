"""Words in table cells that stand for an unknown patient, a missing label, or a part of the split.

The patterns are for lower-case text.
"""

import re

PART_WORDS = {
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
"""Word in a split column -> the part that it means."""
ANONYMOUS_PERSON_PATTERN = (
    r"(?:unknown|unk|anon(?:ym\w*)?|unnamed|unidentified|no name|nobody|noname|redact(?:ed)?|removed|deleted|withheld"
    r"|hidden|masked|blinded|confidential|private|de ?identified|deident|pseudonymi\w+|test|dummy|phantom)"
)
"""One or two words that stand in place of a person's name because it is unknown or was removed."""
NOT_ASSESSED_PATTERN = (
    r"(?:not |un)(?:yet )?(?:read|reported|known|clear|available|applicable|assess(?:ed|able)|gradable|graded|readable"
    r"|evaluat(?:ed|able)|done|given|specified|certain|labell?ed|annotated|reviewed|diagnosed"
    r"|interpret(?:ed|able))(?: yet)?"
)
MISSING_LABEL_PATTERN = re.compile(
    rf"{NOT_ASSESSED_PATTERN}|nil|missing|pending|tb[acd]|todo|unk|x{{2,}}|n\.? ?a\.?"
    r"|(?:no|without|missing|see) ?(?:report|label|value|data|reading|result|grade|view)s?"
)
"""Cells without a label, of which it is unclear if the image was not assessed or is normal."""
