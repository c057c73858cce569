"""Figures of a model on a site's own images: exact and complete, or only those that may leave.

:class:`Figures` computes everything that a request asks for: that is a simulation without limits.
:class:`LimitedFigures` holds the site's policy. Nothing leaves of classes of few patients
(:mod:`client.site.disclosure`), and nothing of a model with parts that never leave the site where masks or noise cover
what is sent.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from client.site.disclosure import released_metrics, rounded_down
from client.site.policy import Policy
from common.data.base.image_set import ImageSet
from common.errors import BadInput, WireError
from common.metrics.auroc import ClassMetrics, Metric, metrics_of, per_class, tolerant_metric
from common.metrics.score_histograms import Floats, ScoreHistogram, score_histogram
from common.models.network import label_matrix, scores_of
from common.models.state import arrays_sha256, layout_of, read_state, state_sha256
from common.wire.records import Request
from strategies.local.objective import examples_of
from strategies.local.training import Validation, validate

if TYPE_CHECKING:
    from client.training.task import LocalTask

T = TypeVar("T")
Nothing = TypeVar("Nothing")
Histograms = Mapping[str, ScoreHistogram]


def scored(task: "LocalTask", part: str) -> tuple[Floats, Floats, tuple[str, ...]]:
    """Return scores and labels ``(n, classes)`` of one part, for the classes the site annotates and the network has."""
    images, network = getattr(task.site, part), task.network
    scores = scores_of(network, task.seen(part), task.plan.training.precision)
    rows = [row for row, name in enumerate(network.class_names) if name in images.class_names]
    names = tuple(network.class_names[row] for row in rows)
    return scores[:, rows], label_matrix(images, names).numpy(), names


def histograms(
    policy: Policy, scores: Floats, labels: Floats, class_names: Sequence[str], hidden: Collection[str] = ()
) -> dict[str, ScoreHistogram]:
    """Count scores ``(n, classes)`` by labels ``(n, classes)``, but not of ``hidden`` classes.

    Returns:
        Nothing where the policy does not allow it, or where a network that diverged has no scores.
    """
    if not policy.score_histograms or not np.isfinite(scores).all():
        return {}
    columns = {name: column for column, name in enumerate(class_names) if name not in hidden}
    return {name: score_histogram(scores[:, column], labels[:, column]) for name, column in columns.items()}


@dataclass(frozen=True)
class ReceivedFigures:
    """How good the received model is.

    Attributes:
        own: On the validation part; the site chooses its best round by it.
        sent: The validation figures that leave.
        test_images, test_correct: Images of the test part, and how many the model puts into the right class; None where
            the plan does not ask.
    """

    own: Validation = field(default_factory=Validation)
    sent: Validation = field(default_factory=Validation)
    test_images: int | None = None
    test_correct: int | None = None


class Figures:
    """All figures that a request asks for, exact, of all images."""

    def judged(self, task: "LocalTask", judge: Callable[[], T], nothing: Nothing) -> T | Nothing:
        """Return the figures that ``judge`` makes; what it raises is an error of the round."""
        return judge()

    def of_received(self, task: "LocalTask") -> ReceivedFigures:
        """Return the figures of a model that is about to be trained."""
        own = task.validated()
        # Where the model goes from site to site it is no model of a round.
        counts = (None, None) if task.method.sequential else self.test_counts(task)
        return ReceivedFigures(own, self.validation(task, own), *counts)

    def validation(self, task: "LocalTask", own: Validation) -> Validation:
        """Return the validation figures that leave, given those over all labels that the site chooses by."""
        return own

    def test_counts(self, task: "LocalTask") -> tuple[int | None, int | None]:
        """Return how many test images there are and how many are put into the right class; None where not asked."""
        return self._counts(task, task.site.test) if task.plan.evaluation.test_each_round else (None, None)

    def test(self, task: "LocalTask") -> tuple[Mapping[str, ClassMetrics], Histograms]:
        """Return each class's metrics on the test part, and how its scores are spread."""
        if not len(task.site.test):
            return {}, {}
        scores, labels, names = scored(task, "test")
        metrics = per_class(scores, labels, names, self._plugin_metrics(task))
        return metrics, histograms(task.site.policy, scores, labels, names) if task.plan.evaluation.pooled else {}

    def validation_histograms(self, task: "LocalTask") -> Histograms:
        """Return how scores on the validation part are spread, on which the coordinator chooses thresholds."""
        if not task.plan.evaluation.pooled or not len(task.site.validation):
            return {}
        return histograms(task.site.policy, *scored(task, "validation"))

    def model_sha256(self, task: "LocalTask", request: Request) -> str:
        """Return the hash of the judged model."""
        return state_sha256(read_state(task.network), layout_of(task.network))

    def _plugin_metrics(self, task: "LocalTask") -> Mapping[str, Metric]:
        return metrics_of(task.plan.evaluation.metrics)

    @staticmethod
    def _counts(task: "LocalTask", images: ImageSet) -> tuple[int, int]:
        labels = label_matrix(images, task.network.class_names).nan_to_num().numpy()
        labelled = labels.any(axis=1)
        if not labelled.any():
            return 0, 0
        scores = scores_of(task.network, task.seen("test"), task.plan.training.precision)
        right = scores.argmax(axis=1) == labels.argmax(axis=1)
        return int(labelled.sum()), int((right & labelled).sum())


