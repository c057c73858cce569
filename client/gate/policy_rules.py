"""The rules of a site's policy for requests and replies of a run.

A rule is a pair: its name for the audit log, and the reason why the record breaks it. The reason is empty if the record
does not break the rule. The rules for requests are checked at the roll call and again at every request. The rules for
replies check the finished record, independently of the code that made it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from polyclinic.client.gate.plan_costs import (
    estimate_network_cost,
    estimate_run_disk_bytes,
    estimate_training_memory_bytes,
    measure_machine_memory,
)
from polyclinic.client.site.policy import MODEL_GROUPS, SitePolicy
from polyclinic.common.config import HospitalPlan
from polyclinic.common.errors import BadInput, quote_names
from polyclinic.common.models.zoo.spec import is_external_network
from polyclinic.common.plugins import (
    LOSSES,
    METHODS,
    METRICS,
    MODELS,
    OPTIMIZERS,
    PLUGIN_PREFIX,
    SCHEDULES,
    TRANSFORMS,
    identify_plugin,
)
from polyclinic.common.system.plain_text import format_bytes
from polyclinic.common.wire.records import (
    NOT_SHOWN_SIGN,
    UNKNOWN_COUNT,
    BenefitReply,
    EvaluateReply,
    RefusalNoted,
    RollCallAnswer,
    TrainReply,
)
from polyclinic.strategies.local.site_method import SiteMethod, compute_largest_epoch_count
from polyclinic.strategies.local.updates import compute_whole_update_norm

GB = 10**9
PRIVACY_RANGES: Mapping[str, tuple[float, float]] = {
    "epsilon": (0.001, 1000.0),
    "delta": (1e-12, 0.1),
    "noise_multiplier": (0.001, 1e6),
}
"""Smallest and largest value of each key in a plan with privacy; a noise multiplier of 0 means no noise.

In these ranges, privacy accountants find the noise in seconds; outside, some accountants never end.
"""
CLIPPING_TOLERANCE = 1e-5
"""Relative excess over the clipping bound that float32 rounding may cause."""

Reply = RollCallAnswer | RefusalNoted | TrainReply | EvaluateReply | BenefitReply


@dataclass(frozen=True)
class RequestedWork:
    """The work that a request asks for, with the facts that the policy's rules need.

    Attributes:
        method: The site's half of the plan's method.
        round: Number of the round; 0 at the roll call.
        test: True if the request also asks for a test of the model.
        rows: Number of rows of the model's head: at the roll call one for each of the site's own classes, later one for
            each class that the request names.
        images: Upper bound of the number of the site's training images, computed from the number that it reports.
        device: The site's device: ``cpu`` or ``cuda``.
        gpus: Number of the site's GPUs that share each batch.
    """

    plan: HospitalPlan
    method: SiteMethod
    round: int = 0
    test: bool = False
    rows: int = 1
    images: int = 0
    device: str = "cpu"
    gpus: int = 1

    @property
    def required_update_groups(self) -> tuple[str, ...]:
        """Return the model groups (trunk, norm, head) whose update the method needs."""
        method = self.method
        sends = {
            "trunk": method.payload.trunk,
            "norm": method.parts.sends_batch_norm,
            "head": method.payload.head,
        }
        return tuple(name for name in MODEL_GROUPS if sends[name])

    @property
    def epochs_per_round(self) -> int:
        """Return the largest possible number of local epochs in a round."""
        return compute_largest_epoch_count(self.method, self.plan)

    @property
    def total_epochs(self) -> int:
        """Return the largest number of local epochs in the run, warm-up included.

        With ``evaluation.compare_local`` it is three times as large, because the site then trains two further models by
        itself.
        """
        epochs = self.plan.run.rounds * self.epochs_per_round + self.method.parameters.warm_up_epochs
        return epochs * (3 if self.plan.evaluation.compare_local else 1)


@dataclass(frozen=True)
class PolicyVerdict:
    """The deciding rule, and its reason against a request or reply; the reason is empty if the policy allows it."""

    rule: str
    reason: str = ""

    @property
    def is_allowed(self) -> bool:
        """True if the record breaks no rule."""
        return not self.reason

    def __str__(self) -> str:
        return f"{self.rule}: {self.reason}."


def decide_on_request(policy: SitePolicy, work: RequestedWork) -> PolicyVerdict:
    """Return the policy's verdict on a request: that of the first rule that the request breaks."""
    broken = (PolicyVerdict(rule, reason) for rule, reason in check_request_rules(policy, work) if reason)
    return next(broken, PolicyVerdict("policy"))


