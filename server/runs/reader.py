"""Read a run folder into typed records, for reports and comparisons."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.metrics.auroc import ClassMetrics, FinalTestSummary, compute_mean_and_sd
from polyclinic.common.metrics.benefit import FederationBenefit
from polyclinic.common.metrics.calibration import ThresholdDecisions
from polyclinic.common.metrics.multi_class import BestClientAccuracies, RoundAccuracy
from polyclinic.common.system.plain_text import format_as_json_text
from polyclinic.common.system.toml import describe_validation_error
from polyclinic.data.base.image_set import SkippedImage
from polyclinic.data.base.pixel_form import PixelForm

SAMPLES = "samples.json"

Measure = Literal[
    "accuracy", "sensitivity", "specificity", "f1", "best_mean_client_test_accuracy", "best_test_accuracy"
]
SINGLE_CLASS_MEASURES: tuple[Measure, ...] = get_args(Measure)
"""Figures of tasks in which each image shows exactly one class."""


class _LenientRunFileModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class SiteSummary(_LenientRunFileModel):
    """Data and network traffic of one site in a run.

    Attributes:
        positives: Class -> number of positive training images; None if the site's policy hides the number.
        smallest_count: The site hides every count that comes from fewer patients than this; None if not recorded.
        level: The level of the site's policy; empty if not recorded.
        release: The site's Polyclinic release; None for a run that did not record it.
        wire: The wire version that was spoken with the site; None for a run that did not record it.
    """

    classes: tuple[str, ...]
    release: str | None = None
    wire: int | None = None
    train_samples: int | None = None
    validation_samples: int | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    positives: dict[str, int | None] = Field(default_factory=dict)
    smallest_count: int | None = None
    level: str = ""


class SiteTestResult(_LenientRunFileModel):
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


class SiteBenefit(_LenientRunFileModel):
    """A site's comparison with the model that it trained alone; ``reason`` says why a comparison is missing."""

    benefit: FederationBenefit | None = None
    reason: str = ""


class EnsembleTestResult(_LenientRunFileModel):
    """Test results of the ensemble, the averaged scores of models that sites trained alone."""

    test: FinalTestSummary
    per_site: dict[str, SiteTestResult] = Field(default_factory=dict)


class PrototypeSimilarity(_LenientRunFileModel):
    """Cosine similarities of the classes' prototypes (mean features); None if no site has the prototype.

    Attributes:
        positives: Similarity of the positive prototypes of every two classes.
        signs: Similarity of the negative and the positive prototype of each class.
    """

    classes: tuple[str, ...]
    positives: tuple[tuple[float | None, ...], ...]
    signs: tuple[float | None, ...]


class LoweredClaim(_LenientRunFileModel):
    """The number of training images that a site claims, and the number that counts."""

    claimed: int
    counted: int


class CountingStatistics(_LenientRunFileModel):
    """The sites whose statements count at the end of a run: numbers of images and labels, statistics and figures.

    Attributes:
        counted: Sites whose statements count.
        uncounted: Site -> why its statements do not count.
        lowered: Site -> its number of images, if it claims too many.
    """

    counted: tuple[str, ...] = ()
    uncounted: dict[str, str] = Field(default_factory=dict)
    lowered: dict[str, LoweredClaim] = Field(default_factory=dict)


class FinalMethodStatistics(_LenientRunFileModel):
    """The statistics of a method, apart from the model, at the end of the run."""

    prototypes: PrototypeSimilarity | None = None


class RoundMethodStatistics(_LenientRunFileModel):
    """The statistics of a method after one round.

    Attributes:
        slopes: Site -> slope of its training loss in its last training.
        difficulty: Class -> share of confident predictions on images of sites that do not label the class.
    """

    slopes: dict[str, float | None] = Field(default_factory=dict)
    difficulty: dict[str, float | None] = Field(default_factory=dict)


class PrivacyBudgetSpent(_LenientRunFileModel):
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


class RunPixels(_LenientRunFileModel):
    """How the images of a run became pixels.

    Attributes:
        form: The form of the pixels of all sites; None for a run that did not record it.
        unknown: The sites whose release does not state it.
    """

    form: PixelForm | None = None
    unknown: tuple[str, ...] = ()


