"""Normalisation and comparison of names in data: columns, classes, findings, patients, hospitals and files.

:func:`normalize_name` removes only differences that nobody can see: Unicode variants of a letter (NFC), kinds of white
space, invisible characters. Names that merely look alike, such as ``P-007`` and ``p7.0``, stay different;
:func:`find_similar_names` finds them, so that the caller can report them.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator

from polyclinic.common.system.plain_text import is_plain_text
from polyclinic.data.base.vocabulary import ANONYMOUS_PERSON_PATTERN, MISSING_LABEL_PATTERN

_NORMALIZED_ASCII = re.compile(r"[!-~]+(?: [!-~]+)*")
"""ASCII text that is already normalised: visible characters with single spaces between them."""
_INVISIBLE_CATEGORIES = ("Cc", "Cf", "Mn", "Lo", "So")
"""Unicode categories with invisible characters; private-use and unassigned characters stay, they may be letters."""
_TEXT_FORMULA = re.compile(r'="([^"]+)"')
"""A spreadsheet formula that protects a text, such as ``="007"``, from being read as a number."""
_WHOLE_NUMBER = re.compile(r"([+-]?\d+)(?:(?:[.,]0+)+|[.,]?0*e[+-]?0+)")
_FLOAT_SUFFIX = re.compile(r"([^.,]*\d)[.,]0+")
"""A name whose last number a program wrote as a float, such as ``1_1.0``."""
_POWER_OF_TEN = re.compile(r"([1-9]\d*)e([1-9])")
"""A number such as ``1e3``, which a spreadsheet or a program may have made of 1000."""
_ID_PREFIX = re.compile(
    r"^[^a-z0-9]*(?:mrn|(?:id)?[^a-z0-9]*p|p?id|n[or]|pt|(?:pat(?:ient)?|case|fall)(?:[^a-z0-9]*(?:id|n[or]))?"
    r"|sub(?:j(?:ect)?)?|acc(?:ession)?)[^a-z0-9]*(?=\d)"
)
"""A prefix of a number that marks it as a patient's identifier."""
_PLACE_SEPARATOR = re.compile(r"[\\/^@]")
_ID_AT_A_PLACE = re.compile(
    r"(?P<before>[^\d\\/^@]+)[\\/^@](?P<last>[^\\/^@]*\d[^\\/^@]*)"
    r"|(?P<first>[^\\/^@]*\d[^\\/^@]*)(?:[\\/^@](?P<after>[^\d\\/^@]+)|\^[^^]*\^[^^]*\^(?P<issuer>.+))"
)
"""An identifier with a digit, and a place without digits, such as a hospital, before or after it (``north/P1``); or an
identifier with its issuer as HL7 writes it (``P1^^^north``)."""
_FAMILY_NAME_FIRST = re.compile(r"[^\d^,]+(?:\^|, ?)[^\d,]+")
_FILE_TYPE = re.compile(r"\.(?:dcm|png|jpe?g|tiff?|nii(?:\.gz)?)$")
_SEPARATORS = re.compile(r"[^a-z0-9\x80-\U0010ffff]+")
_SECOND_VOWEL = re.compile(r"(?<=[aou])e|(?<=a)a(?=[a-z])")
"""The second letter of ä, ö, ü, æ, œ and å where they are written as two letters (``ae``, ``aa``)."""
_LATIN_LOOKALIKES = str.maketrans(
    "авекмнорстухіјѕһԁԛԝӏαβεζηικμνορτυχøłđıð", "abekmhopctyxijshdqwlabezhikmnoptyxoldid"
) | {
    ord("æ"): "ae",
    ord("œ"): "oe",
}
"""Cyrillic or Greek letter -> the Latin letter that looks like it. Letters such as ø map to the plain letter, because
Unicode does not count their stroke as an accent."""
_LETTERS_AND_NUMBER = re.compile(r"([a-z]*)[ _-]*0*([1-9]\d*)", re.ASCII)
_LEADING_ZEROS = re.compile(r"(?<!\d)0+(?=\d)")
_UID = re.compile(r"\d+(?:\.\d+){4,}")
_MIN_CHARACTERS_WITHOUT_SEPARATORS = 4
"""Names that differ only in separators are similar if they have at least this many characters; ``1-1`` and ``11`` may
be two patients."""
_ZEROS_AND_GAPS = re.compile(r"(?<!\d)0+(?=\d)|(?<=\d) (?=\D)|(?<=[^\d ]) (?=\d)")
_IGNORED_CHARACTERS = b"0ae" + bytes(set(range(128)) - set(b"0123456789abcdefghijklmnopqrstuvwxyz"))
"""ASCII characters in which similar names may differ: zeros, separators, and the letters a and e."""
_ANONYMOUS_PATIENT = re.compile(
    r"(?:the )?(?:patient(?:in|en)?|subject|person|name|id)(?: (?:name|id))?|no ?(?:patient|subject)? ?(?:name|id)"
    rf"|(?:patient |subject |person |name )?{ANONYMOUS_PERSON_PATTERN}(?: patient| subject| person| name)?"
)
"""Words, joined by spaces, that stand for a patient whose name is unknown or was removed."""
_DUMMY_PATIENT = re.compile(
    r"0+|9+|(?:x+|n|anon\w*?|unk(?:nown)?|patient|test|dummy|phantom|nobody)[\W_]*\d*", re.IGNORECASE
)
"""Texts that are placeholders if many images have them, and otherwise may be ordinary numbers or pseudonyms."""
_WORDS = re.compile(r"[^\W\d_]+")
_MISSING_VALUE = re.compile(
    r"[+-]?nan(?:\.0+|\(?(?:ind|snan)?\)?)|[+-]?1[.,]#(?:ind|[qs]nan|inf)0*|[+-]?nat|(?:pd|np|numpy)\.(?:na|nan|nat)|none"
    r"|na_(?:character|integer|real|complex|logical)_|=na\(\)|n\.a\.?|<na>|\\n|(?:system\.)?dbnull|null|undefined"
    r"|\.[a-z]|(?:&nbsp|&#160|&#xa0|<br|_x00(?:0[9ad]|a0)_|\W)+|\[object object\]"
    r"|#(?:[^\W\d]|[0/_¡])+[!?]|#n/?a(?: n/a)?|#(?:nv|n/d|getting_data|error|deleted|#+)",
    re.IGNORECASE,
)
"""Texts by which databases, languages and spreadsheets write a missing value or an error."""
_MAX_MISSING_VALUE_CHARACTERS = len("NA_character_")
"""Maximum length of a text of :data:`_MISSING_VALUE` that begins with a letter or digit."""
_BLANK_CELLS = frozenset(("", ".", "nan", "na", "n/a", "#n/a", "<na>", "nat", "null", "none", "\\n"))
"""Lower-case cells by which spreadsheets, databases, R, Python, pandas, SAS and Stata write a missing value."""