def decide_if_reply_may_leave(policy: SitePolicy, work: RequestedWork, reply: Reply) -> PolicyVerdict:
    """Return the policy's verdict on a reply of the site: that of the first rule that the reply breaks."""
    broken = (PolicyVerdict(rule, reason) for rule, reason in check_reply_rules(policy, work, reply) if reason)
    return next(broken, PolicyVerdict("policy"))


# ---------------------------------------------------------------------- requests

_PLUGIN_RULES: tuple[tuple[str, str, Callable[[HospitalPlan], Iterable[str]]], ...] = (
    ("losses", LOSSES, lambda plan: [plan.training.loss]),
    ("metrics", METRICS, lambda plan: plan.evaluation.metrics),
    ("transforms", TRANSFORMS, lambda plan: [plan.augmentation.transform or ""]),
    ("optimizers", OPTIMIZERS, lambda plan: [plan.training.optimizer]),
    ("schedules", SCHEDULES, lambda plan: [plan.training.schedule]),
)
"""Key of the policy, kind of plug-in, and function that returns the names in a plan; only plug-ins are checked."""
_NUMBER_LIMITS: tuple[tuple[str, Callable[["RequestedWork"], int], str], ...] = (
    ("epochs", lambda work: max(work.epochs_per_round, work.method.parameters.warm_up_epochs), "epochs a round"),
    ("total_epochs", lambda work: work.total_epochs, "epochs in all"),
    ("batch_size", lambda work: work.plan.training.batch_size, "images a batch"),
    ("image_size", lambda work: max(work.plan.model.sides), "pixels a side"),
    ("threads", lambda work: work.plan.training.threads, "threads"),
    ("classes", lambda work: work.rows, "head rows"),
    (
        "method_number",
        lambda work: max(_iterate_nested_integers(work.plan.method), default=0),
        "in [method] as one of its numbers",
    ),
)
"""Key of the policy without ``maximum_``, function that returns the plan's number, and noun for this number."""


def check_request_rules(policy: SitePolicy, work: RequestedWork) -> Iterator[tuple[str, str]]:
    """Yield each rule for requests: its name, and the reason why this request breaks it, or an empty text.

    The fast rules come first.
    """
    plan = work.plan
    method = work.method
    last = plan.run.rounds
    yield "policy.methods", find_method_policy_fault(policy, plan)
    network = plan.model.architecture
    fault = ""
    if is_external_network(network) and not (
        fault := _find_plugin_policy_fault(MODELS, network, policy.networks, plan)
    ):
        try:
            estimate_network_cost(plan.model, work.rows)
        except BadInput as bad:
            fault = f"it cannot be made here: {bad.faults[0]}"
    yield "policy.networks", fault

    for key, group, list_names in _PLUGIN_RULES:
        plugins = (name for name in list_names(plan) if name.startswith(PLUGIN_PREFIX))
        faults = (_find_plugin_policy_fault(group, name, getattr(policy, key), plan) for name in plugins)
        yield f"policy.{key}", next(filter(None, faults), "")

    rounds = max(last, work.round)
    limit = policy.maximum_rounds
    is_too_long = limit is not None and rounds > limit
    yield "policy.maximum_rounds", f"it is {limit}, and the run has {rounds} rounds" if is_too_long else ""
    is_announced = 0 <= work.round <= last
    yield "plan.rounds", "" if is_announced else f"the run has {last} rounds, and this is round {work.round}"
    for key, count_in_work, noun in _NUMBER_LIMITS:
        limit = getattr(policy, f"maximum_{key}")
        yield f"policy.maximum_{key}", _find_limit_excess(count_in_work(work), limit, noun)

    is_forbidden_test = plan.evaluation.test_each_round and not policy.test_each_round
    yield "policy.test_each_round", "it is false, and the plan tests every round" if is_forbidden_test else ""
    out_of_range = (
        f"{name} is {value:g}; it must be from {low:g} to {high:g}"
        for name, (low, high) in PRIVACY_RANGES.items()
        if (value := getattr(plan.privacy, name)) and not low <= value <= high
    )
    yield "plan.privacy", next(out_of_range, "") if plan.privacy.level != "none" else ""
    yield from _check_network_size_rules(policy, work)

    needs = f"{method.name} needs"
    groups = work.required_update_groups
    statistics = method.payload.names
    yield "policy.parts", _find_unlisted_names_fault(groups, policy.parts, f"{needs} the change of")
    yield "policy.statistics", _find_unlisted_names_fault(statistics, policy.statistics, needs)
    yield from _check_privacy_rules(policy, work)


