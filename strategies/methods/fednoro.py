"""FedNoRo: sites with noisy labels are detected by their losses, learn from the received model, and weigh less.

Wu, Yu, Jiang, Cheng, Yan: "FedNoRo: Towards Noise-Robust Federated Learning by Addressing Class Imbalance and Label
Noise Heterogeneity", IJCAI 2023; as a comparator in Sun et al., "FedMLP", MICCAI 2024, tables 1 and 2. We had the
paper's abstract and introduction and both groups' released code, not its numbered equations.

A *loss indicator* is a site's mean loss over the images of one label, with one model: in a multi-label task each class
has two, over the images labelled negative and over those labelled positive.

The paper's method. Stage 1: FedAvg with logits adjusted by each class's frequency at the site. Then each site sends its
loss indicators under the global model, and a mixture of two Gaussians divides the sites into clean and noisy. Stage 2:
clean sites continue as before; a noisy site minimises ``lambda KD + (1 - lambda) CE``. KD is the divergence from the
received model's probabilities (logits over 0.8), and lambda rises from nearly 0 to 0.8. A noisy site's weight in the
mean is multiplied by ``exp(-D)``, where D is the distance of its model from the nearest clean site's, divided by the
longest such distance.

Our version, because images have several labels and a site labels some classes:

- The noise is that classes without labels count as negative (``missing = "negative"``). The logit adjustment is
  FedMLP's. Without positives it adds the logarithm of about one over twice the number of images, so that the missing
  class has almost no loss; in the paper's softmax it has none.
- ``missing = "masked"`` with ``noisy = "known"`` is the version of FedMLP's authors: the label contract tells which
  sites have incomplete labels, so nothing is detected; cross-entropy on a site's own classes, distillation on the
  others. If every site lacks a class, all are noisy, and the mean is FedAvg's.
- Indicators refer to the model received in the last round of stage 1, because the model after that round would need
  another exchange.
- A site without indicators, because it joined later or its reply was lost, counts as noisy. A site whose statistics
  do not count any more counts as noisy, too, and the others are divided again without it.
- Sites state their losses. A loss below 0 is impossible, and the reply does not count. A site's losses count for the
  labels that it annotates. If a division leaves a single site clean among four sites or more, the others are divided
  once more among themselves. Otherwise one site that states a loss of 0 would make all others noisy. The paper's rule
  cannot tell such a site from one that alone has good labels; in that case about half of the others count as clean.
  One site can still hide noisy sites, by stating a huge loss, which makes it the only noisy one.
- The divergence is between each entry's two probabilities; in the paper it is over the classes, and FedMLP's code uses
  the squared distance. Here the student's logits are not adjusted in it. The paper's code adjusts them, but there a
  class without images drops out; here the adjustment would raise such a class.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from polyclinic.common.models.network import Model, compute_logits
from polyclinic.common.wire.bounds import MAX_LOSS
from polyclinic.common.wire.records import Arrays
from polyclinic.strategies.aggregation.means import Float64, Weighting, Weights
from polyclinic.strategies.aggregation.robust import compute_distances_between_models, compute_update_inner_products
from polyclinic.strategies.local.losses import Missing
from polyclinic.strategies.local.method_traits import MethodTraits, Parameters, Payload, Statistic
from polyclinic.strategies.local.objective import Batch, ClientContext, LocalRound, copy_model_as_teacher
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.local.stages import RoundDefault, Settings, Stage, get_round_count, make_share_of_rounds
from polyclinic.strategies.methods.base import Method, RoundContext, SiteReply
from polyclinic.strategies.methods.fedmlp import compute_supervised_loss, compute_target_logit_adjustment

Floats = NDArray[np.floating]
Flags = NDArray[np.bool_]

MIXTURE_FITS = 9
"""Number of mixtures, each fitted from another seed; the most frequent division is used, as in the authors' code."""