def normalize_name(text: str) -> str:
    """Normalise a name: Unicode NFC, single spaces, no leading or trailing space, no invisible characters.

    A spreadsheet formula such as ``="007"``, which protects leading zeros, is replaced by its text ``007``.
    """
    if not _NORMALIZED_ASCII.fullmatch(text):
        visible = (
            letter
            for letter in text
            if letter.isspace() or is_plain_text(letter) or unicodedata.category(letter) not in _INVISIBLE_CATEGORIES
        )
        text = unicodedata.normalize("NFC", " ".join("".join(visible).split()))
    formula = _TEXT_FORMULA.fullmatch(text) if text.startswith("=") else None
    return formula[1].strip() if formula else text


def normalize_names_in_text(text: str) -> str:
    """Normalise each name in a text of names that are separated by line ends or tabs; empty names are removed."""
    lines = ("\t".join(filter(None, map(normalize_name, line.split("\t")))) for line in text.splitlines())
    return "\n".join(filter(None, lines))


Name = Annotated[str, AfterValidator(normalize_name)]
"""A name in a config file, normalised like the cells that it is compared with."""


def is_blank_cell(cell: str) -> bool:
    r"""Return True if a normalised table cell has no value: empty, ``.``, ``NaN``, ``#N/A``, ``NULL``, ``\N``."""
    return len(cell) <= 4 and cell.casefold() in _BLANK_CELLS


