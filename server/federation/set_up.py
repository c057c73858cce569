"""The steps of leading a run, wherever its sites are: check, open the folder, track, run, report."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from common.config import ExperimentFile
from server.federation.resume import OpenedRunFolder, finished, opened
from server.runs.scalars import Track
from server.runs.tracking.trackers import store_for, tracked


class Place(Protocol):
    """Where the sites of a run are: on one machine, or at hospitals.

    Attributes:
        durable: Whether what a round leaves must outlive a power cut.
        tell: Prints one line for a person.
    """

    durable: bool
    tell: Callable[[str], None]

    def check(self, *, resume: bool) -> None:
        """Raise :class:`BadInput` with every fault, before anything is written or sent."""

    def alone(self) -> AbstractContextManager[object]:
        """Keep other runs out, where there can be only one."""

    def run(self, opening: OpenedRunFolder) -> dict[str, Any]:
        """Run the rounds and the test; return the summary."""


def lead(
    place: Place,
    file: ExperimentFile,
    out: Path,
    *,
    track: Track | None = None,
    resume: bool = False,
    pages: bool = True,
) -> dict[str, Any]:
    """Run an experiment into the folder ``out``; return its summary.

    Args:
        track: Where figures go beside the run folder.
        resume: Go on with the run in ``out`` from its last checkpoint; if it is done, return its summary, and
            write the pages that are missing.
        pages: Write report and model card: to draw them may take longer than a small run.
    """
    if (summary := finished(out, file.experiment, resume=resume)) is not None:
        if pages and not (out / "report.html").is_file():  # it was stopped after its summary
            write_pages(out)
        return summary
    store = store_for(track)
    place.check(resume=resume)
    with place.alone(), opened(out, file.experiment, resume=resume, durable=place.durable) as opening:
        with tracked(opening.folder, file.experiment, store, place.tell):
            summary = place.run(opening)
        if pages:
            write_pages(out)
    return summary


def write_pages(out: Path) -> None:
    """Write the report and the model card of a run that is done."""
    from server.reporting.pages.model_card import write_model_card  # here: a run need not wait for matplotlib
    from server.reporting.pages.run import write_run_report

    write_run_report(out)
    write_model_card(out)
