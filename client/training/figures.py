"""Metrics of a model on a site's own images: all metrics, or those that the policy allows to leave the hospital.

:class:`RequestedMetricsComputer` computes everything that a request asks for, in a simulation without limits.
:class:`DisclosableMetricsComputer` follows the site's policy: no metric of classes with few patients leaves
(:mod:`polyclinic.client.site.disclosure`). If masks or noise protect the update, it also withholds all metrics of a
model with parts that never leave the site.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from polyclinic.client.site.disclosure import round_count_down, suppress_class_metrics
from polyclinic.client.site.policy import SitePolicy
from polyclinic.common.errors import BadInput, WireError
from polyclinic.common.metrics.auroc import (
    ClassMetrics,
    Metric,
    catch_metric_failures,
    compute_metrics_per_class,
    load_plugin_metrics,
    make_segmentation_metrics,
)
from polyclinic.common.metrics.score_histograms import Floats, ScoreHistogram, compute_score_histogram
from polyclinic.common.metrics.segmentation import (
    PatientFigures,
    compute_patient_figures,
    make_patient_histogram,
)
from polyclinic.common.models.network import (
    compute_image_probabilities,
    logits_to_probabilities,
    select_head_row_labels,
)
from polyclinic.common.models.segmenting import compare_with_masks
from polyclinic.common.models.state import hash_arrays, hash_model_state, make_model_layout, read_model_state
from polyclinic.common.models.zoo.spec import is_segmentation
from polyclinic.common.wire.records import Request
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.images.pixels import make_mask_tensors
from polyclinic.strategies.local.objective import pair_pixels_with_labels
from polyclinic.strategies.local.training import ValidationMetrics, judge_logits, validate_network

if TYPE_CHECKING:
    from polyclinic.client.training.task import LocalTask

T = TypeVar("T")
Nothing = TypeVar("Nothing")
Histograms = Mapping[str, ScoreHistogram]


def score_data_part(task: "LocalTask", part: str) -> tuple[Floats, Floats, tuple[str, ...]]:
    """Return scores and labels, both ``(n, classes)``, and names of the site's classes for one part of its data."""
    images = getattr(task.site, part)
    network = task.network
    scores = logits_to_probabilities(task.get_or_compute_logits(part), network.spec.task).cpu().numpy()
    site_classes = frozenset(images.class_names)
    rows = [row for row, name in enumerate(network.class_names) if name in site_classes]
    names = tuple(network.class_names[row] for row in rows)
    return scores[:, rows], select_head_row_labels(images, names).numpy(), names


def compute_figures_of_patients(task: "LocalTask") -> dict[str, PatientFigures]:
    """Return the figures of a segmentation for each patient of the test part, by class of the site."""
    images = task.site.test
    network = task.network
    pixels = task.site.pixels["test"]
    masks = make_mask_tensors(images, network.class_names, pixels.device)
    assert masks is not None, "checked when the site was opened"
    labels = select_head_row_labels(images, network.class_names).to(pixels.device)
    compared = compare_with_masks(network, pixels, masks, labels, task.plan.training.precision, distances=True)
    site_classes = frozenset(images.class_names)
    return {
        name: compute_patient_figures(compared, images.patients, row)
        for row, name in enumerate(network.class_names)
        if name in site_classes
    }


def make_allowed_patient_histograms(
    policy: SitePolicy, figures: Mapping[str, PatientFigures], hidden: Collection[str] = ()
) -> dict[str, ScoreHistogram]:
    """Return histograms of patients by Dice and distance, by class; empty if the policy forbids score histograms."""
    if not policy.score_histograms:
        return {}
    return {name: make_patient_histogram(each) for name, each in figures.items() if name not in hidden}


def make_allowed_score_histograms(
    policy: SitePolicy, scores: Floats, labels: Floats, class_names: Sequence[str], hidden: Collection[str] = ()
) -> dict[str, ScoreHistogram]:
    """Return histograms of scores by label, by class; empty if the policy forbids them or the model diverged.

    Args:
        scores: Probabilities, ``(n, classes)``.
        labels: ``(n, classes)``: 1, 0 or NaN for unknown.
        hidden: Classes to leave out.
    """
    if not policy.score_histograms or not np.isfinite(scores).all():
        return {}
    columns = {name: column for column, name in enumerate(class_names) if name not in hidden}
    return {name: compute_score_histogram(scores[:, column], labels[:, column]) for name, column in columns.items()}


