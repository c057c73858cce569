"""The schema of ``summary.json`` and ``rounds.jsonl``: the same classes write these files and read them.

A file of an older release lacks some entries, which then have their defaults; entries of a newer one are ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from polyclinic.common.metrics.auroc import ClassMetrics, FinalTestSummary, compute_mean_and_sd
from polyclinic.common.metrics.benefit import FederationBenefit
from polyclinic.common.metrics.calibration import ThresholdDecisions
from polyclinic.common.metrics.multi_class import BestClientAccuracies, RoundAccuracy
from polyclinic.data.base.image_set import SkippedImage
from polyclinic.data.base.pixel_form import PixelForm

Measure = Literal[
    "accuracy", "sensitivity", "specificity", "f1", "best_mean_client_test_accuracy", "best_test_accuracy"
]
SINGLE_CLASS_MEASURES: tuple[Measure, ...] = get_args(Measure)
"""Figures of tasks in which each image shows exactly one class."""


class RunFileModel(BaseModel):
    """A part of a run's files, which is written with all its entries in the order of its fields."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def to_json_object(self) -> dict[str, Any]:
        """Return the entries for JSON."""
        return self.model_dump(mode="json")


class GivenEntriesModel(RunFileModel):
    """A part of a run's files, which is written with the entries that it was made with."""

    @model_serializer(mode="wrap")
    def _write_given_entries(self, write_all: SerializerFunctionWrapHandler) -> dict[str, Any]:
        entries: dict[str, Any] = write_all(self)
        return {name: value for name, value in entries.items() if name in self.model_fields_set}


class SiteSummary(RunFileModel):
    """Data and network traffic of one site in a run.

    Attributes:
        positives: Class -> number of positive training images; None if the site's policy hides the number.
        smallest_count: The site hides every count that comes from fewer patients than this; None if not recorded.
        level: The level of the site's policy; empty if not recorded.
        release: The site's Polyclinic release; None for a run that did not record it.
        wire: The wire version that was spoken with the site; None for a run that did not record it.
        seconds: Time of its training in all rounds; 0 without a decimal point if it trained in none.
        epochs: Number of epochs that it trained in all rounds.
        arithmetic: The site's statement of the number format and memory layout of its training.
    """

    classes: tuple[str, ...]
    train_samples: int | None = None
    validation_samples: int | None = None
    positives: dict[str, int | None] = Field(default_factory=dict)
    smallest_count: int | None = None
    level: str = ""
    release: str | None = None
    wire: int | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    seconds: int | float | None = None
    epochs: int | None = None
    arithmetic: str = ""


class SiteTestResult(GivenEntriesModel):
    """Results of the best model at one site, on the classes that the site annotates.

    Attributes:
        decisions: Class -> decisions on the site's test images, at the threshold that the run chose on validation
            images, else at 0.5; none for a class of which the site sent no counts by score.
    """

    validation_loss: float | None = None
    mean_auroc: float | None = None
    per_class: dict[str, ClassMetrics] = Field(default_factory=dict)
    decisions: dict[str, ThresholdDecisions] = Field(default_factory=dict)

    @property
    def main_mean(self) -> float | None:
        """Return the mean AUROC over the site's classes; in a segmentation, the mean Dice."""
        if self.mean_auroc is not None:
            return self.mean_auroc
        return compute_mean_and_sd(metrics.main_figure for metrics in self.per_class.values())[0]


class SiteBenefit(RunFileModel):
    """A site's comparison with the model that it trained alone; ``reason`` says why a comparison is missing."""

    benefit: FederationBenefit | None = None
    reason: str = ""


class EnsembleTestResult(RunFileModel):
    """Test results of the ensemble, the averaged scores of models that sites trained alone."""

    test: FinalTestSummary
    per_site: dict[str, SiteTestResult] = Field(default_factory=dict)


class PrototypeSimilarity(RunFileModel):
    """Cosine similarities of the classes' prototypes (mean features); None if no site has the prototype.

    Attributes:
        positives: Similarity of the positive prototypes of every two classes.
        signs: Similarity of the negative and the positive prototype of each class.
    """

    classes: tuple[str, ...]
    positives: tuple[tuple[float | None, ...], ...]
    signs: tuple[float | None, ...]


