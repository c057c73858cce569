"""RSCFed: the global model is a mean over random groups of sites, in which sites far from the group's mean weigh less.

Liang, Lin, Fu, Zhu, Li: "RSCFed: Random Sampling Consensus Federated Semi-supervised Learning", CVPR 2022; as a
comparator in Sun et al., "FedMLP", MICCAI 2024, tables 1 and 2. We had the paper's abstract and descriptions of it, its
patent's claims and both groups' released code, not its numbered equations.

The paper's method. Coordinator: M times it draws K sites and merges their models into a *sub-consensus*; the global
model is the plain mean of the M. In a sub-consensus site k weighs ``n_k exp(-beta d_k / n_k)``, where n_k is its number
of images and d_k the distance of its model from the group's mean. Labelled site: cross-entropy. Unlabelled site:
squared distance of the student's probabilities from the sharpened ones of a *mean teacher*, which sees another view of
the image. The teacher is an exponential moving average of the student over all steps of all rounds and stays at the
site; the student starts each round as the global model.

Our version, because each site labels some of the classes: every site does both, cross-entropy on its own classes and
consistency with its teacher on the others, as in FedMLP's code. The defaults are also from that code (M 10, K 6 of 8
sites, beta 0.01, no sharpening, positives of a class weighed by images over positives); RSCFed's code has M 3, K 5 of
10, beta 10,000, and 0.02 for the consistency. FedMLP's code counts positives with labels that the site does not have;
we use the site's own counts.

All sites of a round train, and the groups are drawn among the replies. A site's training does not depend on its group,
so this is the paper's rule without training a site several times. Each group ranks the sites by (seed, round, site,
group), so that a missing site is replaced by the next in rank and no other site changes.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from polyclinic.common.models.network import Model
from polyclinic.common.models.state import read_model_state, write_model_state
from polyclinic.common.system.hashing import derive_seed
from polyclinic.common.wire.records import Arrays, ModelGroups, select_arrays_with_prefix
from polyclinic.strategies.aggregation.means import Float64, Weighting, Weights
from polyclinic.strategies.aggregation.robust import compute_distances_from_mean_model, compute_update_inner_products
from polyclinic.strategies.local.losses import compute_positive_weights, partial_loss
from polyclinic.strategies.local.method_traits import MethodTraits, Parameters
from polyclinic.strategies.local.objective import (
    Batch,
    ClientContext,
    LocalRound,
    compute_teacher_decay,
    copy_model_as_teacher,
    update_teacher_average,
)
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.methods.base import Method, RoundContext, SiteReply
from polyclinic.strategies.methods.fedmlp import compute_teacher_consistency_loss


class RSCFedParameters(Parameters):
    """The ``[method]`` table of ``rscfed``. A sub-consensus is the mean model of a random group of sites.

    Attributes:
        consensus_models: M, the number of sub-consensus models in a round.
        consensus_sites: K, the number of sites in each; all sites if there are fewer.
        distance_scale: The paper's beta, which multiplies a site's distance from the mean model in its weight; 0
            ignores the distances.
        teacher_decay: Decay of the teacher's moving average; lower in the first steps, as in RSCFed's code.
        temperature: Divisor of the teacher's logits; below 1 sharpens.
        consistency_weight: Weight of the distance from the teacher, relative to the cross-entropy.
        balanced: True to weigh the positive labels of a class by the site's ratio ``known labels / positives`` of the
            class.
    """

    weighting: Weighting = "samples"
    consensus_models: int = Field(10, ge=1)
    consensus_sites: int = Field(6, ge=1)
    distance_scale: float = Field(0.01, ge=0)
    teacher_decay: float = Field(0.999, ge=0, lt=1)
    temperature: float = Field(1.0, gt=0)
    consistency_weight: float = Field(1.0, ge=0)
    balanced: bool = True


# ---------------------------------------------------------------------- maths


def draw_consensus_group(sites: Sequence[str], size: int, seed: tuple[int, ...]) -> list[int]:
    """Draw ``size`` sites of one sub-consensus at random, or all if there are fewer; return their indices, sorted."""
    ranked = sorted(range(len(sites)), key=lambda place: derive_seed(*seed, sites[place], "consensus"))
    return sorted(ranked[:size])


def compute_consensus_weights(
    products: Float64, weights: Float64, images: Float64, groups: Sequence[Sequence[int]], scale: float
) -> Float64:
    """Return the weight of each site in the plain mean of the sub-consensus models; the weights sum to 1.

    A sub-consensus model is the mean model of a group of sites.

    Args:
        products: Inner products of all sites' updates, ``(sites, sites)``.
        weights, images: Plain weight and number of training images of each site, ``(sites,)``.
        groups: Indices of the sites of each sub-consensus.
        scale: The paper's beta, which multiplies the distance of a site's model from the mean model.
    """
    total = np.zeros(len(weights))
    for members in groups:
        inside = np.ix_(members, members)
        total[members] += compute_group_weights_by_distance(products[inside], weights[members], images[members], scale)
    return total / len(groups)


def compute_group_weights_by_distance(products: Float64, weights: Float64, images: Float64, scale: float) -> Float64:
    """Return the weight of each site in one group's mean model, lower the farther its model is from the plain mean.

    The weights sum to 1. All arguments are for the sites of the group.

    Args:
        products: Inner products of the sites' updates, ``(sites, sites)``.
        weights, images: Plain weight and number of training images of each site, ``(sites,)``.
        scale: The paper's beta, which multiplies the distances.
    """
    distances = scale * compute_distances_from_mean_model(products, weights) / images
    raw = weights * np.exp(distances.min() - distances)  # 1 for the closest site: a large beta leaves one
    return np.asarray(raw / raw.sum(), np.float64)


# ---------------------------------------------------------------------- hospital


class RSCFedSite(SiteMethod):
    """The hospital's half of RSCFed: cross-entropy on the site's classes, consistency with a teacher on the others."""

    traits = MethodTraits(
        "rscfed",
        parameters_class=RSCFedParameters,
        weighs_updates=True,
        supports_multi_class=False,
        reason_against_segmentation="it compares two views of an image, whose pixels do not lie in one place",
        allows_other_loss=False,
        keeps_method_state=True,
    )
    parameters: RSCFedParameters

    def make_round(self, context: ClientContext) -> LocalRound:
        """Return the local round: it trains the student; the teacher, an average of students, is stored at the site."""
        local = RSCFedRound(context, self.parameters)
        return LocalRound(local.objective, method_state=local.method_state)


class RSCFedRound:
    """One round of RSCFed at one site: training of the student, and the moving average that is the teacher."""

    def __init__(self, context: ClientContext, parameters: RSCFedParameters) -> None:
        self.parameters = parameters
        self.teacher = copy_model_as_teacher(context.network)
        if stored := select_arrays_with_prefix("teacher", context.method_state):
            groups = ModelGroups.from_named_arrays(stored, context.network.class_names)
            write_model_state(self.teacher, trunk=groups.trunk, norm=groups.norm, head=groups.head)
        self.steps = int(context.method_state["steps"][0]) if stored else 0
        self.teacher_is_behind = False  # the student took a step that the teacher has not followed yet
        labels = context.examples.labels
        self.positive_weight = compute_positive_weights(labels) if parameters.balanced else None

    def objective(self, model: Model, batch: Batch) -> Tensor:
        """Return the cross-entropy on the site's own classes plus the distance from the teacher on the others."""
        self._update_teacher(model)
        self.teacher_is_behind = True
        student = batch.logits(model, batch.view())
        with torch.no_grad():
            teacher = batch.logits(self.teacher, batch.view()) / self.parameters.temperature
        supervised = partial_loss(student, batch.labels, batch.annotated, self.positive_weight)
        consistency = compute_teacher_consistency_loss([student], [teacher], batch.annotated)
        return supervised + self.parameters.consistency_weight * consistency

    def method_state(self, model: Model) -> Arrays:
        """Return the teacher, and the number of training steps that it averages."""
        self._update_teacher(model)
        arrays = ModelGroups.from_model(read_model_state(self.teacher)).to_named_arrays()
        teacher = {f"teacher/{name}": array for name, array in arrays.items()}
        return teacher | {"steps": np.array([self.steps], np.float32)}

    def _update_teacher(self, model: Model) -> None:
        if self.teacher_is_behind:
            decay = compute_teacher_decay(self.steps, self.parameters.teacher_decay)
            update_teacher_average(self.teacher, model, decay)
            self.steps = self.steps + 1
            self.teacher_is_behind = False


# ---------------------------------------------------------------------- coordinator


class RSCFed(Method):
    """The coordinator's half of RSCFed: the global model is the mean of sub-consensus models."""

    site_class = RSCFedSite
    site: RSCFedSite

    def site_weights(self, context: RoundContext, replies: Mapping[str, SiteReply], weights: Weights) -> Weights:
        """Return each site's weight in the mean of this round's sub-consensus models."""
        parameters = self.site.parameters
        seed = (context.seed, context.round)
        models = range(parameters.consensus_models)
        groups = [draw_consensus_group(list(replies), parameters.consensus_sites, (*seed, number)) for number in models]
        images = np.array([float(reply.train_samples) for reply in replies.values()])
        products = compute_update_inner_products([reply.update for reply in replies.values()])
        plain = np.asarray(weights, np.float64)
        shares = compute_consensus_weights(products, plain, images, groups, parameters.distance_scale)
        return [float(share) for share in shares]
