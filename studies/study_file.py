"""The file ``study.toml`` of a study that repeats a published paper.

It names the experiments for each of the paper's tables, the paper's numbers, and our differences from the paper.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from polyclinic.common.errors import BadInput, Fault, quote_names, suggest_nearest_name
from polyclinic.common.system.files import is_file
from polyclinic.common.system.toml import TomlSection, read_toml, validate_tables

if TYPE_CHECKING:  # a wrong study.toml is refused before SciPy is imported
    from polyclinic.server.runs.reader import RunFolderContent

FILE_NAME = "study.toml"
Count = Annotated[int, Field(ge=1)]
Figure = Literal["sweep", "curves", "density"]
Reading = Callable[["RunFolderContent"], float | None]

STUDY_MEASURES: Mapping[str, tuple[str, Reading]] = {
    "auroc": ("AUROC", lambda run: run.summary.test.mean_auroc),
    "auroc_sd": ("SD of AUROC over classes", lambda run: run.summary.test.sd_auroc),
    "auroc_shared": ("AUROC, shared classes", lambda run: run.summary.test.shared_classes.mean_auroc),
    "auroc_unique": ("AUROC, unique classes", lambda run: run.summary.test.unique_classes.mean_auroc),
    "average_precision": ("mean average precision", lambda run: run.summary.test.mean_average_precision),
    "balanced_accuracy": ("balanced accuracy", lambda run: run.summary.test.mean_balanced_accuracy),
    "accuracy": ("accuracy", lambda run: run.summary.available_metrics.get("accuracy")),
    "sensitivity": ("sensitivity", lambda run: run.summary.available_metrics.get("sensitivity")),
    "specificity": ("specificity", lambda run: run.summary.available_metrics.get("specificity")),
    "f1": ("F1", lambda run: run.summary.available_metrics.get("f1")),
    "bmcta": ("BMCTA", lambda run: run.summary.available_metrics.get("best_mean_client_test_accuracy")),
    "bta": ("BTA", lambda run: run.summary.available_metrics.get("best_test_accuracy")),
    "rounds": ("rounds", lambda run: float(run.summary.rounds)),
    "epochs": ("epochs at hospitals", lambda run: float(sum(sum(each.epochs.values()) for each in run.rounds))),
    "megabytes": ("MB sent and received", lambda run: run.summary.total_traffic_bytes / 1e6),
    "seconds": ("seconds", lambda run: run.summary.seconds.get("total")),
}
"""Name of a measure in ``study.toml`` -> its heading, and the function that reads it from a run (may be None)."""


def title_to_slug(title: str) -> str:
    """Return a title for a folder's name; characters other than letters, digits, dots and plus become underscores."""
    return re.sub(r"[^\w.+]+", "_", title)


class StudyRowOrColumn(TomlSection):
    """A method or a setting of a study's table.

    Attributes:
        title: Heading of the row or column.
        part: Text that replaces ``{method}`` or ``{setting}`` in the table's ``experiment`` and ``set``.
        x: Position of a setting on the axis of a sweep.
        set: Overrides in the form of ``--set``.
    """

    title: str
    part: str = ""
    x: float | None = None
    set: tuple[str, ...] = ()


class MeanOverClasses(TomlSection):
    """A measure of a table: the mean AUROC over some classes.

    Attributes:
        external: Whether the images are those of ``[external_test]`` instead of the test part.
    """

    title: str
    classes: Annotated[tuple[str, ...], Field(min_length=1)]
    external: bool = False

    def read_mean_auroc_from_run(self, run: "RunFolderContent") -> float | None:
        """Return the mean AUROC over these classes in a run; None if the run has none of them."""
        from polyclinic.common.metrics.auroc import compute_mean_and_sd

        test = run.summary.external if self.external else run.summary.test
        if test is None:
            return None
        results = test.per_class.items()
        return compute_mean_and_sd(result.auroc for name, result in results if name in self.classes)[0]


