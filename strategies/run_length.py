"""The settings of an experiment that count rounds: their defaults, and the check that the run reaches every stage.

Only the coordinator's experiment is completed and checked. A hospital takes the plan that it receives, also from a
coordinator of an earlier release, which does not write these settings.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from polyclinic.common.config import Experiment
from polyclinic.common.errors import BadInput, Fault
from polyclinic.strategies.local.method_traits import Parameters
from polyclinic.strategies.local.stages import RoundDefault, Stage, add_round_defaults
from polyclinic.strategies.registry import find_method_class


def complete_round_settings(experiment: Experiment, begun: Mapping[str, Any] | None = None) -> Experiment:
    """Return an experiment with a value for each setting of its method that counts rounds.

    An experiment of a method that does not exist is returned unchanged.

    Args:
        begun: Experiment of the run that is resumed, as JSON; None for a new run. Its values are kept. A missing one is
            not added, because earlier releases wrote none of these settings.
    """
    defaults = _list_round_defaults(experiment.run.method)
    if begun is None:
        method = add_round_defaults(defaults, experiment.method, experiment.run.rounds)
    else:
        kept = {key: value for key, value in begun.get("method", {}).items() if key in defaults}
        method = {**kept, **experiment.method}
    return experiment.model_copy(update={"method": method})


def complete_earlier_round_settings(experiment: Experiment) -> Experiment:
    """Return the experiment of a finished run with the values that it had for settings that count rounds.

    An earlier release used the values of the paper where the experiment gave none, no matter how many rounds it had.
    """
    table = _find_parameters_class(experiment.run.method)
    papers = {key: table.model_fields[key].default for key in table.round_defaults}
    return experiment.model_copy(update={"method": {**papers, **experiment.method}})


def find_unreached_stage_faults(experiment: Experiment) -> list[Fault]:
    """Return a fault for each stage, ramp or period of the method that begins after the run's last round.

    Args:
        experiment: A completed experiment (:func:`complete_round_settings`). Faults of the method's table are found
            elsewhere; here such a method has no stages.
    """
    rounds = experiment.run.rounds
    rising = experiment.training.schedule_warm_up
    faults = [
        _make_stage_fault(stage, experiment)
        for stage in _list_method_stages(experiment.run.method, experiment.method)
        if stage.first_round > rounds
    ]
    if rising >= rounds:
        key = "training.schedule_warm_up"
        problem = (
            f"is {rising}: the learning rate reaches training.lr in round {rising + 1}, and run.rounds is {rounds}."
        )
        faults.append(Fault(key, problem, _list_choices(f"{key} = {rounds - 1}", f"run.rounds = {rising + 1}")))
    return faults


def _make_stage_fault(stage: Stage, experiment: Experiment) -> Fault:
    """Return the fault of a stage that the run does not reach, with the settings that reach it."""
    name = experiment.run.method
    given = experiment.method
    rounds = experiment.run.rounds
    problem = f"{stage.event} in round {stage.first_round}, and run.rounds is {rounds}."
    longer = f"run.rounds = {stage.first_round}"
    without = f"method.{stage.without}" if stage.without else ""
    others = {key: value for key, value in given.items() if key not in stage.settings}
    by_default = add_round_defaults(_list_round_defaults(name), others, rounds)
    if any(each.first_round > rounds for each in _list_method_stages(name, by_default)):
        return Fault("run.rounds", f"is {rounds}: in {name}, {problem}", _list_choices(longer, without))
    fields = _find_parameters_class(name).model_fields
    values, now = (
        {key: settings.get(key, fields[key].default) for key in stage.settings} for settings in (by_default, given)
    )
    changed = [f"method.{key} = {value}" for key, value in values.items() if value != now[key]]
    last = stage.settings[-1]
    is_last = " with ".join([f"is {now[last]}", *(f"{key} {now[key]}" for key in stage.settings[:-1])])
    remedy = _list_choices(", ".join(changed), longer, without)
    return Fault(f"method.{last}", f"{is_last}: {problem}", remedy)


def _list_choices(*choices: str) -> str:
    return f"Set {', or '.join(choice for choice in choices if choice)}."


def _list_method_stages(name: str, settings: Mapping[str, Any]) -> tuple[Stage, ...]:
    table = _find_parameters_class(name)
    try:
        return table.model_validate(dict(settings)).list_stages()
    except ValidationError:
        return ()


def _list_round_defaults(name: str) -> Mapping[str, RoundDefault]:
    return _find_parameters_class(name).round_defaults


def _find_parameters_class(name: str) -> type[Parameters]:
    """Return the schema of a method's table; :class:`Parameters` if there is no such method."""
    try:
        return find_method_class(name).site_class.traits.parameters_class
    except BadInput:
        return Parameters
