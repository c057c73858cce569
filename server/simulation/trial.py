"""One run of a grid: an experiment with a seed, and the folder that it ends in."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError

from common.config import Experiment, ExperimentFile, read_experiment
from common.errors import BadInput, Fault, stop_on
from common.models.zoo.spec import NAMED_BY_THE_RUN
from server.runs.scalars import Track


@dataclass(frozen=True)
class Cell:
    """One experiment with one seed.

    Attributes:
        experiment: The file.
        folder: Where the finished run is; while it is at work it is :attr:`unfinished`.
        overrides: As after ``--set``, the seed among them.
        label: The experiment's name in the table of progress.
        track: Where the run's figures go beside its folder.
        pages: Whether the run writes its report and its model card.
    """

    experiment: Path
    folder: Path
    overrides: tuple[str, ...]
    label: str
    track: Track | None = None
    pages: bool = True

    @cached_property
    def file(self) -> ExperimentFile:
        """The experiment as this cell runs it."""
        return read_experiment(self.experiment, self.overrides)

    @cached_property
    def identity(self) -> str:
        """A text that is equal for two cells of the same run; its name does not count."""
        experiment = self.file.experiment.model_dump(mode="json")
        experiment["run"].pop("name")
        return json.dumps(experiment, sort_keys=True)

    @property
    def rounds(self) -> int:
        return self.file.experiment.run.rounds

    @property
    def unfinished(self) -> Path:
        """Where the run is until it is finished; what is left there by a run that broke off is thrown away."""
        return self.folder.with_name(f"{self.folder.name}.unfinished")

    def is_done(self) -> bool:
        """Whether the folder holds this very experiment, finished; a key that it did not know yet had its default."""
        summary = self.folder / "summary.json"
        if not summary.is_file():
            return False
        try:
            done = Experiment.model_validate(json.loads(summary.read_text(encoding="utf-8"))["experiment"])
        except ValidationError:
            return False
        model = self.file.experiment.model
        hashes = {key: getattr(model, key) or getattr(done.model, key) for key in NAMED_BY_THE_RUN}
        return done == self.file.experiment.model_copy(update={"model": model.model_copy(update=hashes)})


def refuse_seed(overrides: Iterable[str], remedy: str) -> None:
    """Stop where somebody sets the seed, which the grid sets."""
    if any(override.partition("=")[0].strip() == "run.seed" for override in overrides):
        raise BadInput([Fault("--set run.seed", remedy, "Leave it out.")])


def check(cells: Sequence[Cell]) -> None:
    """Check every experiment with every seed, for partitions depend on it; and folders that hold something else.

    Raises:
        BadInput: With all faults.
    """
    runs = {cell.folder: cell for cell in cells}
    found = {cell.folder: _faults(cell) for cell in sorted(runs.values(), key=_same_data_together)}
    stop_on(list(dict.fromkeys(fault for folder in runs for fault in found[folder])))


def _same_data_together(cell: Cell) -> str:
    """A data set that is cut for one experiment is kept for the next that cuts it alike."""
    experiment = cell.file.experiment.model_dump(mode="json")
    return json.dumps([experiment[key] for key in ("data", "partition", "server_data")] + [experiment["run"]["seed"]])


def _faults(cell: Cell) -> Sequence[Fault]:
    from server.simulation.simulate import checked  # here: a wrong --set is refused before torch is imported

    try:
        checked(cell.file)
        if cell.folder.exists() and any(cell.folder.iterdir()) and not cell.is_done():
            problem = "holds another experiment, and nothing is written over."
            return [Fault(str(cell.folder), problem, "Remove it, or name another --out.")]
    except BadInput as error:
        return error.faults
    return []
