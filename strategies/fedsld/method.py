"""FedSLD: a site's loss is weighted by how common a label is in the batch against how common it is in the federation.

Luo and Wu, "FedSLD: Federated Learning with Shared Label Distribution for Medical Image Classification", 2021
(specs 4.3, 4.4). p_b: share of a class in the batch; P: its share in the federation, the *prior*; image k with label y
weighs ``p_b(y) / P(y)``, without a gradient through p_b.

Coordinator: the prior from the label counts of the roll call. Hospital: the weights, batch by batch.

Departs from the paper, whose eq. 3 sums over the batch and does not train (specs L1): by default the sum is divided by
the number of images. Since ``sum_c p_b(c)^2 / P(c) >= 1``, that lengthens the steps of skewed sites; how much of the
gain is due to it shows ``fedavg_scaled``, FedAvg with the learning rate lengthened alike.

Our extension to multi-label tasks: each class is a distribution of two, present and absent, and each known entry weighs
``p_b / P`` of its own side.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from common.errors import Fault
from common.models.network import SplitNetwork
from common.wire.records import Arrays
from strategies.aggregation.mean import HeadMean, WholeHeadMean
from strategies.aggregation.means import Weighting
from strategies.base.method import (
    Method,
    Parameters,
    Traffic,
)
from strategies.base.round_context import RoundContext
from strategies.fedsld.prior import federation_prior, mean_factor, own_prior, uncounted
from strategies.fedsld.weights import WEIGHTED, WEIGHTS, Reduction
from strategies.local.losses import Missing, filled, mean_where
from strategies.local.objective import LocalRound, Situation
from strategies.local.training import Batch, plain
from strategies.surgical import OwnersMean


class FedSLDParameters(Parameters):
    """The ``[method]`` table.

    Attributes:
        reduction: ``sum_over_batch`` divides the weighted losses by the number of images, ``sum`` (eq. 3 as written) by
            nothing, ``weighted_mean`` by the sum of the weights.
        heads: ``own`` gives each site the rows of its own classes only, averaged as in surgical aggregation.
        missing: What a class counts as that a site does not annotate.
    """

    weighting: Weighting = "samples"
    reduction: Reduction = "sum_over_batch"
    heads: Literal["all", "own"] = "all"
    missing: Missing = "masked"


class ScaledParameters(Parameters):
    """The ``[method]`` table.

    Attributes:
        scale: ``federation``: one factor for all, the mean over the sites, by images, of ``sum_c p_i(c)^2 / P(c)``;
            ``batch``: each batch's own mean weight.
    """

    weighting: Weighting = "samples"
    scale: Literal["federation", "batch"] = "federation"
    missing: Missing = "masked"


class FedSLD(Method):
    """FedAvg in which every site receives the label prior P, made from the label counts of the roll call."""

    name = "fedsld"
    table = FedSLDParameters
    parameters: FedSLDParameters
    declared = Traffic(label_counts=True)
    plain_client = False
    looks_at_images = False
    chooses_loss = False

    @property
    def traffic(self) -> Traffic:
        """``heads = "own"``: each site has the rows of its own classes only."""
        return replace(self.declared, rows=self.parameters.heads)

    @property
    def head_mean(self) -> HeadMean:
        """``heads = "own"``: over a class's owners, as in surgical aggregation."""
        return OwnersMean if self.parameters.heads == "own" else WholeHeadMean

    def roll_call_faults(self, known: RoundContext) -> list[Fault]:
        """Every site has to send its label counts."""
        return uncounted(known)

    def statistics_for(self, known: RoundContext) -> Callable[[str], Arrays]:
        """The prior, for the head rows that the site has."""
        everywhere, contract = federation_prior(known), known.contract

        def prior_of(site: str) -> Arrays:
            prior = own_prior(known, everywhere, site)
            return {"prior": prior[[contract.class_names.index(name) for name in self.rows_of(site, contract)]]}

        return prior_of

    def client(self, situation: Situation) -> LocalRound:
        """Each entry's loss, weighted by p_b / P."""
        prior = torch.from_numpy(situation.told["prior"].copy()).to(situation.examples.labels.device)

        def objective(network: SplitNetwork, batch: Batch) -> Tensor:
            labels = filled(batch.labels, batch.annotated, self.parameters.missing)
            return WEIGHTED[self.task](batch.logits(network, batch.view()), labels, prior, self.parameters.reduction)

        return LocalRound(objective)


class ScaledFedAvg(Method):
    """FedAvg with the learning rate multiplied by FedSLD's mean weight: the honest control (specs 4.4)."""

    name = "fedavg_scaled"
    table = ScaledParameters
    parameters: ScaledParameters
    declared = Traffic(label_counts=True)
    plain_client = False
    looks_at_images = False

    def roll_call_faults(self, known: RoundContext) -> list[Fault]:
        """Every site has to send its label counts."""
        return uncounted(known)

    def statistics_for(self, known: RoundContext) -> Callable[[str], Arrays]:
        """One factor for all sites, or the prior for each batch's own factor."""
        if self.parameters.scale == "batch":
            everywhere = federation_prior(known)
            return lambda site: {"prior": own_prior(known, everywhere, site)}
        factor = np.array([mean_factor(known)], np.float32)
        return lambda site: {"factor": factor}

    def client(self, situation: Situation) -> LocalRound:
        """The plain loss, with longer steps."""
        loss = self.training_loss(situation.examples, situation.spec)
        if self.parameters.scale == "federation":
            return LocalRound(plain(loss), lr_factor=float(situation.told["factor"][0]))
        prior = torch.from_numpy(situation.told["prior"].copy()).to(situation.examples.labels.device)

        def objective(network: SplitNetwork, batch: Batch) -> Tensor:
            weights = WEIGHTS[self.task](filled(batch.labels, batch.annotated, self.parameters.missing), prior)
            counted = weights > 0
            return mean_where(counted, weights) * plain(loss)(network, batch)

        return LocalRound(objective)
