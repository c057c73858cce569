"""The study's vocabulary, from the coordinator's experiment: its classes, with synonyms and definitions.

If a hospital's word is a synonym, the study's class replaces it, as if the hospital had written the class. A word that
is not in the vocabulary is refused, because two words for one finding would become two classes of the model.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import AfterValidator, Field, field_validator

from polyclinic.common.alike_words import find_alike_name
from polyclinic.common.contract import LabelDeclaration
from polyclinic.common.errors import Fault, quote_names, raise_faults
from polyclinic.common.system.plain_text import format_as_json_text, is_plain_text
from polyclinic.common.system.toml import TomlSection
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.base.names import Name, make_class_spelling_key

MAX_CLASS_NAME_CHARACTERS = 100
MAX_DEFINITION_CHARACTERS = 500
CLASS_PLACEHOLDER = "???"
"""Placeholder in a printed line of ``[data.synonyms]`` for the class that the hospital's staff must fill in."""
MIN_WORD_SIMILARITY = 0.75
"""Minimum similarity of two words, 0 to 1 as in :mod:`difflib`, for a refusal to suggest one for the other."""


class VocabularyEntry(TomlSection):
    """One class of the study, a table such as ``[vocabulary.Lymphocyte]``.

    Attributes:
        synonyms: Other words for this class.
        definition: Description of the class for people.
    """

    synonyms: tuple[Name, ...] = ()
    definition: str = Field("", max_length=MAX_DEFINITION_CHARACTERS)

    @field_validator("definition")
    @classmethod
    def _join_lines(cls, text: str) -> str:
        line = " ".join(text.split())
        if not is_plain_text(line):
            raise ValueError("has characters that cannot be printed")
        return line


Vocabulary = Mapping[str, VocabularyEntry]
"""Class of the study -> its entry; empty if the experiment has no vocabulary, so that any word is a class."""


def check_vocabulary(vocabulary: dict[str, VocabularyEntry]) -> dict[str, VocabularyEntry]:
    """Return a vocabulary unchanged if each of its words means exactly one class.

    Raises:
        ValueError: If there is no class, or if a word means two classes; spelling variants count as one word.
    """
    if not vocabulary:
        raise ValueError("is empty: name the study's classes, such as [vocabulary.Mass], or leave it out")
    meanings = dict[str, tuple[str, str]]()  # spelling key -> a word, and the class that it means
    for name, entry in vocabulary.items():
        for word in (name, *entry.synonyms):
            if not word or len(word) > MAX_CLASS_NAME_CHARACTERS or not is_plain_text(word):
                start = word[:MAX_CLASS_NAME_CHARACTERS]
                raise ValueError(f"{start!r} cannot be a word: 1 to {MAX_CLASS_NAME_CHARACTERS} characters that show")
            other, meaning = meanings.setdefault(make_class_spelling_key(word), (word, name))
            if meaning != name:
                words = quote_names(dict.fromkeys((other, word)))
                raise ValueError(f"{words} cannot mean two classes, {quote_names([meaning, name])}")
    return vocabulary


VocabularyTable = Annotated[dict[Name, VocabularyEntry], AfterValidator(check_vocabulary)]
"""The table ``[vocabulary]`` of an experiment."""


def _map_synonyms(vocabulary: Vocabulary) -> dict[str, str]:
    """Return synonym -> class, for all words of a vocabulary that are not classes themselves."""
    return {word: name for name, entry in vocabulary.items() for word in entry.synonyms if word not in vocabulary}


def map_words_to_classes(words: Iterable[str], vocabulary: Vocabulary) -> dict[str, str]:
    """Return word -> class for those words that are synonyms in the vocabulary."""
    classes = _map_synonyms(vocabulary)
    return {word: classes[word] for word in words if word in classes}


def name_declaration_by_vocabulary(declaration: LabelDeclaration, vocabulary: Vocabulary) -> LabelDeclaration:
    """Return a site's declaration with the study's class in place of each synonym.

    If several words mean one class, only the first one stays (:func:`group_words_by_class`).
    """
    columns = dict(zip(declaration.canonical_names, declaration.names, strict=True))
    groups = group_words_by_class(declaration.canonical_names, vocabulary)
    classes = {columns[words[0]]: name for name, words in groups.items()}
    synonyms = {column: name for column, name in classes.items() if column != name}
    return LabelDeclaration(declaration.site, tuple(classes), synonyms)


def group_words_by_class(words: Iterable[str], vocabulary: Vocabulary) -> dict[str, tuple[str, ...]]:
    """Return class -> the words that mean it, in the order of the words; a word outside the vocabulary is its own
    class.
    """
    classes = _map_synonyms(vocabulary)
    groups = dict[str, list[str]]()
    for word in words:
        groups.setdefault(classes.get(word, word), []).append(word)
    return {name: tuple(group) for name, group in groups.items()}


