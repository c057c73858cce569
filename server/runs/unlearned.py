"""The classes that a run's model has not learned, so that its scores for them mean nothing."""

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

NOBODY_TRAINED = "no site that annotates it took part"
STAYED_MASKED = "its head row stayed masked in every round, because fewer hospitals than smallest_cohort sent it"
NO_POSITIVE = "no training image of the sites that annotate it shows it"
COUNT_WITHHELD = (
    "no site that annotates it tells whether a training image shows it (few patients do, or its policy hides it)"
)
"""Why it is not known whether a class was learned."""
MOST_NAMED = 10
"""Most classes that a sentence names."""


@dataclass(frozen=True)
class ClassLearning:
    """What is known of the classes that a run's model may not have learned.

    Attributes:
        unlearned: Class -> why the model has not learned it.
        unknown: Classes of which nobody knows whether it has (:data:`COUNT_WITHHELD`).
    """

    unlearned: dict[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()


def is_shown(positives: int | None) -> bool | None:
    """Return whether a class has a positive image, None if the number of them is not known."""
    return None if positives is None else positives > 0


def find_unlearned_classes(
    class_names: Collection[str],
    shown: Mapping[str, Mapping[str, bool | None]],
    rounds: Sequence[RoundFileLine],
    *,
    warm: Collection[str] = (),
    has_own_images: bool = False,
) -> dict[str, str]:
    """Return class -> why the model of the last of these rounds has not learned it, as a clause.

    A class of which this cannot be known is left out: see :func:`find_classes_of_unknown_learning`.

    Args:
        shown: Class -> site that annotates it -> whether a training image shows it, None if that is not known.
        rounds: The rounds up to that of the model; without any, the result is empty.
        warm: Classes whose head rows come from a finished run.
        has_own_images: Whether the coordinator trains on images of its own, whose labels are not counted here.
    """
    unlearned = dict[str, str]()
    for name in class_names if rounds else ():
        owners, signs = shown.get(name, {}).keys(), shown.get(name, {}).values()
        if name in warm:
            continue
        if not any(owners & set(line.sites) for line in rounds) and any(owners & line.absent.keys() for line in rounds):
            unlearned[name] = NOBODY_TRAINED
        elif all(name in line.closed_rows for line in rounds):
            unlearned[name] = STAYED_MASKED
        elif signs and not any(sign is not False for sign in signs) and not has_own_images:
            unlearned[name] = NO_POSITIVE
    return unlearned


def find_classes_of_unknown_learning(
    shown: Mapping[str, Mapping[str, bool | None]],
    unlearned: Collection[str],
    rounds: Sequence[RoundFileLine],
    *,
    warm: Collection[str] = (),
    has_own_images: bool = False,
) -> list[str]:
    """Return the classes of which it is not known whether the model has learned them (:data:`COUNT_WITHHELD`).

    Args:
        shown, rounds, warm, has_own_images: As in :func:`find_unlearned_classes`.
        unlearned: The classes that it has not learned.
    """
    if has_own_images or not rounds:
        return []
    classes = [name for name in shown if name not in unlearned and name not in warm]
    return [name for name in classes if shown[name] and not any(shown[name].values())]


def select_rounds_of_model(rounds: Sequence[RoundFileLine], best_round: int | None) -> list[RoundFileLine]:
    """Return the rounds that made the tested model; none if it is the initial one.

    Args:
        best_round: The round that validation chose; None for the last one.
    """
    return [line for line in rounds if best_round is None or line.round <= best_round]


def read_unlearned_classes(folder: Path) -> dict[str, str]:
    """Return class -> why a saved model has not learned it; from the run's files if an earlier release saved it.

    Args:
        folder: Folder of a run or of a model alone.

    Raises:
        BadInput: If there is no model, or its description cannot be read.
    """
    if (stated := read_model_description(folder).unlearned) is not None:
        return dict(stated)
    if is_file(folder / "summary.json"):
        with suppress(BadInput):  # of another version, or edited
            return _find_unlearned_classes_of_run(read_run(folder))
    return {}


def read_classes_of_unknown_learning(folder: Path) -> tuple[str, ...]:
    """Return the classes of which nobody knows whether a saved model has learned them; none for earlier releases.

    Raises:
        BadInput: If there is no model, or its description cannot be read.
    """
    return read_model_description(folder).maybe_unlearned


def describe_unlearned_classes(unlearned: Mapping[str, str]) -> str:
    """Return a sentence on classes without predictions; empty if there are none."""
    reasons = [f"{name} ({reason})" for name, reason in unlearned.items()]
    return f"Left out, because the model has not learned them: {join_as_english_list(reasons)}." if reasons else ""


def describe_classes_of_unknown_learning(names: Collection[str]) -> str:
    """Return a sentence on classes of which it is not known whether a model has learned them; empty for none."""
    if not names:
        return ""
    listed = list_first_and_count_rest(list(names), MOST_NAMED)
    return f"Not known whether the model has learned {listed}: {COUNT_WITHHELD}."


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
