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
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from common.models.network import SplitNetwork
from common.models.zoo.spec import Task
from common.wire.records import Arrays
from strategies.base.coordinator_half import Guidance, Known
from strategies.base.method import Method, Parameters, Weighting, shared_choices
from strategies.fedsld.prior import federation_prior, mean_factor, own_prior, uncounted
from strategies.fedsld.weights import WEIGHTED, WEIGHTS, Reduction
from strategies.local.losses import Missing, loss_for, mean_where
from strategies.local.objective import LocalRound, Situation
from strategies.local.training import Batch, plain


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


def fedsld(parameters: FedSLDParameters, task: Task) -> Method:
    """Build the method from its ``[method]`` table."""

    def local(situation: Situation) -> LocalRound:
        prior = torch.from_numpy(situation.told["prior"].copy()).to(situation.examples.labels.device)

        def objective(network: SplitNetwork, batch: Batch) -> Tensor:
            labels = filled(batch, parameters.missing)
            return WEIGHTED[task](batch.logits(network, batch.view()), labels, prior, parameters.reduction)

        return LocalRound(objective)

    def tell(known: Known) -> Callable[[str], Arrays]:
        everywhere, contract = federation_prior(known), known.contract

        def told(site: str) -> Arrays:
            held = contract.sites[site] if parameters.heads == "own" else contract.class_names
            prior = own_prior(known, everywhere, site)
            return {"prior": prior[[contract.class_names.index(name) for name in held]]}

        return told

    return Method(
        "fedsld",
        loss_for(task, parameters.missing),
        rows=parameters.heads,
        needs_label_counts=True,
        guidance=Guidance(tell=tell, faults=uncounted),
        local=local,
        **shared_choices(parameters),
    )


def fedavg_scaled(parameters: ScaledParameters, task: Task) -> Method:
    """FedAvg with the learning rate multiplied by FedSLD's mean weight: the honest control (specs 4.4)."""
    loss = loss_for(task, parameters.missing)

    def local(situation: Situation) -> LocalRound:
        if parameters.scale == "federation":
            return LocalRound(plain(loss), lr_factor=float(situation.told["factor"][0]))
        prior = torch.from_numpy(situation.told["prior"].copy()).to(situation.examples.labels.device)

        def objective(network: SplitNetwork, batch: Batch) -> Tensor:
            weights = WEIGHTS[task](filled(batch, parameters.missing), prior)
            counted = weights > 0
            return mean_where(counted, weights) * plain(loss)(network, batch)

        return LocalRound(objective)

    def tell(known: Known) -> Callable[[str], Arrays]:
        if parameters.scale == "batch":
            everywhere = federation_prior(known)
            return lambda site: {"prior": own_prior(known, everywhere, site)}
        factor = np.array([mean_factor(known)], np.float32)
        return lambda site: {"factor": factor}

    return Method(
        "fedavg_scaled",
        loss,
        needs_label_counts=True,
        guidance=Guidance(tell=tell, faults=uncounted),
        local=local,
        **shared_choices(parameters),
    )


def filled(batch: Batch, missing: Missing) -> Tensor:
    """The batch's labels, with what the site does not annotate as ``missing`` says."""
    return torch.where(batch.annotated, batch.labels, 0.0) if missing == "negative" else batch.labels
