"""The layers around a site's training and evaluation (masks, noise, clipping, limits), and the choice of layers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from polyclinic.client.site.disclosure import mark_head_rows_of_few_patients, suppress_statistics_of_few_patients
from polyclinic.client.site.site import Site
from polyclinic.client.training.figures import DISCLOSABLE_METRICS, may_send_validation_metrics
from polyclinic.client.training.local_round import (
    answer_evaluate_request,
    answer_train_request,
    compute_update_to_send,
    get_local_parts_before_training,
    make_client_context,
)
from polyclinic.client.training.privacy import PrivacyBudgetLayer
from polyclinic.client.training.secure_aggregation import HeldUpdateStore, SiteMaskingLayer
from polyclinic.client.training.task import (
    LocalTask,
    LocalTrainingResult,
    SiteRoundLayer,
    TrainStep,
    adapt_plan_to_site,
)
from polyclinic.common.config import HospitalPlan
from polyclinic.common.errors import BadInput, WireError
from polyclinic.common.models.state import read_model_state, write_model_state
from polyclinic.common.wire.records import (
    Arrays,
    EvaluateReply,
    EvaluateRequest,
    NumberFormat,
    Request,
    TrainReply,
    TrainRequest,
)
from polyclinic.strategies.local.optimisation import make_optimizer
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.local.training import use_thread_count
from polyclinic.strategies.local.updates import clip_update_to_norm, compress_trunk


def train_with_privacy_layers(
    site: Site, request: TrainRequest, held_updates: HeldUpdateStore | None = None
) -> TrainReply:
    """Answer a request to train, with the layers that plan and policy need: clipping, noise, masks, disclosure limits.

    Args:
        held_updates: Store for updates until they are masked; None if no plan may use secure aggregation.
    """
    site_plan = adapt_plan_to_site(site, request.plan)
    layers = make_privacy_layers(site, site_plan.plan, site_plan.method, held_updates)
    answer: Callable[[TrainRequest], TrainReply] = partial(answer_train_request, site, layers=layers)
    for layer in reversed(layers):
        answer = partial(layer.wrap_answer, answer)
    with use_thread_count(site_plan.plan.training.threads):
        return answer(request)


def evaluate_with_privacy_layers(
    site: Site, request: EvaluateRequest, held_updates: HeldUpdateStore | None = None
) -> EvaluateReply:
    """Answer a request to evaluate, with the same layers as :func:`train_with_privacy_layers`."""
    site_plan = adapt_plan_to_site(site, request.plan)
    layers = make_privacy_layers(site, site_plan.plan, site_plan.method, held_updates)
    with use_thread_count(site_plan.plan.training.threads):
        return answer_evaluate_request(site, request, layers)


def make_privacy_layers(
    site: Site, plan: HospitalPlan, method: SiteMethod, held_updates: HeldUpdateStore | None
) -> list[SiteRoundLayer]:
    """Return the layers around a site's training and evaluation, such as noise and masks, the outermost first.

    The list is empty if neither plan nor policy needs a layer. Without ``held_updates``, no layer masks updates.
    """
    privacy = plan.privacy
    parameters = method.parameters
    layers: list[SiteRoundLayer] = []
    if privacy.secure_aggregation and held_updates is not None:
        layers.append(SiteMaskingLayer(held_updates, site, plan, method))
    if parameters.compress_update != "float32":
        layers.append(UpdateCompressionLayer(parameters.compress_update))
    if privacy.level != "none":
        layers.append(PrivacyBudgetLayer(site, plan, method))
    if privacy.protects_updates or not site.has_no_limits:
        layers.append(DisclosureLimitsLayer())
    if parameters.clip_update is not None:
        layers.append(UpdateClippingLayer(parameters.clip_update))
    if privacy.secure_aggregation or privacy.level == "update":
        layers.append(FailureHidingLayer(Exception))
    elif privacy.level != "none" and not site.simulated:
        # An update of zero is a possible result of noisy steps. Other failures are sent as errors, which cost budget.
        layers.append(FailureHidingLayer(FloatingPointError))
    return layers


@dataclass(frozen=True)
class UpdateClippingLayer(SiteRoundLayer):
    """Clips the update to a maximum norm, which the method's parameters set."""

    longest: float

    def wrap_training(self, train: TrainStep, task: LocalTask, request: TrainRequest) -> LocalTrainingResult:
        """Train, and clip the update."""
        result = train(task, request)
        return replace(result, update=clip_update_to_norm(result.update, self.longest))


@dataclass(frozen=True)
class UpdateCompressionLayer(SiteRoundLayer):
    """Rounds the update's trunk to fewer bits; the rounding error is added to the site's next update."""

    form: NumberFormat

    def wrap_training(self, train: TrainStep, task: LocalTask, request: TrainRequest) -> LocalTrainingResult:
        """Train, and compress the update."""
        result = train(task, request)
        update, unsent = compress_trunk(result.update, task.round_state.unsent, self.form)
        return replace(result, update=update, unsent=unsent)


class DisclosureLimitsLayer(SiteRoundLayer):
    """Removes from a reply the metrics and statistics that the site's policy does not allow to leave."""

    def adapt_task(self, task: LocalTask, request: Request) -> LocalTask:
        """Return a task that computes only the metrics that may leave the hospital."""
        return replace(task, figures=DISCLOSABLE_METRICS, validation_chooses=may_send_validation_metrics(task))

    def wrap_training(self, train: TrainStep, task: LocalTask, request: TrainRequest) -> LocalTrainingResult:
        """Train; remove statistics that depend on few patients and, if the policy withholds it, the training loss."""
        result = train(task, request)
        policy = task.site.policy
        few = mark_head_rows_of_few_patients(task.site.train, task.network.class_names, policy)
        statistics = suppress_statistics_of_few_patients(result.statistics, task.method.payload.statistics, few, policy)
        loss = result.train_loss if may_send_validation_metrics(task) else None
        return replace(result, statistics=statistics, train_loss=loss)


@dataclass(frozen=True)
class FailureHidingLayer(SiteRoundLayer):
    """Sends an update of zero after a failed training, so that masks or noise hide the failure.

    A reported failure would name this site. A coordinator could craft a model that diverges, or whose update overflows,
    only for one patient's images. An update of zero is not visible in the sum.

    Attributes:
        hidden: Class of the exceptions that are hidden.
    """

    hidden: type[Exception]

    def wrap_training(self, train: TrainStep, task: LocalTask, request: TrainRequest) -> LocalTrainingResult:
        """Train; return an update of zero if training failed.

        Raises:
            BadInput, WireError: If the request itself is wrong; such an error does not depend on images.
        """
        try:
            result = train(task, request)
            if not result.update.is_finite:
                raise FloatingPointError("the update is longer than a number can be.")
            return result
        except (BadInput, WireError):
            raise
        except self.hidden as error:
            task.site.tell(f"nothing of this round is in the update: {error}")
        plan = task.plan
        network = task.network
        received = task.received
        write_model_state(network, trunk=received.trunk, norm=received.norm, head=received.head)
        statistics: Arrays = {}
        if task.method.payload.statistics:  # statistics of the received model; noise is added later
            local = task.method.make_local_round(make_client_context(task, request))
            statistics = local.statistics(network, np.zeros(plan.training.epochs, np.float32))
        return LocalTrainingResult(
            parts=get_local_parts_before_training(task),
            train_loss=0.0,
            epochs=plan.training.epochs,
            optimizer=make_optimizer(network, plan.training, plan.training.lr),
            method_state=task.round_state.method_state,
            statistics=statistics,
            update=compute_update_to_send(task, request, read_model_state(network)),
        )
