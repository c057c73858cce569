"""A site's answer to the roll call: who it is, what it annotates, how much it has."""

from client.site.disclosure import patients_in, told_count
from client.site.last_plan import remember
from client.site.site import Site
from client.training.network_cache import empty_network
from client.training.private_round import refuse_unaffordable
from common import __version__
from common.config import plan_of_text
from common.models.state import layout_of
from common.wire.roll_call import UNKNOWN_COUNT, RollCall, RollCallAnswer
from strategies.registry import method_of


def answer(site: Site, call: RollCall) -> RollCallAnswer:
    """Say who the site is, what it annotates and how many images it has."""
    plan = plan_of_text(call.plan)
    method = method_of(plan)
    site.refuse_few()
    refuse_unaffordable(site, plan, method)
    if site.durable:
        remember(site.folder, call.plan)
    asks = method.traffic.label_counts
    positives, negatives = label_counts(site) if asks and site.policy.label_counts else ((), ())
    layout = layout_of(empty_network(plan.model, site.declaration.canonical, site.device))
    return RollCallAnswer(
        run=call.run,
        site=site.name,
        names=site.declaration.names,
        class_names=site.declaration.canonical,
        train_samples=site.train_samples,
        validation_samples=told_count(len(site.validation), site.policy) if site.tells("validation") else UNKNOWN_COUNT,
        patients=told_count(patients_in(site.told_train), site.policy),
        layout=layout.signature,
        version=__version__,
        positives=positives,
        negatives=negatives,
        smallest_count=site.policy.smallest_count,
        holds_frozen=site.frozen_parts.holds(plan.model),
    )


def label_counts(site: Site) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Training images with and without each class, in the site's own order; hidden classes stay unknown."""
    labels, hidden = site.told_train.labels, site.hides("train")
    positives, negatives = (
        tuple(
            UNKNOWN_COUNT if name in hidden else told_count(count, site.policy)
            for name, count in zip(site.train.class_names, (labels == value).sum(axis=0).tolist(), strict=True)
        )
        for value in (1, 0)
    )
    return positives, negatives
