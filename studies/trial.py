"""One experiment with one seed, of several that are run side by side, and the folder that it ends in."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError

from common.config import Experiment, ExperimentFile, read_experiment
from common.errors import BadInput, Fault, stop_on
from common.models.zoo.spec import NAMED_BY_THE_RUN
from server.runs.tracking import Track


@dataclass(frozen=True)
class Trial:
    """One experiment with one seed.

    Attributes:
        experiment: The experiment's file.
        folder: Folder of the finished run; while it is at work it is in :attr:`unfinished`.
        overrides: Settings as after ``--set``, with the seed.
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
        """Read the experiment as this trial runs it."""
        return read_experiment(self.experiment, self.overrides)

    @cached_property
    def identity(self) -> str:
        """Return a text that is equal for two trials of the same run; its name does not count."""
        experiment = self.file.experiment.model_dump(mode="json")
        experiment["run"].pop("name")
        return json.dumps(experiment, sort_keys=True)

    @property
    def unfinished(self) -> Path:
        """Return the run's folder until it is finished; a run that broke off leaves it, and the next removes it."""
        return self.folder.with_name(f"{self.folder.name}.unfinished")

    def is_done(self) -> bool:
        """Return whether the folder holds this experiment, finished; a key that it did not know had its default."""
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
    """Refuse a seed among the settings, because the caller sets it."""
    if any(override.partition("=")[0].strip() == "run.seed" for override in overrides):
        raise BadInput([Fault("--set run.seed", remedy, "Leave it out.")])


def check(trials: Sequence[Trial]) -> None:
    """Check every experiment with every seed, for partitions depend on it; and folders that hold something else.

    Raises:
        BadInput: With all faults.
    """

    def data_key(trial: Trial) -> str:
        experiment = trial.file.experiment.model_dump(mode="json")
        keys = [experiment[key] for key in ("data", "partition", "server_data")]
        return json.dumps([*keys, experiment["run"]["seed"]])

    runs = {trial.folder: trial for trial in trials}
    # Experiments that cut a data set alike follow one another, because the last one cut is kept.
    faults = {trial.folder: _faults(trial) for trial in sorted(runs.values(), key=data_key)}
    stop_on(list(dict.fromkeys(fault for folder in runs for fault in faults[folder])))


def _faults(trial: Trial) -> Sequence[Fault]:
    from server.simulation.simulate import checked  # here: a wrong --set is refused before torch is imported

    try:
        checked(trial.file)
        if trial.folder.exists() and any(trial.folder.iterdir()) and not trial.is_done():
            problem = "holds another experiment, and nothing is written over."
            return [Fault(str(trial.folder), problem, "Remove it, or name another --out.")]
    except BadInput as error:
        return error.faults
    return []
