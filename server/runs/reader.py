"""The typed view of a run folder, for anyone who reads one: reports and comparisons."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import BadInput, Fault, stop_on
from common.metrics.auroc import ClassMetrics, Summary
from common.metrics.benefit import Benefit
from common.metrics.multi_class import ClientAccuracy, RoundAccuracy
from common.system.toml import error_text

SAMPLES = "samples.json"

Measure = Literal[
    "accuracy", "sensitivity", "specificity", "f1", "best_mean_client_test_accuracy", "best_test_accuracy"
]
MEASURES: tuple[Measure, ...] = get_args(Measure)
"""What only a task with one class an image has."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class SiteRecord(_Record):
    """What one site brought and sent.

    Attributes:
        positives: Training images that show a class, as its policy tells; None for a hidden one.
        smallest_count: It tells no count of fewer patients than this.
        release: Of Polyclinic at the site; None in a run of a release that did not note it.
    """

    classes: tuple[str, ...]
    release: str | None = None
    train_samples: int | None = None
    validation_samples: int | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    positives: dict[str, int | None] = Field(default_factory=dict)
    smallest_count: int | None = None


class SiteResult(_Record):
    """The best model at one site: validation loss on its own data, AUROC on its test part, for its own classes."""

    validation_loss: float | None = None
    mean_auroc: float | None = None
    per_class: dict[str, ClassMetrics] = Field(default_factory=dict)


class SiteBenefit(_Record):
    """What a site said of training alone, None where its policy tells nothing, or why it said nothing."""

    benefit: Benefit | None = None
    reason: str = ""


class Ensemble(_Record):
    """The models of sites that train alone, answering together."""

    test: Summary
    per_site: dict[str, SiteResult] = Field(default_factory=dict)


class Prototypes(_Record):
    """How much a class's mean features are alike, as cosines; None where nobody has the prototype.

    Attributes:
        positives: Between the positives of every two classes.
        signs: Between a class's negatives and its positives.
    """

    classes: tuple[str, ...]
    positives: tuple[tuple[float | None, ...], ...]
    signs: tuple[float | None, ...]


class Learned(_Record):
    """What a method's coordinator knew at the end beside the model."""

    prototypes: Prototypes | None = None


class LearnedInRound(_Record):
    """What a method has learned after a round.

    Attributes:
        slopes: Site -> slope of its loss when it last trained.
        difficulty: Class -> share of the images of sites that do not label it of which the model is sure.
    """

    slopes: dict[str, float | None] = Field(default_factory=dict)
    difficulty: dict[str, float | None] = Field(default_factory=dict)


class Privacy(_Record):
    """What a run with privacy cost, by site; None where there was no noise.

    Attributes:
        noise: Whether each site added all its noise, or a share.
        honest_sites: With shares, as long as how many sites of a sum add theirs ``epsilon`` holds.
        epsilon_of_one_share: What the whole run costs a site if no other adds its share.
    """

    level: str
    delta: float
    accountant: str
    epsilon: dict[str, float | None]
    noise: str = "local"
    honest_sites: int | None = None
    epsilon_of_one_share: float | None = None


class RunSummary(_Record):
    """``summary.json``; what a method does not have is ``None`` or empty.

    Attributes:
        ended: When, ISO 8601 in UTC.
        criterion: By which figure of the sites' validation parts the best round was chosen; None where none was.
        table_sha256: Of the table of labels, by which ``evaluate`` knows it again.
        patients_known: Whether the data said whose images they are; None where only the sites know.
        external: The model on images of another place; None without them.
        drawn_to_test: The sites that were asked to test the model, where they are a sample; None where all were.
        benefit: Site -> how the run's model compares with one that it trained alone; empty where nobody was asked.
    """

    method: str
    name: str | None = None
    backend: str | None = None
    ended: str | None = None
    rounds: int
    seed: int
    classes: tuple[str, ...]
    sites: dict[str, SiteRecord]
    table_sha256: str | None = None
    patients_known: bool | None = None
    best_round: int | None = None
    criterion: Literal["auroc", "loss"] | None = None
    test: Summary
    client_accuracy: ClientAccuracy | None = None
    per_site: dict[str, SiteResult] = Field(default_factory=dict)
    drawn_to_test: tuple[str, ...] | None = None
    ensemble: Ensemble | None = None
    external: Summary | None = None
    benefit: dict[str, SiteBenefit] = Field(default_factory=dict)
    condemned: dict[str, str] = Field(default_factory=dict)
    learned: Learned = Learned()
    privacy: Privacy | None = None
    seconds: dict[str, float | None] = Field(default_factory=dict)
    model_sha256: str | None = None
    contract_hash: str | None = None
    versions: dict[str, Any] = Field(default_factory=dict)
    experiment: dict[str, Any] = Field(default_factory=dict)

    @cached_property
    def owners(self) -> Mapping[str, tuple[str, ...]]:
        """Class -> the sites that annotate it, in the order of the run's sites; looked up once a site and class."""
        found: dict[str, list[str]] = {}
        for site, record in self.sites.items():
            for name in record.classes:
                found.setdefault(name, []).append(site)
        return {name: tuple(sites) for name, sites in found.items()}

    @property
    def untrained(self) -> bool:
        """Whether the tested model is that before round 1, because no round was better by validation."""
        return self.best_round == 0 and self.rounds > 0

    @property
    def label(self) -> str:
        """What the method is called in tables."""
        return self.name or self.method

    @property
    def traffic_bytes(self) -> int:
        """Return the bytes sent and received by all sites, as far as they were counted."""
        return sum((site.bytes_up or 0) + (site.bytes_down or 0) for site in self.sites.values())

    @property
    def measures(self) -> dict[Measure, float]:
        """Return the measures that the run has."""
        parts = (self.test.multi_class, self.client_accuracy)
        found = {name: getattr(part, name, None) for part in parts for name in MEASURES if hasattr(part, name)}
        return {name: value for name, value in found.items() if value is not None}


