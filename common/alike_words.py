"""Find class names of two hospitals that may mean the same class, by spelling alone, without a dictionary.

Two names are alike if each word of the shorter name is alike a word of the longer one (``Effusion`` and ``Pleural
effusion``), or if one name is the initials of the other (``NF`` and ``No finding``). Two words are alike if

- they differ in case, accents or punctuation, or in the spelling of Latin and Greek words between languages: c, k and
  z; ae, oe and e; ph and f; th and t; y and i; a double letter and a single one (``Lymphozyt``, ``Lymphocyte``);
- they differ in their ending, such as that of the plural (``Nodule``, ``Noduli``, ``Nodules``);
- one word begins with the other (``lympho``, ``Lymphocyte``);
- or they differ by a typing error. In words of 6 letters or more, one letter may be missing, added, replaced or
  exchanged with its neighbour (``Lymphcoyte``, ``Monocye``); in words of 10 letters or more, two letters. A different
  first letter is no typing error (``Typical``, ``Atypical``), nor is a different medical word part
  (:data:`CONTRASTS`: ``Hyperplasia``, ``Hypoplasia``).

Numbers must be equal: ``Type 1`` and ``Type 2`` are two classes. Words with the same meaning but another spelling
(``Pleuraerguss`` and ``Pleural effusion``) are not found; only people can match these.
"""

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from polyclinic.data.base.names import make_class_spelling_key

MIN_PREFIX_LETTERS = 2
"""Minimum length of an abbreviation such as ``AK``, if both names have equally many words."""
MIN_PREFIX_LETTERS_IN_LONGER_NAME = 4
"""Minimum length of an abbreviation if the other name has more words, because many words begin with the same two
letters."""
MIN_STEM_LETTERS = 3
"""Minimum length of a word without its ending; a shorter stem keeps the ending."""
_WORDS_AND_NUMBERS = re.compile(r"[^\W\d_]+|\d+")
_ROMAN_NUMERAL = re.compile(r"[ivx]+")
_NEGATIONS = frozenset(("no", "non", "not", "without"))
"""Words that turn a name into its opposite: ``No finding`` is not ``Finding``."""
_UMLAUTS = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "æ": "ae", "œ": "oe", "ø": "oe", "å": "aa", "ß": "ss"})
_SPELLING_REPLACEMENTS = (
    *(("ae", "e"), ("oe", "e"), ("our", "or"), ("ph", "f"), ("th", "t"), ("k", "c"), ("z", "c"), ("y", "i")),
    *(("mf", "nf"), ("cion", "tion")),
)
"""Letters -> their replacement before two words are compared, applied in this order."""
_DOUBLE_LETTER = re.compile(r"(.)\1+")
_ENDINGS = (re.compile(r"s$"), re.compile(r"(?:ione?|[aeiou]*(?:en|um)|[aeiou]+)$"))
"""Patterns of endings that are removed from a word, applied in this order."""
MIN_LETTERS_FOR_ONE_ERROR = 6
"""Minimum length of the shorter of two words that may differ by one typing error."""
MIN_LETTERS_FOR_TWO_ERRORS = 10
"""Minimum length of the shorter of two words that may differ by two typing errors."""
CONTRASTS = (
    *(("hyper", "hypo"), ("macro", "micro"), ("inter", "intra"), ("peri", "para"), ("ante", "anti"), ("abd", "add")),
    *(("carp", "tars"), ("hemat", "hepat"), ("haemat", "hepat"), ("nephr", "neur"), ("blast", "clast")),
    *(("itis", "osis"), ("osis", "lysis"), ("itis", "lysis"), ("oma", "osis"), ("penia", "philia")),
    *(("medial", "median"), ("perin", "peron"), ("poros", "petros"), ("interior", "inferior")),
)
"""Pairs of similar word parts that make two different medical words."""


@dataclass(frozen=True)
class ComparableWord:
    """One word or number of a name, prepared for comparisons.

    Attributes:
        letters: The letters in lower case, without accents; or the digits.
        spelling: The letters after the replacements of ``_SPELLING_REPLACEMENTS``.
        stem: ``spelling`` without its ending.
        is_number: True for digits and Roman numerals.
    """

    letters: str
    spelling: str
    stem: str
    is_number: bool

    @classmethod
    def from_letters(cls, letters: str) -> "ComparableWord":
        spelling = _respell(letters)
        is_number = letters.isdecimal() or _ROMAN_NUMERAL.fullmatch(letters) is not None
        return cls(letters, spelling, _make_stem(spelling), is_number)

    def is_alike(self, other: "ComparableWord", min_letters: int) -> bool:
        """Return True if the two words may be the same word.

        Args:
            other: The word to compare with.
            min_letters: Minimum length of a word that may abbreviate the other.
        """
        if self.is_number or other.is_number:
            return self.letters.lstrip("0") == other.letters.lstrip("0")
        short, long = sorted((self.letters, other.letters), key=len)
        if self.stem == other.stem or (len(short) >= min_letters and long.startswith(short)):
            return True
        if not (_has_typing_error(self.letters, other.letters) or _has_typing_error(self.spelling, other.spelling)):
            return False
        return not _are_contrasts(self.letters, other.letters)


