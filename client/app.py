"""The hospital's Flower ClientApp: one handler for each kind of record that the coordinator sends."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from polyclinic.client.benefit.compare import compare_with_local_only_training
from polyclinic.client.gate.gate import Mod, make_policy_gate
from polyclinic.client.site.disclosure import count_patients, round_count_down
from polyclinic.client.site.plans import TRAINING_KIND, RequestText, store_request_text
from polyclinic.client.site.site import Site
from polyclinic.client.site.site_file import store_last_plan
from polyclinic.client.training.layers import evaluate_with_privacy_layers, train_with_privacy_layers
from polyclinic.client.training.privacy import refuse_over_privacy_budget
from polyclinic.client.training.secure_aggregation import HeldUpdateStore
from polyclinic.client.training.task import get_unfilled_network
from polyclinic.common import __version__
from polyclinic.common.config import HospitalPlan, parse_plan_json
from polyclinic.common.errors import raise_faults
from polyclinic.common.models.state import make_model_layout
from polyclinic.common.models.zoo.spec import is_segmentation
from polyclinic.common.wire.codec import decode_record, encode_record
from polyclinic.common.wire.counts import CountReply, CountRequest
from polyclinic.common.wire.delivery import DeliveryRequest
from polyclinic.common.wire.evaluation import ScoringReply, ScoringRequest
from polyclinic.common.wire.records import (
    HIDDEN_SIGN,
    NOT_SHOWN_SIGN,
    SHOWN_SIGN,
    UNKNOWN_COUNT,
    BenefitRequest,
    EvaluateRequest,
    Question,
    Refusal,
    RefusalNoted,
    RollCall,
    RollCallAnswer,
    TrainRequest,
)
from polyclinic.common.wire.secure_aggregation import (
    STAGE_BY_REQUEST,
    KeysRequest,
    MaskedRequest,
    RevealRequest,
    SharesRequest,
)
from polyclinic.common.wire.versions import read_version, write_in_version
from polyclinic.data.base.image_set import find_missing_mask_faults
from polyclinic.strategies.privacy.gradients import find_network_privacy_faults
from polyclinic.strategies.registry import get_cached_site_method

SiteOf = Callable[[Context], Site]
"""Function that returns the site to which a message is addressed, from the message's Flower context."""


def make_client_app(
    site_of: SiteOf,
    on_refusal: Callable[[Refusal], None] = lambda refusal: None,
    tell: Callable[[str], None] = lambda text: None,
    mods: Sequence[Mod] | None = None,
) -> ClientApp:
    """Build the ClientApp of a process that serves one site, or all sites of a simulation.

    Args:
        site_of: Returns the site that a message is addressed to, given the message's context.
        on_refusal: Called when the coordinator does not admit the site to a run.
        tell: Prints one line for the hospital's staff.
        mods: Flower mods around every handler; by default the gate, which applies the site's policy and writes its
            audit log.
    """
    app = ClientApp(mods=[make_policy_gate(site_of)] if mods is None else list(mods))
    held_updates = HeldUpdateStore(tell)

    def make_record_handler(kind: type[Any], work: Callable[[Site, Any], Any]) -> Callable[[Message, Context], Message]:
        """Make a Flower handler that decodes a record of class ``kind``, calls ``work`` and encodes the result.

        If the request's plan has a vocabulary, ``work`` receives a copy of the site with the vocabulary's class names.
        The result is written in the wire version of the request.
        """

        def answer_record(message: Message, context: Context) -> Message:
            record = decode_record(message.content, kind)
            site = site_of(context)
            if plan := getattr(record, "plan", ""):
                site = site.name_classes_by(parse_plan_json(plan).vocabulary)
            result = encode_record(work(site, record))
            return Message(write_in_version(result, read_version(message.content)), reply_to=message)

        return answer_record

    def acknowledge_refusal(site: Site, refusal: Refusal) -> RefusalNoted:
        on_refusal(refusal)
        return RefusalNoted(refusal.run, site.name)

    def acknowledge_question(site: Site, question: Question) -> RefusalNoted:
        tell(f"the coordinator asks, before round 1 of run {question.run[:8]}: {question.text}")
        return RefusalNoted(question.run, site.name)

    app.query("question")(make_record_handler(Question, acknowledge_question))
    app.query("roll_call")(make_record_handler(RollCall, answer_roll_call))
    app.query("refusal")(make_record_handler(Refusal, acknowledge_refusal))
    app.train()(
        make_record_handler(TrainRequest, lambda site, request: train_with_privacy_layers(site, request, held_updates))
    )
    app.evaluate()(
        make_record_handler(
            EvaluateRequest, lambda site, request: evaluate_with_privacy_layers(site, request, held_updates)
        )
    )
    app.query("count")(make_record_handler(CountRequest, partial(_answer_count_request, held_updates=held_updates)))
    app.query("scoring")(make_record_handler(ScoringRequest, _answer_scoring_request))
    app.query("delivery")(make_record_handler(DeliveryRequest, _receive_delivery_request))
    app.query("benefit")(make_record_handler(BenefitRequest, compare_with_local_only_training))
    app.query(STAGE_BY_REQUEST[KeysRequest])(make_record_handler(KeysRequest, held_updates.answer_with_keys))
    app.query(STAGE_BY_REQUEST[SharesRequest])(make_record_handler(SharesRequest, held_updates.answer_with_shares))
    app.query(STAGE_BY_REQUEST[MaskedRequest])(
        make_record_handler(MaskedRequest, held_updates.answer_with_masked_update)
    )
    app.query(STAGE_BY_REQUEST[RevealRequest])(
        make_record_handler(RevealRequest, held_updates.answer_with_revealed_shares)
    )
    return app