class LoweredClaim(RunFileModel):
    """The number of training images that a site claims, and the number that counts."""

    claimed: int
    counted: int


class CountingStatistics(RunFileModel):
    """The sites whose statements count at the end of a run: numbers of images and labels, statistics and figures.

    Attributes:
        counted: Sites whose statements count.
        uncounted: Site -> why its statements do not count.
        lowered: Site -> its number of images, if it claims too many.
    """

    counted: tuple[str, ...] = ()
    uncounted: dict[str, str] = Field(default_factory=dict)
    lowered: dict[str, LoweredClaim] = Field(default_factory=dict)


class FinalMethodStatistics(GivenEntriesModel):
    """The statistics of a method, apart from the model, at the end of the run."""

    model_config = ConfigDict(extra="allow")  # figures of a method in a package of its own

    prototypes: PrototypeSimilarity | None = None


class RoundMethodStatistics(GivenEntriesModel):
    """The statistics of a method after one round.

    Attributes:
        slopes: Site -> slope of its training loss in its last training.
        difficulty: Class -> share of confident predictions on images of sites that do not label the class.
    """

    model_config = ConfigDict(extra="allow")  # figures of a method in a package of its own

    slopes: dict[str, float | None] = Field(default_factory=dict)
    difficulty: dict[str, float | None] = Field(default_factory=dict)


class PrivacyBudgetSpent(GivenEntriesModel):
    """The privacy budget (epsilon) that a run spent.

    Attributes:
        epsilon: Site -> epsilon of the whole run; None if the site added no noise.
        noise: ``local`` if each site added the full noise; otherwise each site added a share of the noise.
        honest_sites: Smallest number of sites in a sum that must add their share of the noise for ``epsilon`` to hold;
            None for local noise.
        epsilon_of_one_share: Epsilon of the whole run if only one site adds its share of the noise; None for local
            noise.
    """

    level: str
    delta: float
    accountant: str
    epsilon: dict[str, float | None]
    noise: str = "local"
    honest_sites: int | None = None
    epsilon_of_one_share: float | None = None


class RunPixels(RunFileModel):
    """How the images of a run became pixels.

    Attributes:
        form: The form of the pixels of all sites; None for a run that did not record it.
        unknown: The sites whose release does not state it.
    """

    form: PixelForm | None = None
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunClaims:
    """The claims that a run supports: page, terminal, Python and ``summary.json`` make these and no others.

    Attributes:
        result: The result in one sentence.
        mean_auroc: The mean AUROC, over the classes that enough test images show; None if none can be given.
        mean_auroc_error: Bound of its error; 0 if it is exact.
        no_mean_because: Why there is no mean AUROC, as a clause; empty if there is one.
        cautions: Limitations that are shown beside the result, most severe first.
        limits: Further limitations.
    """

    result: str
    mean_auroc: float | None
    mean_auroc_error: float
    no_mean_because: str
    cautions: tuple[str, ...]
    limits: tuple[str, ...]


