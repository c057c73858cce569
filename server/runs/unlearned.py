"""Find the classes that a run's model has not learned, whose scores have no meaning."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from polyclinic.common.errors import BadInput
from polyclinic.common.models.saved import read_model_description
from polyclinic.common.system.files import is_file
from polyclinic.common.system.plain_text import join_as_english_list, list_first_and_count_rest
from polyclinic.server.runs.reader import RunFolderContent, read_run
from polyclinic.server.runs.schema import RoundFileLine

NOT_TRAINED_REASON = "no site that annotates it took part"
STAYED_MASKED_REASON = "its head row stayed masked in every round, because fewer hospitals than smallest_cohort sent it"
NO_POSITIVE_REASON = "no training image of the sites that annotate it shows it"
COUNT_WITHHELD_REASON = (
    "no site that annotates it tells whether a training image shows it (few patients do, or its policy hides it)"
)
"""Reason why it is not known whether a class was learned."""
MAX_NAMES = 10
"""Greatest number of classes that a sentence names."""


@dataclass(frozen=True)
class ClassLearning:
    """The classes that a run's model has not learned, or may not have learned.

    Attributes:
        unlearned: Class -> reason why the model has not learned it.
        unknown: Classes of which it is not known whether the model has learned them (:data:`COUNT_WITHHELD_REASON`).
    """

    unlearned: dict[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()


def is_shown(positives: int | None) -> bool | None:
    """Return True if the number of positive images is above 0; None if the number is not known."""
    return None if positives is None else positives > 0


def find_unlearned_classes(
    class_names: Collection[str],
    shown: Mapping[str, Mapping[str, bool | None]],
    rounds: Sequence[RoundFileLine],
    *,
    warm: Collection[str] = (),
    has_own_images: bool = False,
) -> dict[str, str]:
    """Return class -> reason why the model of the last of these rounds has not learned it, as a clause.

    Classes of which this is not known are left out; :func:`find_classes_of_unknown_learning` returns them.

    Args:
        shown: Class -> site that annotates it -> True if a training image shows it, None if this is not known.
        rounds: The rounds up to the round of the model; without rounds, the result is empty.
        warm: Classes whose head rows come from a finished run.
        has_own_images: True if the coordinator trains on its own images, whose labels are not counted here.
    """
    unlearned = dict[str, str]()
    for name in class_names if rounds else ():
        if name in warm:
            continue
        owners = shown.get(name, {}).keys()
        shown_at_sites = shown.get(name, {}).values()
        is_trained = any(owners & set(line.sites) for line in rounds)
        has_absent_owner = any(owners & line.absent.keys() for line in rounds)
        if has_absent_owner and not is_trained:
            unlearned[name] = NOT_TRAINED_REASON
        elif all(name in line.closed_rows for line in rounds):
            unlearned[name] = STAYED_MASKED_REASON
        elif shown_at_sites and all(value is False for value in shown_at_sites) and not has_own_images:
            unlearned[name] = NO_POSITIVE_REASON
    return unlearned


def find_classes_of_unknown_learning(
    shown: Mapping[str, Mapping[str, bool | None]],
    unlearned: Collection[str],
    rounds: Sequence[RoundFileLine],
    *,
    warm: Collection[str] = (),
    has_own_images: bool = False,
) -> list[str]:
    """Return the classes of which it is not known whether the model has learned them (:data:`COUNT_WITHHELD_REASON`).

    Args:
        shown: Class -> site that annotates it -> True if a training image shows it, None if this is not known.
        unlearned: Classes that the model has not learned.
        rounds: The rounds up to the round of the model.
        warm: Classes whose head rows come from a finished run.
        has_own_images: True if the coordinator trains on its own images.
    """
    if has_own_images or not rounds:
        return []
    classes = [name for name in shown if name not in unlearned and name not in warm]
    return [name for name in classes if shown[name] and not any(shown[name].values())]


def select_rounds_of_model(rounds: Sequence[RoundFileLine], best_round: int | None) -> list[RoundFileLine]:
    """Return the rounds up to the round of the tested model; an empty list for the initial model.

    Args:
        best_round: Round that validation chose, 0 for the initial model; None for the last round.
    """
    return [line for line in rounds if best_round is None or line.round <= best_round]


def read_unlearned_classes(folder: Path) -> dict[str, str]:
    """Return class -> reason why a saved model has not learned it.

    For a model of an earlier release, the result is computed from the run's files.

    Args:
        folder: Folder of a run, or folder with only a model.

    Raises:
        BadInput: If there is no model, or its description cannot be read.
    """
    if (stated := read_model_description(folder).unlearned) is not None:
        return dict(stated)
    if is_file(folder / "summary.json"):
        with suppress(BadInput):  # another release wrote the files, or they were edited
            return _find_unlearned_classes_of_run(read_run(folder))
    return {}


def read_classes_of_unknown_learning(folder: Path) -> tuple[str, ...]:
    """Return the classes of which it is not known whether a saved model has learned them.

    The result is empty for models of earlier releases.

    Raises:
        BadInput: If there is no model, or its description cannot be read.
    """
    return read_model_description(folder).maybe_unlearned


def describe_unlearned_classes(unlearned: Mapping[str, str]) -> str:
    """Return a sentence on classes that have no predictions because they were not learned; empty without classes."""
    reasons = [f"{name} ({reason})" for name, reason in unlearned.items()]
    return f"Left out, because the model has not learned them: {join_as_english_list(reasons)}." if reasons else ""


def describe_classes_of_unknown_learning(names: Collection[str]) -> str:
    """Return a sentence on classes of which it is not known whether a model has learned them; empty without classes."""
    if not names:
        return ""
    listed = list_first_and_count_rest(list(names), MAX_NAMES)
    return f"Not known whether the model has learned {listed}: {COUNT_WITHHELD_REASON}."


def _find_unlearned_classes_of_run(run: RunFolderContent) -> dict[str, str]:
    summary = run.summary
    shown = {
        name: {
            site: is_shown(summary.sites[site].positives.get(name))
            for site in summary.annotating_sites_by_class.get(name, ())
        }
        for name in summary.classes
    }
    has_own_images = summary.experiment.get("server_data") is not None
    return find_unlearned_classes(
        summary.classes,
        shown,
        select_rounds_of_model(run.rounds, summary.best_round),
        has_own_images=has_own_images,
    )
