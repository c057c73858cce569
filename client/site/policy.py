"""The ``[policy]`` table of ``site.toml``: the hospital's rules for runs that it takes part in and data that leaves.

Only data that a method declares (:mod:`polyclinic.strategies.local.site_method`) leaves. The policy's keys narrow this
down, or allow metrics that need the hospital's consent. :mod:`polyclinic.client.gate.policy_rules` applies the rules.

Each limit has a default that ordinary experiments do not reach. The value None removes a limit. Only code can set it,
because TOML has no such value.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StrictBool, ValidationInfo, field_validator, model_validator

from polyclinic.common.counts import COUNT_TABLES, check_table_names
from polyclinic.common.errors import quote_names, suggest_nearest_name
from polyclinic.common.models.zoo.spec import Sha256
from polyclinic.common.plugins import PLUGIN_PREFIX
from polyclinic.common.system.toml import TomlSection
from polyclinic.strategies.method_list import METHOD_CLASS_PATHS

Group = Literal["trunk", "norm", "head"]
MODEL_GROUPS: tuple[Group, ...] = ("trunk", "norm", "head")

LIMIT_NAMES = (
    *("rounds", "epochs", "total_epochs", "batch_size", "image_size", "parameters", "classes"),
    *("memory_gb", "disk_gb", "threads", "hours", "run_hours", "plan_kb", "method_number"),
)
UNLIMITED_KEYS: dict[str, Any] = {
    **dict.fromkeys((f"maximum_{name}" for name in LIMIT_NAMES), None),
    "methods": ("*", "plugin:*"),
    **dict.fromkeys(("networks", "losses", "metrics", "transforms", "optimizers", "schedules"), ("*",)),
    "smallest_cohort": 1,
    "honest_sites": None,
    "train_hidden_classes": True,
}
"""Keys of a policy without limits, for a simulation, in which the author of the plan owns the machine."""


Level = Literal["trusted", "masked", "private"]
LEVEL_SENTENCES: Mapping[Level, str] = {
    "trusted": "The coordinator is trusted with this hospital's updates as with a copy of its images.",
    "masked": "The coordinator runs the published program; it sees sums only.",
    "private": "Noise covers each patient, so the coordinator learns little of one. Epsilon counts in one ledger; a "
    "second ledger would begin at 0.",
}
"""Level -> sentence about the trust in the coordinator, for all pages and messages."""
_NO_FIGURES_LEAVE = {"training_figures": False, "test_metrics": False, "test_each_round": False}
LEVEL_DEFAULTS: Mapping[Level, Mapping[str, Any]] = {
    "trusted": {"label_counts": True, "score_histograms": True, "train_hidden_classes": True, "counts": COUNT_TABLES},
    "masked": {
        **_NO_FIGURES_LEAVE,
        "masked_only": True,
        "score_histograms": True,
        "smallest_cohort": 3,
        "counts": COUNT_TABLES,
    },
    "private": {**_NO_FIGURES_LEAVE, "epsilon": 8.0, "privacy_unit": "patient", "round_counts_to": 10},
}
"""Level -> defaults that differ from those of :class:`SitePolicy`; a key in the file takes precedence."""
CONFLICTING_KEYS = {"round_counts_to": "smallest_count", "score_histograms": "round_counts_to"}
"""Key -> other key: a level does not set the key if the file sets the other one, because they might conflict."""


class SitePolicy(TomlSection):
    """The keys of a hospital's policy.

    docs/what-leaves.md and a new ``site.toml`` print these texts. ``level`` sets the defaults of other keys
    (:data:`LEVEL_DEFAULTS`).

    Attributes:
        level: Who is trusted; it sets the defaults of other keys.
        approval: `"required"`: nothing runs before a person of this hospital has
            [approved the plan](approval.md).
        methods: Methods that may run; all of this release where left out. A plug-in's method is listed as
            `plugin:NAME`.
        networks: Networks that may run beside Polyclinic's own. A plug-in's network is listed.
        losses: Losses of plug-ins that may run, each as `plugin:NAME`.
        metrics: Metrics of plug-ins that may run. Such code sees scores and labels, and sends a number for each class:
            list one that you have read.
        transforms: Transforms of plug-ins that may run.
        optimizers: Optimizers of plug-ins that may run.
        schedules: Learning-rate schedules of plug-ins that may run.
        maximum_rounds: Rounds of a run.
        maximum_epochs: Local epochs in one round, with warm-up; of a method that trains until its loss settles, the
            most that it may take.
        maximum_total_epochs: Local epochs in a whole run.
        maximum_batch_size: Images in a training batch.
        maximum_image_size: Pixels of an image's side.
        maximum_parameters: Numbers in a model. A message from the coordinator may have eight bytes for each, and 67 MB.
        maximum_classes: Classes of a model.
        maximum_memory_gb: Memory for training, compared with a lower bound of what a run needs; `"machine"`: all that
            the machine or its GPU has. A message from the coordinator may take a third of it.
        maximum_disk_gb: Size of the files that one run may store.
        maximum_threads: Threads of a training.
        maximum_hours: Working time for one request; the site itself stops a longer one.
        maximum_run_hours: Working time for one run, all its requests together.
        maximum_plan_kb: Size of a plan.
        maximum_method_number: Largest whole number in a plan's `[method]` table.
        keep_features: Keep the features of images behind a frozen trunk on the disk, encrypted. False: compute them
            again after each start.
        keep_images: Keep decoded images in `state/`, encrypted with a key that follows from the site's own.
            `"plain"` is faster, for a disk that is encrypted itself. `"no"`: all images have to fit in memory.
        keep_images_gb: Size that the decoded images on the disk may have.
        test_each_round: False: decline runs that count right test images in each round.
        parts: Parts of the network whose change may leave.
        statistics: Statistics of a method that may leave; all that the method declares where left out, `[]` for none.
        maximum_update_norm: Decline runs that do not clip this site's change to this Euclidean length or less.
        training_figures: False: no loss and no validation figure leaves, and no epoch is chosen by validation images.
        test_metrics: False: no figure of the test images leaves.
        train_hidden_classes: False: train on labels of [hidden classes](privacy.md#small-counts) only where `epsilon`
            is set.
        label_counts: Send if any training image shows each class; how many do, where the method asks; and sums over
            volumes, where the coordinator [plans the network](segmentation.md#let-the-volumes-choose-the-network).
        counts: Tables that may leave when the coordinator [counts patients](count.md); where left out all, at level
            `private` none.
        counts_epsilon: Part of `epsilon` that the noisy counts cost each patient, once.
        evaluate: True, or a list of SHA-256: models that the coordinator sends are scored on the test images, and
            [figures leave](evaluate.md#at-hospitals-over-the-network).
        score_histograms: Send histograms of scores on test and validation images, where the experiment asks.
        masked_only: True: decline runs without [secure aggregation](secure-aggregation.md).
        rows_alone: True: head rows of fewer sites than `smallest_cohort` may be seen.
        smallest_cohort: Minimum number of sites in a sum that this site helps to unmask. 1: no rule.
        peers: Names and public keys of the other sites: agree on masks with these only.
        honest_sites: Sites of a sum, this one included, that are trusted to add their share of
            [distributed noise](privacy.md#distributed-noise).
        smallest_count: No count, score or mean leaves of a class that [fewer patients](privacy.md#small-counts) show,
            or fewer do not.
        round_counts_to: Round counts down to a multiple of this number.
        epsilon: Privacy budget of each patient for all runs, over all folders, keys and federations. If set, only
            runs with [noise](privacy.md#differential-privacy).
        delta: The delta at which epsilon is counted.
        privacy_unit: `"patient"`: decline runs whose noise hides only single images.
        ledger: Folder of the [ledger](privacy.md#the-ledger) of what each patient has spent. Empty: this account's,
            `~/.local/state/polyclinic/ledger` or below `$XDG_STATE_HOME`.
        metrics_outside_privacy: True: losses and test results, which no noise covers, leave in runs with noise too.
    """

    level: Level = "trusted"
    approval: Literal["off", "required"] = "off"
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
    keep_images: Literal["encrypted", "plain", "no"] = "encrypted"
    keep_images_gb: float = Field(100.0, gt=0, le=1_000_000)
    test_each_round: bool = True
    parts: tuple[Group, ...] = MODEL_GROUPS
    statistics: tuple[str, ...] | None = None
    maximum_update_norm: float | None = Field(None, gt=0)
    training_figures: bool = True
    test_metrics: bool = True
    train_hidden_classes: bool = False
    label_counts: bool = False
    counts: tuple[str, ...] = ()
    counts_epsilon: float = Field(1.0, gt=0)
    evaluate: StrictBool | tuple[Sha256, ...] = False
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
    ledger: str = ""
    metrics_outside_privacy: bool = False

    @model_validator(mode="before")
    @classmethod
    def _fill_level_defaults(cls, tree: Any) -> Any:
        if not isinstance(tree, dict) or (level := tree.get("level", "trusted")) not in list(LEVEL_DEFAULTS):
            return tree  # pydantic reports the fault; "in list(...)" also accepts unhashable values
        conflicting = {key for key, other in CONFLICTING_KEYS.items() if other in tree}
        defaults = {key: value for key, value in LEVEL_DEFAULTS[level].items() if key not in conflicting}
        return {**defaults, **tree}

    def withholds_unnoised_figures(self, privacy_level: str) -> bool:
        """Return True if figures without noise stay at the hospital in a run with this ``privacy.level``."""
        return privacy_level != "none" and not self.metrics_outside_privacy

    @property
    def keys_changed_from_level(self) -> dict[str, Any]:
        """Return the keys, with their values, that differ from the defaults of the policy's ``level``."""
        return {
            key: getattr(self, key) for key, value in LEVEL_DEFAULTS[self.level].items() if getattr(self, key) != value
        }

    @model_validator(mode="after")
    def _check_count_rounding(self) -> Self:
        if self.smallest_count % self.round_counts_to or self.round_counts_to > max(self.smallest_count, 1):
            raise ValueError("smallest_count must be a multiple of round_counts_to: a count would fall below it")
        if self.round_counts_to > 1 and self.score_histograms:
            raise ValueError("score_histograms add up to exact counts: they do not go with round_counts_to")
        return self

    _check_counts = field_validator("counts")(check_table_names)

    @field_validator("methods")
    @classmethod
    def _check_known_methods(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        built_in = tuple(name for name in names or () if name != "*" and not name.startswith(PLUGIN_PREFIX))
        _refuse_unknown_names(built_in, METHOD_CLASS_PATHS, "methods")
        return names

    @field_validator("statistics")
    @classmethod
    def _check_known_statistics(cls, names: tuple[str, ...] | None, info: ValidationInfo) -> tuple[str, ...] | None:
        plugins = any(name.startswith(PLUGIN_PREFIX) for name in info.data.get("methods") or ())
        if plugins or not names:
            return names
        from polyclinic.strategies.registry import list_statistic_meanings  # imports torch, so only if needed

        return _refuse_unknown_names(names, list_statistic_meanings(), "statistics")


def _refuse_unknown_names(names: tuple[str, ...] | None, options: Iterable[str], noun: str) -> tuple[str, ...] | None:
    """Check that each name in a key of the policy is one of ``options``; return the names.

    Args:
        names: The names; None for no limit.
        noun: Noun for the options, for the message.

    Raises:
        ValueError: If a name is not an option, because a misspelt name would allow nothing.
    """
    options = list(options)
    for name in names or ():
        if name not in options:
            raise ValueError(
                f'"{name}" is none of the {noun}: {suggest_nearest_name(name, options) or quote_names(options)}'
            )
    return names


UNLIMITED = SitePolicy(
    label_counts=True,
    score_histograms=True,
    counts=COUNT_TABLES,
    evaluate=True,
    smallest_count=0,
    metrics_outside_privacy=True,
    **UNLIMITED_KEYS,
)
"""The policy of a simulated site, unless a test or an experiment sets another one."""
