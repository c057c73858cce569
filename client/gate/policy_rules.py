"""The rules that hold a site's policy: of a request, whether the site takes part; of a reply, whether it may leave.

A rule says in words what stands against it, or nothing. Each is looked up under the name that an audit gives for a
refusal. The rules of requests see what the coordinator asks, at the roll call and again with every request; those of
replies see the record itself, as it would leave, no matter what made it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from client.gate.cost_limits import LIMIT_RULES
from client.gate.plan_costs import footprint
from client.gate.requested_work import RequestedWork
from client.site.policy import GROUPS, Policy
from common.config import Plan
from common.errors import BadInput, quoted
from common.models.zoo.spec import is_external
from common.plugins import LOSSES, METHODS, METRICS, MODELS, OPTIMIZERS, PLUGIN, SCHEDULES, TRANSFORMS, stamp_of
from common.wire.benefit import BenefitReply
from common.wire.records import EvaluateReply, Groups, TrainReply
from common.wire.roll_call import UNKNOWN_COUNT, RefusalNoted, RollCallAnswer
from strategies.local.updates import norm_of

ROUNDING = 1e-5
"""By this part a clipped update may be longer than its bound: float32."""

Reply = RollCallAnswer | RefusalNoted | TrainReply | EvaluateReply | BenefitReply


RequestRule = Callable[[Policy, RequestedWork], str]
ReplyRule = Callable[[Policy, RequestedWork, Reply], str]


# ---------------------------------------------------------------------- requests


def _method(policy: Policy, asked: RequestedWork) -> str:
    return method_fault(policy, asked.plan)


def method_fault(policy: Policy, plan: Plan) -> str:
    """Why a plan's method is not run here; empty for one that is allowed.

    A plug-in has to be listed, and its files have to be the coordinator's; nothing of it is imported before.
    """
    name = plan.run.method
    if name.startswith(PLUGIN):
        listed = tuple(one for one in policy.methods or () if one.startswith(PLUGIN))
        return _plugin_fault(METHODS, name, listed, plan)
    return "" if policy.methods is None or {name, "*"} & set(policy.methods) else f'it does not have "{name}"'


def _networks(policy: Policy, asked: RequestedWork) -> str:
    """Plug-ins are the coordinator's word against this site's own files, which it compares."""
    name = asked.plan.model.architecture
    if not is_external(name):
        return ""
    if fault := _plugin_fault(MODELS, name, policy.networks, asked.plan):
        return fault
    try:
        footprint(asked.plan.model, asked.rows)
    except BadInput as bad:
        return f"it cannot be made here: {bad.faults[0]}"
    return ""


def _listed(group: str, key: str, named: Callable[[Plan], Iterable[str]]) -> RequestRule:
    """The rule that holds plug-ins of one kind to a list of the policy and to this site's own files.

    Args:
        key: The list's.
        named: What a plan names of this kind; Polyclinic's own names need no entry.
    """

    def rule(policy: Policy, asked: RequestedWork) -> str:
        plugins = (name for name in named(asked.plan) if name.startswith(PLUGIN))
        faults = (_plugin_fault(group, name, getattr(policy, key), asked.plan) for name in plugins)
        return next(filter(None, faults), "")

    return rule


def _plugin_fault(group: str, name: str, allowed: tuple[str, ...], plan: Plan) -> str:
    """Why a name is not built or run here; empty for one that is allowed and means the same at both ends."""
    if not any(fnmatchcase(name, pattern) for pattern in allowed):
        return f'it does not have "{name}"'
    inner = name.removeprefix(PLUGIN)
    theirs = [stamp for stamp in plan.plugins if (stamp.group, stamp.name) == (group, inner)]
    try:
        own = [stamp_of(group, inner)] if name.startswith(PLUGIN) else []
    except BadInput as bad:
        return f"it cannot be made here: {bad.faults[0]}"
    if own == theirs:
        return ""
    return f"the coordinator has {quoted(map(str, theirs)) or 'none'}, this site {quoted(map(str, own)) or 'none'}"


def _parts(policy: Policy, asked: RequestedWork) -> str:
    return _beyond(asked.parts, policy.parts, f"{asked.method.name} needs the change of")


def _statistics(policy: Policy, asked: RequestedWork) -> str:
    return _beyond(asked.method.traffic.names, policy.statistics, f"{asked.method.name} needs")


def _clipping(policy: Policy, asked: RequestedWork) -> str:
    bound, method = policy.maximum_update_norm, asked.method
    if bound is None or not asked.parts:
        return ""
    clips = (
        asked.plan.privacy.max_update_norm if asked.plan.privacy.level == "update" else method.parameters.clip_update
    )
    if clips is None:
        return f"it is {bound:g}, and the plan does not clip: method.clip_update is not set"
    if clips > bound:
        return f"it is {bound:g}, and the plan clips to {clips:g}"
    if method.parameters.compress_update != "float32":
        return "with compress_update an update also carries what rounding left of earlier ones, and has no bound"
    return ""


def _masked(policy: Policy, asked: RequestedWork) -> str:
    bare = policy.masked_only and not asked.plan.privacy.secure_aggregation
    why = ' (level = "masked" sets it)' if policy.level == "masked" else ""
    return f"it is true{why}, and the plan has updates bare: privacy.secure_aggregation is not set" if bare else ""


def _budget(policy: Policy, asked: RequestedWork) -> str:
    if policy.epsilon is None or asked.plan.privacy.level != "none":
        return ""
    why = f' (level = "private" sets it to {policy.epsilon:g})' if policy.level == "private" else ""
    return f"it takes part only in runs with privacy{why}, and the plan has no [privacy] level"


def _unit(policy: Policy, asked: RequestedWork) -> str:
    by_image = policy.privacy_unit == "patient" and asked.plan.privacy.level == "sample"
    return 'it is "patient", and privacy.level = "sample" hides single images' if by_image else ""


def _honest(policy: Policy, asked: RequestedWork) -> str:
    needed = asked.plan.privacy.honest_sites
    if needed is None or policy.honest_sites is None or needed <= policy.honest_sites:
        return ""
    reason = f"the plan's epsilon holds only while {needed} sites of a sum add their noise"
    return f"it is {policy.honest_sites}, and {reason}"


def _known_sites(policy: Policy, asked: RequestedWork) -> str:
    needed = asked.plan.privacy.honest_sites
    if needed is None or policy.honest_sites is None or len(policy.peers) >= needed - 1:
        return ""
    known = len(policy.peers)
    return f"it lists {known} sites, and of {needed} that add their noise the coordinator could make up the rest"


REQUEST_RULES: Mapping[str, RequestRule] = {
    "policy.methods": _method,
    "policy.networks": _networks,
    "policy.losses": _listed(LOSSES, "losses", lambda plan: [plan.training.loss]),
    "policy.metrics": _listed(METRICS, "metrics", lambda plan: plan.evaluation.metrics),
    "policy.transforms": _listed(TRANSFORMS, "transforms", lambda plan: [plan.augmentation.transform or ""]),
    "policy.optimizers": _listed(OPTIMIZERS, "optimizers", lambda plan: [plan.training.optimizer]),
    "policy.schedules": _listed(SCHEDULES, "schedules", lambda plan: [plan.training.schedule]),
    **LIMIT_RULES,
    "policy.parts": _parts,
    "policy.statistics": _statistics,
    "policy.maximum_update_norm": _clipping,
    "policy.masked_only": _masked,
    "policy.epsilon": _budget,
    "policy.privacy_unit": _unit,
    "policy.honest_sites": _honest,
    "policy.peers": _known_sites,
}


def _beyond(names: tuple[str, ...], allowed: tuple[str, ...] | None, what: str) -> str:
    extra = [] if allowed is None else [name for name in names if name not in allowed]
    return f"{what} {quoted(extra)}" if extra else ""


# ---------------------------------------------------------------------- replies


def _groups_declared(policy: Policy, asked: RequestedWork, reply: Reply) -> str:
    due = asked.parts if asked.round else ()  # round 0 ranks the sites by their statistics
    sent = _groups_in(reply.update) if isinstance(reply, TrainReply) else ()
    return _beyond(sent, due, f"round {asked.round} of {asked.method.name} is not told the change of")


def _groups_allowed(policy: Policy, asked: RequestedWork, reply: Reply) -> str:
    sent = _groups_in(reply.update) if isinstance(reply, TrainReply) else ()
    return _beyond(sent, policy.parts, "it does not have")


def _statistics_declared(policy: Policy, asked: RequestedWork, reply: Reply) -> str:
    sent = tuple(reply.statistics) if isinstance(reply, TrainReply) else ()
    return _beyond(sent, asked.method.traffic.names, f"{asked.method.name} does not declare")


def _statistics_allowed(policy: Policy, asked: RequestedWork, reply: Reply) -> str:
    sent = tuple(reply.statistics) if isinstance(reply, TrainReply) else ()
    return _beyond(sent, policy.statistics, "it does not have")


def _length(policy: Policy, asked: RequestedWork, reply: Reply) -> str:
    bound = policy.maximum_update_norm
    if (
        bound is None
        or not isinstance(reply, TrainReply)
        or asked.plan.privacy.level == "update"  # noise comes on top of what was clipped
        or (length := norm_of(reply.update)) <= bound * (1 + ROUNDING)
    ):
        return ""
    return f"it is {bound:g}, and the update has length {length:g}"


def _label_counts(policy: Policy, asked: RequestedWork, reply: Reply) -> str:
    if not isinstance(reply, RollCallAnswer) or not reply.positives:
        return ""
    if not asked.method.traffic.label_counts:
        return f"{asked.method.name} does not ask how many images show a class"
    return "" if policy.label_counts else "it is false"


def _scores(policy: Policy, asked: RequestedWork, reply: Reply) -> str:
    if not isinstance(reply, EvaluateReply):
        return ""
    if not (reply.told_classes or reply.validation_classes or reply.masked_classes):
        return ""
    if not (asked.test and asked.plan.evaluation.pooled):
        return "nobody asked how scores are spread"
    return "" if policy.score_histograms else "it is false"


def _small_counts(policy: Policy, asked: RequestedWork, reply: Reply) -> str:
    least = policy.smallest_count
    if isinstance(reply, RollCallAnswer | EvaluateReply):
        counts = (*reply.positives, *reply.negatives)
        if any(UNKNOWN_COUNT < count < least for count in counts):
            return f"it is {least}, and a label count is less"
    if isinstance(reply, RollCallAnswer):
        small = min(reply.train_samples, reply.patients) < least or 0 < reply.validation_samples < least
        return f"it is {least}, and there are fewer images or patients" if small else ""
    if isinstance(reply, EvaluateReply):
        spread = [*reply.histograms.values(), *reply.validation_histograms.values()]
        told = [min(h.positives.sum(), h.negatives.sum()) for h in spread]
        return f"it is {least}, and scores of fewer images are told" if min(told, default=least) < least else ""
    return ""


def _test_metrics(policy: Policy, asked: RequestedWork, reply: Reply) -> str:
    if isinstance(reply, BenefitReply):
        if reply.class_names and not asked.plan.evaluation.alone:
            return "nobody asked for a comparison with training alone"
        return "it is false" if reply.class_names and not policy.test_metrics else ""
    if not isinstance(reply, TrainReply | EvaluateReply):
        return ""
    tested = isinstance(reply, EvaluateReply) and bool(reply.class_names)
    counted = reply.test_images is not None
    if tested and not asked.test:
        return "nobody asked for a test"
    scored = isinstance(reply, EvaluateReply) and (reply.class_names or reply.validation_classes)
    if scored and asked.plan.privacy.secure_aggregation:
        return "under secure aggregation the figures of a test leave in a sum alone"
    if counted and not asked.plan.evaluation.test_each_round:
        return "nobody asked how many test images are right"
    return "it is false" if (tested or counted) and not policy.test_metrics else ""


def _training_figures(policy: Policy, asked: RequestedWork, reply: Reply) -> str:
    if policy.training_figures or not isinstance(reply, TrainReply | EvaluateReply):
        return ""
    return "it is false" if _some_told(_of_training(reply)) else ""


def _of_training(reply: TrainReply | EvaluateReply) -> list[float | None]:
    """Figures of the training and validation parts; a class whose validation scores are counted stands as a figure."""
    more = [reply.train_loss] if isinstance(reply, TrainReply) else [0.0] * len(reply.validation_classes)
    return [*more, reply.validation_loss, reply.validation_auroc]


def _some_told(figures: Iterable[float | None]) -> bool:
    return any(figure is not None for figure in figures)


def _metrics_asked(policy: Policy, asked: RequestedWork, reply: Reply) -> str:
    named = reply.metric_names if isinstance(reply, EvaluateReply) else ()
    return _beyond(named, asked.plan.evaluation.metrics, "the plan does not ask for")


def _outside_privacy(policy: Policy, asked: RequestedWork, reply: Reply) -> str:
    if asked.plan.privacy.level == "none" or isinstance(reply, RollCallAnswer | RefusalNoted):
        return ""
    if isinstance(reply, BenefitReply):
        told = bool(reply.class_names)
    else:
        tested = [] if isinstance(reply, TrainReply) else reply.auroc
        told = _some_told([*_of_training(reply), reply.test_images, *tested])
    return "it is false" if told and not policy.metrics_outside_privacy else ""


REPLY_RULES: Mapping[str, ReplyRule] = {
    "method.groups": _groups_declared,
    "policy.parts": _groups_allowed,
    "method.statistics": _statistics_declared,
    "policy.statistics": _statistics_allowed,
    "policy.maximum_update_norm": _length,
    "policy.label_counts": _label_counts,
    "policy.score_histograms": _scores,
    "policy.smallest_count": _small_counts,
    "policy.training_figures": _training_figures,
    "policy.test_metrics": _test_metrics,
    "evaluation.metrics": _metrics_asked,
    "policy.metrics_outside_privacy": _outside_privacy,
}


def _groups_in(update: Groups) -> tuple[str, ...]:
    return tuple(name for name in GROUPS if getattr(update, name) is not None)


# ---------------------------------------------------------------------- verdicts


@dataclass(frozen=True)
class Verdict:
    """Allowed, or the rule that stands against it and why; ``reason`` is empty where it is allowed."""

    rule: str
    reason: str = ""

    @property
    def allowed(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        return f"{self.rule}: {self.reason}."


def of_request(policy: Policy, asked: RequestedWork) -> Verdict:
    """Whether the site takes part."""
    reasons = ((name, rule(policy, asked)) for name, rule in REQUEST_RULES.items())
    return next((Verdict(name, reason) for name, reason in reasons if reason), Verdict("policy"))


def of_reply(policy: Policy, asked: RequestedWork, reply: Reply) -> Verdict:
    """Whether this record may leave."""
    reasons = ((name, rule(policy, asked, reply)) for name, rule in REPLY_RULES.items())
    return next((Verdict(name, reason) for name, reason in reasons if reason), Verdict("policy"))
