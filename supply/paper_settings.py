"""Tables of docs/papers.md: the keys of the experiment files beside their papers, and what a small run changes.

The settings of a paper, of its authors' code and our departures stand in ``experiments/papers/*/study.toml``; those of
all papers in ``experiments/papers/defaults.toml``. ``make reference`` writes the tables.
"""

import re
import tomllib
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
from supply.blocks import format_table

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
DEFAULTS = EXPERIMENTS / "papers" / "defaults.toml"
STUDIES = sorted(path.parent for path in (EXPERIMENTS / "papers").glob("*/study.toml"))
NOT_A_SETTING = ("extends", "small", "run.name", "run.method")
Part = PaperSetting | PaperDeparture


@cache
def read_experiment_file(path: Path, *overrides: str) -> Experiment:
    """Return an experiment file, with overrides such as ``scale=small``; each is read once."""
    return read_experiment(path, overrides).experiment


@cache
def find_study_files(folder: Path) -> dict[str, Path]:
    """Return path below ``experiments`` -> file, of a study's tables and of the paper's own folder."""
    named = (trial.experiment for trial in list_study_runs(folder))
    paths = {path.resolve() for path in (*named, *(EXPERIMENTS / folder.name).glob("*.toml"))}
    return {str(path.relative_to(EXPERIMENTS).with_suffix("")): path for path in sorted(paths)}


def list_study_runs(folder: Path) -> list[Trial]:
    """Return every run of a study's tables, with one seed."""
    grids = list_study_trials(read_study(folder, quick=False), folder, folder, (), range(1))
    return [trial for grid in grids for row in grid for column in row for trial in column]


