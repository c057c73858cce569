"""The comparison of the federated model with local training, made by each site after the final test.

The experiment has to request the comparison. A site that fails in it, or exceeds its deadline, keeps its test results.
"""

from collections.abc import Collection
from functools import partial

from flwr.app import Message, MessageType

from polyclinic.common.metrics.benefit import COMPARED_SITE_MODELS, CONTENDER_MODELS, FederationBenefit
from polyclinic.common.metrics.bootstrap import EstimateWithInterval
from polyclinic.common.models.state import ModelState
from polyclinic.common.system.timers import LOCAL_COMPARISON_TIME_FACTOR
from polyclinic.common.wire.codec import encode_record
from polyclinic.common.wire.records import BenefitReply, BenefitRequest, ModelGroups
from polyclinic.server.federation.recorder import RunTotals
from polyclinic.server.runs.schema import SiteBenefit
from polyclinic.strategies.engine.coordinator import Coordinator
from polyclinic.strategies.engine.state import select_site_model_groups

BENEFIT_MESSAGE_TYPE = f"{MessageType.QUERY}.benefit"

NOT_TRAINED_REASON = "it trained in no round"
NOT_TESTED_REASON = "it did not test the model"


def compare_with_local_training(
    coordinator: Coordinator, initial: ModelState, tested: Collection[str], totals: RunTotals
) -> dict[str, SiteBenefit]:
    """Ask each site to train a model alone and to compare it with the run's model; collect the results.

    Args:
        initial: Model before round 1, with which local training starts.
        tested: Sites that tested the run's model. Of these, the sites that also trained in the run are asked.
        totals: Sums over the rounds of the run.

    Returns:
        Site -> comparison, or reason why there is none; empty if the experiment does not request the comparison.
    """
    if not coordinator.plan.evaluation.compare_local:
        return {}
    members = coordinator.sites.members
    sites_per_round = coordinator.participation.sites_per_round
    drawn_share = min(sites_per_round / len(members), 1.0) if sites_per_round else 1.0
    deadline_s = compute_comparison_deadline_s(coordinator.deadline_s, totals.round_seconds, drawn_share)
    epochs = {site: totals.epochs[site] for site in tested if totals.epochs[site]}  # of the sites that are asked
    server_round = coordinator.state.round
    requests = coordinator.begin_message_exchange(server_round)
    requests.deadline_s = deadline_s
    messages = list[Message]()
    for site, count in sorted(epochs.items()):
        groups = select_site_model_groups(initial, requests.context.contract.sites[site], "float32")
        record = partial(BenefitRequest, initial=groups, epochs=count)
        request = requests.make_request_record(record, site, coordinator.result_model)
        requests.due_updates[site] = ModelGroups()
        messages.append(
            requests.make_flower_message(site, BENEFIT_MESSAGE_TYPE, encode_record(request, requests.encoded_arrays))
        )
    exchange = coordinator.exchange_messages(messages, "benefit", server_round, deadline_s=deadline_s)
    replies = coordinator.collect_checked_replies(requests, exchange, BenefitReply)
    coordinator.callbacks.on_absent_sites("benefit", replies.absent)
    silent = {
        site: NOT_TRAINED_REASON if site in tested else NOT_TESTED_REASON for site in members if site not in epochs
    }
    benefits = {
        site: SiteBenefit(benefit=read_federation_benefit(reply), reason="") for site, reply in replies.accepted.items()
    }
    benefits |= {site: SiteBenefit(benefit=None, reason=why) for site, why in {**silent, **replies.absent}.items()}
    return dict(sorted(benefits.items()))


def compute_comparison_deadline_s(round_deadline_s: float, all_rounds_s: float, drawn_share: float) -> float:
    """Return the seconds that sites have for local training and the comparison with the run's model.

    The deadline is a round's deadline plus :data:`LOCAL_COMPARISON_TIME_FACTOR` times the time that the rounds would
    have taken with all sites, estimated as ``all_rounds_s / drawn_share``.

    Args:
        all_rounds_s: Duration of all rounds together, in seconds.
        drawn_share: Share of the sites that was drawn for each round, above 0 and at most 1.
    """
    return round_deadline_s + LOCAL_COMPARISON_TIME_FACTOR * all_rounds_s / drawn_share


def read_federation_benefit(reply: BenefitReply) -> FederationBenefit | None:
    """Return a site's comparison; None if the site's policy hides the metrics, or no class could be tested."""
    names, aurocs = reply.class_names, iter(reply.auroc)
    if not names:
        return None
    means = zip(COMPARED_SITE_MODELS, reply.mean, reply.mean_low, reply.mean_high, strict=True)
    gains = zip(CONTENDER_MODELS, reply.gain, reply.gain_low, reply.gain_high, strict=True)
    return FederationBenefit(
        {model: {name: next(aurocs) for name in names} for model in COMPARED_SITE_MODELS},
        {model: EstimateWithInterval(value, (low, high)) for model, value, low, high in means},
        {model: EstimateWithInterval(value, (low, high)) for model, value, low, high in gains},
        "patients" if reply.over_patients else "images",
    )