def is_missing_value(cell: str) -> bool:
    r"""Return True if a normalised text says that there is no value.

    Such texts are: a blank cell; a missing value or an error as programs write it (``None``, ``\N``, ``#REF!``), also
    in brackets or quotes; a text without letters and digits, such as ``-`` and ``?``.
    """
    if is_blank_cell(cell) or not (cell[:1].isalnum() or any(map(str.isalnum, cell))):
        return True
    if cell[0].isalnum():
        return (
            cell[0] in "1npudsNPUDS"
            and len(cell) <= _MAX_MISSING_VALUE_CHARACTERS
            and _MISSING_VALUE.fullmatch(cell) is not None
        )
    bare = cell.strip("[](){}<>'\" ")
    return (
        is_blank_cell(bare) or _MISSING_VALUE.fullmatch(cell) is not None or _MISSING_VALUE.fullmatch(bare) is not None
    )


def is_anonymous_patient(name: str) -> bool:
    """Return True if a normalised patient name is a missing value, or a word such as ``ANON`` or ``No^Name``."""
    if name[-1:].isdecimal():
        return is_missing_value(name)
    if is_missing_value(name):
        return True
    text = name.casefold().strip("[](){}<>*'\" .:!^")
    if _ANONYMOUS_PATIENT.fullmatch(" ".join(_WORDS.findall(text))) and not any(map(str.isdecimal, text)):
        return True
    return MISSING_LABEL_PATTERN.fullmatch(text) is not None and len(text) > 2  # two letters may be initials


def looks_like_dummy_patient(name: str) -> bool:
    """Return True if a normalised patient name may be a placeholder for unknown patients: ``0000``, ``ANON1``."""
    return _DUMMY_PATIENT.fullmatch(name) is not None


def make_name_similarity_key(name: str) -> str:
    """Return a comparison key, which is equal for similar names such as ``P-007`` and ``p7.0``."""
    if name.isascii() and (simple := _LETTERS_AND_NUMBER.fullmatch(_strip_id_prefix_and_extension(name))):
        return simple[1] + simple[2]  # fast path for most ids
    groups = _fold_name_to_plain_words(name)
    return _ZEROS_AND_GAPS.sub("", groups) or groups


def _fold_name_to_plain_words(name: str) -> str:
    """Return the letters and digits of a name in lower case, without accents, with a space for each separator."""
    if name.isascii():
        folded = _strip_id_prefix_and_extension(name)
    else:
        bare = (letter for letter in unicodedata.normalize("NFKD", name) if not "\u0300" <= letter <= "\u036f")
        folded = (
            "".join(str(unicodedata.decimal(letter, letter)) for letter in bare).casefold().translate(_LATIN_LOOKALIKES)
        )
        folded = _ID_PREFIX.sub("", _FILE_TYPE.sub("", folded))
    if as_float := _FLOAT_SUFFIX.fullmatch(folded):
        folded = as_float[1]
    if whole := _WHOLE_NUMBER.fullmatch(folded):
        folded = whole[1]
    if not name.isascii():
        folded = "".join(" " if unicodedata.category(letter)[0] in "PSZC" else letter for letter in folded)
    return _SEPARATORS.sub(" ", folded).strip() or folded


def _strip_id_prefix_and_extension(name: str) -> str:
    """Return an ASCII name in lower case, without a prefix such as ``MRN`` and without the ending of an image file."""
    lower = name.lower()
    lower = _FILE_TYPE.sub("", lower) if "." in lower[-7:-2] else lower
    power = _POWER_OF_TEN.fullmatch(lower) if "e" in lower else None
    if power:
        return power[1] + "0" * int(power[2])
    return _ID_PREFIX.sub("", lower) if lower[:1] in "acfimnps" or not lower[:1].isalnum() else lower