class PaperTable(TomlSection):
    """A table of the paper that the study repeats.

    Attributes:
        title: Title of the table.
        settings: The columns, for instance numbers of hospitals.
        methods: The rows.
        experiment: Path relative to the study's folder, with ``{method}`` and ``{setting}``.
        measures: Names of measures (:data:`STUDY_MEASURES`), or ``{ title, classes }`` for the mean AUROC of named
            classes; with ``external = true`` on the images of ``[external_test]``.
        reference: Title of the method against which each other method is tested; empty for no tests.
        paper: Title of a method -> the paper's numbers, by setting, in the order of ``measures``; the last ones may be
            missing.
        paper_unit: Unit of the numbers in ``paper``; our own numbers are fractions.
        tests: Pairing of a method with the reference for a test. ``settings`` is one test, with a pair of means of the
            first measure for each setting; ``classes`` is one test in each setting, with a pair of AUROCs for each
            class. With 4 settings and 10 classes a method has one test of 4 pairs, or 4 tests of 10 pairs.
        figures: ``sweep`` plots measures along ``x``, ``curves`` the sites' accuracy by round, and ``density`` the
            distribution of accuracy over sites.
        quick: Titles of the settings and methods of the quick scale. Without a setting, all settings run; without a
            method, all methods.
        differs: Differences from the paper in this table alone.
    """

    title: str
    experiment: str
    settings: Annotated[tuple[StudyRowOrColumn, ...], Field(min_length=1)] = (StudyRowOrColumn(title=""),)
    methods: Annotated[tuple[StudyRowOrColumn, ...], Field(min_length=1)]
    measures: Annotated[tuple[str | MeanOverClasses, ...], Field(min_length=1)]
    reference: str = ""
    tests: Literal["settings", "classes"] = "settings"
    paper: dict[str, tuple[tuple[float, ...], ...]] = Field(default_factory=dict)
    paper_unit: Literal["fraction", "percent"] = "fraction"
    figures: tuple[Figure, ...] = ()
    quick: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check_table_shape(self) -> "PaperTable":
        names = [method.title for method in self.methods]
        for kind, parts in (("methods", self.methods), ("settings", self.settings)):
            if len({title_to_slug(part.title) for part in parts}) < len(parts):
                raise ValueError(f'two {kind} of "{self.title}" have one title')
        for measure in self.measures:
            if isinstance(measure, str) and measure not in STUDY_MEASURES:
                remedy = suggest_nearest_name(measure, STUDY_MEASURES) or f"Known: {quote_names(STUDY_MEASURES)}"
                raise ValueError(f'"{measure}" is no measure. {remedy}')
        for name in (self.reference, *self.paper):
            if name and name not in names:
                raise ValueError(f'"{name}" is no method of "{self.title}". Methods: {quote_names(names)}')
        if "sweep" in self.figures and any(setting.x is None for setting in self.settings):
            raise ValueError(f'every setting of "{self.title}" needs an x for its sweep')
        for name, rows in self.paper.items():
            if len(rows) != len(self.settings) or any(len(row) > len(self.measures) for row in rows):
                expected = f"{len(self.settings)} settings of at most {len(self.measures)} measures"
                raise ValueError(f'the paper\'s row "{name}" of "{self.title}" has not {expected}')
        return self

    @property
    def measure_headings(self) -> list[str]:
        return [STUDY_MEASURES[each][0] if isinstance(each, str) else each.title for each in self.measures]

    @property
    def measure_readers(self) -> list[Reading]:
        """Return the functions that read the measures from a run."""
        return [
            STUDY_MEASURES[each][1] if isinstance(each, str) else each.read_mean_auroc_from_run
            for each in self.measures
        ]

    def get_paper_value(self, method: str, setting: int, measure: int) -> float | None:
        """Return the paper's number as a fraction; None if the paper gives none."""
        row = self.paper[method][setting] if method in self.paper else ()
        if measure >= len(row):
            return None
        return row[measure] / 100 if self.paper_unit == "percent" else row[measure]

    def reduce_to_quick_scale(self) -> "PaperTable":
        """Return the table with only the settings and methods of the quick scale."""
        indices = [index for index, setting in enumerate(self.settings) if setting.title in self.quick]
        if not indices:
            indices = list(range(len(self.settings)))
        methods = tuple(method for method in self.methods if method.title in self.quick) or self.methods
        names = {method.title for method in methods}
        paper = {name: tuple(rows[index] for index in indices) for name, rows in self.paper.items() if name in names}
        settings = tuple(self.settings[index] for index in indices)
        return self.model_copy(update={"settings": settings, "methods": methods, "paper": paper})