class LimitedFigures(Figures):
    """The figures that a site's policy lets out, exactly or not at all."""

    def judged(self, task: "LocalTask", judge: Callable[[], T], nothing: Nothing) -> T | Nothing:
        """Return the figures that ``judge`` makes; none where that fails, which can depend on one patient's image.

        Raises:
            BadInput, WireError: If the request cannot be answered, no matter on which images.
            Exception: What judging raised, in a simulation without masks and noise.
        """
        try:
            return judge()
        except (BadInput, WireError):
            raise
        except Exception as error:
            if task.site.simulated and not task.plan.privacy.covers:
                raise
            task.site.tell(f"the model could not be judged: {error}")
            return nothing

    def of_received(self, task: "LocalTask") -> ReceivedFigures:
        """Return the figures of a model that is about to be trained; none where it cannot be judged."""
        received = super().of_received
        return self.judged(task, lambda: received(task), ReceivedFigures())

    def validation(self, task: "LocalTask", own: Validation) -> Validation:
        """Return the validation figures that leave: the loss is over classes that are not hidden."""
        site, network, plan = task.site, task.network, task.plan
        if not site.reports("validation") or not validation_figures_leave(task):
            return Validation()
        if not site.hides("validation") or site.trained_on("validation", plan) is not site.validation:
            return own  # no label of a hidden class is in it
        images = site.without_hidden("validation", plan.model.task)
        examples = examples_of(images, task.seen("validation"), network.class_names)
        return validate(network, examples, task.method.loss, plan.training, site.hides("validation"))

    def test_counts(self, task: "LocalTask") -> tuple[int | None, int | None]:
        """Return the two counts, without images that show nothing but hidden classes."""
        site = task.site
        if not task.plan.evaluation.test_each_round or not test_figures_leave(task) or not site.reports("test"):
            return None, None
        images, correct = self._counts(task, site.without_hidden("test", task.plan.model.task))
        return rounded_down(images, site.policy), rounded_down(correct, site.policy)

    def test(self, task: "LocalTask") -> tuple[Mapping[str, ClassMetrics], Histograms]:
        """Return the metrics of classes that are not hidden, and how their scores are spread.

        Under secure aggregation there are none: they leave in a sum (:func:`histograms_of_sum`).
        """
        site, policy = task.site, task.site.policy
        if not test_figures_leave(task) or task.plan.privacy.secure_aggregation:
            return {}, {}
        metrics, spread = super().test(task)
        hidden = site.hides("test")
        return (
            {name: released_metrics(result, policy, hidden=name in hidden) for name, result in metrics.items()},
            {name: histogram for name, histogram in spread.items() if name not in hidden},
        )

    def validation_histograms(self, task: "LocalTask") -> Histograms:
        """Return the histograms of classes that are not hidden; none under secure aggregation."""
        site = task.site
        allowed = site.policy.score_histograms and validation_figures_leave(task)
        if not allowed or task.plan.privacy.secure_aggregation or not site.reports("validation"):
            return {}
        hidden = site.hides("validation")
        return {name: spread for name, spread in super().validation_histograms(task).items() if name not in hidden}

    def model_sha256(self, task: "LocalTask", request: Request) -> str:
        """Return the hash of the judged model; of the parts that were sent where masks or noise cover and others stay.

        A coordinator could try all values that training can give to a part that stays.
        """
        if task.method.keeps_local_parts and task.plan.privacy.covers and not task.site.simulated:
            return arrays_sha256(*(part for _, part in sorted(request.model.named().items())))
        return super().model_sha256(task, request)

    def _plugin_metrics(self, task: "LocalTask") -> Mapping[str, Metric]:
        metrics = super()._plugin_metrics(task)
        if task.site.simulated:
            return metrics
        # That a metric fails, and how, can depend on one patient's image.
        return {name: tolerant_metric(name, metric, task.site.tell) for name, metric in metrics.items()}


ALL_FIGURES, LIMITED_FIGURES = Figures(), LimitedFigures()


def covers_local_parts(task: "LocalTask") -> bool:
    """Check whether parts of the model never leave and masks or noise on updates cover what is sent.

    Such parts are trained on bare data. Behind a trunk that the coordinator chooses, each figure of the model says
    something of them.
    """
    covered = task.plan.privacy.secure_aggregation or task.plan.privacy.level == "update"
    return covered and task.method.keeps_local_parts and not task.site.simulated


def validation_figures_leave(task: "LocalTask") -> bool:
    """Check whether figures of the validation part may leave: only then the site chooses an epoch by that part.

    The update depends on which epoch was chosen, and so says something of these images.
    """
    return task.site.policy.training_figures and not stays_for_noise(task) and not covers_local_parts(task)


def test_figures_leave(task: "LocalTask") -> bool:
    """Check whether figures of the test part may leave."""
    return task.site.policy.test_metrics and not stays_for_noise(task) and not covers_local_parts(task)


def stays_for_noise(task: "LocalTask") -> bool:
    """Check whether the plan has noise, which does not cover figures, and the policy lets only covered things out."""
    return task.plan.privacy.level != "none" and not task.site.policy.metrics_outside_privacy


def histograms_of_sum(task: "LocalTask") -> dict[str, ScoreHistogram]:
    """Return how scores on the test part are spread, for a sum over sites under secure aggregation.

    Counts of a model that cannot be judged are zero: whether it can may depend on one patient's image.
    """
    site, policy = task.site, task.site.policy
    allowed = policy.score_histograms and task.plan.evaluation.pooled and not stays_for_noise(task)
    if not len(site.test) or not allowed or covers_local_parts(task):
        return {}
    hidden = site.hides("test")
    names = [name for name in task.network.class_names if name in site.test.class_names and name not in hidden]
    nothing = {name: score_histogram(np.zeros(0), np.zeros(0)) for name in names}
    judge = lambda: histograms(policy, *scored(task, "test"), hidden)  # noqa: E731
    return LIMITED_FIGURES.judged(task, judge, nothing) or nothing