@lru_cache(maxsize=1 << 14)  # a thousand sites have the same few names
def make_class_spelling_key(name: str) -> str:
    """Return a comparison key for names of classes and hospitals: that of similar names, with spaces removed.

    Spaces between digits stay. ``St. Mary's`` and ``St Marys`` have the same key.
    """
    return re.sub(r"(?<!\d) | (?!\d)", "", _SECOND_VOWEL.sub("", make_name_similarity_key(name)))


def find_similar_names(names: Sequence[str]) -> dict[str, str]:
    r"""Find names that may mean the same thing, because they differ only in spelling.

    Ignored are case, accents, punctuation, spaces, leading zeros and number formats, a prefix such as ``MRN`` or ``P``
    before a number, and a file extension. Letters of other alphabets count as the Latin letters that they look like,
    ``ae`` is equal to ``ä``, and ``aa`` within a word to ``å``. ``12-34-56`` is similar to ``123456`` and ``12-3456``,
    but not to ``123-456``. ``north/P1`` is similar to ``north\P1``, ``P1^north`` and ``P1``, but not to ``south/P1``.

    Args:
        names: Distinct normalised names.

    Returns:
        Name -> a similar name. In each group of similar names, exactly one name is no key; following the pairs from any
        other name leads to it.
    """
    # A coarse key is ten times as fast as the fine one: a second for a million names.
    texts = (
        _strip_id_prefix_and_extension(name) if name.isascii() else make_name_similarity_key(name) for name in names
    )
    coarse = [text.encode(errors="replace").translate(None, _IGNORED_CHARACTERS) for text in texts]
    counts = Counter(coarse)
    first_by_key = dict[str, str]()
    similar = dict[str, str]()
    for name, key in zip(names, coarse, strict=True):
        if counts[key] > 1:
            similarity_key = _SECOND_VOWEL.sub("", make_name_similarity_key(name))
            earliest = first_by_key.setdefault(similarity_key, name)
            code, other = map(_strip_id_prefix_and_extension, (name, earliest))
            # Two codes of equal length differ, such as hexadecimal 2cae05 and 2ca005; but P1 is 01.
            if code != other and len(code) == len(other) and (code + other).isascii() and (code + other).isalnum():
                earliest = first_by_key.setdefault(name.lower(), name)
            if earliest is not name:
                similar[name] = earliest
    _pair_names_by_separators(similar, first_by_key)
    _pair_ids_with_and_without_place(similar, names)
    _pair_reversed_person_names(similar, names)
    return similar


def _pair_names_by_separators(similar: dict[str, str], first_by_key: Mapping[str, str]) -> None:
    """Add to ``similar`` pairs of names that differ in separators only, if one has all separators of the other.

    Args:
        similar: Maps a name to a similar one, see :func:`find_similar_names`.
        first_by_key: Similarity key -> the first name that has it.
    """
    same_letters = defaultdict[str, list[tuple[set[int], str]]](list)
    for similarity_key, name in first_by_key.items():
        if " " not in similarity_key or _UID.fullmatch(name):
            continue
        text = ""
        gaps = set[int]()  # positions of the separators, in characters from the end of the text
        for group in reversed(_SECOND_VOWEL.sub("", _fold_name_to_plain_words(name)).split(" ")):
            # A gap between a letter and a digit is not counted, because A-1 and A1 have the same key.
            if text and group[-1:].isdecimal() == text[0].isdecimal():
                gaps.add(len(text))
            text = group + text
        letters = _LEADING_ZEROS.sub("", text)
        if len(letters) >= _MIN_CHARACTERS_WITHOUT_SEPARATORS:
            for other_gaps, earlier in same_letters[letters]:
                if gaps < other_gaps or gaps > other_gaps:
                    _merge_name_groups(similar, name, earlier)
            same_letters[letters].append((gaps, name))
            if letters in first_by_key:
                _merge_name_groups(similar, name, first_by_key[letters])


