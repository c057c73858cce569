"""A trial: an experiment with a seed, among several that are run and compared, and its folder."""

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from polyclinic.common.config import Experiment, ExperimentFile, read_experiment, validate_experiment
from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.models.zoo.spec import RUN_DETERMINED_KEYS
from polyclinic.server.runs.tracking import TrackingService


@dataclass(frozen=True)
class Trial:
    """An experiment with a seed.

    Attributes:
        experiment: The experiment's file, or the name of an example; for given tables, the name in faults.
        folder: Folder of the finished run; an active run is in :attr:`unfinished_folder`.
        overrides: Overrides in the form of ``--set``, including the seed.
        label: The experiment's name in the progress table.
        track: Service that also receives the run's metrics.
        pages: Whether the run writes its report and its model card.
        tables: The experiment's tables, if they are given instead of a file.
    """

    experiment: Path
    folder: Path
    overrides: tuple[str, ...]
    label: str
    track: TrackingService | None = None
    pages: bool = True
    tables: Mapping[str, Any] | None = None

    @cached_property
    def experiment_file(self) -> ExperimentFile:
        """Read the experiment with the overrides of this trial."""
        if self.tables is None:
            return read_experiment(self.experiment, self.overrides)
        return validate_experiment(deepcopy(dict(self.tables)), self.experiment, self.overrides, name=self.label)

    @cached_property
    def settings_text(self) -> str:
        """Return the settings without the run's name as JSON text; trials with equal texts are the same run."""
        experiment = self.experiment_file.experiment.model_dump(mode="json")
        experiment["run"].pop("name")
        return json.dumps(experiment, sort_keys=True)

    @property
    def unfinished_folder(self) -> Path:
        """Return the folder of an unfinished run; the next attempt removes what a stopped one left."""
        return self.folder.with_name(f"{self.folder.name}.unfinished")

    def _read_finished_experiment(self) -> Experiment | None:
        """Return the experiment of the finished run in the folder; None if this release can read none."""
        from polyclinic.strategies.run_length import complete_earlier_round_settings  # here: it imports torch

        summary = self.folder / "summary.json"
        if not summary.is_file():
            return None
        try:
            done = Experiment.model_validate(json.loads(summary.read_text(encoding="utf-8"))["experiment"])
        except ValidationError:
            return None
        return complete_earlier_round_settings(done)

    def describe_changes(self) -> str:
        """Describe the settings in which the finished run in the folder differs from this trial; empty if unknown."""
        from polyclinic.server.federation.checkpoints import describe_experiment_changes  # here: it imports torch
        from polyclinic.strategies.run_length import complete_round_settings

        if (done := self._read_finished_experiment()) is None:
            return ""
        experiment = complete_round_settings(self.experiment_file.experiment)
        return describe_experiment_changes(done.model_dump(mode="json"), experiment)

    def is_trial_finished(self) -> bool:
        """Return True if the folder holds this trial's finished run; keys missing from its summary have defaults."""
        from polyclinic.strategies.run_length import complete_round_settings  # here: it imports torch

        if (done := self._read_finished_experiment()) is None:
            return False
        experiment = complete_round_settings(self.experiment_file.experiment)
        hashes = {key: getattr(experiment.model, key) or getattr(done.model, key) for key in RUN_DETERMINED_KEYS}
        return done == experiment.model_copy(update={"model": experiment.model.model_copy(update=hashes)})


def refuse_seed_override(overrides: Iterable[str]) -> None:
    """Refuse overrides of the seed, because the caller sets the seeds."""
    if any(override.partition("=")[0].strip() == "run.seed" for override in overrides):
        raise BadInput([Fault("--set run.seed", "is settled by --seeds.", "Leave it out.")])


def check_trials(trials: Sequence[Trial]) -> None:
    """Check each trial's experiment, and that its folder holds no run of another experiment.

    Raises:
        BadInput: With all faults.
    """

    def get_cached_data_key(trial: Trial) -> str:
        experiment = trial.experiment_file.experiment.model_dump(mode="json")
        keys = [experiment[key] for key in ("data", "partition", "server_data")]
        return json.dumps([*keys, experiment["run"]["seed"]])

    runs = {trial.folder: trial for trial in trials}
    faults: dict[Path, Sequence[Fault]] = {}
    # Experiments with the same partition follow one another, because the last partition is cached.
    in_order = sorted(runs.values(), key=get_cached_data_key)
    from polyclinic.server.simulation.simulate import (
        check_simulation_experiment,  # here: a wrong --set is refused before torch is imported
    )

    for trial in in_order:
        try:
            check_simulation_experiment(trial.experiment_file)
            if trial.folder.exists() and any(trial.folder.iterdir()) and not trial.is_trial_finished():
                changed = trial.describe_changes()
                reason = f": {changed}. Nothing" if changed else ", and nothing"
                problem = f"holds another experiment{reason} is written over."
                faults[trial.folder] = [Fault(str(trial.folder), problem, "Remove it, or name another --out.")]
        except BadInput as error:
            faults[trial.folder] = error.faults
    raise_faults(list(dict.fromkeys(fault for folder in runs for fault in faults.get(folder, ()))))