def find_vocabulary_faults(declarations: Iterable[LabelDeclaration], vocabulary: Vocabulary) -> list[Fault]:
    """Return a fault, with the line that fixes it, for each class of a site that is not a class of the study.

    The first fault of a site lists the study's classes.
    """
    faults = list[Fault]()
    for declaration in declarations if vocabulary else ():
        is_first = True
        for local_name, word in zip(declaration.names, declaration.canonical_names, strict=True):
            if word not in vocabulary:
                faults.append(
                    _make_foreign_word_fault(declaration, local_name, word, vocabulary, lists_classes=is_first)
                )
                is_first = False
    return faults


def _make_foreign_word_fault(
    declaration: LabelDeclaration, local_name: str, word: str, vocabulary: Vocabulary, *, lists_classes: bool
) -> Fault:
    """Return the fault of a word that is not a class of the study.

    Args:
        declaration: The site's declaration.
        local_name: The site's label name for the class.
        word: The name of the class in the federation, after the site's synonyms.
        vocabulary: The study's vocabulary.
        lists_classes: True to list the study's classes.
    """
    site = declaration.site
    problem = f'"{word}" is no class of the study\'s vocabulary.'
    problem += f" Its classes: {quote_names(vocabulary)}." if lists_classes else ""
    nearest = find_nearest_class(word, vocabulary)
    if nearest:
        remedy = (
            f"If it means {quote_names([nearest])}, this line under [data.synonyms] in site.toml of {site} settles "
        )
        remedy += f"it:\n    {format_synonym_line(local_name, nearest)}"
    else:
        remedy = (
            f"If it means one of these, write that in place of {CLASS_PLACEHOLDER} under [data.synonyms] in site.toml "
        )
        remedy += f"of {site}:\n    {format_synonym_line(local_name, CLASS_PLACEHOLDER)}"
    remedy += (
        "\nIf it is another class, leave it out of data.annotates, or the coordinator adds it to the experiment:\n"
    )
    remedy += f"    [vocabulary.{format_as_json_text(word)}]"
    return Fault(f"site.toml of {site}: data.annotates", problem, remedy, site)


def find_nearest_class(word: str, vocabulary: Vocabulary) -> str:
    """Return the class of the study that a word outside the vocabulary may mean; empty if none is similar."""
    meanings = {name: name for name in vocabulary} | _map_synonyms(vocabulary)
    if alike := find_alike_name(word, meanings):
        return meanings[alike]
    by_folded = {spelling.casefold(): name for spelling, name in meanings.items()}
    near = difflib.get_close_matches(word.casefold(), by_folded, n=1, cutoff=MIN_WORD_SIMILARITY)
    return by_folded[near[0]] if near else ""


def format_synonym_line(local_name: str, class_name: str) -> str:
    """Return the line of ``[data.synonyms]`` that maps a site's word to a class."""
    return f"{format_as_json_text(local_name)} = {format_as_json_text(class_name)}"


def merge_words_of_classes(images: ImageSet, vocabulary: Vocabulary) -> ImageSet:
    """Return images with the study's class in place of each synonym among their class names.

    Several columns of one class become one column: an image shows the class if one of them is positive. Columns outside
    the vocabulary stay unchanged.
    """
    groups = group_words_by_class(images.class_names, vocabulary)
    return images.merge_label_columns(groups.values()).rename_classes(tuple(groups))


def name_images_by_vocabulary(images: ImageSet, vocabulary: Vocabulary | None, where: str) -> ImageSet:
    """Apply :func:`merge_words_of_classes`, and refuse images with a column outside the vocabulary.

    Args:
        images: The images.
        vocabulary: The study's vocabulary; without one the images are returned unchanged.
        where: Table of the experiment that names the images, for faults.

    Raises:
        BadInput: If a column means no class of the study.
    """
    if not vocabulary:
        return images
    groups = group_words_by_class(images.class_names, vocabulary)
    raise_faults([_make_foreign_column_fault(name, vocabulary, where) for name in groups if name not in vocabulary])
    return merge_words_of_classes(images, vocabulary)


def _make_foreign_column_fault(word: str, vocabulary: Vocabulary, where: str) -> Fault:
    problem = f"{quote_names([word])} is no class of [vocabulary]. Its classes: {quote_names(vocabulary)}."
    remedy = f"If it is another class, add [vocabulary.{format_as_json_text(word)}]."
    if near := find_nearest_class(word, vocabulary):
        table = f"[vocabulary.{format_as_json_text(near)}]"
        remedy += f" If it means {quote_names([near])}, add it to synonyms under {table}."
    return Fault(where, problem, remedy)


def list_definitions(class_names: Iterable[str], vocabulary: Vocabulary | None) -> dict[str, str]:
    """Return class -> definition for the classes that the vocabulary defines."""
    entries = vocabulary or {}
    return {name: entries[name].definition for name in class_names if name in entries and entries[name].definition}