def _pair_ids_with_and_without_place(similar: dict[str, str], names: Sequence[str]) -> None:
    """Add to ``similar`` pairs of names with one identifier, unless they name different places, such as hospitals.

    The two names may have the same place (``north/P1`` and ``P1^north``), or only one may have a place (``north/P1``
    and ``P1``).
    """
    parsed_names = dict[str, tuple[str, str]]()  # name -> similarity keys of its place and of its identifier
    for name in filter(_PLACE_SEPARATOR.search, names):
        if match := _ID_AT_A_PLACE.fullmatch(name):
            place = match["before"] or match["after"] or match["issuer"]
            identifier = match["first"] or match["last"]
            parsed_names[name] = make_name_similarity_key(place), make_name_similarity_key(identifier)
    identifiers = {identifier for _, identifier in parsed_names.values()}
    names_by_identifier = defaultdict[str, dict[str, str]](dict)
    for name in names if identifiers else ():
        place, identifier = parsed_names.get(name) or ("", make_name_similarity_key(name))
        if identifier in identifiers:
            name_by_place = names_by_identifier[identifier]
            if place not in name_by_place:
                # Names of two places differ; a name without a place is similar to that of each place.
                for other_place in [""] if place else list(name_by_place):
                    if other_place in name_by_place:
                        _merge_name_groups(similar, name, name_by_place[other_place])
            elif name_by_place[place] is not name:
                _merge_name_groups(similar, name, name_by_place[place])
            name_by_place.setdefault(place, name)


def _pair_reversed_person_names(similar: dict[str, str], names: Sequence[str]) -> None:
    """Add to ``similar`` pairs of names of one person, such as ``Doe^John`` or ``Doe, John``, and ``John Doe``."""
    by_words = dict[tuple[str, ...], str]()
    for name in names:
        if ("^" in name or "," in name) and _FAMILY_NAME_FIRST.fullmatch(name):
            by_words.setdefault(tuple(sorted(_fold_name_to_plain_words(name).split())), name)
    for name in names if by_words else ():
        if " " in name and not any(map(str.isdecimal, name)):
            words = tuple(sorted(_fold_name_to_plain_words(name).split()))
            if words in by_words and by_words[words] is not name:
                _merge_name_groups(similar, name, by_words[words])


def _merge_name_groups(similar: dict[str, str], name: str, earlier: str) -> None:
    """Add the pair of two names to ``similar``, unless the pairs in ``similar`` already connect the two names."""
    root = _find_group_root(similar, name)
    if root == _find_group_root(similar, earlier):
        return
    if name in similar and earlier not in similar:
        similar[earlier] = name
    else:
        similar[root] = earlier


def _find_group_root(pairs: Mapping[str, str], name: str) -> str:
    """Follow the pairs from a name to the name of its group that is not a key of ``pairs``."""
    while name in pairs:
        name = pairs[name]
    return name


def map_names_to_group_names(similar: Mapping[str, str]) -> dict[str, str]:
    """Map each name in the pairs of :func:`find_similar_names` to the alphabetically first name of its group."""
    group_names = dict[str, str]()
    for name in similar:
        root = _find_group_root(similar, name)
        group_names[root] = min(group_names.get(root, root), name)
    return {name: group_names[_find_group_root(similar, name)] for name in {*similar, *group_names}}


def normalize_name_array(values: NDArray[np.generic]) -> NDArray[np.str_]:
    """Convert an array ``(n,)`` of texts, bytes or numbers to normalised names.

    If all values are floats without a fraction, the names have no ``.0``.
    """
    values = np.asarray(values.tolist()) if values.dtype.kind == "O" else values
    distinct, inverse = np.unique(values, return_inverse=True)
    if distinct.dtype.kind == "S":
        distinct = np.char.decode(distinct, "utf-8", "backslashreplace")
    elif distinct.dtype.kind == "f" and bool((distinct == np.floor(distinct)).all()):
        distinct = distinct.astype(np.int64)
    texts = [normalize_name(str(value)) for value in distinct.tolist()]
    names: NDArray[np.str_] = np.array(texts, dtype=np.str_)[inverse.reshape(-1)]
    return names
