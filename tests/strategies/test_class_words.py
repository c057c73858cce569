"""Words of three hospitals before round 1: which pairs stop, which are asked about, and what answers the question."""

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from flwr.app import Message

from polyclinic.common.config import ParticipationSection
from polyclinic.common.errors import BadInput
from polyclinic.common.vocabulary import VocabularyEntry
from polyclinic.common.wire.codec import decode_record
from polyclinic.common.wire.fleet_protocol import QUESTION_TYPE, REFUSAL_TYPE, ROLL_CALL_TYPE
from polyclinic.common.wire.records import Question, RefusalNoted, RollCallAnswer
from polyclinic.strategies.engine.admission_limits import SiteAdmissionLimits
from polyclinic.strategies.engine.membership import RunMembership
from polyclinic.strategies.registry import build_experiment_strategy
from tests.client.rounds import plan
from tests.strategies.scripted import Answer, Clock, ScriptedGrid, Site, record

SHARED = "Normal cell"
"""A class that all three hospitals annotate."""
ONE_CLASS = [
    ("Lymphocyte", "Lymphozyt"),  # German
    ("Lymphocyte", "lympho"),  # abbreviation
    ("Lymphocytes", "Lymphozyten"),  # German, plural
    ("Lymphocyte", "Linfocito"),  # Italian, Spanish
    ("Pneumothorax", "pneumothorax"),  # case
    ("Pneumothorax", "PNEUMOTÓRAX"),  # Portuguese
    ("Nodule", "Nodules"),  # plural
    ("Nodule", "Noduli"),  # Latin plural
    ("Mass", "Massa"),  # Italian
    ("Nevus", "Nävus"),  # German
    ("Nevus", "Nevi"),  # Latin plural
    ("akiec", "AK"),  # HAM10000 and the clinic
    ("Edema", "Oedema"),  # British
    ("Edema", "Ödem"),  # German
    ("Cardiomegaly", "Kardiomegalie"),  # German
    ("Atelectasis", "Atelektase"),  # German
    ("Infiltration", "Infiltrate"),  # NIH and PadChest
    ("Consolidation", "Consolidación"),  # Spanish
    ("Pleural_Thickening", "pleural thickening"),  # punctuation
    ("Pleural Effusion", "Effusion"),  # CheXpert and NIH
    ("No Finding", "NF"),  # initials
    ("Lymphocyte", "Lymphcoyte"),  # letters exchanged
    ("Monocyte", "Monocye"),  # a letter missing
]
"""Words for one class, each a hospital's own: caught, because their spelling shows it."""
UNLIKE_WORDS = [
    ("Pleural effusion", "Pleuraerguss"),  # German
    ("No finding", "Unauffällig"),  # German for normal
    ("Pneumonia", "Polmonite"),  # Italian
]
"""Words for one class that share no spelling: each is shown as a class that one hospital alone uses."""
TWO_CLASSES = [
    ("Edema", "Emphysema"),
    ("Atelectasis left", "Atelectasis right"),
    ("Type 1", "Type 2"),
    ("Infiltration", "Infarction"),
    ("Mass", "Mast cell"),
    ("Pneumonia", "Pneumothorax"),
    ("Hyperplasia", "Hypoplasia"),
    ("Macrocyte", "Microcyte"),
]
"""Words for two classes that look alike to a hasty eye: taken as two, and shown as those of one hospital each."""
PAIRS = [*ONE_CLASS, *UNLIKE_WORDS, *TWO_CLASSES]


def test_there_are_thirty_pairs_or_more() -> None:
    assert len(set(PAIRS)) == len(PAIRS) >= 30


def hospital(answer: RollCallAnswer) -> Site:
    def make(message: Message) -> Message:
        noted = RefusalNoted("run-1", answer.site)
        return record(answer if message.metadata.message_type == ROLL_CALL_TYPE else noted)(message)

    return Site([Answer(0, make)] * 4)


def answer(name: str, classes: tuple[str, ...], **changes: Any) -> RollCallAnswer:
    return replace(RollCallAnswer("run-1", name, classes, classes, 10, 5, 9, "layout", "0.1.0"), **changes)


def gathered(
    clock: Clock,
    classes: Mapping[str, tuple[str, ...]],
    *,
    lists: Mapping[str, tuple[str, ...]] | None = None,
    vocabulary: dict[str, VocabularyEntry] | None = None,
    simulated: bool = False,
    **participation: Any,
) -> tuple[RunMembership, ScriptedGrid]:
    """The members after the roll call of hospitals that were admitted in this order."""
    of = plan("surgical", {}).model_copy(update={"vocabulary": vocabulary})
    nodes = dict(enumerate(classes, start=7))
    grid = ScriptedGrid({node: hospital(answer(name, classes[name])) for node, name in nodes.items()}, clock)
    limits = {
        name: SiteAdmissionLimits(frozenset((lists or {}).get(name, ())), order=place)
        for place, name in enumerate(classes)
    }
    members = RunMembership(
        build_experiment_strategy(of),
        of,
        ParticipationSection(**participation),
        "run-1",
        registered=None if simulated else lambda: nodes,
        claims=lambda: limits,
    )
    grid_of_flower: Any = grid
    members.call_roll(grid_of_flower, len(classes))
    return members, grid


