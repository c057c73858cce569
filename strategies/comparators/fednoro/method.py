"""FedNoRo, both halves.

Wu, Yu, Jiang, Cheng, Yan: "FedNoRo: Towards Noise-Robust Federated Learning by Addressing Class Imbalance and Label
Noise Heterogeneity", IJCAI 2023; as a comparator in Sun et al., "FedMLP", MICCAI 2024, tables 1 and 2. We had the
paper's abstract and introduction and both groups' released code at hand, not its numbered equations.

The paper's. Stage 1: FedAvg with logits adjusted by how often the site sees each class. Then each site tells its
per-class mean loss under the global model, and a mixture of two Gaussians divides the sites into clean and noisy. Stage
2: clean sites go on as before; a noisy site minimises ``lambda KD + (1 - lambda) CE``, KD being the divergence from the
received model's probabilities (logits over 0.8), lambda rising from nearly 0 to 0.8. A noisy site's weight in the mean
is multiplied by ``exp(-D)``, D its model's distance from the nearest clean site's over the longest such distance.

Ours, for several labels of which each site gives some:

- The noise is that what a site does not label counts as negative (``missing = "negative"``). A class is two, present
  and absent, so that a site has two indicators a class. The adjustment is FedMLP's: where a site has no positive it
  adds the logarithm of about one over twice the images, and what the missing class costs is next to nothing; in the
  paper's softmax a class without images has no part at all.
- ``missing = "masked"`` with ``noisy = "known"`` is what FedMLP's authors made of it: the label contract says whose
  labels are incomplete, so nothing has to be found; cross-entropy on a site's own classes, distillation on the others.
  Where every site lacks a class all are noisy, nobody is there to measure distances by, and the mean is FedAvg's.
- Indicators are of the model received in the last round of stage 1: the one after it would cost another exchange.
- A site that was not judged, because it joined later or its reply was lost, is taken for noisy.
- The divergence is of each entry's two probabilities, in the paper over the classes, in FedMLP's code their squared
  distance. The student's logits are not adjusted in it: in the paper's code they are, but there a class that a site
  never sees drops out, while here the adjustment would push it up.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from common.errors import Fault
from common.models.inference import logits_of
from common.models.network import SplitNetwork
from common.wire.records import Arrays, TrainReply
from strategies.aggregation.distances import inner_products
from strategies.aggregation.means import (
    Weighting,
    Weights,
)
from strategies.base.method import (
    Method,
    Parameters,
    Statistic,
    Traffic,
    without_local_norm,
)
from strategies.base.round_context import RoundContext
from strategies.comparators.fednoro.detection import Flags, distance_aware, loss_indicators, noisy_sites
from strategies.fedmlp.losses import supervised
from strategies.fedmlp.prior import adjustment_of
from strategies.local.losses import Missing
from strategies.local.objective import LocalRound, Situation, fixed_copy
from strategies.local.training import Batch


class FedNoRoParameters(Parameters):
    """The ``[method]`` table.

    Attributes:
        stage_one_rounds: Rounds before noisy sites are taught.
        noisy: ``found`` by their losses, or ``known``: every site that does not label all classes.
        missing: What a class counts as that a site does not label; ``masked`` leaves it to the distillation.
        distillation: Lambda at its highest.
        ramp_rounds: Rounds after stage 1 until lambda is there.
        temperature: The received model's logits are divided by it.
    """

    weighting: Weighting = "samples"
    stage_one_rounds: int = Field(10, ge=1)
    noisy: Literal["found", "known"] = "found"
    missing: Missing = "negative"
    distillation: float = Field(0.8, ge=0, le=1)
    ramp_rounds: int = Field(39, ge=1)
    temperature: float = Field(0.8, gt=0)


class FedNoRo(Method):
    """Stage 1 is FedAvg; then sites found to be noisy are taught by the received model, and weigh less."""

    name = "fednoro"
    table = FedNoRoParameters
    parameters: FedNoRoParameters
    declared = Traffic(
        statistics=(Statistic("indicators", "signs", "mean loss on each class's images, present and absent"),)
    )
    plain_client = False
    looks_at_images = True
    chooses_loss = False
    weighs_updates = True
    multi_class = False

    def statistics_for(self, known: RoundContext) -> Callable[[str], Arrays]:
        """Whether the site's labels are taken for noisy."""
        return lambda site: told(known, site, self.parameters)

    def statistics_shape(self, known: RoundContext, site: str, features: int) -> Mapping[str, tuple[int, ...]]:
        """Loss indicators, in the last round of stage 1."""
        return expected(known, self.parameters)

    def aggregate_statistics(self, known: RoundContext, replies: Mapping[str, TrainReply]) -> Arrays:
        """Who is noisy."""
        return learned(known, replies, self.parameters)

    def site_weights(self, known: RoundContext, replies: Mapping[str, TrainReply], weights: Weights) -> Weights:
        """Noisy sites weigh less the further they are from every clean one."""
        return shares(known, replies, weights, self.parameters)

    def summary_figures(self, known: RoundContext) -> Mapping[str, Any]:
        """Which sites were taken for noisy."""
        return noisy_noted(known, self.parameters)

    def contradictions(self) -> list[Fault]:
        """Sites are compared by the model of all."""
        why = "it compares sites by the model of all"
        return [*without_local_norm(self.name, self.parameters.trunk, why), *super().contradictions()]

    def client(self, situation: Situation) -> LocalRound:
        """Adjusted cross-entropy; at a noisy site mixed with distillation."""
        return FedNoRoClient(situation, self.parameters).round()


