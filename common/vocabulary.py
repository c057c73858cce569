"""The study's vocabulary, which the coordinator's experiment states: its classes, with synonyms and definitions.

A hospital's word that is a synonym is mapped to the study's class, as if the hospital had written the class itself. A
word that the vocabulary lacks is refused, because two words for one finding would become two classes of the model.
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

LONGEST_NAME, LONGEST_DEFINITION = 100, 500
UNSTATED_CLASS = "???"
"""Stands in a printed line of ``[data.synonyms]`` for the class that only the hospital's staff can name."""
NEAR = 0.75
"""Similarity of two words, from 0 to 1 as in :mod:`difflib`, from which a refusal names one for the other."""


class VocabularyEntry(TomlSection):
    """One class of the study, a table such as ``[vocabulary.Lymphocyte]``.

    Attributes:
        synonyms: Words that mean this class.
        definition: What the class is, in words for people.
    """

    synonyms: tuple[Name, ...] = ()
    definition: str = Field("", max_length=LONGEST_DEFINITION)

    @field_validator("definition")
    @classmethod
    def _join_lines(cls, text: str) -> str:
        line = " ".join(text.split())
        if not is_plain_text(line):
            raise ValueError("has characters that cannot be printed")
        return line


Vocabulary = Mapping[str, VocabularyEntry]
"""The study's classes by name; empty if the experiment states none, so that any word is a class."""


def check_vocabulary(vocabulary: dict[str, VocabularyEntry]) -> dict[str, VocabularyEntry]:
    """Return a vocabulary if each of its words means one class.

    Raises:
        ValueError: If it has no class, or if one word, or two that differ in spelling only, stand for two classes.
    """
    if not vocabulary:
        raise ValueError("is empty: name the study's classes, such as [vocabulary.Mass], or leave it out")
    meanings = dict[str, tuple[str, str]]()  # spelling key -> a word, and the class that it means
    for name, entry in vocabulary.items():
        for word in (name, *entry.synonyms):
            if not word or len(word) > LONGEST_NAME or not is_plain_text(word):
                raise ValueError(f"{word[:LONGEST_NAME]!r} cannot be a word: 1 to {LONGEST_NAME} characters that show")
            other, meaning = meanings.setdefault(make_class_spelling_key(word), (word, name))
            if meaning != name:
                words = quote_names(dict.fromkeys((other, word)))
                raise ValueError(f"{words} cannot mean two classes, {quote_names([meaning, name])}")
    return vocabulary


VocabularyTable = Annotated[dict[Name, VocabularyEntry], AfterValidator(check_vocabulary)]
"""The table ``[vocabulary]`` of an experiment."""


def _map_synonyms(vocabulary: Vocabulary) -> dict[str, str]:
    """Return synonym -> the class that it means, for all words of a vocabulary that are no class."""
    return {word: name for name, entry in vocabulary.items() for word in entry.synonyms if word not in vocabulary}


def map_words_to_classes(words: Iterable[str], vocabulary: Vocabulary) -> dict[str, str]:
    """Return word -> class for the words that a vocabulary replaces: its synonyms."""
    classes = _map_synonyms(vocabulary)
    return {word: classes[word] for word in words if word in classes}


def name_declaration_by_vocabulary(declaration: LabelDeclaration, vocabulary: Vocabulary) -> LabelDeclaration:
    """Return a site's declaration with the study's class in place of each synonym.

    Of several words of one class, the first one is left (:func:`group_words_by_class`).
    """
    columns = dict(zip(declaration.canonical_names, declaration.names, strict=True))
    groups = group_words_by_class(declaration.canonical_names, vocabulary)
    classes = {columns[words[0]]: name for name, words in groups.items()}
    synonyms = {column: name for column, name in classes.items() if column != name}
    return LabelDeclaration(declaration.site, tuple(classes), synonyms)


def group_words_by_class(words: Iterable[str], vocabulary: Vocabulary) -> dict[str, tuple[str, ...]]:
    """Return class of the study -> the words that mean it, in the order of the words.

    A word that means no class of the study is a class of its own.
    """
    classes = _map_synonyms(vocabulary)
    groups = dict[str, list[str]]()
    for word in words:
        groups.setdefault(classes.get(word, word), []).append(word)
    return {name: tuple(group) for name, group in groups.items()}


def find_vocabulary_faults(declarations: Iterable[LabelDeclaration], vocabulary: Vocabulary) -> list[Fault]:
    """Return a fault for each class of a site that is no class of the study, with the line to write.

    The first fault of a site lists the study's classes.
    """
    faults = list[Fault]()
    for declaration in declarations if vocabulary else ():
        is_first = True
        for own, word in zip(declaration.names, declaration.canonical_names, strict=True):
            if word not in vocabulary:
                faults.append(_make_foreign_word_fault(declaration, own, word, vocabulary, lists_classes=is_first))
                is_first = False
    return faults


def _make_foreign_word_fault(
    declaration: LabelDeclaration, own: str, word: str, vocabulary: Vocabulary, *, lists_classes: bool
) -> Fault:
    """Return the fault of a word that is no class of the study.

    Args:
        own: The site's own name of the class.
        word: The name that the site gives it in the federation.
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
        remedy += f"it:\n    {format_synonym_line(own, nearest)}"
    else:
        remedy = (
            f"If it means one of these, write that in place of {UNSTATED_CLASS} under [data.synonyms] in site.toml "
        )
        remedy += f"of {site}:\n    {format_synonym_line(own, UNSTATED_CLASS)}"
    remedy += (
        "\nIf it is another class, leave it out of data.annotates, or the coordinator adds it to the experiment:\n"
    )
    remedy += f"    [vocabulary.{format_as_json_text(word)}]"
    return Fault(f"site.toml of {site}: data.annotates", problem, remedy, site)


def find_nearest_class(word: str, vocabulary: Vocabulary) -> str:
    """Return the class of the study that a foreign word may mean; empty if none is near."""
    meanings = {name: name for name in vocabulary} | _map_synonyms(vocabulary)
    if alike := find_alike_name(word, meanings):
        return meanings[alike]
    by_folded = {spelling.casefold(): name for spelling, name in meanings.items()}
    near = difflib.get_close_matches(word.casefold(), by_folded, n=1, cutoff=NEAR)
    return by_folded[near[0]] if near else ""


def format_synonym_line(own: str, name: str) -> str:
    """Return the line of ``[data.synonyms]`` by which a site's own word counts as a class."""
    return f"{format_as_json_text(own)} = {format_as_json_text(name)}"


def merge_words_of_classes(images: ImageSet, vocabulary: Vocabulary) -> ImageSet:
    """Return images with the study's class in place of each synonym among their class names.

    Several columns of one class are one class: an image shows it if one of the columns says so. Columns that mean no
    class of the study stay as they are.
    """
    groups = group_words_by_class(images.class_names, vocabulary)
    return images.merge_label_columns(groups.values()).rename_classes(tuple(groups))


def name_images_by_vocabulary(images: ImageSet, vocabulary: Vocabulary | None, where: str) -> ImageSet:
    """Return images as :func:`merge_words_of_classes` does, if each of their columns means a class of the study.

    Args:
        where: Table of the experiment that the images are of, for faults.

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