class RunSummary(RunFileModel):
    """The content of ``summary.json``; metrics that a method does not have are None or empty.

    docs/run-folder.md prints these texts.

    Attributes:
        name: Name of the run, or of the method where the experiment names none.
        method: Name of the method.
        backend: What reached the sites: `ray`, `inline` or `network`.
        ended: End of the run in UTC, ISO 8601.
        rounds: Number of rounds that count.
        best_round: Round whose model is the result; None if no round was selected.
        last_model_because: Why the last model is the result though the experiment asks for the best one, if so.
        criterion: Validation metric that selected the best round; None if no round was selected.
        seed: Seed of the run.
        excluded: Site -> why its updates do not count any more.
        left_out: Site -> why it could not take part, though it is admitted and was connected.
        absent: Admitted sites that have not answered the roll call, up to the end of the run.
        statistics: Sites whose statements of numbers count, and why others do not.
        classes: Classes of the model, in the order of its outputs.
        sites: Site -> its classes, release, policy level, numbers of images, and bytes that it sent and received.
        table_sha256: Hash of the label table, by which `flwr-sim evaluate` recognizes the table.
        patients_known: Whether the data names the patient of every image; None if only the sites know.
        skipped_images: Images of simulated sites that could not be read, with reasons.
        notes: Sentences about the label table of simulated sites.
        omissions: Sentences that count what is left out of the images of simulated sites.
        reproducible: False if the same seed gave other pictures of a simulated site's data set.
        test: Results of the final test: means and classes with 95 % intervals, thresholds that were chosen on
            validation images (`operating_points`), errors of figures (`errors`), and why figures are missing
            (`withheld`).
        per_site: Site -> results of the model on the classes that the site annotates.
        drawn_to_test: Sites that were drawn at random to test the model; None if all sites tested it.
        ensemble: Results of the averaged scores of models that sites trained alone.
        external: Results on external test images; None without them.
        learned: Statistics of the method at the end of the run, such as similarities of prototypes.
        privacy: Privacy budget that the run spent at each site; None without noise.
        client_accuracy: Best accuracies of single sites, where each image shows exactly one class.
        seconds: Time of the run by phase: `train` is the time in which sites computed, `aggregate` the coordinator's
            averaging, `idle` the rest.
        model_sha256: Hash of the model.
        contract_hash: Hash of the label contract.
        pixels: How the sites' images became pixels, and the sites of which this is not known.
        classes_of_one_site: Class -> site, for the classes that one site alone annotates, and the coordinator has not
            confirmed.
        versions: Versions of Polyclinic, Python and the libraries.
        wire: The coordinator's newest wire version; None for a run that did not record it.
        experiment: The experiment's settings.
        benefit: Site -> comparison of the run's model with one that the site trained alone; empty if not requested.
        start: Sentences on what the first model takes from a finished run; empty if it takes nothing.
        unlearned: Class -> why the model has not learned it.
        maybe_unlearned: Classes of which it is not known whether the model has learned them.
        claims: The sentences and figures that the report shows; None for a run that did not record them.
    """

    name: str | None = None
    method: str
    backend: str | None = None
    ended: str | None = None
    rounds: int
    best_round: int | None = None
    last_model_because: str | None = None
    criterion: Literal["auroc", "loss"] | None = None
    seed: int
    excluded: dict[str, str] = Field(default_factory=dict)
    left_out: dict[str, str] = Field(default_factory=dict)
    absent: tuple[str, ...] = ()
    statistics: CountingStatistics = CountingStatistics()
    classes: tuple[str, ...]
    sites: dict[str, SiteSummary]
    table_sha256: str | None = None
    patients_known: bool | None = None
    skipped_images: tuple[SkippedImage, ...] = ()
    notes: tuple[str, ...] = ()
    omissions: tuple[str, ...] = ()
    reproducible: bool = True
    test: FinalTestSummary
    per_site: dict[str, SiteTestResult] = Field(default_factory=dict)
    drawn_to_test: tuple[str, ...] | None = None
    ensemble: EnsembleTestResult | None = None
    external: FinalTestSummary | None = None
    learned: FinalMethodStatistics = FinalMethodStatistics()
    privacy: PrivacyBudgetSpent | None = None
    client_accuracy: BestClientAccuracies | None = None
    seconds: dict[str, float | None] = Field(default_factory=dict)
    model_sha256: str | None = None
    contract_hash: str | None = None
    pixels: RunPixels = RunPixels()
    classes_of_one_site: dict[str, str] = Field(default_factory=dict)
    versions: dict[str, Any] = Field(default_factory=dict)
    wire: int | None = None
    experiment: dict[str, Any] = Field(default_factory=dict)
    benefit: dict[str, SiteBenefit] = Field(default_factory=dict)
    start: tuple[str, ...] = ()
    unlearned: dict[str, str] = Field(default_factory=dict)
    maybe_unlearned: tuple[str, ...] = ()
    claims: RunClaims | None = None

    @cached_property
    def annotating_sites_by_class(self) -> Mapping[str, tuple[str, ...]]:
        """Return class -> sites that annotate the class, in the order of the run's sites."""
        owners: dict[str, list[str]] = {}
        for site, record in self.sites.items():
            for name in record.classes:
                owners.setdefault(name, []).append(site)
        return {name: tuple(sites) for name, sites in owners.items()}

    @cached_property
    def class_definitions(self) -> Mapping[str, str]:
        """Return class -> definition, for the classes that the study's vocabulary defines."""
        vocabulary = self.experiment.get("vocabulary") or {}
        return {name: entry["definition"] for name, entry in vocabulary.items() if entry.get("definition")}

    def describe_site_release(self, site: str) -> str:
        """Return a site's release, with its wire version if that is not the coordinator's; ``n/a`` if unknown."""
        record = self.sites[site]
        release = record.release or "n/a"
        return release if record.wire in (None, self.wire) else f"{release} (wire version {record.wire})"

    @property
    def is_initial_model_tested(self) -> bool:
        """Return whether the tested model is the initial one, because no round improved the validation metric."""
        return self.best_round == 0 and self.rounds > 0

    @property
    def table_label(self) -> str:
        """Return the run's title; the method's name if it has none."""
        return self.name or self.method

    @property
    def purpose(self) -> str:
        """Return the study's purpose; empty if its plan has none."""
        return str((self.experiment.get("run") or {}).get("purpose", ""))

    @property
    def total_traffic_bytes(self) -> int:
        """Return the bytes sent to and received from all sites, as far as they were counted."""
        return sum((site.bytes_up or 0) + (site.bytes_down or 0) for site in self.sites.values())

    @property
    def available_metrics(self) -> dict[Measure, float]:
        """Return the metrics that this run has."""
        parts = (self.test.multi_class, self.client_accuracy)
        measures = {
            name: getattr(part, name, None) for part in parts for name in SINGLE_CLASS_MEASURES if hasattr(part, name)
        }
        return {name: value for name, value in measures.items() if value is not None}