# The next three handlers import their modules late, because a hospital that only trains needs none of them.


def _answer_count_request(site: Site, request: CountRequest, held_updates: HeldUpdateStore) -> CountReply:
    from polyclinic.client.counts.answer import answer_count_request

    return answer_count_request(site, request, held_updates)


def _answer_scoring_request(site: Site, request: ScoringRequest) -> ScoringReply:
    from polyclinic.client.evaluation.answer import answer_scoring_request

    return answer_scoring_request(site, request)


def _receive_delivery_request(site: Site, request: DeliveryRequest) -> RefusalNoted:
    from polyclinic.client.delivery.store import receive_delivery_request

    return receive_delivery_request(site, request)


def answer_roll_call(site: Site, call: RollCall) -> RollCallAnswer:
    """Answer the roll call, a run's first message, with the site's name, classes, and numbers of images and patients.

    Raises:
        BadInput: If the site has too few patients, if the run would exceed its privacy budget, or if the network cannot
            be trained with the plan's noise.
    """
    plan = parse_plan_json(call.plan)
    policy = site.policy
    method = get_cached_site_method(site.name, call.plan)
    if is_segmentation(plan.model.task):
        raise_faults(find_missing_mask_faults({"site.toml: data": site.train}))

    site.refuse_too_few_patients()
    refuse_over_privacy_budget(site, plan, method, call.run)
    if not site.simulated:  # a simulation checks this for all its sites before it starts
        raise_faults(find_network_privacy_faults(plan, method))

    if site.durable:
        store_last_plan(site.folder, call.plan)
        store_request_text(site, RequestText(TRAINING_KIND, call.plan))
    if site.stated_counts is not None:
        site.stated_counts.write_count(call.run, site.train_samples)

    counts_leave = method.payload.label_counts and policy.label_counts
    network = get_unfilled_network(plan.model, site.declaration.canonical_names, site.device, site.gpus)
    validation = (
        round_count_down(len(site.validation), policy) if site.may_report_metrics("validation") else UNKNOWN_COUNT
    )
    return RollCallAnswer(
        run=call.run,
        site=site.name,
        names=site.declaration.names,
        class_names=site.declaration.canonical_names,
        train_samples=site.train_samples,
        validation_samples=validation,
        patients=round_count_down(count_patients(site.reported_training_images), policy),
        layout=make_model_layout(network).layout_sha256,
        version=__version__,
        positives=count_training_images_per_class(site, 1) if counts_leave else (),
        negatives=count_training_images_per_class(site, 0) if counts_leave else (),
        smallest_count=policy.smallest_count,
        holds_frozen=site.frozen_part_files.ensure_frozen_part_stored(plan.model),
        pixels=site.pixel_form.to_json() if site.pixel_form else "",
        level="" if site.simulated else policy.level,
        shown=_mark_shown_classes(site, plan),
        fingerprint=_describe_volumes(site, plan),
    )


def _describe_volumes(site: Site, plan: HospitalPlan) -> str:
    """Return the fingerprint of the training volumes as JSON.

    The text is empty if the plan asks for no fingerprint, or if the policy lets none leave.
    """
    if plan.planning is None or not may_send_label_counts(site, plan):
        return ""
    # Imported late: the import takes a second, and few plans need it.
    from polyclinic.client.counts.volumes import make_volume_fingerprint

    fingerprint = make_volume_fingerprint(site)
    return "" if fingerprint is None else fingerprint.to_json()


def may_send_label_counts(site: Site, plan: HospitalPlan) -> bool:
    """Return True if the policy lets counts of training images leave in a run of this plan."""
    return site.policy.label_counts and not site.policy.withholds_unnoised_figures(plan.privacy.level)


def _mark_shown_classes(site: Site, plan: HospitalPlan) -> str:
    """Return one character for each class: ``SHOWN`` if a training image shows it, else ``NOT_SHOWN``, or ``HIDDEN``.

    A class is ``HIDDEN`` if the policy hides its counts: "no image shows it" would disclose a count of 0. The text is
    empty if the policy lets no counts leave in this run.
    """
    if not may_send_label_counts(site, plan):
        return ""
    hidden = site.hidden_classes("train")
    shown = (site.reported_training_images.labels == 1).any(axis=0).tolist()
    signs = (SHOWN_SIGN if is_shown else NOT_SHOWN_SIGN for is_shown in shown)
    return "".join(
        HIDDEN_SIGN if name in hidden else sign for name, sign in zip(site.train.class_names, signs, strict=True)
    )


def count_training_images_per_class(site: Site, value: int) -> tuple[int, ...]:
    """Count the training images of each class with label ``value`` (1 present, 0 absent), rounded down by the policy.

    The count of a class that the policy hides is :data:`UNKNOWN_COUNT`.
    """
    counts = (site.reported_training_images.labels == value).sum(axis=0).tolist()
    hidden = site.hidden_classes("train")
    return tuple(
        UNKNOWN_COUNT if name in hidden else round_count_down(count, site.policy)
        for name, count in zip(site.train.class_names, counts, strict=True)
    )