def find_method_policy_fault(policy: SitePolicy, plan: HospitalPlan) -> str:
    """Return the reason why the policy does not allow a plan's method; empty if the policy allows it.

    A plug-in method must be listed in the policy, and its files must equal the coordinator's. It is imported only
    after this check.
    """
    name = plan.run.method
    if name.startswith(PLUGIN_PREFIX):
        listed = tuple(method for method in policy.methods or () if method.startswith(PLUGIN_PREFIX))
        return _find_plugin_policy_fault(METHODS, name, listed, plan)
    return "" if policy.methods is None or {name, "*"} & set(policy.methods) else f'it does not have "{name}"'


def _find_plugin_policy_fault(group: str, name: str, allowed: tuple[str, ...], plan: HospitalPlan) -> str:
    """Return the reason against a plug-in, or another library's network; empty if the policy allows it.

    The policy must list its name, and the files of a plug-in must equal the coordinator's files.

    Args:
        group: Kind of plug-in, such as losses.
        allowed: Names, or patterns of names, that the policy lists.
    """
    if not any(fnmatchcase(name, pattern) for pattern in allowed):
        return f'it does not have "{name}"'
    plugin_name = name.removeprefix(PLUGIN_PREFIX)
    coordinator_stamps = [stamp for stamp in plan.plugins if (stamp.group, stamp.name) == (group, plugin_name)]
    try:
        site_stamps = [identify_plugin(group, plugin_name)] if name.startswith(PLUGIN_PREFIX) else []
    except BadInput as bad:
        return f"it cannot be made here: {bad.faults[0]}"
    if site_stamps == coordinator_stamps:
        return ""
    return (
        f"the coordinator has {quote_names(map(str, coordinator_stamps)) or 'none'}, this site "
        f"{quote_names(map(str, site_stamps)) or 'none'}"
    )


def _check_network_size_rules(policy: SitePolicy, work: RequestedWork) -> Iterator[tuple[str, str]]:
    """Yield the rules for parameters, memory and disk space, for each limit that the policy sets."""
    plan = work.plan
    rows = work.rows
    if (parameters := policy.maximum_parameters) is not None:
        numbers = estimate_network_cost(plan.model, rows).parameters
        yield "policy.maximum_parameters", _find_limit_excess(numbers, parameters, "numbers a model")
    for key, gigabytes in (("memory", policy.maximum_memory_gb), ("disk", policy.maximum_disk_gb)):
        if gigabytes is None:
            continue
        limit = measure_machine_memory(work.device) if gigabytes == "machine" else int(gigabytes * GB)
        if key == "memory":
            needed = estimate_training_memory_bytes(plan, rows, work.images, work.device, work.gpus)
        else:
            needed = estimate_run_disk_bytes(plan, work.method, rows)
        reason = f"it is {format_bytes(limit)}, and this plan takes {format_bytes(needed)} of {key} or more"
        yield f"policy.maximum_{key}_gb", reason if needed > limit else ""


