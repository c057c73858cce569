"""The methods by name: one line each; a wrong name is refused before torch is imported."""

from collections.abc import Mapping

from common.errors import Fault, did_you_mean, quoted

CLASSES: Mapping[str, str] = {
    "surgical": "strategies.surgical:SurgicalAggregation",
    "fedsld": "strategies.fedsld.method:FedSLD",
    "fedmlp": "strategies.fedmlp.method:FedMLP",
    "rscfed": "strategies.comparators.rscfed:RSCFed",
    "cbafed": "strategies.comparators.cbafed:CBAFed",
    "fednoro": "strategies.comparators.fednoro.method:FedNoRo",
    "unifed": "strategies.unifed.method:UniFed",
    "vanilla": "strategies.comparators.baselines:Vanilla",
    "partial_loss": "strategies.comparators.baselines:PartialLoss",
    "pfl": "strategies.comparators.baselines:PersonalisedHeads",
    "individual": "strategies.comparators.baselines:Individual",
    "centralised": "strategies.comparators.baselines:Centralised",
    "fedavg": "strategies.comparators.baselines:FedAvg",
    "fedbn": "strategies.comparators.baselines:FedBN",
    "fedbn_plus": "strategies.comparators.baselines:FedBNPlus",
    "fedprox": "strategies.comparators.baselines:FedProx",
    "fedavg_scaled": "strategies.fedsld.method:ScaledFedAvg",
    "fedseq": "strategies.unifed.method:SequentialTraining",
    "server_only": "strategies.unifed.method:ServerOnly",
    "fedlsr": "strategies.comparators.fedlsr:FedLSR",
    "fedfixmatch": "strategies.comparators.fedfixmatch:FedFixMatch",
    "fedirm": "strategies.comparators.fedirm.method:FedIRM",
}
"""Method -> module and class; :data:`strategies.registry.STRATEGIES` imports them, which takes torch and seconds."""


def unknown_method(name: str) -> Fault:
    """The fault of a name that is not among :data:`CLASSES`."""
    remedy = did_you_mean(name, CLASSES) or f"Methods: {quoted(CLASSES, limit=len(CLASSES))}."
    return Fault("run.method", f'"{name}" is not a method.', remedy)
