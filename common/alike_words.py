"""Words of two hospitals that may name one class: compared by spelling alone, without a dictionary of any language.

Two names may be one class in two words if all words of the shorter name stand in the longer one too (``Effusion`` and
``Pleural effusion``), or if one is the initials of the other (``NF`` and ``No finding``). Two words are alike if

- they differ in case, accents or punctuation, or in the spelling of Latin and Greek words between languages: c, k and
  z; ae, oe and e; ph and f; th and t; y and i; a double letter and a single one (``Lymphozyt``, ``Lymphocyte``);
- they differ in their ending, such as that of the plural (``Nodule``, ``Noduli``, ``Nodules``);
- one begins with the other (``lympho``, ``Lymphocyte``);
- or they differ by a typing error: in words of 6 letters or more one letter is missing, added, another one, or has
  changed places with its neighbour (``Lymphcoyte``, ``Monocye``); in words of 10 letters or more two. A first letter
  that differs is no typing error (``Typical``, ``Atypical``), nor is a part that makes another medical word
  (:data:`CONTRASTS`: ``Hyperplasia``, ``Hypoplasia``).

Numbers must be equal: ``Type 1`` and ``Type 2`` are two classes. What is meant by words that share no spelling
(``Pleuraerguss`` and ``Pleural effusion``), only people can say.
"""

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from polyclinic.data.base.names import make_class_spelling_key

FEWEST_OF_PREFIX = 2
"""Letters of an abbreviation such as ``AK``, in a name of as many words as the other."""
FEWEST_OF_PREFIX_IN_LONGER = 4
"""Letters of an abbreviation in a name of fewer words than the other: two letters begin too many words."""
FEWEST_OF_STEM = 3
_PIECES = re.compile(r"[^\W\d_]+|\d+")
_ROMAN = re.compile(r"[ivx]+")
_NEGATIONS = frozenset(("no", "non", "not", "without"))
"""Words that turn a name into its opposite: ``No finding`` is not ``Finding``."""
_UMLAUTS = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "æ": "ae", "œ": "oe", "ø": "oe", "å": "aa", "ß": "ss"})
_SPELLINGS = (
    *(("ae", "e"), ("oe", "e"), ("our", "or"), ("ph", "f"), ("th", "t"), ("k", "c"), ("z", "c"), ("y", "i")),
    *(("mf", "nf"), ("cion", "tion")),
)
"""Letters, and those that are compared in their place, one after the other."""
_DOUBLE = re.compile(r"(.)\1+")
_ENDINGS = (re.compile(r"s$"), re.compile(r"(?:ione?|[aeiou]*(?:en|um)|[aeiou]+)$"))
"""Endings that are taken off one after the other."""
FEWEST_OF_TYPING_ERROR, FEWEST_OF_TWO_TYPING_ERRORS = 6, 10
"""Letters of the shorter of two words from which one, and from which two, letters may be typing errors."""
CONTRASTS = (
    *(("hyper", "hypo"), ("macro", "micro"), ("inter", "intra"), ("peri", "para"), ("ante", "anti"), ("abd", "add")),
    *(("carp", "tars"), ("hemat", "hepat"), ("haemat", "hepat"), ("nephr", "neur"), ("blast", "clast")),
    *(("itis", "osis"), ("osis", "lysis"), ("itis", "lysis"), ("oma", "osis"), ("penia", "philia")),
    *(("medial", "median"), ("perin", "peron"), ("poros", "petros"), ("interior", "inferior")),
)
"""Parts of words that differ by few letters and make two medical words."""


@dataclass(frozen=True)
class ComparableWord:
    """One word or number of a name.

    Attributes:
        letters: Its letters in lower case, without accents; or its digits.
        spelling: Its letters in one spelling.
        stem: Its letters in one spelling, without their ending.
        is_number: True for digits and Roman numerals.
    """

    letters: str
    spelling: str
    stem: str
    is_number: bool

    @classmethod
    def from_letters(cls, letters: str) -> "ComparableWord":
        spelling = _respell(letters)
        is_number = letters.isdecimal() or _ROMAN.fullmatch(letters) is not None
        return cls(letters, spelling, _make_stem(spelling), is_number)

    def is_alike(self, other: "ComparableWord", fewest: int) -> bool:
        """Return True if the two may be one word.

        Args:
            fewest: Letters of a word that may be an abbreviation of the other.
        """
        if self.is_number or other.is_number:
            return self.letters.lstrip("0") == other.letters.lstrip("0")
        short, long = sorted((self.letters, other.letters), key=len)
        if self.stem == other.stem or (len(short) >= fewest and long.startswith(short)):
            return True
        if not (_has_typing_error(self.letters, other.letters) or _has_typing_error(self.spelling, other.spelling)):
            return False
        return not _are_contrasts(self.letters, other.letters)


