"""The file ``benchmark.toml`` with its data sets, label patterns, methods and variants, and the runs of a variant.

A variant is a table ``[forms.NAME]`` of the file: a benchmark of one size, such as ``small`` or ``full``.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from polyclinic.common.config import ExperimentFile, read_experiment
from polyclinic.common.errors import BadInput, Fault, quote_names, suggest_nearest_name
from polyclinic.common.system.files import is_file
from polyclinic.common.system.plain_text import format_as_json_text
from polyclinic.common.system.toml import TomlSection, read_toml, validate_tables

FILE_NAME = "benchmark.toml"
Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]


class BenchmarkMethod(TomlSection):
    """One method of the benchmark, a row of its table.

    Attributes:
        title: Name in the table; the method's name if empty.
        set: Overrides of the experiment; ``{third}`` stands for a third of the rounds.
        beyond: An advantage of the method that hospitals do not have, such as all images in one place. A method with
            such an advantage is shown but not ranked. Empty for a ranked method.
        all_labels: True if every site annotates every class.
        own_images: True if the method needs images at the coordinator, which the key ``own`` of the data set describes.
    """

    name: str
    title: str = ""
    set: tuple[str, ...] = ()
    beyond: str = ""
    all_labels: bool = False
    own_images: bool = False

    @property
    def label(self) -> str:
        """Return the method's name in tables and result lines."""
        return self.title or self.name


class LabelPattern(TomlSection):
    """A label pattern: the distribution of images and labels over simulated sites.

    Attributes:
        set: Keys of the experiment's table ``[partition]`` other than ``sites`` and ``size_skew``.
    """

    name: str
    title: str
    sites: Count
    size_skew: float = 0.0
    set: Annotated[tuple[str, ...], Field(min_length=1)]


class BenchmarkDataSet(TomlSection):
    """A data set of the benchmark, described by an experiment file ``NAME.toml`` in the same folder.

    Attributes:
        own: Keys of ``[data]`` for images of the coordinator; empty if the coordinator has no images.
    """

    name: str
    title: str
    own: tuple[str, ...] = ()


class BenchmarkVariant(TomlSection):
    """One variant of the benchmark, a table ``[forms.NAME]`` of ``benchmark.toml``: rounds, seeds, data and methods.

    Attributes:
        blocks: Pairs of a data set and a label pattern, in the order of their runs.
        methods: Labels of the methods of this variant; empty for all methods.
        rates: Name of the variant whose runs choose the learning rates; empty for this variant.
        widen: True to try further rates for a method whose best rate is the smallest or largest candidate.
        set: Overrides for all runs.
        sizes: Data set -> overrides for the runs on it.
    """

    title: str
    rounds: Count
    seeds: Count
    blocks: Annotated[tuple[tuple[str, str], ...], Field(min_length=1)]
    methods: tuple[str, ...] = ()
    rates: str = ""
    widen: bool = False
    set: tuple[str, ...] = ()
    sizes: dict[str, tuple[str, ...]] = Field(default_factory=dict)