class PaperSetting(TomlSection):
    """A setting of a paper, as a key of our experiment files.

    Attributes:
        paper: Value in the paper, or words if no value of the key expresses it; None if the paper states none.
        code: Value in the authors' code, or words; only if it differs from the paper, or the paper states none.
        value: Value of the key that stands for the words in ``paper`` or ``code``; our own value if neither states one.
        files: Patterns of the experiment files with this setting: paths below ``experiments`` without ``.toml``.
        rows: Short name of these files in the docs' table, instead of the patterns.
    """

    key: str
    paper: Any = None
    code: Any = None
    value: Any = None
    why: str = ""
    files: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)
    rows: str = ""

    @property
    def reference_value(self) -> object:
        """Return the first of ``value``, ``paper`` and ``code`` that is set; files without a departure have it."""
        return next((each for each in (self.value, self.paper, self.code) if each is not None), None)


class PaperDeparture(TomlSection):
    """A value in experiment files that is not the paper's or, if the paper states none, not the code's.

    Attributes:
        ours: Value of the key in these files.
        files: Patterns as in :class:`PaperSetting`.
    """

    key: str
    ours: Any
    why: Annotated[str, Field(min_length=1)]
    files: Annotated[tuple[str, ...], Field(min_length=1)]

    def __str__(self) -> str:
        return f"{self.key} = {self.ours} in {', '.join(self.files)}: {self.why}"


class StudyQuickScale(TomlSection):
    """The quick scale of a study, which finishes in minutes; applied after the experiments' ``[small]`` tables.

    Attributes:
        seeds: Number of seeds.
        set: Overrides for all experiments.
        differs: Differences from the paper at this scale.
    """

    seeds: Count = 1
    set: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()


class StudyFile(TomlSection):
    """The content of ``study.toml``.

    Attributes:
        title: The study's name.
        seeds: Number of seeds of each experiment: 0, 1, and so on.
        quick: The quick scale.
        tables: The paper's tables.
        paper: Authors, year and venue.
        differs: Differences from the paper in data and scale, for all tables.
        settings: Settings of the paper with which a test compares the experiment files.
        departures: Values in experiment files that differ from the paper's.
    """

    title: str
    paper: str
    seeds: Count = 3
    differs: tuple[str, ...] = ()
    settings: tuple[PaperSetting, ...] = ()
    departures: tuple[PaperDeparture, ...] = ()
    quick: StudyQuickScale | None = None
    tables: Annotated[tuple[PaperTable, ...], Field(min_length=1)]


def read_study(folder: Path, *, quick: bool) -> StudyFile:
    """Read ``folder/study.toml``, reduced to the quick scale if ``quick``.

    Raises:
        BadInput: With all faults of the file.
    """
    if not is_file(folder / FILE_NAME):
        remedy = f"Name a folder with a {FILE_NAME}; a checkout has them in experiments/papers."
        raise BadInput([Fault(str(folder / FILE_NAME), "there is no such file.", remedy)])
    study = validate_tables(StudyFile, read_toml(folder / FILE_NAME), FILE_NAME)
    if not quick:
        return study
    if study.quick is None:
        raise BadInput([Fault(f"{FILE_NAME}: --quick", "there is no [quick] table.")])
    differs = (*study.differs, *study.quick.differs)
    tables = tuple(table.reduce_to_quick_scale() for table in study.tables)
    return study.model_copy(update={"seeds": study.quick.seeds, "differs": differs, "tables": tables})
