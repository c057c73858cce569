"""Faults of the experiment files beside their papers: a key without a setting, a departure that is not listed."""

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from polyclinic.common.config import Experiment, read_experiment_tables
from polyclinic.strategies.registry import build_site_method
from polyclinic.studies.study_file import PaperSetting, StudyFile
from supply.paper_settings import (
    NOT_A_SETTING,
    Defaults,
    Part,
    applies_to,
    find_value,
    list_keys,
    read_experiment_file,
)

FIRST_OF_TABLE = {"privacy": "privacy.level", "simulation": "simulation.backend"}
"""Tables whose other keys matter only with another value of the first."""


@cache
def keys_of(path: Path) -> set[str]:
    """The keys that a file and its ancestors set, in full scale."""
    keys = list_keys(read_experiment_tables(path)[0])
    return {key for key in keys if key not in NOT_A_SETTING and key.split(".")[0] not in NOT_A_SETTING}


def every_key(experiment: Experiment) -> set[str]:
    """Every key that an experiment has, set or by default; of ``privacy`` and ``simulation`` their first alone."""
    keys = {"privacy", "simulation", "server_data", "external_test"}
    keys |= {f"method.{name}" for name in type(build_site_method(experiment).parameters).model_fields}
    for section in ("run", "model", "training", "augmentation", "evaluation", "participation", "data", "partition"):
        keys |= {f"{section}.{name}" for name in type(getattr(experiment, section)).model_fields}
    return keys - set(NOT_A_SETTING)


def keys_left(
    study: StudyFile, files: Mapping[str, Path], more: tuple[PaperSetting, ...] = ()
) -> Iterator[tuple[str, str, object]]:
    """Yield a file's name, each key that it leaves at its default and no setting has, and the value."""
    for name, path in files.items():
        experiment, own = read_experiment_file(path), keys_of(path)
        settings = [setting for setting in (*study.settings, *more) if applies_to(setting, name)]
        for key in sorted(every_key(experiment)):
            is_set = any(each == key or each.startswith(f"{key}.") for each in own)
            if not is_set and not any(covers(setting, key) for setting in settings):
                yield name, key, find_value(experiment, FIRST_OF_TABLE.get(key, key))


def faults_of_defaults(study: StudyFile, files: Mapping[str, Path], defaults: Defaults) -> list[str]:
    """Every key that a file does not set and no list has, or that is idle with another value than the file has."""
    faults = []
    for name, key, value in keys_left(study, files, defaults.settings):
        if key not in defaults.idle:
            faults.append(f"{name}: {key} is {value} by default, and no list has it")
        elif not equal(value, defaults.idle[key]):
            faults.append(f"{name}: {key} is {value} by default, not {defaults.idle[key]}")
    return faults


def with_defaults(study: StudyFile, defaults: Defaults) -> StudyFile:
    """The study with the settings and departures of all files among its own."""
    both = {"settings": (*study.settings, *defaults.settings), "departures": (*study.departures, *defaults.departures)}
    return study.model_copy(update=both)


def faults_of_files(study: StudyFile, files: Mapping[str, Path]) -> list[str]:
    """Every key of a file that the study compares with nothing, or that differs from the paper without being listed."""
    faults = []
    for name, path in files.items():
        experiment = read_experiment_file(path)
        settings = [setting for setting in study.settings if applies_to(setting, name)]
        faults += [
            f"{name}: {key} is compared with nothing"
            for key in sorted(keys_of(path))
            if not any(covers(setting, key) for setting in settings)
        ]
        keys = Counter(setting.key for setting in settings)
        faults += [f"{name}: {key} is in settings twice" for key, count in keys.items() if count > 1]
        for setting in settings:
            ours = find_value(experiment, setting.key)
            listed = [each for each in study.departures if each.key == setting.key and applies_to(each, name)]
            differs = setting.reference_value is not None and not equal(ours, setting.reference_value)
            if differs and not any(equal(ours, each.ours) for each in listed):
                faults.append(
                    f"{name}: {setting.key} is {ours}, not {setting.reference_value}, and no departure says so"
                )
            if not differs and listed:
                faults.append(f"{name}: {setting.key} is {ours} as in the paper, and a departure says that it is not")
    return faults


def faults_of_lists(study: StudyFile, files: Mapping[str, Path]) -> list[str]:
    """Every setting or departure that goes for no file, and every departure without a setting of its key."""
    parts: list[Part] = [*study.settings, *study.departures]
    idle = [part for part in parts if not any(applies_to(part, name) for name in files)]
    faults = [f"{part.key}: {list(part.files)} is no file" for part in idle]
    keys = {setting.key for setting in study.settings}
    faults += [f"{each.key}: a departure from no setting" for each in study.departures if each.key not in keys]
    words = [each for each in study.settings if each.value is not None and isinstance(each.paper, bool | int | float)]
    return faults + [f"{each.key}: value hides the paper's {each.paper}" for each in words]


def covers(part: Part, key: str) -> bool:
    return key == part.key or key.startswith(f"{part.key}.")


def equal(ours: object, theirs: object) -> bool:
    return list(ours) == list(theirs) if isinstance(ours, list | tuple) and isinstance(theirs, list) else ours == theirs