@dataclass(frozen=True)
class ComparableName:
    """The name of a class, prepared for many comparisons."""

    name: str
    key: str
    words: tuple[ComparableWord, ...]

    @classmethod
    def from_name(cls, name: str) -> "ComparableName":
        text = unicodedata.normalize("NFC", name).casefold().translate(_UMLAUTS)
        bare = "".join(letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))
        words = (ComparableWord.from_letters(piece) for piece in _PIECES.findall(bare))
        return cls(name, make_class_spelling_key(name), tuple(words))

    def is_alike(self, other: "ComparableName") -> bool:
        """Return True if the two names may name one class."""
        if self.key == other.key:
            return True
        short, long = sorted((self.words, other.words), key=len)
        return bool(short) and (_covers(short, long) or _is_acronym(short, long))


def _respell(word: str) -> str:
    for written, counted in _SPELLINGS:
        word = word.replace(written, counted)
    return _DOUBLE.sub(r"\1", word)


def _make_stem(word: str) -> str:
    for ending in _ENDINGS:
        shorter = ending.sub("", word)
        word = shorter if len(shorter) >= FEWEST_OF_STEM else word
    return word


def _are_contrasts(first: str, second: str) -> bool:
    """Return True if the words have the two parts of a contrast, one each, so that they are two words."""
    for one, other in CONTRASTS:
        for mine, theirs in ((one, other), (other, one)):
            if mine in first and theirs in second and mine not in second and theirs not in first:
                return True
    return False


def _has_typing_error(first: str, second: str) -> bool:
    """Return True if two words differ by as few letters as a typing error does."""
    fewest = min(len(first), len(second))
    if fewest < FEWEST_OF_TYPING_ERROR or first[0] != second[0]:
        return False
    limit = 2 if fewest >= FEWEST_OF_TWO_TYPING_ERRORS else 1
    return abs(len(first) - len(second)) <= limit and count_typing_errors(first, second, limit) <= limit


def count_typing_errors(first: str, second: str, limit: int) -> int:
    """Return how many letters were left out, added, replaced or exchanged with their neighbour between two words.

    This is the Damerau-Levenshtein distance in its restricted form (optimal string alignment).

    Args:
        limit: Of more errors than this, any larger number is returned.
    """
    before, last = list[int](), list(range(len(second) + 1))  # rows of the table of distances between beginnings
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
    """Return True if each word of the shorter name is alike one of the longer name, and no word negates the rest."""
    fewest = FEWEST_OF_PREFIX if len(short) == len(long) else FEWEST_OF_PREFIX_IN_LONGER
    rest = list(long)
    for word in short:
        match = next((other for other in rest if word.is_alike(other, fewest)), None)
        if match is None:
            return False
        rest.remove(match)
    return not any(word.letters in _NEGATIONS for word in rest)


def _is_acronym(short: tuple[ComparableWord, ...], long: tuple[ComparableWord, ...]) -> bool:
    initials = "".join(word.letters[0] for word in long)
    return len(short) == 1 and len(long) > 1 and short[0].letters == initials


def are_alike(first: str, second: str) -> bool:
    """Return True if two names may name one class."""
    return ComparableName.from_name(first).is_alike(ComparableName.from_name(second))


def find_alike_name(name: str, names: Iterable[str]) -> str:
    """Return the name that may name the same class as ``name``; empty if there is none.

    A name of the same letters comes before one that is only alike.
    """
    wanted = ComparableName.from_name(name)
    options = [ComparableName.from_name(other) for other in names]
    same = [option.name for option in options if option.key == wanted.key]
    alike = [option.name for option in options if option.is_alike(wanted)]
    return next(iter((*same, *alike)), "")