class RunSummary(_LenientRunFileModel):
    """The content of ``summary.json``; metrics that a method does not have are None or empty.

    docs/run-folder.md prints these texts.

    Attributes:
        method: Name of the method.
        name: Name of the run, or of the method where the experiment names none.
        backend: What reached the sites: `ray`, `inline` or `network`.
        ended: End of the run in UTC, ISO 8601.
        rounds: Number of rounds that count.
        seed: Seed of the run.
        classes: Classes of the model, in the order of its outputs.
        sites: Site -> its classes, release, policy level, numbers of images, and bytes that it sent and received.
        table_sha256: Hash of the label table, by which `flwr-sim evaluate` recognizes the table.
        patients_known: Whether the data names the patient of every image; None if only the sites know.
        skipped_images: Images of simulated sites that could not be read, with reasons.
        notes: Sentences about the label table of simulated sites.
        omissions: Sentences that count what is left out of the images of simulated sites.
        reproducible: False if the same seed gave other pictures of a simulated site's data set.
        best_round: Round whose model is the result; None if no round was selected.
        last_model_because: Why the last model is the result though the experiment asks for the best one, if so.
        criterion: Validation metric that selected the best round; None if no round was selected.
        test: Results of the final test: means and classes with 95 % intervals, thresholds that were chosen on
            validation images (`operating_points`), errors of figures (`errors`), and why figures are missing
            (`withheld`).
        client_accuracy: Best accuracies of single sites, where each image shows exactly one class.
        per_site: Site -> results of the model on the classes that the site annotates.
        drawn_to_test: Sites that were drawn at random to test the model; None if all sites tested it.
        ensemble: Results of the averaged scores of models that sites trained alone.
        external: Results on external test images; None without them.
        benefit: Site -> comparison of the run's model with one that the site trained alone; empty if not requested.
        excluded: Site -> why its updates do not count any more.
        left_out: Site -> why it could not take part, though it is admitted and was connected.
        absent: Admitted sites that have not answered the roll call, up to the end of the run.
        start: Sentences on what the first model takes from a finished run; empty if it takes nothing.
        unlearned: Class -> why the model has not learned it.
        maybe_unlearned: Classes of which it is not known whether the model has learned them.
        statistics: Sites whose statements of numbers count, and why others do not.
        learned: Statistics of the method at the end of the run, such as similarities of prototypes.
        privacy: Privacy budget that the run spent at each site; None without noise.
        seconds: Time of the run by phase: `train` is the time in which sites computed, `aggregate` the coordinator's
            averaging, `idle` the rest.
        model_sha256: Hash of the model.
        contract_hash: Hash of the label contract.
        versions: Versions of Polyclinic, Python and the libraries.
        wire: The coordinator's newest wire version; None for a run that did not record it.
        pixels: How the sites' images became pixels, and the sites of which this is not known.
        classes_of_one_site: Class -> site, for the classes that one site alone annotates, and the coordinator has not
            confirmed.
        experiment: The experiment's settings.
    """

    method: str
    name: str | None = None
    backend: str | None = None
    ended: str | None = None
    rounds: int
    seed: int
    classes: tuple[str, ...]
    sites: dict[str, SiteSummary]
    table_sha256: str | None = None
    patients_known: bool | None = None
    skipped_images: tuple[SkippedImage, ...] = ()
    notes: tuple[str, ...] = ()
    omissions: tuple[str, ...] = ()
    reproducible: bool = True
    best_round: int | None = None
    last_model_because: str | None = None
    criterion: Literal["auroc", "loss"] | None = None
    test: FinalTestSummary
    client_accuracy: BestClientAccuracies | None = None
    per_site: dict[str, SiteTestResult] = Field(default_factory=dict)
    drawn_to_test: tuple[str, ...] | None = None
    ensemble: EnsembleTestResult | None = None
    external: FinalTestSummary | None = None
    benefit: dict[str, SiteBenefit] = Field(default_factory=dict)
    excluded: dict[str, str] = Field(default_factory=dict)
    left_out: dict[str, str] = Field(default_factory=dict)
    absent: tuple[str, ...] = ()
    start: tuple[str, ...] = ()
    unlearned: dict[str, str] = Field(default_factory=dict)
    maybe_unlearned: tuple[str, ...] = ()
    statistics: CountingStatistics = CountingStatistics()
    learned: FinalMethodStatistics = FinalMethodStatistics()
    privacy: PrivacyBudgetSpent | None = None
    seconds: dict[str, float | None] = Field(default_factory=dict)
    model_sha256: str | None = None
    contract_hash: str | None = None
    versions: dict[str, Any] = Field(default_factory=dict)
    wire: int | None = None
    pixels: RunPixels = RunPixels()
    classes_of_one_site: dict[str, str] = Field(default_factory=dict)
    experiment: dict[str, Any] = Field(default_factory=dict)

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


class SampleImage(_LenientRunFileModel):
    """One test image with its prediction, for the report.

    Attributes:
        kind: Kind of prediction: ``found``, ``missed`` or ``false alarm``.
        probability: Predicted probability of the class.
        truth: True classes of the image.
        png: The downsized image as PNG in base64.
    """

    kind: str
    probability: float
    truth: tuple[str, ...]
    png: Annotated[str, Field(pattern=r"^[A-Za-z0-9+/=]+$")]


class ClassSampleImages(_LenientRunFileModel):
    """The sample images of one class, for the report."""

    name: str
    samples: tuple[SampleImage, ...]


