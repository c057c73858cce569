"""Checkpoints of a run: the coordinator's complete state after a round, from which the run can be resumed.

A round has two files in ``checkpoints/``: ``round-000012.safetensors`` with the tensors, and ``round-000012.json`` with
the other values, the run's identifier, and a BLAKE3 hash of tensors and values. Each file is written under a temporary
name, flushed and renamed, the JSON file last. A checkpoint is valid only if both files exist and the hash is right. The
last two checkpoints are kept.
"""

import bisect
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from polyclinic.common.config import Experiment
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.models.zoo.spec import PATCH_KEYS, PLANNED_KEYS, RUN_DETERMINED_KEYS
from polyclinic.common.plugins import format_plugin_user_name, is_local_plugin_name
from polyclinic.common.system.files import ContentParts, make_private_folder, write_atomically
from polyclinic.common.system.plain_text import list_first_and_count_rest
from polyclinic.server.runs.tracking import flatten_nested_tables
from polyclinic.strategies.engine.state import (
    FederationState,
    deserialize_federation_state,
    serialize_federation_state_parts,
)
from polyclinic.strategies.registry import build_experiment_strategy

FORMAT_VERSION = 4
KEPT_CHECKPOINTS = 2
_MAX_LISTED_CHANGES = 5
_CHANGEABLE_SETTINGS = (
    "simulation",
    "participation.sites",
    "participation.min_sites",
    "participation.round_deadline_s",
    "participation.roll_call_deadline_s",
)
"""Tables and keys of an experiment that a resumed run may change: where sites train, and how long it waits for them."""
_SIMULATE_ARGUMENTS = {
    "model.architecture": "model",
    "training.loss": "loss",
    "augmentation.transform": "transform",
    "training.optimizer": "optimizer",
    "training.schedule": "schedule",
    "data.name": "dataset",
    "evaluation.metrics": "metrics",
}
"""Key of a setting that can name a user's Python object -> argument of ``polyclinic.simulate`` for that object."""


@dataclass(frozen=True)
class Checkpoint:
    """The complete state of a run after a round.

    Attributes:
        run: The run's identifier, under which sites store their own state.
        experiment: The experiment with which the run began, as JSON values.
        totals: Sums over the rounds so far (:class:`polyclinic.server.federation.recorder.RunTotals`), as JSON.
        last_validation: Latest validation result that the sites have sent.
    """

    run: str
    state: FederationState
    experiment: Mapping[str, Any]
    totals: Mapping[str, Any]
    last_validation: Mapping[str, Any]


