"""What a site tells about a model and its validation images, or its test images: exactly, blurred, or nothing."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from client.site.disclosure import told_metrics
from client.site.grown_models import GrownModels
from client.site.told_figures import (
    DIGITS,
    PATIENTS,
    bounded,
    by_patient,
    middle_of,
    most_of_one,
    noise_on_precision,
    noise_on_score,
    of_each_few,
    share_of_one,
)
from client.training.model_and_images import Work
from common.errors import BadInput
from common.metrics.auroc import ClassMetrics, mean_auroc, per_class
from common.metrics.plugin import Metric, or_undefined
from common.metrics.score_histograms import Floats
from common.models.inference import logits_of, probabilities
from common.models.state import arrays_sha256, layout_of, read_state, state_sha256
from common.wire.errors import WireError
from common.wire.records import Groups, Request, TrainRequest
from strategies.local.training import Examples, Validation

Judged = TypeVar("Judged")
Nothing = TypeVar("Nothing")


class ToldFigures:
    """The figures of one request, as the site's policy lets them leave.

    Attributes:
        grew: Whether the received model is the run's first or followed from the last; figures of no other leave.
    """

    def __init__(self, work: Work, request: Request) -> None:
        self._work, self._site, self._request = work, work.site, request
        self.exact = self._site.policy.exact_figures
        trains = isinstance(request, TrainRequest)
        self.grew = self.exact or self._grown.follows(request.model, request.round, trains=trains)
        if not self.grew:
            self._site.tell(
                f"round {request.round}: the model does not follow from the last one: no figure of it leaves"
            )

    @cached_property
    def _grown(self) -> GrownModels:
        own = self._site.declaration.canonical
        return GrownModels(self._work.folder.folder, self._site.figure_secret, own, durable=self._site.durable)

    def note_trained(self) -> None:
        """Note that the site trained: it tests models of this run then."""
        if not self.exact:
            self._grown.note_trained()

    @property
    def tests(self) -> bool:
        """Whether the site says how good the model is on its test part: only of one that it helped to train."""
        return self.exact or (self._all_came and self.grew and self._grown.trained_here())

    @property
    def _all_came(self) -> bool:
        """Whether all of the judged model may be seen outside.

        Parts that never leave are trained on bare data. Behind a trunk that the coordinator chooses, each figure says
        something of them, so none leaves where the run promises that masks or noise cover what is sent.
        """
        privacy = self._work.plan.privacy
        covered = privacy.secure_aggregation or privacy.level == "update"
        return not (covered and self._work.method.keeps_local_parts)

    def or_nothing(self, judge: Callable[[], Judged], nothing: Nothing) -> Judged | Nothing:
        """Judge the model; one that cannot be judged has no figures: whether it fails can hang on one patient's image.

        Raises:
            BadInput, WireError: If the request cannot be answered, no matter on which images.
            Exception: What judging raised, in a run without masks and noise at a site that tells exact figures.
        """
        try:
            return judge()
        except (BadInput, WireError):
            raise
        except Exception as error:
            if self.exact and not self._work.plan.privacy.covers:
                raise
            self._site.tell(f"the model could not be judged: {error}")
            return nothing

    def validation(self, found: Validation, examples: Examples) -> Validation:
        """What leaves of the validation figures that were found."""
        if not self._site.tells("validation") or not self.grew or not (self.exact or self._all_came):
            return Validation()
        return found if self.exact or found.loss is None else self._blurred(found, examples)

    def _blurred(self, found: Validation, examples: Examples) -> Validation:
        """Figures of the patients that count, over told classes, with noise on top."""
        work, patients = self._work, self._site.validation.patients
        logits, labels = logits_of(work.network, examples.images, work.plan.training.precision), examples.labels.clone()
        labels[:, self._site.hidden_rows("validation", work.network.class_names)] = math.nan
        labels[torch.from_numpy(self._site.unsaid_images("validation"))] = math.nan
        one_class = work.network.spec.task == "multi_class"
        known = (labels == 1).any(dim=1) if one_class else ~labels.isnan().all(dim=1)
        kept = self._of_the_rest("validation", known.cpu().numpy())
        scored = kept[of_each_few(patients[kept])]
        if not len(kept):
            return Validation()
        told = [work.method.loss(logits[[row]], labels[[row]], examples.annotated).item() for row in kept.tolist()]
        asked, secret = self._question(), self._site.figure_secret
        every = by_patient(np.nan_to_num(np.array(told), nan=np.inf), patients[kept])  # one's loss counts up to a bound
        middle = middle_of(every, secret.noise("middle", asked))
        if not np.isfinite(middle):
            return Validation(math.inf)  # the model is broken, for some half of the patients or more
        losses, bound = bounded(every, middle, self._chance)
        loss = losses.mean() + bound / len(losses) * secret.noise("loss", asked)
        scores = without_gaps(probabilities(logits, work.network.spec.task)[scored].cpu().numpy())
        noise = PATIENTS * most_of_one(patients[scored]) * secret.noise("auroc", asked)
        auroc = _blurred_auroc(scores, labels[scored].cpu().numpy(), noise)
        return Validation(round(max(float(loss), 0.0), DIGITS), auroc)

    def counted(self, part: str, known: NDArray[np.bool_]) -> NDArray[np.intp]:
        """The images of one part that are in a score, of those ``(n,)`` of which any label is known."""
        patients: NDArray[np.str_] = getattr(self._site, part).patients
        rows = self._of_the_rest(part, known)
        return rows[of_each_few(patients[rows])]

    def _of_the_rest(self, part: str, known: NDArray[np.bool_]) -> NDArray[np.intp]:
        """The images that are not of the secret fifth of patients, of those ``(n,)`` of which any label is known."""
        return np.flatnonzero(~self._site.figure_secret.left_out(getattr(self._site, part).patients) & known)

    def tested(
        self, scores: Floats, labels: Floats, class_names: Sequence[str], more: Mapping[str, Metric]
    ) -> dict[str, ClassMetrics]:
        """Each class's metrics on the test part, as they may leave.

        Args:
            scores, labels: Of all images, ``(n, classes)``; scores :func:`without_gaps` where figures are not exact.
            more: Metrics of plug-ins by name.
        """
        policy, hidden = self._site.policy, self._site.hides("test")
        found = per_class(scores, labels, class_names, more) if self.exact else {}
        if not self.exact:
            # That a metric fails, and how, can hang on one patient's image.
            more = {name: or_undefined(name, metric, self._site.tell) for name, metric in more.items()}
            known: NDArray[np.bool_] = np.any(~np.isnan(labels), axis=1)
            rows = self.counted("test", known)
            images = most_of_one(self._site.test.patients[rows])
            blurred = per_class(scores[rows], labels[rows], class_names, more)
            for (name, one), column in zip(blurred.items(), labels.T, strict=True):
                positives, negatives = int((column == 1).sum()), int((column == 0).sum())
                found[name] = replace(self._noisy(name, one, images), positives=positives, negatives=negatives)
        return {name: told_metrics(one, policy, hidden=name in hidden) for name, one in found.items()}

    def _noisy(self, name: str, one: ClassMetrics, images: int) -> ClassMetrics:
        """Metrics of a class with noise on them, of which one patient has so many images."""
        positives, negatives = one.positives or 0, one.negatives or 0
        asked, secret = self._question(), self._site.figure_secret

        def noisy(key: str, value: float | None, width: float) -> float | None:
            return None if value is None else value + width * secret.noise(key, name, asked)

        wide = noise_on_score(positives, negatives, images)
        return replace(
            one,
            auroc=noisy("auroc", one.auroc, wide),
            balanced_accuracy=noisy("balanced_accuracy", one.balanced_accuracy, wide),
            average_precision=noisy("average_precision", one.average_precision, noise_on_precision(positives, images)),
        )

    def _question(self) -> str:
        """All that a figure is a function of beside the images: noise that two functions share would cancel out.

        It is no function of the images itself: then equal answers would say that two models do the same to them.
        """
        plan, network = self._work.plan, self._work.network
        judged = plan.run.method, plan.method, plan.training.precision, network.class_names
        return json.dumps([self.judged_sha256, plan.model.model_dump(mode="json"), *judged], sort_keys=True)

    @property
    def _chance(self) -> float:
        """The loss of guessing."""
        network = self._work.network
        return math.log(max(len(network.class_names), 2) if network.spec.task == "multi_class" else 2)

    @cached_property
    def judged_sha256(self) -> str:
        """The hash of the model as it is now."""
        network = self._work.network
        return state_sha256(read_state(network), layout_of(network))

    def other_parts_put(self) -> None:
        """Forget the hash: a site that chooses between two models judges both."""
        vars(self).pop("judged_sha256", None)

    @property
    def told_model_sha256(self) -> str:
        """The hash of the model that was judged, as it leaves; where parts of it never leave, of the others alone.

        A coordinator could try all values that training can give to such a part, or see whether it changed.
        """
        if self.exact or not self._work.method.keeps_local_parts:
            return self.judged_sha256
        return groups_sha256(self._request.model)


def _blurred_auroc(scores: NDArray[np.float32], labels: NDArray[np.float32], noise: float) -> float | None:
    pairs = [(int((column == 1).sum()), int((column == 0).sum())) for column in labels.T]
    rows = [row for row, pair in enumerate(pairs) if min(pair)]
    value = mean_auroc(scores[:, rows], labels[:, rows])
    if value is None:
        return None
    noisy = value + share_of_one([pairs[row] for row in rows]) * noise
    return round(min(max(noisy, 0.0), 1.0), DIGITS - 1)


def groups_sha256(groups: Groups) -> str:
    """The hash of the groups that are there."""
    return arrays_sha256(*(part for _, part in sorted(groups.named().items())))


def without_gaps(scores: NDArray[np.floating]) -> NDArray[np.floating]:
    """Probabilities with 0.5 where there is no number: whether a model fails on one image is in no figure."""
    return np.where(np.isnan(scores), scores.dtype.type(0.5), scores)