def list_keys(table: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Yield the dotted keys of a table and of those in it."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from list_keys(value, f"{before}{key}.")
        else:
            yield before + key


def find_value(experiment: Experiment, key: str) -> object:
    """Return a key's value, set or by default.

    The value of a mapping is the list of its names; that of a key without value is "none".
    """
    section, *rest = key.split(".")
    value: Any = build_site_method(experiment).parameters if section == "method" else getattr(experiment, section)
    for name in rest:
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    if isinstance(value, Mapping):
        return list(value)
    return "none" if value is None else value if not isinstance(value, BaseModel) else value.model_dump()


@dataclass(frozen=True)
class Defaults:
    """What goes for the files of all papers.

    Attributes:
        settings: Papers' settings that no file sets.
        departures: Our values of these, and why.
        idle: Key -> the default with which it changes no run.
    """

    settings: tuple[PaperSetting, ...]
    departures: tuple[PaperDeparture, ...]
    idle: Mapping[str, object]


def read_defaults() -> Defaults:
    """Return what ``experiments/papers/defaults.toml`` says."""
    tables = tomllib.loads(DEFAULTS.read_text(encoding="utf-8"))
    settings = tuple(PaperSetting.model_validate(each) for each in tables["settings"])
    departures = tuple(PaperDeparture.model_validate(each) for each in tables["departures"])
    return Defaults(settings, departures, {**tables["off"], **tables["beside"]})


def applies_to(part: Part, name: str) -> bool:
    """Return True if a setting or departure is of a file, named by its path below ``experiments``."""
    return any(fnmatchcase(name, pattern) for pattern in part.files)


# ---------------------------------------------------------------------- tables


def list_blocks_of_settings() -> dict[str, str]:
    """Return block -> text of docs/papers.md."""
    blocks = {"settings of all papers": format_settings_of_all(), "keys of the benchmark": format_benchmark_table()}
    for folder in STUDIES:
        files = find_study_files(folder)
        blocks[f"settings of {folder.name}"] = format_settings_table(read_study(folder, quick=False), files)
        blocks[f"small scale of {folder.name}"] = format_small_table(files)
    return blocks


def format_settings_of_all() -> str:
    """Return the settings that no file sets, and our departures from them."""
    defaults, any_study = read_defaults(), read_study(STUDIES[0], quick=False)
    alone = any_study.model_copy(update={"settings": defaults.settings, "departures": defaults.departures})
    return format_settings_table(alone, find_study_files(STUDIES[0]))


def format_settings_table(study: StudyFile, files: Mapping[str, Path]) -> str:
    """Return a study's settings and departures as a table, without those that name our value alone."""
    rows = list[tuple[str, ...]]()
    for setting in study.settings:
        departures = [
            each
            for each in study.departures
            if each.key == setting.key and any(applies_to(each, name) and applies_to(setting, name) for name in files)
        ]
        if setting.paper is None and setting.code is None and not setting.why and not departures:
            continue
        rest = [n for n in files if applies_to(setting, n) and not any(applies_to(each, n) for each in departures)]
        ours = [format_cell(setting.reference_value)] if rest else []
        partial = bool(rest) or len(departures) > 1
        ours += [format_cell(each.ours) + (f" ({format_patterns(each)})" if partial else "") for each in departures]
        key = f"`{setting.key}`" + (f" ({setting.rows or format_patterns(setting)})" if setting.files != ("*",) else "")
        why = "; ".join(dict.fromkeys(text for text in (setting.why, *(each.why for each in departures)) if text))
        rows.append((key, format_cell(setting.paper), format_cell(setting.code), "; ".join(ours), why))
    return format_table(("key", "paper", "code", "ours", "why"), rows)


def format_patterns(part: Part) -> str:
    """Return the patterns of the files that a setting or departure is of."""
    return ", ".join(f"`{pattern}`" for pattern in part.files)


def format_cell(value: object) -> str:
    """Return a value as a cell of a table: a file by its name alone, a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, list | tuple):
        return ", ".join(str(each) for each in value)
    if isinstance(value, str) and "/" in value:
        return f"`{Path(value).name}`"
    if isinstance(value, float):
        return f"{value:g}".replace("e-0", "e-")
    return str(value).lower() if isinstance(value, bool) else str(value)


def format_small_table(files: Mapping[str, Path]) -> str:
    """Return a table of the keys that ``[small]`` tables change, in full and in small."""
    changes: dict[str, dict[tuple[str, str], list[str]]] = {}
    for name, path in files.items():
        small = read_experiment_tables(path)[0].get("small", {})
        if not small:
            continue
        full, short = read_experiment_file(path), read_experiment_file(path, "scale=small")
        for key in list_keys(small):
            values = (format_value(full, key), format_value(short, key))
            if values[0] != values[1] and key not in NOT_A_SETTING and not key.endswith("_sha256"):
                changes.setdefault(key, {}).setdefault(values, []).append(name)
    rows = list[tuple[str, ...]]()
    for key, by_values in changes.items():
        texts = [f"{full}: {short} ({choose_patterns(names, files)})" for (full, short), names in by_values.items()]
        rows.append((f"`{key}`", "; ".join(texts)))
    return format_table(("key", "full: small"), rows)


def format_value(experiment: Experiment, key: str) -> str:
    """Return a key's value as a cell of a table."""
    value = find_value(experiment, key)
    return format_cell(value) if value or value == 0 else "none"


def choose_patterns(names: Sequence[str], files: Mapping[str, Path]) -> str:
    """Return a few patterns that match these files and no others: beginnings, parts and ends of their names."""
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


def format_benchmark_table() -> str:
    """Return a table of what the benchmark sets for single rows; docs/results.md has the weights of positives."""
    tables = tomllib.loads((EXPERIMENTS / "benchmark" / "benchmark.toml").read_text(encoding="utf-8"))
    rows = list[tuple[str, ...]]()
    for method in tables["methods"]:
        keys = [f"`{each}`" for each in method.get("set", ()) if not each.startswith("training.class_weights")]
        if keys:
            rows.append((method.get("title", method["name"]), ", ".join(keys)))
    return format_table(("row", "keys"), rows)
