"""The ``[policy]`` table of ``site.toml``: the hospital's rules for runs that it takes part in and data that leaves.

Only data that a method declares (:mod:`polyclinic.strategies.local.site_method`) leaves. The policy's keys narrow this
down, or allow metrics that need the hospital's consent. :mod:`polyclinic.client.gate.policy_rules` applies the rules.

Each limit has a default that ordinary experiments do not reach. The value None removes a limit; only code can set it,
because TOML has no such value.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StrictBool, ValidationInfo, field_validator, model_validator

from polyclinic.common.counts import COUNT_TABLES, check_table_names
from polyclinic.common.errors import quote_names, suggest_nearest_name
from polyclinic.common.models.zoo.spec import Sha256
from polyclinic.common.plugins import PLUGIN
from polyclinic.common.system.toml import TomlSection
from polyclinic.strategies.method_list import METHOD_CLASS_PATHS

Group = Literal["trunk", "norm", "head"]
GROUPS: tuple[Group, ...] = ("trunk", "norm", "head")

LIMITS = (
    *("rounds", "epochs", "total_epochs", "batch_size", "image_size", "parameters", "classes"),
    *("memory_gb", "disk_gb", "threads", "hours", "run_hours", "plan_kb", "method_number"),
)
WITHOUT_LIMITS: dict[str, Any] = {
    **dict.fromkeys((f"maximum_{name}" for name in LIMITS), None),
    "methods": ("*", "plugin:*"),
    **dict.fromkeys(("networks", "losses", "metrics", "transforms", "optimizers", "schedules"), ("*",)),
    "smallest_cohort": 1,
    "honest_sites": None,
    "train_hidden_classes": True,
}
"""Keys without limits, for a simulation, where the author of the plan owns the machine."""


Level = Literal["trusted", "masked", "private"]
TRUST: Mapping[Level, str] = {
    "trusted": "The coordinator is trusted with this hospital's updates as with a copy of its images.",
    "masked": "The coordinator runs the published program; it sees sums only.",
    "private": "Nobody is trusted. Epsilon counts for each patient in one ledger; a second ledger would begin at 0.",
}
"""Sentence for each level about who is trusted, for all pages and messages."""
_FIGURES_STAY = {"training_figures": False, "test_metrics": False, "test_each_round": False}
LEVELS: Mapping[Level, Mapping[str, Any]] = {
    "trusted": {"label_counts": True, "score_histograms": True, "train_hidden_classes": True, "counts": COUNT_TABLES},
    "masked": {
        **_FIGURES_STAY,
        "masked_only": True,
        "score_histograms": True,
        "smallest_cohort": 3,
        "counts": COUNT_TABLES,
    },
    "private": {**_FIGURES_STAY, "epsilon": 8.0, "privacy_unit": "patient", "round_counts_to": 10},
}
"""Defaults of keys that each level changes; a key in the file takes precedence."""
CONFLICTING_KEYS = {"round_counts_to": "smallest_count", "score_histograms": "round_counts_to"}
"""Key -> other key: a level does not set the key if the file sets the other one, because they might conflict."""


class SitePolicy(TomlSection):
    """The keys of a hospital's policy.

    docs/what-leaves.md ("The policy") explains each key; a test checks that this page and a new site.toml have all
    keys. ``level`` sets the defaults of other keys (:data:`LEVELS`). A class with fewer patients than
    ``smallest_count`` is hidden (:mod:`polyclinic.client.site.disclosure`). Limits on epochs also count warm-up epochs
    and, for a method that trains until its loss settles, its largest number of epochs. Memory is compared with a lower
    bound (:mod:`polyclinic.client.gate.plan_costs`).
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
    parts: tuple[Group, ...] = GROUPS
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
        if not isinstance(tree, dict) or (level := tree.get("level", "trusted")) not in list(LEVELS):
            return tree  # pydantic says what is wrong; a list cannot be looked up in a mapping
        unfit = {key for key, other in CONFLICTING_KEYS.items() if other in tree}
        return {**{key: value for key, value in LEVELS[level].items() if key not in unfit}, **tree}

    @property
    def keys_changed_from_level(self) -> dict[str, Any]:
        """Return the keys, with their values, that differ from the defaults of the policy's ``level``."""
        return {key: getattr(self, key) for key, value in LEVELS[self.level].items() if getattr(self, key) != value}

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
        built_in = tuple(name for name in names or () if name != "*" and not name.startswith(PLUGIN))
        _refuse_unknown_names(built_in, METHOD_CLASS_PATHS, "methods")
        return names

    @field_validator("statistics")
    @classmethod
    def _check_known_statistics(cls, names: tuple[str, ...] | None, info: ValidationInfo) -> tuple[str, ...] | None:
        plugins = any(name.startswith(PLUGIN) for name in info.data.get("methods") or ())
        if plugins or not names:
            return names
        from polyclinic.strategies.registry import list_statistic_meanings  # imports torch, so only if needed

        return _refuse_unknown_names(names, list_statistic_meanings(), "statistics")


def _refuse_unknown_names(names: tuple[str, ...] | None, options: Iterable[str], noun: str) -> tuple[str, ...] | None:
    """Return the names in a key of the policy unchanged, after a check that each is one of ``options``.

    Args:
        names: The names; None for no limit.
        noun: Noun for the options, for the message.

    Raises:
        ValueError: If a name is no option, because a misspelt name would allow nothing.
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
    **WITHOUT_LIMITS,
)
"""The policy of a simulated site, unless a test or an experiment sets another one."""
