"""The classes that a run's model has not learned, so that its scores for them mean nothing."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from polyclinic.common.errors import BadInput
from polyclinic.common.models.saved import read_model_description
from polyclinic.common.system.files import is_file
from polyclinic.common.system.plain_text import join_as_english_list
from polyclinic.server.runs.reader import RoundFileLine, RunFolderContent, read_run

NOBODY_TRAINED = "no site that annotates it took part"
STAYED_MASKED = "its head row stayed masked in every round, because fewer hospitals than smallest_cohort sent it"
NO_POSITIVE = "no training image of the sites that annotate it shows it"


def find_unlearned_classes(
    class_names: Collection[str],
    positives: Mapping[str, Mapping[str, int | None]],
    rounds: Sequence[RoundFileLine],
    *,
    warm: Collection[str] = (),
    has_own_images: bool = False,
) -> dict[str, str]:
    """Return class -> why the model of the last of these rounds has not learned it, as a clause.

    A class of which this cannot be known, because sites hide their counts, is left out.

    Args:
        positives: Class -> site that annotates it -> number of positive training images, None if that is not known.
        rounds: The rounds up to that of the model; without any, the result is empty.
        warm: Classes whose head rows come from a finished run.
        has_own_images: Whether the coordinator trains on images of its own, whose labels are not counted here.
    """
    unlearned = dict[str, str]()
    for name in class_names if rounds else ():
        owners, counts = positives.get(name, {}).keys(), positives.get(name, {}).values()
        if name in warm:
            continue
        if not any(owners & set(line.sites) for line in rounds) and any(owners & line.absent.keys() for line in rounds):
            unlearned[name] = NOBODY_TRAINED
        elif all(name in line.closed_rows for line in rounds):
            unlearned[name] = STAYED_MASKED
        elif counts and all(count == 0 for count in counts) and not has_own_images:
            unlearned[name] = NO_POSITIVE
    return unlearned


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


def describe_unlearned_classes(unlearned: Mapping[str, str]) -> str:
    """Return a sentence on classes without predictions; empty if there are none."""
    reasons = [f"{name} ({reason})" for name, reason in unlearned.items()]
    return f"Left out, because the model has not learned them: {join_as_english_list(reasons)}." if reasons else ""


def _find_unlearned_classes_of_run(run: RunFolderContent) -> dict[str, str]:
    summary = run.summary
    positives = {
        name: {
            site: summary.sites[site].positives.get(name) for site in summary.annotating_sites_by_class.get(name, ())
        }
        for name in summary.classes
    }
    has_own_images = summary.experiment.get("server_data") is not None
    return find_unlearned_classes(
        summary.classes,
        positives,
        select_rounds_of_model(run.rounds, summary.best_round),
        has_own_images=has_own_images,
    )
