"""The ``[policy]`` table of ``site.toml``: what the hospital takes part in, and what it lets out.

What a method needs, it declares (:mod:`strategies.local.site_method`); nothing else leaves. These keys narrow that
down, or allow what is told only where a hospital says so. The rules that hold them are in
:mod:`client.gate.policy_rules`.

The limits have defaults that an ordinary experiment never meets; None takes one away, which no file can say.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from common.errors import did_you_mean, quoted
from common.plugins import PLUGIN
from common.system.toml import Section
from strategies.method_list import CLASSES

Group = Literal["trunk", "norm", "head"]
GROUPS: tuple[Group, ...] = ("trunk", "norm", "head")

LIMITS = (
    *("rounds", "epochs", "total_epochs", "batch_size", "image_size", "parameters", "classes"),
    *("memory_gb", "disk_gb", "threads", "hours", "run_hours", "plan_kb", "method_number"),
)
WITHOUT_LIMITS: dict[str, Any] = {
    **dict.fromkeys((f"maximum_{name}" for name in LIMITS), None),
    "methods": ("*", "plugin:*"),
    "networks": ("*",),
    "losses": ("*",),
    "metrics": ("*",),
    "transforms": ("*",),
    "optimizers": ("*",),
    "schedules": ("*",),
    "smallest_cohort": 1,
    "honest_sites": None,
    "train_hidden_classes": True,
}
"""For a simulation: who writes the plan there owns the machine."""


Level = Literal["trusted", "masked", "private"]
TRUST: Mapping[Level, str] = {
    "trusted": "The coordinator is trusted with this hospital's updates as with a copy of its images.",
    "masked": "The coordinator runs the published program; it sees sums only.",
    "private": "Nobody is trusted.",
}
"""Who is trusted at each level, in the words of every page and message."""
_FIGURES_STAY = {"training_figures": False, "test_metrics": False, "test_each_round": False}
LEVELS: Mapping[Level, Mapping[str, Any]] = {
    "trusted": {
        "label_counts": True,
        "score_histograms": True,
        "train_hidden_classes": True,
    },
    "masked": {
        **_FIGURES_STAY,
        "masked_only": True,
        "score_histograms": True,
        "smallest_cohort": 3,
    },
    "private": {
        **_FIGURES_STAY,
        "epsilon": 8.0,
        "privacy_unit": "patient",
        "round_counts_to": 10,
    },
}
"""What a level sets where the file does not say otherwise; all else is at its default."""
NOT_BESIDE = {"round_counts_to": "smallest_count", "score_histograms": "round_counts_to"}
"""Keys that a level leaves alone where the file sets the other key: the two might contradict each other."""


class Policy(Section):
    """What the hospital takes part in, and lets out.

    Attributes:
        level: Who is trusted (:data:`TRUST`), and so which defaults hold (:data:`LEVELS`): ``masked`` takes part only
            in runs with secure aggregation, ``private`` only in runs whose noise hides whole patients; no figure of
            this site alone leaves in either.
        methods: Those it takes part in; every method of this release where left out, as ``*`` says too. A plug-in's is
            allowed only where it is listed, ``plugin:NAME``.
        networks: Networks that are not Polyclinic's own and that it builds, ``*`` standing for any letters; a plug-in
            is allowed only where it is listed, ``plugin:NAME``.
        losses: Losses of plug-ins that it minimises, ``plugin:NAME``; Polyclinic's own need not be listed.
        metrics: Metrics of plug-ins that it computes on its test images and sends, ``plugin:NAME``.
        transforms: Transforms of plug-ins that change its training images, ``plugin:NAME``.
        optimizers: Optimisers of plug-ins that it trains with, ``plugin:NAME``; Polyclinic's own need not be listed.
        schedules: Schedules of plug-ins for its learning rate, ``plugin:NAME``; Polyclinic's own need not be listed.
        maximum_rounds: Most rounds of a run that it takes part in.
        maximum_epochs: Most local epochs in one round, those of a method that trains until its loss settles included.
        maximum_total_epochs: Most local epochs in a whole run, warm-up epochs included.
        maximum_batch_size: Most images in a training batch.
        maximum_image_size: Largest side, in pixels, to which a network brings images.
        maximum_parameters: Most numbers in a model.
        maximum_classes: Most head rows in a model.
        maximum_memory_gb: Most memory that training may take by our estimate, a lower bound; ``machine`` stands for
            all that the machine has, or its GPU.
        maximum_disk_gb: Most that one run may leave on the disk.
        maximum_threads: Most threads that training uses.
        maximum_hours: Longest time of work on one request; the site itself stops a longer one.
        maximum_run_hours: Longest time of work on one run, all its requests together.
        maximum_plan_kb: Largest plan, in units of 1,000 bytes.
        maximum_method_number: Largest whole number in a plan's ``[method]`` table.
        keep_features: Whether the features of a frozen backbone are kept on its disk, encrypted with its key; else they
            are computed again after each start.
        test_each_round: Whether it takes part in runs that test the model on its own test part every round.
        parts: Groups of the network whose change may leave.
        statistics: What a method may be told beside the change of the network, by name; where left out, what the
            method declares.
        maximum_update_norm: Longest Euclidean length of a change that leaves; runs whose plan does not clip to it, or
            to less, are declined.
        training_figures: Whether it tells the loss on its training images, and loss and AUROC on its validation
            images; else no round is chosen by them.
        test_metrics: Whether it tells how good the model is on its own test part, class by class; not in a run with
            secure aggregation.
        train_hidden_classes: Whether labels of hidden classes are trained on where no ``epsilon`` makes sure that noise
            covers the update; else nothing is known of these classes there.
        label_counts: Whether it tells how many training images show each class, where a method asks.
        score_histograms: Whether it tells how the final model's scores on its test and validation parts are spread, if
            asked; in a run with secure aggregation those of the test part, in a sum over sites alone.
        masked_only: Send no update but under secure aggregation.
        rows_alone: Whether, under secure aggregation, a head row that fewer sites of the round own than
            ``smallest_cohort`` may be opened. Else it stays masked, and the model's row stays as it was.
        smallest_cohort: Under secure aggregation, fewest sites whose sum it helps to open; and a round that is asked
            again is masked among the same sites only. 1: sums of two sites, and of any others when a round is repeated.
        peers: Under secure aggregation, the other sites' names with the public keys that their statements must be
            signed with, as OpenSSH lines; where left out, the coordinator is trusted to relay the right ones.
        honest_sites: Of the sites in a sum, this one included, how many it trusts to add their share of distributed
            noise; runs whose epsilon holds only with more are declined. It knows them by ``peers``.
        smallest_count: Of a class that fewer patients show, or fewer do not, nothing is told.
        round_counts_to: Counts are rounded down to a multiple of it.
        epsilon, delta: What all runs together may cost; the site stops taking part before that, and takes no part in
            a run without privacy.
        privacy_unit: What the noise of a run with privacy must hide here at least: single images, or whole patients.
        metrics_outside_privacy: Whether losses and test results, which no noise covers, leave in a run with privacy.
    """

    level: Level = "trusted"
    methods: tuple[str, ...] | None = None
    networks: tuple[str, ...] = ("timm:*", "torchvision:*", "monai:*", "torchxrayvision:*")
    losses: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    transforms: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    maximum_rounds: int | None = Field(10_000, ge=1)
    maximum_epochs: int | None = Field(500, ge=1)
    maximum_total_epochs: int | None = Field(100_000, ge=1)
    maximum_batch_size: int | None = Field(4096, ge=1)
    maximum_image_size: int | None = Field(1024, ge=1)
    maximum_parameters: int | None = Field(200_000_000, ge=1)
    maximum_classes: int | None = Field(1000, ge=1)
    maximum_memory_gb: Annotated[float, Field(gt=0)] | Literal["machine"] | None = "machine"
    maximum_disk_gb: float | None = Field(20.0, gt=0)
    maximum_threads: int | None = Field(64, ge=1)
    maximum_hours: float | None = Field(24.0, gt=0)
    maximum_run_hours: float | None = Field(720.0, gt=0)
    maximum_plan_kb: float | None = Field(64.0, gt=0)
    maximum_method_number: int | None = Field(10_000, ge=1)
    keep_features: bool = True
    test_each_round: bool = True
    parts: tuple[Group, ...] = GROUPS
    statistics: tuple[str, ...] | None = None
    maximum_update_norm: float | None = Field(None, gt=0)
    training_figures: bool = True
    test_metrics: bool = True
    train_hidden_classes: bool = False
    label_counts: bool = False
    score_histograms: bool = False
    masked_only: bool = False
    rows_alone: bool = False
    smallest_cohort: int = Field(3, ge=1)
    peers: dict[str, str] = Field(default_factory=dict)
    honest_sites: int | None = Field(1, ge=1)
    smallest_count: int = Field(10, ge=0)
    round_counts_to: int = Field(1, ge=1)
    epsilon: float | None = Field(None, gt=0)
    delta: float = Field(1e-5, gt=0, lt=1)
    privacy_unit: Literal["image", "patient"] = "image"
    metrics_outside_privacy: bool = False

    @model_validator(mode="before")
    @classmethod
    def _as_the_level_says(cls, said: Any) -> Any:
        if not isinstance(said, dict) or (level := said.get("level", "trusted")) not in list(LEVELS):
            return said  # pydantic says what is wrong; a list cannot be looked up in a mapping
        unfit = {key for key, other in NOT_BESIDE.items() if other in said}
        return {**{key: value for key, value in LEVELS[level].items() if key not in unfit}, **said}

    @property
    def beside_its_level(self) -> dict[str, Any]:
        """The keys that have another value than the level sets."""
        return {key: getattr(self, key) for key, value in LEVELS[self.level].items() if getattr(self, key) != value}

    @model_validator(mode="after")
    def _rounding_makes_no_zero(self) -> Self:
        if self.smallest_count % self.round_counts_to or self.round_counts_to > max(self.smallest_count, 1):
            raise ValueError("smallest_count must be a multiple of round_counts_to: a count would fall below it")
        if self.round_counts_to > 1 and self.score_histograms:
            raise ValueError("score_histograms add up to exact counts: they do not go with round_counts_to")
        return self

    @field_validator("methods")
    @classmethod
    def _known_methods(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        _known(tuple(name for name in names or () if name != "*" and not name.startswith(PLUGIN)), CLASSES, "methods")
        return names

    @field_validator("statistics")
    @classmethod
    def _known_statistics(cls, names: tuple[str, ...] | None, info: ValidationInfo) -> tuple[str, ...] | None:
        plugins = any(name.startswith(PLUGIN) for name in info.data.get("methods") or ())
        if plugins or not names:
            return names
        from strategies.registry import statistics_sent  # here: only a file that names them waits for torch

        return _known(names, statistics_sent(), "statistics")


def _known(names: tuple[str, ...] | None, options: Iterable[str], what: str) -> tuple[str, ...] | None:
    """The names, if each is one of the options: a misspelt one would forbid what it was meant to allow."""
    known = list(options)
    for name in names or ():
        if name not in known:
            raise ValueError(f'"{name}" is none of the {what}: {did_you_mean(name, known) or quoted(known)}')
    return names