def _check_privacy_rules(policy: SitePolicy, work: RequestedWork) -> Iterator[tuple[str, str]]:
    """Yield the rules for clipping, masks and noise of an update."""
    privacy = work.plan.privacy
    parameters = work.method.parameters
    bound = policy.maximum_update_norm
    clip_norm = privacy.max_update_norm if privacy.level == "update" else parameters.clip_update
    reason = ""
    if bound is not None and work.required_update_groups:
        if clip_norm is None:
            reason = f"it is {bound:g}, and the plan does not clip: method.clip_update is not set"
        elif clip_norm > bound:
            reason = f"it is {bound:g}, and the plan clips to {clip_norm:g}"
        elif parameters.compress_update != "float32":
            reason = "with compress_update an update also carries what rounding left of earlier ones, and has no bound"
    yield "policy.maximum_update_norm", reason

    is_unmasked = policy.masked_only and not privacy.secure_aggregation
    origin = ' (level = "masked" sets it)' if policy.level == "masked" else ""
    reason = f"it is true{origin}, and the plan has updates bare: privacy.secure_aggregation is not set"
    yield "policy.masked_only", reason if is_unmasked else ""

    lacks_noise = policy.epsilon is not None and privacy.level == "none"
    origin = f' (level = "private" sets it to {policy.epsilon:g})' if policy.level == "private" and lacks_noise else ""
    reason = f"it takes part only in runs with privacy{origin}, and the plan has no [privacy] level"
    yield "policy.epsilon", reason if lacks_noise else ""

    hides_images_only = policy.privacy_unit == "patient" and privacy.level == "sample"
    reason = 'it is "patient", and privacy.level = "sample" hides single images'
    yield "policy.privacy_unit", reason if hides_images_only else ""

    needed = privacy.honest_sites
    trusted = policy.honest_sites
    if needed is None or trusted is None:
        return
    reason = f"it is {trusted}, and the plan's epsilon holds only while {needed} sites of a sum add their noise"
    yield "policy.honest_sites", reason if needed > trusted else ""
    listed = len(policy.peers)
    reason = f"it lists {listed} sites, and of {needed} that add their noise the coordinator could make up the rest"
    yield "policy.peers", reason if listed < needed - 1 else ""


def _find_limit_excess(value: int, limit: int | None, noun: str) -> str:
    return f"it is {limit:,}, and the plan has {value:,} {noun}" if limit is not None and value > limit else ""


def _find_unlisted_names_fault(names: Iterable[str], allowed: tuple[str, ...] | None, problem: str) -> str:
    extra = [] if allowed is None else [name for name in names if name not in allowed]
    return f"{problem} {quote_names(extra)}" if extra else ""


def _iterate_nested_integers(tree: Any) -> Iterator[int]:
    """Yield all integers of a table, including nested tables and lists."""
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, list):
        for value in tree:
            yield from _iterate_nested_integers(value)
    elif isinstance(tree, int):
        yield tree


# ---------------------------------------------------------------------- replies


def check_reply_rules(policy: SitePolicy, work: RequestedWork, reply: Reply) -> Iterator[tuple[str, str]]:
    """Yield each rule for replies: its name, and the reason why this reply breaks it, or an empty text."""
    evaluation = work.plan.evaluation
    level = work.plan.privacy.level
    match reply:
        case RollCallAnswer():
            if reply.positives:
                is_asked = work.method.payload.label_counts
                reason = f"{work.method.name} does not ask how many images show a class"
                yield "policy.label_counts", "" if is_asked else reason
                yield "policy.label_counts", "" if policy.label_counts else "it is false"
            if reply.fingerprint:
                yield "plan.planning", "" if work.plan.planning is not None else "it does not ask for sums over volumes"
            if reply.shown or reply.fingerprint:
                yield "policy.label_counts", "" if policy.label_counts else "it is false"
                withheld = policy.withholds_unnoised_figures(level)
                yield "policy.metrics_outside_privacy", "it is false, and the run has noise" if withheld else ""
            yield "policy.smallest_count", _find_small_count_fault(policy, reply)

        case TrainReply():
            name = work.method.name
            groups = tuple(group for group in MODEL_GROUPS if getattr(reply.update, group) is not None)
            needed = work.required_update_groups if work.round else ()  # round 0 ranks the sites by their statistics
            unneeded = f"round {work.round} of {name} does not need the change of"
            yield "method.groups", _find_unlisted_names_fault(groups, needed, unneeded)
            yield "policy.parts", _find_unlisted_names_fault(groups, policy.parts, "it does not have")
            sent = tuple(reply.statistics)
            declared = work.method.payload.names
            yield "method.statistics", _find_unlisted_names_fault(sent, declared, f"{name} does not declare")
            yield "policy.statistics", _find_unlisted_names_fault(sent, policy.statistics, "it does not have")
            bound = policy.maximum_update_norm
            if bound is not None and work.plan.privacy.level != "update":  # noise is added after clipping
                length = compute_whole_update_norm(reply.update)
                reason = f"it is {bound:g}, and the update has length {length:g}"
                yield "policy.maximum_update_norm", reason if length > bound * (1 + CLIPPING_TOLERANCE) else ""
            yield "policy.test_metrics", _find_test_metrics_fault(policy, work, reply)
            figures: tuple[float | None, ...] = (reply.train_loss, reply.validation_loss, reply.validation_auroc)
            yield from _check_metric_rules(policy, level, figures, tested=reply.test_images is not None)

        case EvaluateReply():
            has_histograms = bool(reply.histogram_classes or reply.validation_classes or reply.masked_classes)
            if has_histograms and not (work.test and evaluation.pooled):
                yield "policy.score_histograms", "nobody asked how scores are spread"
            yield "policy.score_histograms", "it is false" if has_histograms and not policy.score_histograms else ""
            yield "policy.smallest_count", _find_small_count_fault(policy, reply)
            yield "policy.test_metrics", _find_test_metrics_fault(policy, work, reply)
            metrics = _find_unlisted_names_fault(
                reply.metric_names, work.plan.test_metrics, "the plan does not ask for"
            )
            yield "evaluation.metrics", metrics
            # A validation histogram of a class counts as a metric.
            counted = [0.0] * len(reply.validation_classes)
            figures = (*counted, reply.validation_loss, reply.validation_auroc)
            tested = reply.test_images is not None or bool(reply.auroc)
            yield from _check_metric_rules(policy, level, figures, tested=tested)

        case BenefitReply() if reply.class_names:
            if not evaluation.compare_local:
                yield "policy.test_metrics", "nobody asked for a comparison with training alone"
            yield "policy.test_metrics", "" if policy.test_metrics else "it is false"
            yield from _check_metric_rules(policy, level, (), tested=True)