@dataclass(frozen=True)
class ReceivedModelMetrics:
    """Metrics of the received model before training.

    Attributes:
        own: Validation metrics over all labels that the site trains on, by which it chooses its own best round.
        sent: Validation metrics in the reply.
        test_images: Number of test images with a known class; None if the plan does not ask for it, or the site
            withholds it.
        test_correct: Number of these that the model classifies correctly; None if ``test_images`` is None.
    """

    own: ValidationMetrics = field(default_factory=ValidationMetrics)
    sent: ValidationMetrics = field(default_factory=ValidationMetrics)
    test_images: int | None = None
    test_correct: int | None = None


class RequestedMetricsComputer:
    """Computes all metrics that a request asks for, on all images and without rounding."""

    def run_metric_computation(self, task: "LocalTask", compute: Callable[[], T], nothing: Nothing) -> T | Nothing:
        """Run a metric computation; an exception propagates.

        Args:
            nothing: Result that :class:`DisclosableMetricsComputer` returns after a failure; not used here.
        """
        return compute()

    def compute_received_model_metrics(self, task: "LocalTask") -> ReceivedModelMetrics:
        """Return the metrics of the received model, before training."""
        validation = task.validate_current_network()
        # In a sequential method, this model is not the model of a round.
        counted = task.plan.evaluation.test_each_round and not task.method.traits.sequential
        counts = self.count_correct_test_images(task) if counted else (None, None)
        return ReceivedModelMetrics(validation, self.compute_validation_metrics(task, validation), *counts)

    def compute_validation_metrics(self, task: "LocalTask", own: ValidationMetrics) -> ValidationMetrics:
        """Return the validation metrics to send, which are here the same as ``own``."""
        return own

    def count_correct_test_images(self, task: "LocalTask") -> tuple[int | None, int | None]:
        """Return the number of test images with a known class, and of correct predictions; None if not requested."""
        return (
            self._count_known_and_correct_images(task, task.site.test)
            if task.plan.evaluation.test_each_round
            else (None, None)
        )

    def compute_test_metrics(self, task: "LocalTask") -> tuple[Mapping[str, ClassMetrics], Histograms]:
        """Return the metrics and the score histogram of each class on the test part."""
        if not len(task.site.test):
            return {}, {}
        if is_segmentation(task.plan.model.task):
            figures = compute_figures_of_patients(task)
            metrics_by_class = {name: make_segmentation_metrics(each) for name, each in figures.items()}
            pooled = task.plan.evaluation.pooled
            return metrics_by_class, make_allowed_patient_histograms(task.site.policy, figures) if pooled else {}
        scores, labels, names = score_data_part(task, "test")
        metrics = compute_metrics_per_class(scores, labels, names, self._compute_plugin_metrics(task))
        pooled = task.plan.evaluation.pooled
        return metrics, make_allowed_score_histograms(task.site.policy, scores, labels, names) if pooled else {}

    def compute_validation_histograms(self, task: "LocalTask") -> Histograms:
        """Return score histograms of the validation part by class, from which the coordinator chooses thresholds."""
        # A segmentation has no thresholds to choose.
        unasked = not task.plan.evaluation.pooled or is_segmentation(task.plan.model.task)
        if unasked or not len(task.site.validation):
            return {}
        return make_allowed_score_histograms(task.site.policy, *score_data_part(task, "validation"))

    def hash_evaluated_model(self, task: "LocalTask", request: Request) -> str:
        """Return the SHA-256 of the evaluated model."""
        return hash_model_state(read_model_state(task.network), make_model_layout(task.network))

    def _compute_plugin_metrics(self, task: "LocalTask") -> Mapping[str, Metric]:
        return load_plugin_metrics(task.plan.evaluation.metrics)

    @staticmethod
    def _count_known_and_correct_images(task: "LocalTask", images: ImageSet) -> tuple[int, int]:
        labels = select_head_row_labels(images, task.network.class_names).nan_to_num().numpy()
        labelled = labels.any(axis=1)
        if not labelled.any():
            return 0, 0
        scores = compute_image_probabilities(
            task.network, task.prepare_network_inputs("test"), task.plan.training.precision
        )
        right = scores.argmax(axis=1) == labels.argmax(axis=1)
        return int(labelled.sum()), int((right & labelled).sum())