def _choose_ramp(rounds: int, settings: Settings) -> int:
    """Return two fifths of the rounds, but at most the number of rounds after the first round of stage 2."""
    most = rounds - 1 - get_round_count(settings, "stage_one_rounds", 1)
    return max(1, min(39, rounds * 2 // 5, most))


class FedNoRoParameters(Parameters):
    """The ``[method]`` table of ``fednoro``. lambda is the weight of distillation at a noisy site.

    Attributes:
        stage_one_rounds: Number of rounds before noisy sites learn from the received model; a third of the run's
            rounds, at most 10, if the experiment gives none.
        noisy: ``detect`` finds noisy sites by their losses; ``known`` takes every site that does not label all classes.
        missing: How the loss treats classes that a site does not label; ``masked`` leaves them to the distillation.
        distillation: The largest value of lambda.
        ramp_rounds: Number of rounds after stage 1 until lambda reaches its largest value; two fifths of the run's
            rounds, at most 39, and not past the last one, if the experiment gives none.
        temperature: Divisor of the received model's logits.
    """

    round_defaults: ClassVar[Mapping[str, RoundDefault]] = {
        "stage_one_rounds": make_share_of_rounds("a third", 1, 3, most=10),
        "ramp_rounds": RoundDefault("two fifths of the rounds, at most 39, and not past the last", _choose_ramp),
    }
    weighting: Weighting = "samples"
    stage_one_rounds: int = Field(10, ge=1)
    noisy: Literal["detect", "known"] = "detect"
    missing: Missing = "negative"
    distillation: float = Field(0.8, ge=0, le=1)
    ramp_rounds: int = Field(39, ge=1)
    temperature: float = Field(0.8, gt=0)

    def list_stages(self) -> tuple[Stage, ...]:
        """Return stage 2, and the round in which lambda is at its largest value."""
        second = self.stage_one_rounds + 1
        event = "stage 2, in which noisy sites learn from the received model, begins"
        stages = [Stage(event, second, ("stage_one_rounds",))]
        if self.distillation:
            settings = ("stage_one_rounds", "ramp_rounds")
            stages.append(Stage("the distillation reaches its weight", second + self.ramp_rounds, settings))
        return tuple(stages)


# ---------------------------------------------------------------------- noisy sites and their weights


def compute_mean_loss_by_label(logits: Floats, labels: Floats) -> Float64:
    """Return a site's mean cross-entropy over the negatives and the positives of each class, ``(classes, 2)``.

    NaN where the site has no such image.

    Args:
        logits: Logits without adjustment, ``(n, classes)``.
        labels: 1, 0, or NaN for omitted, ``(n, classes)``.
    """
    losses = np.logaddexp(0.0, np.where(labels == 1, -1.0, 1.0) * logits.astype(np.float64))
    members = np.stack([labels == 0, labels == 1], axis=-1)  # (n, classes, 2)
    counts = members.sum(axis=0)
    sums = (losses[..., None] * members).sum(axis=0)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def find_noisy_sites(indicators: Floats) -> Flags:
    """Return a mask ``(sites,)`` of the noisy sites: those that a mixture of two Gaussians puts into the high-loss one.

    Each indicator is scaled to the range 0 to 1 over the sites; a missing indicator counts as the lowest. If all sites
    are equal, none is noisy. The mixture is fitted from :data:`MIXTURE_FITS` seeds; the most frequent division of the
    sites is returned.

    Args:
        indicators: Mean losses of each site, ``(sites, indicators)``, NaN if a site has none.
    """
    scaled = scale_values_over_sites(indicators)
    if (scaled == scaled[0]).all():
        return np.zeros(len(scaled), np.bool_)
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture  # only the coordinator needs it, once a run

    votes = []
    for seed in range(MIXTURE_FITS):
        mixture = GaussianMixture(n_components=2, random_state=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # few sites: any division that repeats will do
            components = mixture.fit_predict(scaled)
        votes.append(np.asarray(components == mixture.means_.sum(axis=1).argmax(), np.bool_))
    return max(votes, key=lambda vote: sum(np.array_equal(vote, other) for other in votes))  # the first of equals


MIN_SITES_TO_DIVIDE_AGAIN = 4
"""If only one of this many sites or more is clean, the others, at least three, are divided again."""


def find_noisy_sites_despite_liar(indicators: Floats) -> Flags:
    """Return the noisy sites, found without a site that would be the only clean one.

    If :func:`find_noisy_sites` leaves a single site clean, of four or more, it is applied once more to the others.

    The site that is set aside counts as clean. Departs from the paper, whose sites do not lie.

    Args:
        indicators: Mean losses of each site, ``(sites, indicators)``, NaN if a site has none.
    """
    noisy = find_noisy_sites(indicators)
    if len(noisy) < MIN_SITES_TO_DIVIDE_AGAIN or (~noisy).sum() != 1:
        return noisy
    divided = noisy.copy()
    divided[noisy] = find_noisy_sites(indicators[noisy])
    return divided


@lru_cache(maxsize=8)
def _find_noisy_sites_in_bytes(indicators: tuple[bytes, ...]) -> Flags:
    """Return :func:`find_noisy_sites_despite_liar` of float32 bytes; results are cached, because a fit is slow."""
    return find_noisy_sites_despite_liar(np.stack([np.frombuffer(values, np.float32) for values in indicators]))


def find_noisy_site_names(indicators: Mapping[str, NDArray[np.float32]]) -> frozenset[str]:
    """Return the names of the noisy sites (:func:`find_noisy_sites_despite_liar`).

    Args:
        indicators: Site -> its mean losses, flat.
    """
    noisy = _find_noisy_sites_in_bytes(tuple(values.tobytes() for values in indicators.values()))
    return frozenset(site for site, flag in zip(indicators, noisy.tolist(), strict=True) if flag)


def scale_values_over_sites(indicators: Floats) -> Float64:
    """Scale each column to the range 0 to 1 over the sites; a column that is equal at all sites becomes 0."""
    is_known = ~np.isnan(indicators)
    lowest = np.where(is_known, indicators, np.inf).min(axis=0)
    low = np.where(is_known.any(axis=0), lowest, 0.0)
    above = np.where(is_known, indicators - low, 0.0)
    spread = above.max(axis=0)
    return np.asarray(above / np.where(spread > 0, spread, 1.0), np.float64)


def lower_noisy_site_weights(weights: Floats, products: Float64, noisy: Flags) -> Float64:
    """Return the sites' weights ``(sites,)``, with the weight of each noisy site multiplied by ``exp(-D)``.

    D is the distance of a noisy site's model from that of the nearest clean site, divided by the longest of these
    distances.

    Args:
        weights: Plain weights, ``(sites,)``.
        products: Inner products of the sites' updates, ``(sites, sites)``.
        noisy: True for noisy sites, ``(sites,)``; the weights are unchanged if all sites are noisy or all clean.
    """
    plain = np.asarray(weights, np.float64)
    if noisy.all() or not noisy.any():
        return plain
    nearest = compute_distances_between_models(products)[:, ~noisy].min(axis=1)
    distance = np.where(noisy, nearest, 0.0)
    return np.asarray(plain * np.exp(-distance / (distance.max() or 1.0)), np.float64)


# ---------------------------------------------------------------------- distillation


def compute_distillation_weight(server_round: int, parameters: FedNoRoParameters) -> float:
    """Return lambda: its largest value times ``exp(-5 (1 - x)^2)``.

    x is 0 in the first round after stage 1, and rises to 1 within ``ramp_rounds`` rounds.
    """
    risen = min(1.0, (server_round - 1 - parameters.stage_one_rounds) / parameters.ramp_rounds)
    return parameters.distillation * float(np.exp(-5.0 * (1.0 - risen) ** 2))


def compute_distillation_divergence(student: Tensor, teacher: Tensor, chosen: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of the student from the teacher, averaged over the chosen entries.

    Args:
        student, teacher: Logits ``(batch, classes)``; the teacher's get no gradient.
        chosen: Mask of the classes that count, bool ``(classes,)``.
    """
    student = student[:, chosen]
    teacher = teacher[:, chosen].detach()
    soft = teacher.sigmoid()
    entries = binary_cross_entropy_with_logits(student, soft, reduction="none")
    own = binary_cross_entropy_with_logits(teacher, soft, reduction="none")
    return (entries - own).sum() / max(1, entries.numel())


# ---------------------------------------------------------------------- hospital


class FedNoRoSite(SiteMethod):
    """The hospital's half of FedNoRo: adjusted cross-entropy; at a noisy site also distillation."""

    traits = MethodTraits(
        "fednoro",
        parameters_class=FedNoRoParameters,
        payload=Payload(
            statistics=(
                Statistic("indicators", "signs", "mean loss on each class's images, present and absent", least=0),
            )
        ),
        weighs_updates=True,
        supports_multi_class=False,
        reason_against_segmentation="it finds noisy sites by the losses of whole images",
        allows_other_loss=False,
        reason_for_global_norm="it compares sites by the model of all",
        stores_statistics_by_site=True,
    )
    parameters: FedNoRoParameters

    def make_round(self, context: ClientContext) -> LocalRound:
        """Return the local round: adjusted cross-entropy; at a noisy site also distillation from the received model.

        In the last round of stage 1 the site measures its loss indicators before training.
        """
        parameters = self.parameters
        examples = context.examples
        negative = parameters.missing == "negative"
        targets = torch.where(examples.annotated, examples.labels, 0.0) if negative else examples.labels  # (n, classes)
        indicators = self.compute_loss_by_label_statistics(context, targets)
        adjustment = compute_target_logit_adjustment(targets)
        share = compute_distillation_weight(context.round, parameters)
        noisy = "noisy" in context.statistics and bool(context.statistics["noisy"][0])
        teacher = copy_model_as_teacher(context.network) if noisy else None

        def objective(model: Model, batch: Batch) -> Tensor:
            view = batch.view()
            student = batch.logits(model, view)
            labels = compute_supervised_loss([student], targets[batch.rows], adjustment)
            if teacher is None:
                return labels
            with torch.no_grad():
                received = batch.logits(teacher, view) / parameters.temperature
            chosen = torch.ones_like(batch.annotated) if negative else ~batch.annotated
            return share * compute_distillation_divergence(student, received, chosen) + (1 - share) * labels

        return LocalRound(objective, lambda model, losses: indicators)

    def compute_loss_by_label_statistics(self, context: ClientContext, targets: Tensor) -> Arrays:
        """Return the site's loss indicators: its mean loss over the negatives and the positives of each class.

        The site computes them only in the last round of stage 1, and only if noisy sites are detected by their losses.
        Otherwise the result is empty.
        """
        if self.parameters.noisy == "known" or context.round != self.parameters.stage_one_rounds:
            return {}
        logits = compute_logits(context.network, context.examples.images, context.spec.precision)
        indicators = compute_mean_loss_by_label(logits.cpu().numpy(), targets.cpu().numpy())
        return {"indicators": np.minimum(indicators, MAX_LOSS).astype(np.float32)}


# ---------------------------------------------------------------------- coordinator


class FedNoRo(Method):
    """The coordinator's half of FedNoRo: FedAvg in stage 1; then lower weights for noisy sites."""

    site_class = FedNoRoSite
    site: FedNoRoSite

    def is_noisy_site(self, context: RoundContext, site: str) -> bool:
        """Return True if a site's labels count as noisy; only meaningful in stage 2."""
        if self.site.parameters.noisy == "known":
            return not context.contract.annotated_class_mask(site).all()
        if site not in context.statistics or site in context.uncounted:
            return True
        if context.statistics.keys() & context.uncounted:  # the division rests on losses that do not count any more
            return site in self._divide_counting_sites(context)
        return bool(context.statistics[site][0])

    def _divide_counting_sites(self, context: RoundContext) -> frozenset[str]:
        """Return the noisy sites if the sites are divided without those whose statistics do not count."""
        counting = sorted(context.statistics.keys() - context.uncounted)
        return find_noisy_site_names({site: context.statistics[site][1:] for site in counting})

    def statistics_for(self, context: RoundContext) -> Callable[[str], Arrays]:
        """Return a function that gives each site in stage 2 a flag: 1 if its labels count as noisy, else 0.

        In stage 1 the function gives no statistics.
        """
        if context.round <= self.site.parameters.stage_one_rounds:
            return lambda site: {}
        return lambda site: {"noisy": np.array([self.is_noisy_site(context, site)], np.float32)}

    def statistics_shape(self, context: RoundContext, site: str, features: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of a site's mean losses by class and label, ``(classes, 2)``.

        Sites send them only in the last round of stage 1, and only if noisy sites are detected by their losses.
        Otherwise the result is empty.
        """
        if self.site.parameters.noisy == "known" or context.round != self.site.parameters.stage_one_rounds:
            return {}
        return {"indicators": (len(context.contract.class_names), 2)}

    def aggregate_statistics(self, context: RoundContext, replies: Mapping[str, SiteReply]) -> Arrays:
        """Return site -> 1 if it is noisy, else 0, and its mean losses, from the last round of stage 1.

        In all other rounds, and if noisy sites are not detected by their losses, the statistics stay as they are.
        """
        if self.site.parameters.noisy == "known" or context.round != self.site.parameters.stage_one_rounds:
            return context.statistics
        losses = {site: self._select_stated_losses(context, site, reply) for site, reply in replies.items()}
        noisy = find_noisy_site_names(losses)
        return {site: np.array([site in noisy, *values], np.float32) for site, values in losses.items()}

    def _select_stated_losses(self, context: RoundContext, site: str, reply: SiteReply) -> NDArray[np.float32]:
        """Return the losses that a site can state, flat ``(2 classes,)``; NaN for positives that it does not annotate.

        Where missing labels count as negative, it has negatives of every class.
        """
        losses = reply.statistics["indicators"].clip(0, MAX_LOSS).astype(np.float32)  # (classes, 2)
        annotated = context.contract.annotated_class_mask(site)
        has_negatives = annotated | (self.site.parameters.missing == "negative")
        return np.where(np.stack([has_negatives, annotated], axis=1), losses, np.nan).astype(np.float32).reshape(-1)

    def site_weights(self, context: RoundContext, replies: Mapping[str, SiteReply], weights: Weights) -> Weights:
        """Return in stage 2 the weights of :func:`lower_noisy_site_weights`; in stage 1 the plain ``weights``."""
        noisy: Flags = np.array([self.is_noisy_site(context, site) for site in replies], np.bool_)
        if context.round <= self.site.parameters.stage_one_rounds or noisy.all() or not noisy.any():
            return weights
        products = compute_update_inner_products([reply.update for reply in replies.values()])
        return [float(weight) for weight in lower_noisy_site_weights(np.asarray(weights), products, noisy)]

    def compute_summary_figures(self, context: RoundContext) -> Mapping[str, Any]:
        """Return the names of the noisy sites; empty before stage 2."""
        if context.round <= self.site.parameters.stage_one_rounds:
            return {}
        return {"noisy": [site for site in sorted(context.contract.sites) if self.is_noisy_site(context, site)]}