class CheckpointFolder:
    """The folder ``checkpoints/`` of one run.

    Attributes:
        durable: True to flush files to disk. In simulation, where it is False, a power failure may lose more rounds.
    """

    def __init__(self, run_folder: Path, *, durable: bool) -> None:
        self.folder = run_folder / "checkpoints"
        self.durable = durable

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, and remove old ones, so that :data:`KEPT_CHECKPOINTS` checkpoints remain."""
        content = serialize_federation_state_parts(checkpoint.state)
        number = checkpoint.state.round
        facts = {
            "round": number,
            "run": checkpoint.run,
            "experiment": checkpoint.experiment,
            "books": checkpoint.totals,
            "last_validation": checkpoint.last_validation,
        }
        make_private_folder(self.folder)  # unfinished models and sites' statistics are for this account only
        write_atomically(self._round_checkpoint_path(number, "safetensors"), content, durable=self.durable)
        document = {"version": FORMAT_VERSION, "blake3": _hash_checkpoint(content, facts), "facts": facts}
        encoded = json.dumps(document).encode()
        write_atomically(self._round_checkpoint_path(number, "json"), encoded, durable=self.durable)
        # Checkpoints of later rounds can only be damaged ones. They do not count among the checkpoints to keep.
        numbers = self._list_checkpoint_rounds()
        self._remove_checkpoints(numbers[: max(bisect.bisect_right(numbers, number) - KEPT_CHECKPOINTS, 0)])

    def read_round_checkpoint(self, server_round: int) -> Checkpoint | None:
        """Return the checkpoint of this round; None if it is missing or damaged."""
        try:
            return self._read_verified_checkpoint(server_round)
        except (OSError, ValueError):
            return None

    def revert_to_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write this checkpoint of an earlier round, and remove all later ones, so that the run repeats from there.

        A run that is killed before the removal resumes from a later checkpoint, and reverts again.
        """
        self.save_checkpoint(checkpoint)
        self._remove_checkpoints(later for later in self._list_checkpoint_rounds() if later > checkpoint.state.round)

    def _remove_checkpoints(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            for kind in ("json", "safetensors"):
                self._round_checkpoint_path(number, kind).unlink(missing_ok=True)

    def read_newest_undamaged_checkpoint(self) -> tuple[Checkpoint | None, dict[str, str]]:
        """Return the newest undamaged checkpoint; and file name -> fault of each newer, damaged checkpoint."""
        faults: dict[str, str] = {}
        for number in reversed(self._list_checkpoint_rounds()):
            try:
                return self._read_verified_checkpoint(number), faults
            except (OSError, ValueError) as error:
                problem = str(error)
                if isinstance(error, FileNotFoundError):
                    problem = f"there is no {Path(error.filename).name} beside it"
                elif isinstance(error, OSError):
                    problem = f"it cannot be read: {error.strerror}"
                faults[self._round_checkpoint_path(number, "json").name] = problem
        return None, faults

    def _read_verified_checkpoint(self, number: int) -> Checkpoint:
        """Return the checkpoint of a round.

        Raises:
            OSError: If a file is missing or cannot be read.
            ValueError: If a file is damaged, or of another release or round.
        """
        json_path = self._round_checkpoint_path(number, "json")
        tensors_path = self._round_checkpoint_path(number, "safetensors")
        special_files = [path.name for path in (json_path, tensors_path) if path.exists() and not path.is_file()]
        if special_files:  # reading from a pipe might never end
            raise ValueError(f"{special_files[0]} is no file")
        text = json_path.read_bytes()
        content = tensors_path.read_bytes()
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("it is cut off or damaged") from None
        if not isinstance(document, dict) or "version" not in document:
            raise ValueError("it is not what a run writes")
        if document["version"] != FORMAT_VERSION:
            raise ValueError(f"it has version {document['version']}, this release reads {FORMAT_VERSION}")
        facts: Any = document.get("facts")
        if _hash_checkpoint([content], facts) != document.get("blake3"):
            raise ValueError("its hash is not that of what it says and of the state beside it")

        state = deserialize_federation_state(content)
        is_of_round = isinstance(facts, dict) and isinstance(facts.get("run"), str)
        is_of_round = is_of_round and facts.get("round") == state.round == number
        tables = [facts.get(name) for name in ("books", "last_validation", "experiment")] if is_of_round else []
        if tables and isinstance(experiment := tables[-1], dict):
            tables += [experiment.get("run"), experiment.get("model")]
        if not tables or not all(isinstance(table, dict) for table in tables):
            raise ValueError("it is not what a run writes after this round")
        return Checkpoint(facts["run"], state, facts["experiment"], facts["books"], facts["last_validation"])

    def _list_checkpoint_rounds(self) -> list[int]:
        numbers = []
        for path in self.folder.glob("round-*.json"):
            if (name := path.stem.removeprefix("round-")).isdecimal():
                numbers.append(int(name))
        return sorted(numbers)

    def _round_checkpoint_path(self, number: int, kind: str) -> Path:
        return self.folder / f"round-{number:06d}.{kind}"


def _hash_checkpoint(content: ContentParts, facts: Any) -> str:
    digest = blake3()
    for part in content:
        digest.update(part)
    digest.update(json.dumps(facts).encode())
    return digest.hexdigest()


def refuse_checkpoint_of_other_experiment(checkpoint: Checkpoint, experiment: Experiment, out: Path) -> None:
    """Raise :class:`BadInput` unless a run can be resumed from a checkpoint with this experiment.

    The experiment may set another number of rounds, but not fewer than are completed. The number must be the same if
    the completed rounds depend on it: by a learning rate schedule, by the noise of a privacy level, or because the
    method treats its last rounds differently.
    """
    refuse_experiment_changes(checkpoint.experiment, experiment, out)
    rounds = experiment.run.rounds
    rounds_before = checkpoint.experiment["run"]["rounds"]
    done = checkpoint.state.round
    if done and rounds != rounds_before:
        special_rounds = build_experiment_strategy(experiment).site.special_last_rounds
        if experiment.training.schedule != "constant":
            reason = f'the learning rates of training.schedule "{experiment.training.schedule}" follow from it'
        elif experiment.privacy.level != "none":
            reason = f'the noise of privacy.level "{experiment.privacy.level}" follows from it'
        elif special_rounds and done > min(rounds_before, rounds) - special_rounds:
            reason = f'the last {special_rounds} rounds of "{experiment.run.method}" differ from the others'
        else:
            reason = ""
        if reason:
            problem = (
                f"has done {done} rounds as a run of {rounds_before}; run.rounds cannot become {rounds}, for {reason}."
            )
            remedy = f"Set run.rounds to {rounds_before}, or {suggest_new_run(out)}."
            raise BadInput([Fault(f"--resume {out}", problem, remedy)])
    if done > rounds:
        problem = f"has done {done} rounds; the experiment asks for {rounds}."
        raise BadInput([Fault(f"--resume {out}", problem, "Set run.rounds to as many, or more.")])


def suggest_new_run(out: Path) -> str:
    """Return a remedy for a message: to begin a new run, from the global model if the run in ``out`` has one."""
    weights = out.resolve() / "model.safetensors"
    if not weights.is_file():
        return "begin a new run: --out NEW"
    return f"begin a new run from its model: --out NEW --set model.weights={weights}"


def refuse_experiment_changes(before: Mapping[str, Any], experiment: Experiment, out: Path) -> None:
    """Raise :class:`BadInput` if an experiment differs from that of the run in more than its rounds and name.

    Args:
        before: The experiment of the run, as JSON.
    """
    with_same_rounds = {**before, "run": {**before["run"], "rounds": experiment.run.rounds}}
    changes = describe_experiment_changes(with_same_rounds, experiment)
    if changes:
        problem = f"began with another experiment: {changes}."
        raise BadInput([Fault(f"--resume {out}", problem, "Resume with the same file and --set, or take a new --out.")])


def describe_experiment_changes(before: Mapping[str, Any], experiment: Experiment) -> str:
    """Describe the settings in which an experiment differs from that of a run, except its name; empty if in none.

    Args:
        before: The experiment of the run, as JSON.
    """
    began = dict(before)
    now = experiment.model_dump(mode="json")
    began["run"] = {**began["run"], "name": now["run"]["name"]}
    planned = (*PLANNED_KEYS, *PATCH_KEYS) if experiment.planning is not None else ()
    for key in (*RUN_DETERMINED_KEYS, *planned):
        if now["model"].get(key) is None:  # the value is compared when the network is built
            now["model"] = {**now["model"], key: began["model"].get(key)}
    if planned and "batch_size" not in experiment.training.model_fields_set:
        now["training"] = {**now["training"], "batch_size": began["training"]["batch_size"]}
    old, new = (
        {
            key: value
            for key, value in flatten_nested_tables(tree)
            if value not in ({}, []) and not {key, key.partition(".")[0]} & {*_CHANGEABLE_SETTINGS}
        }
        for tree in (began, now)
    )
    # The number of GPUs over which a batch of a simulated site is split; another release may have other keys.
    gpus = [tree.get("simulation", {}).get("gpus_per_site", "auto") for tree in (began, now)]
    gpus_before, gpus_now = (1 if number == "auto" else max(1, int(number)) for number in gpus)
    if gpus_before != gpus_now:  # sums over another number of parts have other rounding errors
        old["simulation.gpus_per_site"] = gpus_before
        new["simulation.gpus_per_site"] = gpus_now
    changes = [
        _describe_setting_change(key, old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    return list_first_and_count_rest(changes, _MAX_LISTED_CHANGES) if changes else ""


def _describe_setting_change(key: str, before: Any, now: Any) -> str:
    """Describe the change of a setting.

    A user's object is called by its argument of ``polyclinic.simulate``, such as ``dataset``.

    Args:
        key: Dotted key of the setting in the experiment.
        before: Value in the run's experiment.
        now: Value in the present experiment.
    """
    argument = _SIMULATE_ARGUMENTS.get(key, "")
    lists = [value if isinstance(value, list) else [value] for value in (before, now)]
    names = [[name for name in values if isinstance(name, str)] for values in lists]
    if not argument or not any(map(is_local_plugin_name, names[0] + names[1])):
        return f"{key} was {json.dumps(before)}, is {json.dumps(now)}"
    texts = [", ".join(format_plugin_user_name(argument, name) for name in value) or "not given" for value in names]
    if texts[0] != texts[1]:
        return f"{key} was {texts[0]}, is {texts[1]}"
    parts = "pictures, labels, names or code" if argument == "dataset" else "code or values"
    return f"{texts[0]} has other {parts} than the run began with"