class DisclosableMetricsComputer(RequestedMetricsComputer):
    """Computes only the metrics that a site's policy allows to leave the hospital."""

    def run_metric_computation(self, task: "LocalTask", compute: Callable[[], T], nothing: Nothing) -> T | Nothing:
        """Run a metric computation; return ``nothing`` if it fails, as a failure can depend on one patient's image.

        Raises:
            BadInput, WireError: If the request itself is wrong; such an error does not depend on images.
            Exception: Any exception of ``compute``, in a simulation without masks and noise.
        """
        try:
            return compute()
        except (BadInput, WireError):
            raise
        except Exception as error:
            if task.site.simulated and not task.plan.privacy.protects_updates:
                raise
            task.site.tell(f"the model could not be judged: {error}")
            return nothing

    def compute_received_model_metrics(self, task: "LocalTask") -> ReceivedModelMetrics:
        """Return the metrics of the received model before training; empty if it cannot be evaluated."""
        received = super().compute_received_model_metrics
        return self.run_metric_computation(task, lambda: received(task), ReceivedModelMetrics())

    def compute_validation_metrics(self, task: "LocalTask", own: ValidationMetrics) -> ValidationMetrics:
        """Return the validation metrics to send, over classes that are not hidden; empty if the policy withholds them.

        Args:
            own: Validation metrics by which the site chooses its best round.
        """
        site = task.site
        network = task.network
        plan = task.plan
        if not site.may_report_metrics("validation") or not may_send_validation_metrics(task):
            return ValidationMetrics()
        if (
            not site.hidden_classes("validation")
            or site.get_images_to_train_on("validation", plan) is not site.validation
        ):
            return own  # computed without labels of hidden classes
        images = site.get_images_without_hidden_labels("validation", plan.model.task)
        examples = pair_pixels_with_labels(images, task.prepare_network_inputs("validation"), network.class_names)
        if examples.masks is not None:
            return validate_network(
                network, examples, task.method.loss, plan.training, site.hidden_classes("validation")
            )
        logits = task.get_or_compute_logits("validation")
        hidden = site.hidden_classes("validation")
        return judge_logits(network, logits, examples, task.method.loss, hidden)

    def count_correct_test_images(self, task: "LocalTask") -> tuple[int | None, int | None]:
        """Return the numbers of test images with a known class that is not hidden, and of correct predictions.

        Both are rounded down. Both are None if the plan does not ask for them, or the policy withholds them.
        """
        site = task.site
        plan = task.plan
        allowed = may_send_test_metrics(task) and site.may_report_metrics("test")
        if not plan.evaluation.test_each_round or not allowed:
            return None, None
        visible = site.get_images_without_hidden_labels("test", plan.model.task)
        images, correct = self._count_known_and_correct_images(task, visible)
        return round_count_down(images, site.policy), round_count_down(correct, site.policy)

    def compute_test_metrics(self, task: "LocalTask") -> tuple[Mapping[str, ClassMetrics], Histograms]:
        """Return the metrics and score histograms of classes; a hidden class has metrics of None and no histogram.

        Both are empty if the policy withholds them, and under secure aggregation, where histograms leave only in a sum
        over sites (:func:`compute_test_histograms_for_sum`).
        """
        site = task.site
        policy = task.site.policy
        if not may_send_test_metrics(task) or task.plan.privacy.secure_aggregation:
            return {}, {}
        metrics, spread = super().compute_test_metrics(task)
        hidden = site.hidden_classes("test")
        return (
            {name: suppress_class_metrics(result, policy, hidden=name in hidden) for name, result in metrics.items()},
            {name: histogram for name, histogram in spread.items() if name not in hidden},
        )

    def compute_validation_histograms(self, task: "LocalTask") -> Histograms:
        """Return the score histograms of classes that are not hidden.

        They are empty under secure aggregation, or if the policy withholds them.
        """
        site = task.site
        allowed = site.policy.score_histograms and may_send_validation_metrics(task)
        if not allowed or task.plan.privacy.secure_aggregation or not site.may_report_metrics("validation"):
            return {}
        hidden = site.hidden_classes("validation")
        return {
            name: spread for name, spread in super().compute_validation_histograms(task).items() if name not in hidden
        }

    def hash_evaluated_model(self, task: "LocalTask", request: Request) -> str:
        """Return the SHA-256 of the evaluated model or, to protect local parts, only of the received model.

        Local parts are parts of the model that stay at the site. They are protected if masks or noise protect the
        update: from a hash over local parts, the coordinator could find their values by trial.
        """
        if task.method.parts.keeps_local_parts and task.plan.privacy.protects_updates and not task.site.simulated:
            return hash_arrays(*(part for _, part in sorted(request.model.to_named_arrays().items())))
        return super().hash_evaluated_model(task, request)

    def _compute_plugin_metrics(self, task: "LocalTask") -> Mapping[str, Metric]:
        metrics = super()._compute_plugin_metrics(task)
        if task.site.simulated:
            return metrics
        # The failure of a metric can depend on one patient's image.
        return {name: catch_metric_failures(name, metric, task.site.tell) for name, metric in metrics.items()}


