"""The ``[policy]`` table of ``site.toml``: the hospital's rules for runs that it takes part in and data that leaves.

A method declares what it needs (:mod:`strategies.local.site_method`); nothing else leaves. These keys narrow that down,
or allow figures that leave only with a hospital's consent. The rules are applied in :mod:`client.gate.policy_rules`.

The limits have defaults that an ordinary experiment never meets; None takes one away, which no file can say.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from common.errors import quote_names, suggest_nearest_name
from common.plugins import PLUGIN
from common.system.toml import TomlSection
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
"""Sentences of every page and message on who is trusted at each level."""
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
"""Keys that a level sets where the file does not set them; all other keys have their defaults."""
NOT_BESIDE = {"round_counts_to": "smallest_count", "score_histograms": "round_counts_to"}
"""Keys that a level leaves alone where the file sets the other key: the two might contradict each other."""


class Policy(TomlSection):
    """The keys of a hospital's policy.

    Each is explained once, in docs/what-leaves.md ("The policy"); a test holds that the page and a new site.toml have
    them all. ``level`` sets the defaults of others (:data:`LEVELS`). A class with fewer patients than
    ``smallest_count`` is hidden (:mod:`client.site.disclosure`). Limits of epochs count those of a method that trains
    until its loss settles, and warm-up epochs. Memory is estimated from below (:mod:`client.gate.plan_costs`).
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
    keep_images: Literal["encrypted", "plain", "no"] = "encrypted"
    keep_images_gb: float = Field(100.0, gt=0, le=1_000_000)
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
    def _with_defaults_of_the_level(cls, tree: Any) -> Any:
        if not isinstance(tree, dict) or (level := tree.get("level", "trusted")) not in list(LEVELS):
            return tree  # pydantic says what is wrong; a list cannot be looked up in a mapping
        unfit = {key for key, other in NOT_BESIDE.items() if other in tree}
        return {**{key: value for key, value in LEVELS[level].items() if key not in unfit}, **tree}

    @property
    def changes_from_level(self) -> dict[str, Any]:
        """Return the keys that have another value than the policy's ``level`` gives them."""
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
        built_in = tuple(name for name in names or () if name != "*" and not name.startswith(PLUGIN))
        _check_names(built_in, CLASSES, "methods")
        return names

    @field_validator("statistics")
    @classmethod
    def _known_statistics(cls, names: tuple[str, ...] | None, info: ValidationInfo) -> tuple[str, ...] | None:
        plugins = any(name.startswith(PLUGIN) for name in info.data.get("methods") or ())
        if plugins or not names:
            return names
        from strategies.registry import describe_statistics  # here: only a file that names them waits for torch

        return _check_names(names, describe_statistics(), "statistics")


def _check_names(names: tuple[str, ...] | None, options: Iterable[str], noun: str) -> tuple[str, ...] | None:
    """Return the names if each is one of the options, because a misspelt name would forbid what it should allow."""
    options = list(options)
    for name in names or ():
        if name not in options:
            raise ValueError(
                f'"{name}" is none of the {noun}: {suggest_nearest_name(name, options) or quote_names(options)}'
            )
    return names


UNLIMITED = Policy(
    label_counts=True, score_histograms=True, smallest_count=0, metrics_outside_privacy=True, **WITHOUT_LIMITS
)
"""The policy of a simulated site where nobody sets another one."""
