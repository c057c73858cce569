"""Experiment files beside their papers: what each key is, what the study says that it is, and the table of the docs.

``PYTHONPATH=. python -m tests.studies.paper_settings`` writes the tables of docs/papers.md anew.
"""

import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from polyclinic.common.config import Experiment, read_experiment, read_experiment_tables
from polyclinic.strategies.registry import build_site_method
from polyclinic.studies.study import list_study_trials
from polyclinic.studies.study_file import PaperDeparture, PaperSetting, StudyFile, read_study
from polyclinic.studies.trial import Trial

ROOT = Path(__file__).parents[2]
EXPERIMENTS, PAGE = ROOT / "experiments", ROOT / "docs" / "papers.md"
DEFAULTS = EXPERIMENTS / "papers" / "defaults.toml"
STUDIES = sorted(path.parent for path in (EXPERIMENTS / "papers").glob("*/study.toml"))
NOT_A_SETTING = ("extends", "small", "run.name", "run.method")
FIRST_OF_TABLE = {"privacy": "privacy.level", "simulation": "simulation.backend"}
"""Tables whose other keys matter only with another value of the first."""
Part = PaperSetting | PaperDeparture


@cache
def read_file(path: Path, *overrides: str) -> Experiment:
    return read_experiment(path, overrides).experiment


@cache
def files_of(folder: Path) -> dict[str, Path]:
    """The experiment files of a study's tables and of the paper's own folder, by path below ``experiments``."""
    named = (trial.experiment for trial in trials_in(folder))
    paths = {path.resolve() for path in (*named, *(EXPERIMENTS / folder.name).glob("*.toml"))}
    return {str(path.relative_to(EXPERIMENTS).with_suffix("")): path for path in sorted(paths)}


def trials_in(folder: Path) -> list[Trial]:
    """Every run of a study's tables, with one seed."""
    grids = list_study_trials(read_study(folder, quick=False), folder, folder, (), range(1))
    return [trial for grid in grids for row in grid for column in row for trial in column]


@cache
def keys_of(path: Path) -> set[str]:
    """The keys that a file and its ancestors set, in full scale."""
    keys = flat(read_experiment_tables(path)[0])
    return {key for key in keys if key not in NOT_A_SETTING and key.split(".")[0] not in NOT_A_SETTING}


def flat(table: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{key}.")
        else:
            yield before + key


def value_of(experiment: Experiment, key: str) -> object:
    """The value that a key has, set or by default; a table's value is the names in it, and that of no value "none"."""
    section, *rest = key.split(".")
    value: Any = build_site_method(experiment).parameters if section == "method" else getattr(experiment, section)
    for name in rest:
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    if isinstance(value, Mapping):
        return list(value)
    return "none" if value is None else value if not isinstance(value, BaseModel) else value.model_dump()


@dataclass(frozen=True)
class Defaults:
    """What no file after a paper sets: settings and departures of all files, and key -> a value that changes no run."""

    settings: tuple[PaperSetting, ...]
    departures: tuple[PaperDeparture, ...]
    idle: Mapping[str, object]


def read_defaults() -> Defaults:
    tables = tomllib.loads(DEFAULTS.read_text(encoding="utf-8"))
    settings = tuple(PaperSetting.model_validate(each) for each in tables["settings"])
    departures = tuple(PaperDeparture.model_validate(each) for each in tables["departures"])
    return Defaults(settings, departures, {**tables["off"], **tables["beside"]})


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
        experiment, own = read_file(path), keys_of(path)
        settings = [setting for setting in (*study.settings, *more) if goes_for(setting, name)]
        for key in sorted(every_key(experiment)):
            is_set = any(each == key or each.startswith(f"{key}.") for each in own)
            if not is_set and not any(covers(setting, key) for setting in settings):
                yield name, key, value_of(experiment, FIRST_OF_TABLE.get(key, key))


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


def goes_for(part: Part, name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in part.files)


def covers(part: Part, key: str) -> bool:
    return key == part.key or key.startswith(f"{part.key}.")


def equal(ours: object, theirs: object) -> bool:
    return list(ours) == list(theirs) if isinstance(ours, list | tuple) and isinstance(theirs, list) else ours == theirs


def faults_of_files(study: StudyFile, files: Mapping[str, Path]) -> list[str]:
    """Every key of a file that the study compares with nothing, or that differs from the paper without being listed."""
    faults = []
    for name, path in files.items():
        experiment = read_file(path)
        settings = [setting for setting in study.settings if goes_for(setting, name)]
        faults += [
            f"{name}: {key} is compared with nothing"
            for key in sorted(keys_of(path))
            if not any(covers(setting, key) for setting in settings)
        ]
        keys = Counter(setting.key for setting in settings)
        faults += [f"{name}: {key} is in settings twice" for key, count in keys.items() if count > 1]
        for setting in settings:
            ours = value_of(experiment, setting.key)
            listed = [each for each in study.departures if each.key == setting.key and goes_for(each, name)]
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
    idle = [part for part in parts if not any(goes_for(part, name) for name in files)]
    faults = [f"{part.key}: {list(part.files)} is no file" for part in idle]
    keys = {setting.key for setting in study.settings}
    faults += [f"{each.key}: a departure from no setting" for each in study.departures if each.key not in keys]
    words = [each for each in study.settings if each.value is not None and isinstance(each.paper, bool | int | float)]
    return faults + [f"{each.key}: value hides the paper's {each.paper}" for each in words]


# ---------------------------------------------------------------------- the table of the docs


def settings_table(study: StudyFile, files: Mapping[str, Path]) -> str:
    """The study's settings and departures as a table in Markdown, without those that name our value alone."""
    rows = ["| key | paper | code | ours | why |", "| --- | --- | --- | --- | --- |"]
    for setting in study.settings:
        departures = [
            each
            for each in study.departures
            if each.key == setting.key and any(goes_for(each, name) and goes_for(setting, name) for name in files)
        ]
        if setting.paper is None and setting.code is None and not setting.why and not departures:
            continue
        rest = [n for n in files if goes_for(setting, n) and not any(goes_for(each, n) for each in departures)]
        ours = [cell(setting.reference_value)] if rest else []
        partial = bool(rest) or len(departures) > 1
        ours += [cell(each.ours) + (f" ({patterns(each)})" if partial else "") for each in departures]
        key = f"`{setting.key}`" + (f" ({setting.rows or patterns(setting)})" if setting.files != ("*",) else "")
        why = "; ".join(dict.fromkeys(text for text in (setting.why, *(each.why for each in departures)) if text))
        rows.append(f"| {key} | {cell(setting.paper)} | {cell(setting.code)} | {'; '.join(ours)} | {why} |")
    return "\n".join(rows)


def patterns(part: Part) -> str:
    return ", ".join(f"`{pattern}`" for pattern in part.files)


def cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, list | tuple):
        return ", ".join(str(each) for each in value)
    if isinstance(value, str) and "/" in value:
        return f"`{Path(value).name}`"
    if isinstance(value, float):
        return f"{value:g}".replace("e-0", "e-")
    return str(value).lower() if isinstance(value, bool) else str(value)