@dataclass(frozen=True)
class ComparableName:
    """The name of a class, prepared for many comparisons.

    Attributes:
        name: The name as the hospital writes it.
        key: The spelling key of the name, equal for names that differ only in case, spaces or punctuation.
        words: The words and numbers of the name.
    """

    name: str
    key: str
    words: tuple[ComparableWord, ...]

    @classmethod
    def from_name(cls, name: str) -> "ComparableName":
        text = unicodedata.normalize("NFC", name).casefold().translate(_UMLAUTS)
        bare = "".join(letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))
        words = (ComparableWord.from_letters(piece) for piece in _WORDS_AND_NUMBERS.findall(bare))
        return cls(name, make_class_spelling_key(name), tuple(words))

    def is_alike(self, other: "ComparableName") -> bool:
        """Return True if the two names may mean the same class."""
        if self.key == other.key:
            return True
        short, long = sorted((self.words, other.words), key=len)
        return bool(short) and (_covers(short, long) or _is_acronym(short, long))


def _respell(word: str) -> str:
    for written, counted in _SPELLING_REPLACEMENTS:
        word = word.replace(written, counted)
    return _DOUBLE_LETTER.sub(r"\1", word)


def _make_stem(word: str) -> str:
    for ending in _ENDINGS:
        shorter = ending.sub("", word)
        word = shorter if len(shorter) >= MIN_STEM_LETTERS else word
    return word


def _are_contrasts(first: str, second: str) -> bool:
    """Return True if one word contains one part of a pair of :data:`CONTRASTS`, and the other word the other part."""
    for one, other in CONTRASTS:
        for mine, theirs in ((one, other), (other, one)):
            if mine in first and theirs in second and mine not in second and theirs not in first:
                return True
    return False


def _has_typing_error(first: str, second: str) -> bool:
    """Return True if two words differ by so few letters that a typing error explains it."""
    length = min(len(first), len(second))
    if length < MIN_LETTERS_FOR_ONE_ERROR or first[0] != second[0]:
        return False
    limit = 2 if length >= MIN_LETTERS_FOR_TWO_ERRORS else 1
    return abs(len(first) - len(second)) <= limit and count_typing_errors(first, second, limit) <= limit


def count_typing_errors(first: str, second: str, limit: int) -> int:
    """Return the number of letters that are missing, added, replaced or exchanged with their neighbour between two
    words.

    This is the Damerau-Levenshtein distance in its restricted form (optimal string alignment).

    Args:
        first, second: The two words.
        limit: Above this number of errors, any larger number may be returned.
    """
    # Two rows of the table of distances between the beginnings of both words.
    before = list[int]()
    last = list(range(len(second) + 1))
    for row, letter in enumerate(first, start=1):
        current = [row]
        for column, other in enumerate(second, start=1):
            replaced = last[column - 1] + (letter != other)
            errors = min(replaced, last[column] + 1, current[column - 1] + 1)
            if row > 1 and column > 1 and letter == second[column - 2] and first[row - 2] == other:
                errors = min(errors, before[column - 2] + 1)
            current.append(errors)
        # Each later row is built on this one or, for two exchanged letters, on the one before.
        if min(current) > limit and min(last) > limit:
            return limit + 1
        before = last
        last = current
    return last[-1]


def _covers(short: tuple[ComparableWord, ...], long: tuple[ComparableWord, ...]) -> bool:
    """Return True if each word of ``short`` is alike one of ``long``, and no other word of ``long`` is a negation."""
    min_letters = MIN_PREFIX_LETTERS if len(short) == len(long) else MIN_PREFIX_LETTERS_IN_LONGER_NAME
    rest = list(long)
    for word in short:
        match = next((other for other in rest if word.is_alike(other, min_letters)), None)
        if match is None:
            return False
        rest.remove(match)
    return not any(word.letters in _NEGATIONS for word in rest)


def _is_acronym(short: tuple[ComparableWord, ...], long: tuple[ComparableWord, ...]) -> bool:
    initials = "".join(word.letters[0] for word in long)
    return len(short) == 1 and len(long) > 1 and short[0].letters == initials


def are_alike(first: str, second: str) -> bool:
    """Return True if two names may mean the same class."""
    return ComparableName.from_name(first).is_alike(ComparableName.from_name(second))


def find_alike_name(name: str, names: Iterable[str]) -> str:
    """Return the first of ``names`` that may mean the same class as ``name``; empty if there is none.

    A name that differs only in case, spaces or punctuation comes first.
    """
    comparable = ComparableName.from_name(name)
    options = [ComparableName.from_name(other) for other in names]
    same = [option.name for option in options if option.key == comparable.key]
    alike = [option.name for option in options if option.is_alike(comparable)]
    return next(iter((*same, *alike)), "")