def _find_small_count_fault(policy: SitePolicy, reply: RollCallAnswer | EvaluateReply) -> str:
    smallest = policy.smallest_count
    if any(UNKNOWN_COUNT < count < smallest for count in (*reply.positives, *reply.negatives)):
        return f"it is {smallest}, and a label count is less"
    if isinstance(reply, RollCallAnswer):
        if smallest and NOT_SHOWN_SIGN in reply.shown:
            return f"it is {smallest}, and a class without a positive image would leave"
        is_small = min(reply.train_samples, reply.patients) < smallest or 0 < reply.validation_samples < smallest
        return f"it is {smallest}, and there are fewer images or patients" if is_small else ""
    histograms = (*reply.histograms.values(), *reply.validation_histograms.values())
    fewest = min((min(each.positives.sum(), each.negatives.sum()) for each in histograms), default=smallest)
    return f"it is {smallest}, and scores of fewer images would leave" if fewest < smallest else ""


def _find_test_metrics_fault(policy: SitePolicy, work: RequestedWork, reply: TrainReply | EvaluateReply) -> str:
    tested = isinstance(reply, EvaluateReply) and bool(reply.class_names)
    counted = reply.test_images is not None
    if tested and not work.test:
        return "nobody asked for a test"
    scored = isinstance(reply, EvaluateReply) and (reply.class_names or reply.validation_classes)
    if scored and work.plan.privacy.secure_aggregation:
        return "under secure aggregation the figures of a test leave in a sum alone"
    if counted and not work.plan.evaluation.test_each_round:
        return "nobody asked how many test images are right"
    return "it is false" if (tested or counted) and not policy.test_metrics else ""


def _check_metric_rules(
    policy: SitePolicy, privacy_level: str, figures: Iterable[float | None], *, tested: bool
) -> Iterator[tuple[str, str]]:
    """Yield the rules for the metrics in a reply.

    Args:
        privacy_level: The run's ``privacy.level``.
        figures: Metrics of training and validation in the reply; None for one that is not sent.
        tested: True if the reply has figures of the test part.
    """
    has_training_figures = any(figure is not None for figure in figures)
    yield "policy.training_figures", "it is false" if has_training_figures and not policy.training_figures else ""
    is_withheld = policy.withholds_unnoised_figures(privacy_level) and (has_training_figures or tested)
    yield "policy.metrics_outside_privacy", "it is false" if is_withheld else ""