def with_tables(page: str) -> str:
    """The page with each table between its marks as the study has it now; the first is of the defaults of all files."""

    def fill(mark: str, table: str) -> None:
        nonlocal page
        marks = rf"(<!-- {mark} -->\n).*?(<!-- end -->)"
        page = re.sub(marks, lambda match: f"{match[1]}\n{table}\n\n{match[2]}", page, flags=re.DOTALL)

    for folder in STUDIES:
        fill(f"settings: {folder.name}", settings_table(read_study(folder, quick=False), files_of(folder)))
        fill(f"small: {folder.name}", small_table(files_of(folder)))
    everywhere, first = read_defaults(), read_study(STUDIES[0], quick=False)
    alone = first.model_copy(update={"settings": everywhere.settings, "departures": everywhere.departures})
    fill("settings: all", settings_table(alone, files_of(STUDIES[0])))
    fill("benchmark", benchmark_table())
    return page


def small_table(files: Mapping[str, Path]) -> str:
    """Every key that a ``[small]`` table changes, in full and in small, as a table in Markdown."""
    changes: dict[str, dict[tuple[str, str], list[str]]] = {}
    for name, path in files.items():
        small = read_experiment_tables(path)[0].get("small", {})
        full, short = read_file(path), read_file(path, "scale=small") if small else None
        for key in flat(small) if short else ():
            values = (key_cell(full, key), key_cell(short, key))
            if values[0] != values[1] and key not in NOT_A_SETTING and not key.endswith("_sha256"):
                changes.setdefault(key, {}).setdefault(values, []).append(name)
    rows = ["| key | full: small |", "| --- | --- |"]
    for key, by_values in changes.items():
        texts = [f"{full}: {short} ({common_patterns(names, files)})" for (full, short), names in by_values.items()]
        rows.append(f"| `{key}` | {'; '.join(texts)} |")
    return "\n".join(rows)


def key_cell(experiment: Experiment, key: str) -> str:
    value = value_of(experiment, key)
    return cell(value) if value or value == 0 else "none"


def common_patterns(names: Sequence[str], files: Mapping[str, Path]) -> str:
    """A few patterns that go for these files and no others: beginnings, parts and ends of their names."""
    if set(names) == set(files):
        return "all"
    cuts = [(name, cut.start()) for name in names for cut in re.finditer("[/_]", name)]
    parts = {part for name in names for part in re.split("[/_]", name)}
    candidates = [f"{name[: cut + 1]}*" for name, cut in cuts] + [f"{name}*" for name in names]
    candidates += [f"*{name[cut:]}" for name, cut in cuts] + [f"*{part}*" for part in parts]
    fitting = sorted({each for each in candidates if {n for n in files if fnmatchcase(n, each)} <= set(names)})
    left, chosen = set(names), list[str]()
    while left:
        chosen.append(max((*fitting, *sorted(left)), key=lambda each: sum(fnmatchcase(name, each) for name in left)))
        left -= {name for name in left if fnmatchcase(name, chosen[-1])}
    return ", ".join(f"`{each}`" for each in chosen)


def benchmark_table() -> str:
    """The keys that the benchmark sets for single rows, but for the weights of positives, which results.md lists."""
    tables = tomllib.loads((EXPERIMENTS / "benchmark" / "benchmark.toml").read_text(encoding="utf-8"))
    rows = ["| row | keys |", "| --- | --- |"]
    for method in tables["methods"]:
        keys = [f"`{each}`" for each in method.get("set", ()) if not each.startswith("training.class_weights")]
        if keys:
            rows.append(f"| {method.get('title', method['name'])} | {', '.join(keys)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