class SampleOutline(_LenientRunFileModel):
    """A test image with the outlined and the predicted area of a class, for the report.

    Attributes:
        dice: Dice of this image alone.
        png: The picture, or a slice of the volume, with both borders, as PNG in base64.
    """

    dice: float
    png: Annotated[str, Field(pattern=r"^[A-Za-z0-9+/=]+$")]


class ClassOutlines(_LenientRunFileModel):
    """The outlines of one class, for the report, the best first."""

    name: str
    samples: tuple[SampleOutline, ...]


class ReportSampleImages(_LenientRunFileModel):
    """The content of ``samples.json``, which only simulated runs have; without it, the report shows no images.

    Attributes:
        classes_left_out: Number of classes without sample images.
        examined: Number of test images from which the samples were chosen.
        outlines: Of a segmentation, the outlines of each class; ``classes`` is empty then.
    """

    classes: tuple[ClassSampleImages, ...] = ()
    outlines: tuple[ClassOutlines, ...] = ()
    classes_left_out: int = 0
    examined: int = 0


class RoundFileLine(_LenientRunFileModel):
    """A round as a line of ``rounds.jsonl``."""

    round: int
    sites: tuple[str, ...] = ()
    absent: dict[str, str] = Field(default_factory=dict)
    shortened: dict[str, str] = Field(default_factory=dict)
    closed_rows: tuple[str, ...] = ()
    train_loss: float | None = None
    validation_loss: float | None = None
    validation_auroc: float | None = None
    test_accuracy: RoundAccuracy | None = None
    learned: RoundMethodStatistics = RoundMethodStatistics()
    epochs: dict[str, int] = Field(default_factory=dict)
    site_seconds: dict[str, float] = Field(default_factory=dict)
    seconds: float | None = None


@dataclass(frozen=True)
class RunFolderContent:
    """The files of a run folder as typed records."""

    folder: Path
    summary: RunSummary
    rounds: tuple[RoundFileLine, ...]
    samples: ReportSampleImages | None = None

    @cached_property
    def round_count_by_site(self) -> dict[str, int]:
        """Return site -> number of rounds in which the site took part."""
        counts = Counter[str]()
        for line in self.rounds:
            counts.update(line.sites)
        return {name: counts[name] for name in self.summary.sites}


def parse_summary(summary: Mapping[str, Any]) -> RunSummary:
    """Return the typed summary of a run, from the content of ``summary.json`` before it is written."""
    return RunSummary.model_validate_json(format_as_json_text(summary))


def read_rounds(folder: Path) -> tuple[RoundFileLine, ...]:
    """Read ``rounds.jsonl`` of a run that is about to end; the result is empty if no round has ended.

    Raises:
        BadInput: If a line is invalid.
    """
    path = folder / "rounds.jsonl"
    return parse_round_lines(path, path.read_text(encoding="utf-8")) if path.exists() else ()


def parse_round_lines(path: Path, text: str) -> tuple[RoundFileLine, ...]:
    """Parse the lines of ``rounds.jsonl``.

    Raises:
        BadInput: If a line is invalid.
    """
    lines = {f"{path} line {n}": line for n, line in enumerate(text.splitlines(), start=1) if line.strip()}
    return tuple(_parse_json_records(RoundFileLine, lines))


def read_run(folder: Path) -> RunFolderContent:
    """Read ``summary.json``, ``rounds.jsonl`` and, if it exists, ``samples.json``.

    Raises:
        BadInput: If a file is missing or invalid, with every fault.
    """
    faults: list[Fault] = []

    def read_run_file_text(path: Path) -> str:
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            problem = f"cannot be read ({error.strerror})." if isinstance(error, OSError) else "is not UTF-8 text."
            faults.append(Fault(str(path), problem, "Name the folder of a finished run."))
            return ""

    paths = folder / "summary.json", folder / "rounds.jsonl"
    summary_text, rounds_text = map(read_run_file_text, paths)
    raise_faults(faults)
    (summary,) = _parse_json_records(RunSummary, {str(paths[0]): summary_text})
    rounds = parse_round_lines(paths[1], rounds_text)
    path = folder / SAMPLES
    texts = {str(path): read_run_file_text(path)} if path.exists() else {}
    raise_faults(faults)
    samples = _parse_json_records(ReportSampleImages, texts)
    return RunFolderContent(folder, summary, rounds, *samples)


_R = TypeVar("_R", bound=_LenientRunFileModel)


def _parse_json_records(record: type[_R], texts: Mapping[str, str]) -> list[_R]:
    """Parse JSON texts into records; the keys of ``texts`` name the places in error messages."""
    records = []
    for where, text in texts.items():
        try:
            records.append(record.model_validate_json(text))
        except ValidationError as error:
            remedy = "Was it written by this program and left as it was?"
            raise BadInput(
                Fault(
                    f"{where}: {'.'.join(map(str, fault['loc'])) or 'the whole file'}",
                    describe_validation_error(dict(fault)),
                    remedy,
                )
                for fault in error.errors(include_url=False)
            ) from None
    return records