def hospitals(first: str, second: str) -> dict[str, tuple[str, ...]]:
    """Two hospitals use the first word, the third one uses the second."""
    return {"east": (SHARED, first), "north": (SHARED, first), "south": (SHARED, second)}


def texts_to(grid: ScriptedGrid, node: int) -> list[str]:
    questions = [message for message in grid.to(node) if message.metadata.message_type == QUESTION_TYPE]
    return [decode_record(message.content, Question).text for message in questions]


@pytest.mark.parametrize("pair", ONE_CLASS, ids=str)
def test_two_words_for_one_class_stop_the_run_with_both_ways_out(pair: tuple[str, str], clock: Clock) -> None:
    with pytest.raises(BadInput) as stopped:
        gathered(clock, hospitals(*pair))
    assert {fault.site for fault in stopped.value.faults} == {"south"}
    assert f'"{pair[1]}" = "{pair[0]}"' in str(stopped.value)


@pytest.mark.parametrize("pair", ONE_CLASS, ids=str)
def test_the_line_of_the_message_makes_them_one_class(pair: tuple[str, str], clock: Clock) -> None:
    members, _ = gathered(clock, hospitals(pair[0], pair[0]))
    assert members.contract.class_names == tuple(sorted((SHARED, pair[0])))
    assert members.classes_of_one_site == {}


@pytest.mark.parametrize("pair", [*UNLIKE_WORDS, *TWO_CLASSES], ids=str)
def test_words_without_a_like_spelling_are_two_classes_and_each_hospital_alone_is_asked(
    pair: tuple[str, str], clock: Clock
) -> None:
    members, grid = gathered(clock, {"east": (SHARED, pair[0]), "north": (SHARED,), "south": (SHARED, pair[1])})
    assert members.contract.class_names == tuple(sorted((SHARED, *pair)))
    assert members.classes_of_one_site == {pair[0]: "east", pair[1]: "south"}
    question = members.ask_about_classes_of_one_site()
    assert f'"{pair[0]}" (east); "{pair[1]}" (south)' in question
    assert f'distinct_classes = ["{min(pair)}", "{max(pair)}"]' in question
    (to_east,), (to_south,) = texts_to(grid, 7), texts_to(grid, 9)
    assert f'No other site annotates "{pair[0]}"' in to_east
    assert f'"{pair[0]}"' in to_south
    assert texts_to(grid, 8) == []


def test_all_printed_lines_can_be_written_together(clock: Clock) -> None:
    """West's ``lympho`` is like both words of the others, and three words are questioned at once."""
    words = {"east": ("Lymphocyte", "Nodule"), "south": ("Lymphozyt", "Nodules"), "west": ("lympho",)}
    with pytest.raises(BadInput) as stopped:
        gathered(clock, words)
    text = str(stopped.value)
    synonyms = {line.strip() for line in text.splitlines() if line.startswith('    "')}
    assert synonyms == {'"Lymphozyt" = "Lymphocyte"', '"Nodules" = "Nodule"', '"lympho" = "Lymphocyte"'}
    (line,) = [line for line in text.splitlines() if "distinct_classes = " in line]
    distinct = tomllib.loads(line)["distinct_classes"]
    both = tuple(sorted((*words["east"], *words["south"], *words["west"])))
    assert gathered(clock, words, distinct_classes=tuple(distinct))[0].contract.class_names == both
    mapped = {"east": words["east"], "south": ("Lymphocyte", "Nodule"), "west": ("Lymphocyte",)}
    assert gathered(clock, mapped)[0].contract.class_names == ("Lymphocyte", "Nodule")


def test_two_words_that_may_be_one_word_of_a_third_site_are_both_asked_about(clock: Clock) -> None:
    """South uses ``Lymphozyt`` and ``lympho`` for two classes: the line of one of them does not join the other."""
    words = {"east": ("Lymphocyte",), "south": ("Lymphozyt", "lympho")}
    with pytest.raises(BadInput) as stopped:
        gathered(clock, words)
    assert len([fault for fault in stopped.value.faults if fault.site == "south"]) == 2


