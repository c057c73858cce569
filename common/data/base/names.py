"""Normalisation and comparison of names in data: columns, classes, findings, patients, hospitals and files.

:func:`normalize_name` removes only differences that nobody can see: Unicode variants of a letter (NFC), kinds of white
space, invisible characters. Names that merely look alike, such as ``P-007`` and ``p7.0``, stay different;
:func:`find_similar` finds them, so that the caller can report them.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator

from common.system.plain_text import is_plain

_CLEAN = re.compile(r"[!-~]+(?: [!-~]+)*")
"""ASCII text that is already normalised: visible characters with single spaces between them."""
_FORMATS = ("Cc", "Cf", "Mn", "Lo", "So")
"""Unicode categories that include invisible characters; private and unassigned characters may be somebody's letters."""
_FORMULA = re.compile(r'="([^"]+)"')
"""A spreadsheet formula that protects a text, such as ``="007"``, from being read as a number."""
_WHOLE_NUMBER = re.compile(r"([+-]?\d+)(?:(?:[.,]0+)+|[.,]?0*e[+-]?0+)")
_AS_FLOAT = re.compile(r"([^.,]*\d)[.,]0+")
"""A name whose last number a program wrote as a float, such as ``1_1.0``."""
_TAG = re.compile(r"^[^a-z0-9]*(?:mrn|(?:id)?[^a-z0-9]*p|p?id|n[or]|pat(?:ient)?(?:[ _-]?id)?|subject)[^a-z0-9]*(?=\d)")
"""A prefix of a number that marks it as a patient's identifier."""
_PLACE_SIGN = re.compile(r"[\\/^@]")
_ID_AT_A_PLACE = re.compile(
    r"(?P<before>[^\d\\/^@]+)[\\/^@](?P<last>[^\\/^@]*\d[^\\/^@]*)|(?P<first>[^\\/^@]*\d[^\\/^@]*)[\\/^@](?P<after>[^\d\\/^@]+)"
)
"""An identifier with a digit, before or after the name of a place without digits, such as a hospital."""
_FILE_TYPE = re.compile(r"\.(?:dcm|png|jpe?g|tiff?|nii(?:\.gz)?)$")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}([,.' ])\d{3}(?:\1\d{3})*")
_SEPARATORS = re.compile(r"[^a-z0-9\x80-\U0010ffff]+")
_SECOND_VOWEL = re.compile(r"(?<=[aou])e|(?<=a)a(?=[a-z])")
"""The second letter of ä, ö, ü, æ, œ and å when written as two letters."""
_LOOK_ALIKE = str.maketrans("авекмнорстухіјѕһԁԛԝӏαβεζηικμνορτυχøłđıð", "abekmhopctyxijshdqwlabezhikmnoptyxoldid") | {
    ord("æ"): "ae",
    ord("œ"): "oe",
}
"""Maps Cyrillic and Greek letters to the Latin letters they look like, and letters such as ø, whose stroke Unicode does
not count as an accent, to the bare letter."""
_LETTERS_AND_NUMBER = re.compile(r"([a-z]*)[ _-]*0*([1-9]\d*)", re.ASCII)
_ZEROS_AND_GAPS = re.compile(r"(?<!\d)0+(?=\d)|(?<=\d) (?=\D)|(?<=[^\d ]) (?=\d)")
_NEVER_TELLING = b"0ae" + bytes(set(range(128)) - set(b"0123456789abcdefghijklmnopqrstuvwxyz"))
"""Characters that similar names may differ in: zeros, separators, and the letters a and e."""
_NOBODY = frozenset(("unknown", "anonymous", "anonym", "anonymized", "anonymised", "anon", "unbekannt", "noname"))
_BLANK = frozenset(("", "nan", "na", "n/a", "#n/a", "<na>", "nat", "null"))
"""Lower-case cells by which spreadsheets, R and pandas write a missing value."""


def normalize_name(text: str) -> str:
    """Normalise a name: Unicode NFC, single spaces, no leading or trailing space, no invisible characters.

    A spreadsheet formula such as ``="007"``, which protects leading zeros, is replaced by its text ``007``.
    """
    if not _CLEAN.fullmatch(text):
        visible = (
            letter
            for letter in text
            if letter.isspace() or is_plain(letter) or unicodedata.category(letter) not in _FORMATS
        )
        text = unicodedata.normalize("NFC", " ".join("".join(visible).split()))
    formula = _FORMULA.fullmatch(text) if text.startswith("=") else None
    return formula[1].strip() if formula else text


def normalize_multiline_text(text: str) -> str:
    """Normalise each name of a text with several lines or tabs; the line ends and tabs between names stay."""
    lines = ("\t".join(filter(None, map(normalize_name, line.split("\t")))) for line in text.splitlines())
    return "\n".join(filter(None, lines))


Name = Annotated[str, AfterValidator(normalize_name)]
"""A name in a config file, normalised like the cells that it is compared with."""


def is_blank(cell: str) -> bool:
    """Return True if a normalised table cell has no value: empty, ``NaN``, ``NA`` or ``NULL``."""
    return len(cell) <= 4 and cell.casefold() in _BLANK


def is_nameless(cell: str) -> bool:
    """Return True if a normalised text names nothing: a blank cell, ``None``, or only signs such as ``-`` and ``?``."""
    is_word = len(cell) <= 4 and (cell.casefold() in _BLANK or cell.casefold() == "none")
    return is_word or not (cell[:1].isalnum() or any(map(str.isalnum, cell)))


def is_nobody(name: str) -> bool:
    """Return True if a normalised text names no patient: it names nothing, or is a word such as ``ANON``."""
    return is_nameless(name) or name.casefold().replace(" ", "") in _NOBODY


def name_similarity_key(name: str) -> str:
    """Return a comparison key, which is equal for similar names such as ``P-007`` and ``p7.0``."""
    if name.isascii():
        folded = _lower_without_tag(name)
        if simple := _LETTERS_AND_NUMBER.fullmatch(folded):  # fast path for most ids
            return simple[1] + simple[2]
    else:
        bare = (letter for letter in unicodedata.normalize("NFKD", name) if not "\u0300" <= letter <= "\u036f")
        folded = "".join(str(unicodedata.decimal(letter, letter)) for letter in bare).casefold().translate(_LOOK_ALIKE)
        folded = _TAG.sub("", _FILE_TYPE.sub("", folded))
    if as_float := _AS_FLOAT.fullmatch(folded):
        folded = as_float[1]
    if whole := _WHOLE_NUMBER.fullmatch(folded):
        folded = whole[1]
    elif thousands := _THOUSANDS.fullmatch(folded):
        folded = folded.replace(thousands[1], "")
    if not name.isascii():
        folded = "".join(" " if unicodedata.category(letter)[0] in "PSZC" else letter for letter in folded)
    return _ZEROS_AND_GAPS.sub("", _SEPARATORS.sub(" ", folded).strip()) or folded


def _lower_without_tag(name: str) -> str:
    lower = name.lower()
    lower = _FILE_TYPE.sub("", lower) if "." in lower[-7:-2] else lower
    return _TAG.sub("", lower) if lower[:1] in "mpisn" or not lower[:1].isalnum() else lower


def normalize_spelling(name: str) -> str:
    """Return a comparison key for names of classes and hospitals, which is equal for names of the same letters.

    Spaces are ignored except between digits, so that ``St. Mary's`` and ``St Marys`` are equal.
    """
    return re.sub(r"(?<!\d) | (?!\d)", "", _SECOND_VOWEL.sub("", name_similarity_key(name)))


def find_similar(names: Sequence[str]) -> dict[str, str]:
    r"""Find names that may mean the same thing, because they differ only in spelling.

    Ignored are case, accents, punctuation, spaces, leading zeros and number formats, a prefix such as ``MRN`` or ``P``
    before a number, and a file extension. Letters of other alphabets that look like Latin ones are equal to these,
    ``ae`` is equal to ``ä``, and ``aa`` within a word to ``å``. ``north/P1`` is similar to ``north\P1``, ``P1^north``
    and ``P1``, but not to ``south/P1``.

    Args:
        names: Distinct normalised names.

    Returns:
        For each name that is similar to an earlier name, the first such name.
    """
    # A coarse key is ten times as fast as the fine one: a second for a million names.
    texts = (_lower_without_tag(name) if name.isascii() else name_similarity_key(name) for name in names)
    coarse = [text.encode(errors="replace").translate(None, _NEVER_TELLING) for text in texts]
    counts, first, similar = Counter(coarse), dict[str, str](), dict[str, str]()
    for name, key in zip(names, coarse, strict=True):
        if counts[key] > 1:
            likeness = _SECOND_VOWEL.sub("", name_similarity_key(name))
            if (earliest := first.setdefault(likeness, name)) is not name:
                similar[name] = earliest
    placed = dict[str, tuple[str, str]]()  # keys of the place and of the id in it
    for name in filter(_PLACE_SIGN.search, names):
        if match := _ID_AT_A_PLACE.fullmatch(name):
            place, number = match["before"] or match["after"], match["first"] or match["last"]
            placed[name] = name_similarity_key(place), name_similarity_key(number)
    ids = {number for _, number in placed.values()}
    by_place, plain, any_place = dict[tuple[str, str], str](), dict[str, str](), dict[str, str]()
    for name in names if ids else ():
        place, number = placed.get(name) or ("", name_similarity_key(name))
        if number in ids:
            others = plain if place else any_place  # places differ from one another, not from an id without one
            earliest = others.get(number) or by_place.setdefault((place, number), name)
            (any_place if place else plain).setdefault(number, name)
            if earliest is not name:
                similar.setdefault(name, similar.get(earliest, earliest))
    return similar


def array_to_names(values: NDArray[np.generic]) -> NDArray[np.str_]:
    """Convert an array ``(n,)`` of texts, bytes or numbers to normalised names; 7.0 becomes ``7``."""
    values = np.asarray(values.tolist()) if values.dtype.kind == "O" else values
    distinct, inverse = np.unique(values, return_inverse=True)
    if distinct.dtype.kind == "S":
        distinct = np.char.decode(distinct, "utf-8", "backslashreplace")
    elif distinct.dtype.kind == "f" and bool((distinct == np.floor(distinct)).all()):
        distinct = distinct.astype(np.int64)
    texts = [normalize_name(str(value)) for value in distinct.tolist()]
    names: NDArray[np.str_] = np.array(texts, dtype=np.str_)[inverse.reshape(-1)]
    return names
