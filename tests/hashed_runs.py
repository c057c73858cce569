"""Runs whose model must stay the same to the bit: every method, and each wrapper on one."""

from collections.abc import Iterable, Mapping

from tests.federations import ALL_DIGITS, AT_COORDINATOR, OWN_IMAGES, needs_of

ROUNDS = "run.rounds=4"
WRAPPED: Mapping[str, tuple[str, ...]] = {
    "proximal": ("method.proximal_mu=0.1",),
    "clip": ("method.clip_update=0.5",),
    "float16": ('method.compress_update="float16"',),
    "int8": ('method.compress_update="int8"',),
    "adam": ('method.server_optimizer={kind="adam"}',),
    "yogi": ('method.server_optimizer={kind="yogi"}',),
    "momentum": ('method.server_optimizer={kind="momentum"}',),
    "median": ('method.mean={kind="coordinate_median"}',),
    "trimmed": ('method.mean={kind="trimmed_mean", fraction=0.34}',),
    "krum": ("partition.sites=5", 'method.mean={kind="krum", byzantine=1}'),
    "samples": ('method.weighting="samples"',),
    "fedbn": ('method.trunk="fedbn"',),
    "warmup": ("method.warm_up_epochs=1",),
    "secagg": ("partition.sites=4", "privacy.secure_aggregation=true"),
    "privacy": (
        'privacy.level="update"',
        "privacy.noise_multiplier=0.05",
        'evaluation.checkpoint="last"',
        'model.norm="group"',
    ),
    "unbounded": ('participation.clip="off"',),
    "contiguous": ('training.memory_format="contiguous"',),
    "bf16": ('training.precision="bf16"',),
    "some": ("participation.sites_per_round=2",),
}


def cases(methods: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Name of a run -> overrides of the digits experiment."""
    plain = {
        name: (ALL_DIGITS, f"run.method={name}", *needs_of(name), ROUNDS, *[OWN_IMAGES] * (name in AT_COORDINATOR))
        for name in methods
    }
    wrapped = {f"surgical+{name}": (ROUNDS, ALL_DIGITS, *overrides) for name, overrides in WRAPPED.items()}
    return plain | wrapped