def test_the_question_to_a_site_has_its_own_word_on_the_left_and_no_class_on_the_right(clock: Clock) -> None:
    own = answer("south", (SHARED, "Eosinophil"), names=(SHARED, "Eosinophiler"))
    nodes = {"north": hospital(answer("north", (SHARED, "Mass"))), "south": hospital(own)}
    grid = ScriptedGrid(dict(enumerate(nodes.values(), start=7)), clock)
    members = RunMembership(
        build_experiment_strategy(plan("surgical", {})),
        plan("surgical", {}),
        ParticipationSection(),
        "run-1",
        registered=lambda: dict(enumerate(nodes, start=7)),
    )
    grid_of_flower: Any = grid
    members.call_roll(grid_of_flower, 2)
    members.ask_about_classes_of_one_site()
    (text,) = texts_to(grid, 8)
    assert '"Eosinophiler" = "???"' in text
    assert f'"Mass", "{SHARED}"' in text


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_vocabulary_settles_the_pair_before_the_round(pair: tuple[str, str], clock: Clock) -> None:
    entries = {SHARED: VocabularyEntry(), pair[0]: VocabularyEntry()}
    with pytest.raises(BadInput, match="is no class of the study's vocabulary") as stopped:
        gathered(clock, hospitals(*pair), vocabulary=entries)
    assert {fault.site for fault in stopped.value.faults} == {"south"}


@pytest.mark.parametrize("pair", [("Nodule", "Nodules"), ("Rib fracture", "Fracture")], ids=str)
def test_the_coordinator_can_say_that_two_words_are_two_classes(pair: tuple[str, str], clock: Clock) -> None:
    both = tuple(sorted((SHARED, *pair)))
    assert gathered(clock, hospitals(*pair), distinct_classes=(pair[1],))[0].contract.class_names == both
    lists = {"east": (SHARED, pair[0]), "south": (SHARED, pair[1])}
    assert gathered(clock, hospitals(*pair), lists=lists)[0].contract.class_names == both
    entries = {name: VocabularyEntry() for name in both}
    assert gathered(clock, hospitals(*pair), vocabulary=entries)[0].contract.class_names == both


def test_two_words_that_one_hospital_uses_are_two_classes(clock: Clock) -> None:
    both = {"east": ("Nodule",), "north": ("Nodule", "Nodules"), "south": ("Nodules",)}
    assert gathered(clock, both)[0].contract.class_names == ("Nodule", "Nodules")


def test_with_min_sites_the_run_goes_on_without_the_hospital_and_both_sides_are_told(clock: Clock) -> None:
    members, grid = gathered(clock, hospitals("Nodule", "Nodules"), min_sites=2)
    assert members.members.keys() == {"east", "north"}
    assert '"Nodules" = "Nodule"' in members.left_out_sites["south"]
    assert 'distinct_classes = ["Nodules"]' in members.left_out_sites["south"]
    assert [message.metadata.message_type for message in grid.to(9)] == [ROLL_CALL_TYPE, REFUSAL_TYPE]
    for node in (7, 8):
        (text,) = texts_to(grid, node)
        assert '"Nodule" (sites east, north) and "Nodules" (site south) may be one class in two words' in text


@pytest.mark.parametrize(
    ("classes", "lists", "left_out"),
    [
        ({"east": ("Nodule",), "north": ("Nodules",)}, {}, "north"),
        ({"east": ("Nodule",), "north": ("Nodules",), "south": ("Nodules",)}, {}, "east"),
        ({"east": ("Nodule",), "north": ("Nodules",)}, {"north": ("Nodules",)}, "east"),
    ],
    ids=["admitted first", "more sites", "listed"],
)
def test_the_word_that_counts_is_the_listed_one_then_that_of_more_sites_then_of_the_site_admitted_first(
    classes: dict[str, tuple[str, ...]], lists: dict[str, tuple[str, ...]], left_out: str, clock: Clock
) -> None:
    members, _ = gathered(clock, classes, lists=lists, min_sites=1)
    assert members.left_out_sites.keys() == {left_out}


@pytest.mark.parametrize("settled", ["distinct", "listed", "vocabulary"])
def test_a_class_of_one_hospital_is_no_question_once_the_coordinator_has_confirmed_it(
    settled: str, clock: Clock
) -> None:
    classes = {"east": (SHARED, "Blast"), "north": (SHARED,)}
    answers: dict[str, dict[str, Any]] = {
        "distinct": {"distinct_classes": ("Blast",)},
        "listed": {"lists": {"east": (SHARED, "Blast")}},
        "vocabulary": {"vocabulary": {SHARED: VocabularyEntry(), "Blast": VocabularyEntry()}},
    }
    members, grid = gathered(clock, classes, **answers[settled])
    assert members.ask_about_classes_of_one_site() == ""
    assert texts_to(grid, 7) == []


def test_a_simulations_classes_are_columns_of_one_table_and_are_not_compared(clock: Clock) -> None:
    members, _ = gathered(clock, hospitals("Nodule", "Nodules"), simulated=True)
    assert members.contract.class_names == tuple(sorted((SHARED, "Nodule", "Nodules")))
    assert members.classes_of_one_site == {}


def test_a_synonym_that_an_earlier_release_does_not_map_is_refused_with_the_line(clock: Clock) -> None:
    entries = {SHARED: VocabularyEntry(), "Nodule": VocabularyEntry(synonyms=("Knoten",))}
    members, _ = gathered(clock, hospitals("Nodule", "Knoten"), vocabulary=entries, min_sites=2)
    assert '"Knoten" = "Nodule"' in members.left_out_sites["south"]