class SampleImage(_Record):
    """One test image in the report.

    Attributes:
        kind: ``found``, ``missed`` or ``false alarm``.
        probability: That the model gives to the class.
        truth: Classes that it is known to show.
        png: The picture, small, in base64.
    """

    kind: str
    probability: float
    truth: tuple[str, ...]
    png: Annotated[str, Field(pattern=r"^[A-Za-z0-9+/=]+$")]


class SamplesOfClass(_Record):
    """The sample images of one class."""

    name: str
    samples: tuple[SampleImage, ...]


class Samples(_Record):
    """``samples.json``, which only simulated runs have; without it a report shows no image.

    Attributes:
        examined: Test images that they were chosen from, the first ones.
    """

    classes: tuple[SamplesOfClass, ...]
    classes_left_out: int = 0
    examined: int = 0


class RoundLine(_Record):
    """One line of ``rounds.jsonl``."""

    round: int
    sites: tuple[str, ...] = ()
    absent: dict[str, str] = Field(default_factory=dict)
    shortened: dict[str, str] = Field(default_factory=dict)
    closed_rows: tuple[str, ...] = ()
    train_loss: float | None = None
    validation_loss: float | None = None
    validation_auroc: float | None = None
    test_mean_auroc: float | None = None
    test_accuracy: RoundAccuracy | None = None
    learned: LearnedInRound = LearnedInRound()
    epochs: dict[str, int] = Field(default_factory=dict)
    site_seconds: dict[str, float] = Field(default_factory=dict)
    seconds: float | None = None


@dataclass(frozen=True)
class Run:
    """A run folder, read."""

    folder: Path
    summary: RunSummary
    rounds: tuple[RoundLine, ...]
    samples: Samples | None = None

    @property
    def rounds_taken(self) -> dict[str, int]:
        """Site -> rounds in which it took part."""
        taken = Counter(site for each in self.rounds for site in each.sites)
        return {name: taken[name] for name in self.summary.sites}


def read_run(folder: Path) -> Run:
    """Read ``summary.json``, ``rounds.jsonl`` and, where there is one, ``samples.json``.

    Raises:
        BadInput: If a file is missing or is not what a run writes, with every fault in it.
    """
    texts = [_text(folder / name) for name in ("summary.json", "rounds.jsonl")]
    faults = [text for text in texts if isinstance(text, Fault)]
    stop_on(faults)
    summary_text, rounds_text = (str(text) for text in texts)
    summary = _parsed(RunSummary, summary_text, str(folder / "summary.json"))
    where = str(folder / "rounds.jsonl")
    lines = [(number, line) for number, line in enumerate(rounds_text.splitlines(), start=1) if line.strip()]
    rounds = tuple(_parsed(RoundLine, line, f"{where} line {n}") for n, line in lines)
    return Run(folder, summary, rounds, _samples(folder / SAMPLES))


def _samples(path: Path) -> Samples | None:
    if not path.exists():
        return None
    stop_on([text] if isinstance(text := _text(path), Fault) else [])
    return _parsed(Samples, str(text), str(path))


def _text(path: Path) -> str | Fault:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        remedy = "Name the folder of a finished run."
        return Fault(str(path), f"cannot be read ({error.strerror}).", remedy)
    except UnicodeDecodeError:
        return Fault(str(path), "is not UTF-8 text.", "Name the folder of a finished run.")


_R = TypeVar("_R", bound=_Record)


def _parsed(record: type[_R], text: str, where: str) -> _R:
    try:
        return record.model_validate_json(text)
    except ValidationError as error:
        each = error.errors(include_url=False)
        places = [(".".join(map(str, one["loc"])) or "the whole file", error_text(dict(one))) for one in each]
        remedy = "Was it written by this program and left as it was?"
        raise BadInput(Fault(f"{where}: {place}", said, remedy) for place, said in places) from None
