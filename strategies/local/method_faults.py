"""Checks that a method's parameters agree with one another, and with the classes that each site annotates."""

from polyclinic.common.contract import LabelContract
from polyclinic.common.errors import Fault, quote_names
from polyclinic.strategies.local.method_traits import Parameters
from polyclinic.strategies.local.site_method import SiteMethod

AVERAGING_OPTIONS = ("clip_update", "compress_update", "compress_model", "server_optimizer", "mean")
"""Parameters that make sense only in a method that averages updates."""


def find_parameter_faults(method: SiteMethod) -> list[Fault]:
    """Return the faults of parameters that contradict one another: by the rules for all methods, then by its own."""
    faults = list[Fault]()
    if method.traits.reason_for_global_norm and method.parameters.trunk == "fedbn":
        reason = f'{method.traits.reason_for_global_norm}, and with "fedbn" there is none'
        faults.append(_make_trunk_fault(method, reason))

    if reason := explain_no_averaging(method):
        problem = f"makes no sense in {method.name}: {reason}."
        faults += [Fault(f"method.{key}", problem, "Leave it out.") for key in list_useless_options(method)]

    if method.parameters.mean is not None and method.traits.weighs_updates:
        problem = f"makes no sense in {method.name}: it weighs the sites by a rule of its own."
        faults.append(Fault("method.mean", problem, "Leave it out."))

    if method.traits.sequential and method.parameters.trunk == "fedbn":
        faults.append(_make_trunk_fault(method, "the whole network is passed on, batch normalisation too"))
    return faults + method.find_own_parameter_faults()


def _make_trunk_fault(method: SiteMethod, reason: str) -> Fault:
    problem = f"makes no sense in {method.name}: {reason}."
    return Fault("method.trunk", problem, 'Use "fedavg" or "fedbn_plus".')


def explain_no_averaging(method: SiteMethod) -> str:
    """Return why the method averages nothing; empty if it averages updates."""
    if method.traits.sequential:
        return "the model is passed on, not averaged"
    if method.pooled_missing_labels != "no":
        return "there is one pseudo-site, and nothing to average"
    return "" if method.payload.trunk else "every site trains by itself, and nothing is averaged"


def list_useless_options(method: SiteMethod) -> list[str]:
    """Return the names of changed parameters that have no effect in a method that averages nothing.

    A method that passes the model on has no weights and no warm-up either; but its hospitals can train with FedProx's
    proximal term.
    """
    options = list(AVERAGING_OPTIONS)
    if not (method.traits.sequential and method.traits.hospitals_train):
        options.insert(0, "proximal_mu")
    if method.traits.sequential:
        options += ["weighting", "warm_up_epochs"]
    return [key for key in options if getattr(method.parameters, key) != Parameters.model_fields[key].default]


def find_contract_faults(method: SiteMethod, contract: LabelContract) -> list[Fault]:
    """Return the faults if the method does not support a label contract: the classes that each site annotates."""
    mean = method.parameters.mean
    if mean is not None and len(contract.sites) < mean.min_sites_for_robust_mean:
        needed = mean.min_sites_for_robust_mean
        problem = f"{mean.kind} needs {needed} sites or more; there are {len(contract.sites)}."
        return [Fault("method.mean", problem, "Leave it out, or choose another.")]

    shared = frozenset(contract.shared_classes)
    partial = [name for name in contract.class_names if name not in shared]
    if not method.traits.needs_full_coverage or not partial:
        return []
    problem = f"{method.name} needs every class annotated by every site; {quote_names(partial)} are not."
    remedy = 'Use "surgical" or "partial_loss", which learn from partial labels, or "vanilla": missing is negative.'
    return [Fault("run.method", problem, remedy)]