class SiteLosses(RunFileModel):
    """The losses of one site in a round: of its training, and of the round's model on its validation images."""

    train_loss: float | None = None
    validation_loss: float | None = None


class CoordinatorTraining(RunFileModel):
    """Figures of the coordinator's training on its own images in one round."""

    train_loss: float
    epochs: int
    seconds: float


class RoundFileLine(RunFileModel):
    """A round as a line of ``rounds.jsonl``.

    Attributes:
        sites: Sites whose replies count.
        absent: Site -> why it did not take part.
        shortened: Site -> how its update was shortened, because it was too long.
        closed_rows: Classes whose head row stayed masked, because too few sites that own it were left.
        best: True if validation was best in this round so far.
        epsilon: Site -> privacy budget that it has spent so far.
        arithmetic: Each site's statement of the number format and memory layout of its training.
        coordinator: Figures of the coordinator's own training; None if it does not train.
        learned: Statistics of the method after the round.
        site_seconds: Site -> time of its training.
        seconds: Duration of the round by the coordinator's clock.
    """

    round: int
    sites: tuple[str, ...] = ()
    absent: dict[str, str] = Field(default_factory=dict)
    shortened: dict[str, str] = Field(default_factory=dict)
    closed_rows: tuple[str, ...] = ()
    train_loss: float | None = None
    validation_loss: float | None = None
    validation_auroc: float | None = None
    test_accuracy: RoundAccuracy | None = None
    best: bool = False
    site_losses: dict[str, SiteLosses] = Field(default_factory=dict)
    epochs: dict[str, int] = Field(default_factory=dict)
    epsilon: dict[str, float] = Field(default_factory=dict)
    arithmetic: dict[str, str] = Field(default_factory=dict)
    coordinator: CoordinatorTraining | None = None
    learned: RoundMethodStatistics = RoundMethodStatistics()
    site_seconds: dict[str, float] = Field(default_factory=dict)
    seconds: float | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
