"""After the final test, each site compares the federated model with one that it trains alone (for ``summary.json``).

The comparison is optional: a site that fails in the comparison, or exceeds its deadline, keeps its test results.
"""

from collections.abc import Collection
from functools import partial

from flwr.app import Message, MessageType

from polyclinic.common.metrics.benefit import COMPARED_MODELS, MODELS, FederationBenefit
from polyclinic.common.metrics.bootstrap import EstimateWithInterval
from polyclinic.common.models.state import ModelState
from polyclinic.common.system.timers import ALONE_TIMES
from polyclinic.common.wire.codec import encode_record
from polyclinic.common.wire.records import BenefitReply, BenefitRequest, ModelGroups
from polyclinic.server.federation.recorder import RunTotals
from polyclinic.server.runs.schema import SiteBenefit
from polyclinic.strategies.engine.coordinator import Coordinator
from polyclinic.strategies.engine.state import select_site_model_groups

QUERY = f"{MessageType.QUERY}.benefit"

NOT_TRAINED = "it trained in no round"
NOT_TESTED = "it did not test the model"


def compare_with_local_training(
    coordinator: Coordinator, initial: ModelState, tested: Collection[str], totals: RunTotals
) -> dict[str, SiteBenefit]:
    """Let each site compare the run's model with one that it trains alone; collect results or reasons for failure.

    Args:
        initial: Model before round 1, from which each site trains alone.
        tested: Sites that tested the run's model. Those of them that also trained in the run are asked.
        totals: Sums over the rounds of the run.

    Returns:
        Site -> comparison and reason; empty if the experiment does not request the comparison.
    """
    if not coordinator.plan.evaluation.compare_local:
        return {}
    members, drawn = coordinator.sites.members, coordinator.participation.sites_per_round
    share = min(drawn / len(members), 1.0) if drawn else 1.0
    seconds = compute_comparison_deadline_s(coordinator.deadline_s, totals.round_seconds, share)
    epochs = {site: totals.epochs[site] for site in tested if totals.epochs[site]}  # local epochs, of those asked
    server_round = coordinator.state.round
    requests = coordinator.begin_message_exchange(server_round)
    requests.deadline_s, messages = seconds, list[Message]()
    for site, count in sorted(epochs.items()):
        groups = select_site_model_groups(initial, requests.context.contract.sites[site], "float32")
        record = partial(BenefitRequest, initial=groups, epochs=count)
        request = requests.make_request_record(record, site, coordinator.result_model)
        requests.due_updates[site] = ModelGroups()
        messages.append(requests.make_flower_message(site, QUERY, encode_record(request, requests.encoded_arrays)))
    exchange = coordinator.exchange_messages(messages, "benefit", server_round, deadline_s=seconds)
    replies = coordinator.collect_checked_replies(requests, exchange, BenefitReply)
    coordinator.callbacks.on_absent_sites("benefit", replies.absent)
    silent = {site: NOT_TRAINED if site in tested else NOT_TESTED for site in members if site not in epochs}
    benefits = {
        site: SiteBenefit(benefit=read_federation_benefit(reply), reason="") for site, reply in replies.accepted.items()
    }
    benefits |= {site: SiteBenefit(benefit=None, reason=why) for site, why in {**silent, **replies.absent}.items()}
    return dict(sorted(benefits.items()))


def compute_comparison_deadline_s(round_deadline_s: float, rounds_took_s: float, drawn: float) -> float:
    """Return the deadline for the sites to train a model alone each and compare it with the run's model.

    It is a round's deadline plus :data:`ALONE_TIMES` times the time that the rounds would have taken with all sites,
    estimated as ``rounds_took_s / drawn``.

    Args:
        rounds_took_s: Duration of all rounds together.
        drawn: Share of the sites that was drawn for each round, above 0 and at most 1.
    """
    return round_deadline_s + ALONE_TIMES * rounds_took_s / drawn


def read_federation_benefit(reply: BenefitReply) -> FederationBenefit | None:
    """Return a site's comparison; None if the site's policy hides the metrics, or no class could be tested."""
    names, aurocs = reply.class_names, iter(reply.auroc)
    if not names:
        return None
    means = zip(MODELS, reply.mean, reply.mean_low, reply.mean_high, strict=True)
    gains = zip(COMPARED_MODELS, reply.gain, reply.gain_low, reply.gain_high, strict=True)
    return FederationBenefit(
        {model: {name: next(aurocs) for name in names} for model in MODELS},
        {model: EstimateWithInterval(value, (low, high)) for model, value, low, high in means},
        {model: EstimateWithInterval(value, (low, high)) for model, value, low, high in gains},
        "patients" if reply.over_patients else "images",
    )