# ---------------------------------------------------------------------- coordinator


def expected(known: RoundContext, parameters: FedNoRoParameters) -> Mapping[str, tuple[int, ...]]:
    """Expect each site's loss indicators in the last round of stage 1, if they decide."""
    if parameters.noisy == "known" or known.round != parameters.stage_one_rounds:
        return {}
    return {"indicators": (len(known.contract.class_names), 2)}


def learned(known: RoundContext, replies: Mapping[str, TrainReply], parameters: FedNoRoParameters) -> Arrays:
    """Site -> 1 for noisy, 0 for clean; once."""
    if not expected(known, parameters):
        return known.statistics
    found = noisy_sites(np.stack([reply.statistics["indicators"].reshape(-1) for reply in replies.values()]))
    return {site: np.array([flag], np.float32) for site, flag in zip(replies, found, strict=True)}


def is_noisy(known: RoundContext, site: str, parameters: FedNoRoParameters) -> bool:
    """What a site was found to be; in stage 2 only."""
    if parameters.noisy == "known":
        return not known.contract.annotated(site).all()
    return site not in known.statistics or bool(known.statistics[site][0])


def noisy_noted(known: RoundContext, parameters: FedNoRoParameters) -> dict[str, Any]:
    """Which sites were taken for noisy, once stage 2 has begun."""
    if known.round <= parameters.stage_one_rounds:
        return {}
    return {"noisy": [site for site in sorted(known.contract.sites) if is_noisy(known, site, parameters)]}


def told(known: RoundContext, site: str, parameters: FedNoRoParameters) -> Arrays:
    """Send each site, in stage 2, whether its labels are taken for noisy."""
    if known.round <= parameters.stage_one_rounds:
        return {}
    return {"noisy": np.array([is_noisy(known, site, parameters)], np.float32)}


def shares(
    known: RoundContext, replies: Mapping[str, TrainReply], weights: Weights, parameters: FedNoRoParameters
) -> Weights:
    """Weigh, in stage 2, noisy sites less the further they are from every clean one."""
    noisy: Flags = np.array([is_noisy(known, site, parameters) for site in replies], np.bool_)
    if known.round <= parameters.stage_one_rounds or noisy.all() or not noisy.any():
        return weights
    products = inner_products([reply.update for reply in replies.values()])
    return [float(weight) for weight in distance_aware(np.asarray(weights), products, noisy)]


# ---------------------------------------------------------------------- hospital


def distillation_weight(server_round: int, parameters: FedNoRoParameters) -> float:
    """Lambda: ``exp(-5 (1 - x)^2)`` of its highest, x rising from 0 to 1 over the ramp."""
    risen = min(1.0, (server_round - 1 - parameters.stage_one_rounds) / parameters.ramp_rounds)
    return parameters.distillation * float(np.exp(-5.0 * (1.0 - risen) ** 2))


def divergence(student: Tensor, teacher: Tensor, chosen: Tensor) -> Tensor:
    """Kullback-Leibler divergence of each entry's student from its teacher, mean over the chosen entries.

    Args:
        student: Logits ``(batch, classes)``.
        teacher: Logits, without gradient.
        chosen: Classes, bool ``(classes,)``.
    """
    student, teacher = student[:, chosen], teacher[:, chosen].detach()
    soft = teacher.sigmoid()
    entries = binary_cross_entropy_with_logits(student, soft, reduction="none")
    own = binary_cross_entropy_with_logits(teacher, soft, reduction="none")
    return (entries - own).sum() / max(1, entries.numel())


class FedNoRoClient:
    """One round at one site."""

    def __init__(self, situation: Situation, parameters: FedNoRoParameters) -> None:
        self.situation, self.parameters = situation, parameters
        examples = situation.examples
        self.negative = parameters.missing == "negative"
        known = torch.where(examples.annotated, examples.labels, 0.0) if self.negative else examples.labels
        self.targets = known  # (n, classes)
        self.noisy = bool(situation.told["noisy"][0]) if "noisy" in situation.told else False
        self.adjustment = adjustment_of(known)

    def round(self) -> LocalRound:
        """Judge the received model, if it is time to, before it is trained; keep it as a teacher, if one is needed."""
        indicators = self._indicators()
        if self.noisy:
            self.teacher = fixed_copy(self.situation.network)
        return LocalRound(self.objective, lambda network, losses: indicators)

    def objective(self, network: SplitNetwork, batch: Batch) -> Tensor:
        """Adjusted cross-entropy; at a noisy site mixed with what the received model says."""
        view = batch.view()
        student = batch.logits(network, view)
        labels = supervised([student], self.targets[batch.rows], self.adjustment)
        if not self.noisy:
            return labels
        with torch.no_grad():
            teacher = batch.logits(self.teacher, view) / self.parameters.temperature
        chosen = torch.ones_like(batch.annotated) if self.negative else ~batch.annotated
        share = distillation_weight(self.situation.round, self.parameters)
        return share * divergence(student, teacher, chosen) + (1 - share) * labels

    def _indicators(self) -> Arrays:
        parameters, situation = self.parameters, self.situation
        if parameters.noisy == "known" or situation.round != parameters.stage_one_rounds:
            return {}
        logits = logits_of(situation.network, situation.examples.images, situation.spec.precision)
        found = loss_indicators(logits.cpu().numpy(), self.targets.cpu().numpy())
        return {"indicators": found.astype(np.float32)}