class BenchmarkFile(TomlSection):
    """The content of ``benchmark.toml``.

    Attributes:
        reference: Label of the method with which the others are compared in tests.
        fewest_positives: A class with fewer positives or negatives in the test part is trained but not scored.
        learning_rates: Candidates; the best by validation AUROC is chosen for each method and data set.
        wider_learning_rates: Further candidates for variants with ``widen``.
        failing_rates: Triples of data set, method and further rate that are not tried, because the run fails.
        tuning_seed: Seed of the runs that choose a learning rate; no other run uses it.
    """

    title: str
    reference: str
    fewest_positives: Count = 30
    learning_rates: Annotated[tuple[Rate, ...], Field(min_length=1)]
    wider_learning_rates: tuple[Rate, ...] = ()
    failing_rates: tuple[tuple[str, str, Rate], ...] = ()
    tuning_seed: Annotated[int, Field(ge=0)]
    data: Annotated[tuple[BenchmarkDataSet, ...], Field(min_length=1)]
    methods: Annotated[tuple[BenchmarkMethod, ...], Field(min_length=1)]
    patterns: Annotated[tuple[LabelPattern, ...], Field(min_length=1)]
    forms: Annotated[dict[str, BenchmarkVariant], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_benchmark_names(self) -> "BenchmarkFile":
        names = {
            "data sets": [data.name for data in self.data],
            "patterns": [pattern.name for pattern in self.patterns],
            "methods": [method.label for method in self.methods],
        }
        for kind, of_kind in names.items():
            if twice := sorted({name for name in of_kind if of_kind.count(name) > 1}):
                raise ValueError(f"two {kind} are called {quote_names(twice)}; give one another name or title")
        kinds = {"a data set": names["data sets"], "a pattern": names["patterns"]}
        for title, form in self.forms.items():
            for block in form.blocks:
                for (kind, of_kind), name in zip(kinds.items(), block, strict=True):
                    if name not in of_kind:
                        raise ValueError(f'"{name}" in form "{title}" is not {kind}; there are {quote_names(of_kind)}')
            if self.tuning_seed < form.seeds:
                raise ValueError(f'tuning_seed {self.tuning_seed} is a seed of form "{title}"')
            self._check_rows_and_rates(title, form)
        if self.reference not in {method.label for method in self.methods if not method.beyond}:
            raise ValueError(f'the reference "{self.reference}" is no method that is ranked')
        return self

    def _check_rows_and_rates(self, title: str, form: BenchmarkVariant) -> None:
        labels = [method.label for method in self.methods]
        if unknown := [label for label in form.methods if label not in labels]:
            raise ValueError(
                f'{quote_names(unknown)} in form "{title}" is not a method; there are {quote_names(labels)}'
            )
        if form.methods and self.reference not in form.methods:
            raise ValueError(f'the reference "{self.reference}" is missing in the methods of form "{title}"')
        if not form.rates:
            return
        if form.rates not in self.forms:
            raise ValueError(f'rates "{form.rates}" of form "{title}" is no form; there are {quote_names(self.forms)}')
        source = self.forms[form.rates]
        data_sets = {data for data, _ in source.blocks}
        if missing := sorted({data for data, _ in form.blocks} - data_sets):
            raise ValueError(
                f'form "{form.rates}" chooses no rates for {quote_names(missing)}, which form "{title}" needs'
            )


def read_benchmark_toml(folder: Path) -> BenchmarkFile:
    """Read ``folder/benchmark.toml``.

    Raises:
        BadInput: With all faults of the file.
    """
    if not is_file(folder / FILE_NAME):
        remedy = "A checkout has one in experiments/benchmark; name its folder."
        raise BadInput([Fault(str(folder / FILE_NAME), "there is no such file.", remedy)])
    return validate_tables(BenchmarkFile, read_toml(folder / FILE_NAME), FILE_NAME)


@dataclass(frozen=True)
class PlannedRun:
    """One planned run of the benchmark.

    Attributes:
        tuning: True if the run only serves to choose the learning rate.
        experiment: The experiment file of the data set.
        overrides: Overrides of the experiment file.
    """

    data: str
    pattern: str
    method: str
    lr: float
    seed: int
    tuning: bool
    experiment: Path
    overrides: tuple[str, ...]

    @cached_property
    def experiment_file(self) -> ExperimentFile:
        """The experiment with the overrides of this run; reads the file on first access."""
        return read_experiment(self.experiment, self.overrides)

    @cached_property
    def settings_text(self) -> str:
        """The settings of the run that differ from defaults, as JSON text; equal runs have equal text."""
        experiment = self.experiment_file.experiment
        return json.dumps(experiment.model_dump(mode="json", exclude_defaults=True), sort_keys=True)

    @property
    def results_key(self) -> str:
        """The key of the run's line in the results file, a hash of its settings."""
        return hashlib.sha256(self.settings_text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class BenchmarkVariantPlan:
    """All runs of one variant of the benchmark.

    Attributes:
        folder: Folder with ``benchmark.toml`` and the experiment files of the data sets.
        form: The variant.
    """

    benchmark: BenchmarkFile
    folder: Path
    form: BenchmarkVariant

    @classmethod
    def read_benchmark_variant(cls, folder: Path, form: str) -> "BenchmarkVariantPlan":
        """Read the benchmark in a folder, and select its variant named ``form``.

        Raises:
            BadInput: If the folder has no benchmark, or the benchmark has no such variant.
        """
        benchmark = read_benchmark_toml(folder)
        if form not in benchmark.forms:
            remedy = suggest_nearest_name(form, benchmark.forms) or f"Forms: {quote_names(benchmark.forms)}."
            raise BadInput([Fault("--variant", f'there is no form "{form}".', remedy)])
        return cls(benchmark, folder, benchmark.forms[form])

    def add_method(self, name: str, settings: Sequence[str] = ()) -> tuple["BenchmarkVariantPlan", str]:
        """Add a method to compare with all rows of the variant; return the new plan, and the label of its row.

        A method of the file has its settings from the file. If the variant does not have the method, it is added.

        Args:
            name: Label of a row of the file, or a value of ``run.method``.
            settings: Overrides for the method's runs. If there are any, the method gets a new row.
        """
        benchmark, form, label = self.benchmark, self.form, name
        own = next((method for method in benchmark.methods if method.label == name), None)
        if own is None or settings:
            label = ", ".join([name, *settings]) if own else name
            base = own or BenchmarkMethod(name=name)
            row = base.model_copy(update={"title": label, "set": (*base.set, *settings)})
            benchmark = benchmark.model_copy(update={"methods": (*benchmark.methods, row)})
        if form.methods and label not in form.methods:
            form = form.model_copy(update={"methods": (*form.methods, label)})
        if form.rates:
            # The rates of the new row come from the other variant, which therefore has to run it too.
            forms = dict(benchmark.forms)
            rates = forms[form.rates]
            if rates.methods and label not in rates.methods:
                forms[form.rates] = rates.model_copy(update={"methods": (*rates.methods, label)})
            benchmark = benchmark.model_copy(update={"forms": forms})
        return replace(self, benchmark=benchmark, form=form), label

    @property
    def variant_methods(self) -> list[BenchmarkMethod]:
        """Return the methods of the variant, in the order of the file."""
        labels = self.form.methods
        return [method for method in self.benchmark.methods if method.label in labels or not labels]

    @property
    def rate_tuning_variant(self) -> BenchmarkVariant:
        """Return the variant whose runs choose the learning rates."""
        return self.benchmark.forms[self.form.rates] if self.form.rates else self.form

    def list_methods_for_data(self, data: str) -> list[BenchmarkMethod]:
        """Return the methods that can run on a data set; some need images at the coordinator."""
        own = next(each.own for each in self.benchmark.data if each.name == data)
        return [method for method in self.variant_methods if own or not method.own_images]

    def list_data_sets(self) -> list[str]:
        """Return the data sets of the variant, in the order of its blocks."""
        return list(dict.fromkeys(data for data, _ in self.form.blocks))

    def list_patterns_for_data(self, data: str) -> list[str]:
        """Return the label patterns for a data set, in the order of the variant's blocks."""
        return [pattern for name, pattern in self.form.blocks if name == data]

    def iterate_representative_runs(self) -> Iterator[tuple[PlannedRun, str]]:
        """Yield a few runs that cover all settings, to check them before the start, each with a title for messages.

        For the first label pattern of each data set, there is one run of each method. For each further pattern, there
        is one run of the first method.
        """
        rate, seed, complete = self.benchmark.learning_rates[0], self.benchmark.tuning_seed, set[str]()
        for data, pattern in self.form.blocks:
            methods = self.list_methods_for_data(data)
            for method in methods[:1] if data in complete else methods:
                run = self.make_planned_run(data, pattern, method, rate, seed)
                yield run, f"{FILE_NAME}: {method.label} on {data}, {pattern}"
            complete.add(data)

    def iterate_tuning_runs(self, data: str) -> Iterator[PlannedRun]:
        """Yield the runs that choose each method's learning rate on a data set, with its first label pattern."""
        for method in self.list_methods_for_data(data):
            for lr in self.benchmark.learning_rates:
                yield self.make_tuning_run(data, method, lr)

    def make_tuning_run(self, data: str, method: BenchmarkMethod, lr: float) -> PlannedRun:
        """Make the run that tries one learning rate of a method on a data set, with its first label pattern."""
        plan = replace(self, form=self.rate_tuning_variant)
        pattern = plan.list_patterns_for_data(data)[0]
        return plan.make_planned_run(data, pattern, method, lr, self.benchmark.tuning_seed)

    def iterate_runs_of_all_settings(self) -> Iterator[PlannedRun]:
        """Yield one run for each combination of overrides; all other runs differ from these only in rate and seed."""
        rate, seed = self.benchmark.learning_rates[0], self.benchmark.tuning_seed
        for data in self.list_data_sets():
            for method in self.list_methods_for_data(data):
                yield self.make_tuning_run(data, method, rate)
                for pattern in self.list_patterns_for_data(data):
                    yield self.make_planned_run(data, pattern, method, rate, seed)

    def iterate_block_runs(self, data: str, pattern: str, rates: dict[str, float]) -> Iterator[PlannedRun]:
        """Yield the runs of a data set and label pattern, seed by seed.

        Args:
            rates: Method -> its learning rate; a method without one is left out.
        """
        for seed in range(self.form.seeds):
            for method in self.list_methods_for_data(data):
                if method.label in rates:
                    yield self.make_planned_run(data, pattern, method, rates[method.label], seed)

    def make_planned_run(self, data: str, pattern: str, method: BenchmarkMethod, lr: float, seed: int) -> PlannedRun:
        """Make one run, with the overrides of its label pattern, its method and the variant."""
        partition = next(each for each in self.benchmark.patterns if each.name == pattern)
        sizes = [f"size_skew={partition.size_skew}"] if partition.size_skew else []
        lists = ['kind="missing_classes"', "missing=0"] if method.all_labels else partition.set
        tuning, path, server_data = seed == self.benchmark.tuning_seed, self.folder / f"{data}.toml", list[str]()
        if method.own_images:  # the keys of [data] in the experiment file, changed by the keys ``own`` of the data set
            own = next(each.own for each in self.benchmark.data if each.name == data)
            changed = {key.strip() for key, _, _ in (text.partition("=") for text in own)}
            written = read_toml(path)["data"].items()
            keys = [f"{key}={format_as_json_text(value)}" for key, value in written if key not in changed]
            server_data = [f"server_data={{{', '.join([*keys, *own])}}}"]
        overrides = (
            f"run.method={method.name}",
            f"run.rounds={self.form.rounds}",
            f"run.seed={seed}",
            f"training.lr={lr}",
            f"partition={{{', '.join([f'sites={partition.sites}', *sizes, *lists])}}}",
            'simulation.backend="inline"',
            *server_data,
            *(text.replace("{third}", str(max(1, self.form.rounds // 3))) for text in method.set),
            *self.form.set,
            *self.form.sizes.get(data, ()),
        )
        return PlannedRun(data, pattern, method.label, lr, seed, tuning, path, overrides)