UNRESTRICTED_METRICS = RequestedMetricsComputer()
DISCLOSABLE_METRICS = DisclosableMetricsComputer()


def has_protected_local_parts(task: "LocalTask") -> bool:
    """Return True if parts of the model stay at the site, and masks or noise protect the update of the other parts.

    No metric of such a model may leave. Its local parts are trained without noise, and the coordinator chooses its
    other parts, so each metric would reveal something about the local parts. In a simulation the result is False.
    """
    is_protected = task.plan.privacy.secure_aggregation or task.plan.privacy.level == "update"
    return is_protected and task.method.parts.keeps_local_parts and not task.site.simulated


def may_send_validation_metrics(task: "LocalTask") -> bool:
    """Return True if metrics of the validation part may leave.

    If False, the validation part must also not decide which epoch is kept. Otherwise the update, which depends on that
    epoch, would disclose something about the validation images.
    """
    withheld = are_unnoised_metrics_withheld(task) or has_protected_local_parts(task)
    return task.site.policy.training_figures and not withheld


def may_send_test_metrics(task: "LocalTask") -> bool:
    """Return True if metrics of the test part may leave the hospital."""
    withheld = are_unnoised_metrics_withheld(task) or has_protected_local_parts(task)
    return task.site.policy.test_metrics and not withheld


def are_unnoised_metrics_withheld(task: "LocalTask") -> bool:
    """Return True if the run has differential privacy and the policy withholds metrics, because these have no noise."""
    return task.site.policy.withholds_unnoised_figures(task.plan.privacy.level)


def compute_test_histograms_for_sum(task: "LocalTask") -> dict[str, ScoreHistogram]:
    """Return score histograms of the test part, for a sum over sites under secure aggregation.

    The result is empty if the policy or the plan allows none. All counts are zero if the model cannot be evaluated,
    because that can depend on one patient's image.
    """
    site = task.site
    policy = task.site.policy
    allowed = policy.score_histograms and task.plan.evaluation.pooled and not are_unnoised_metrics_withheld(task)
    if not len(site.test) or not allowed or has_protected_local_parts(task):
        return {}
    hidden = site.hidden_classes("test")
    names = [name for name in task.network.class_names if name in site.test.class_names and name not in hidden]
    nothing = {name: compute_score_histogram(np.zeros(0), np.zeros(0)) for name in names}
    if is_segmentation(task.plan.model.task):
        compute_histograms = lambda: make_allowed_patient_histograms(policy, compute_figures_of_patients(task), hidden)  # noqa: E731
        return DISCLOSABLE_METRICS.run_metric_computation(task, compute_histograms, nothing) or nothing
    compute_histograms = lambda: make_allowed_score_histograms(policy, *score_data_part(task, "test"), hidden)  # noqa: E731
    return DISCLOSABLE_METRICS.run_metric_computation(task, compute_histograms, nothing) or nothing
