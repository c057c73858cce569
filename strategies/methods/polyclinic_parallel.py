"""Our own method for hospitals that train at the same time: surgical aggregation with three additions.

Surgical aggregation (:mod:`polyclinic.strategies.methods.surgical`) with hospitals that label different classes has
three weaknesses, and each addition is for one of them:

- *Momentum*. Each site's update serves its own classes, so the updates of a round hardly agree, and their mean is much
  shorter than each of them. With momentum (Hsu, Qi, Brown, arXiv 1909.06335) the means of several rounds add up.
- *Mean of late models*. A model that moves faster also swings. Training ends with the mean of the models of the last
  ``mean_rounds`` rounds (Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", UAI
  2018).
- *Solved head rows*. Trained head rows lag behind the trunk. In one more round, in which nothing is trained, each site
  solves the rows of its own classes in closed form on the mean model, and the new row is a mixture of both.

The solved row is Fisher's linear discriminant: ``w = (S + shrinkage * tr(S) / F * I)^-1 (m1 - m0)``, with the means m1
and m0 of the features of the site's images with and without the class, and S the mean squared deviation of the images
from the mean of their side ``(F, F)``. It is scaled and shifted so that its logits have the standard deviation and the
mean of those of the trained row over the same images; so the mixture of both is a row on the same scale.

Closed-form heads in federated learning are by Fanì et al. (Fed3R, ICML 2024), He et al. (AFL, CVPR 2025) and Goswami et
al. (FedCOF, NeurIPS 2025), over a fixed trunk with one label for each image. They send sums of features. Here a site
sends its rows, as in each round of surgical aggregation, and a row is averaged over the sites that annotate its class.
So nothing new leaves a hospital, and masked sums suffice.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polyclinic.common.errors import Fault
from polyclinic.common.models.network import Model, compute_features_and_logits
from polyclinic.common.models.state import ModelState
from polyclinic.common.wire.records import ModelGroups, select_arrays_with_prefix
from polyclinic.strategies.aggregation.means import HeadMean, mix_models
from polyclinic.strategies.aggregation.server_optimizer import Moments, ServerOptimizer
from polyclinic.strategies.local.objective import Batch, ClientContext, LabelledExamples, LocalRound
from polyclinic.strategies.local.site_method import Parameters, Payload, SiteMethod
from polyclinic.strategies.local.stages import RoundDefault, Settings, Stage
from polyclinic.strategies.methods.base import Method
from polyclinic.strategies.methods.surgical import OwnersMean

FEWEST_IMAGES = 5
"""Fewest images with a class, and without it, from which its row is solved: a mean of fewer is nearly an image."""
LATE_MODELS = "late models"
"""Name of the mean of the late models among the moments."""


def _choose_training_rounds(rounds: int, settings: Settings) -> int:
    return max(1, rounds - 1)


def _choose_mean_rounds(rounds: int, settings: Settings) -> int:
    return max(1, rounds // 4)


class PolyclinicParallelParameters(Parameters):
    """The ``[method]`` table of ``polyclinic_parallel``.

    Attributes:
        server_optimizer: Momentum of the mean update; ``beta1 = 0`` turns it off.
        training_rounds: Number of rounds with training. In the round after them, sites solve head rows.
        mean_rounds: Number of rounds at the end of training whose models are averaged; 1 takes the last model.
        solved_share: Weight of a solved row in its mixture with the trained row.
        shrinkage: Multiple of the mean variance of a feature that is added to the diagonal of S.
    """

    round_defaults: ClassVar[Mapping[str, RoundDefault]] = {
        "training_rounds": RoundDefault("all but the last", _choose_training_rounds),
        "mean_rounds": RoundDefault("a quarter of the rounds", _choose_mean_rounds),
    }
    server_optimizer: ServerOptimizer | None = ServerOptimizer(kind="momentum", beta1=0.7)
    training_rounds: int = Field(99, ge=1)
    mean_rounds: int = Field(25, ge=1)
    solved_share: float = Field(0.5, ge=0, le=1)
    shrinkage: float = Field(0.1, gt=0)

    def list_stages(self) -> tuple[Stage, ...]:
        """Return the rounds in which the last model of the mean is made, and in which the head rows are solved."""
        return (
            Stage("the last of the models in the mean is made", self.mean_rounds, ("mean_rounds",)),
            Stage("the head rows are solved", self.training_rounds + 1, ("training_rounds",)),
        )


# ---------------------------------------------------------------------- maths


def solve_row(features: Tensor, present: Tensor, shrinkage: float) -> Tensor:
    """Return Fisher's linear discriminant ``(F,)`` of images with and without a class.

    Args:
        features: float64 ``(n, F)``.
        present: True for the images that show the class, bool ``(n,)``; at least one on each side.
    """
    positives, negatives = features[present], features[~present]
    difference = positives.mean(dim=0) - negatives.mean(dim=0)
    deviations = torch.cat([positives - positives.mean(dim=0), negatives - negatives.mean(dim=0)])  # (n, F)
    scatter = deviations.T @ deviations / len(deviations)  # (F, F)
    ridge = shrinkage * scatter.trace() / len(scatter)
    if ridge == 0:  # features that are equal within each side: any multiple of the difference separates them
        return difference
    row: Tensor = torch.linalg.solve(scatter + ridge * torch.eye(len(scatter), dtype=scatter.dtype), difference)
    return row


def mix_with_solved_row(
    weight: Tensor, bias: Tensor, features: Tensor, present: Tensor, share: float, shrinkage: float
) -> tuple[Tensor, Tensor]:
    """Return the mixture of a trained row and of the solved row on the trained row's scale.

    Args:
        weight: The trained row, float64 ``(F,)``.
        bias: Its bias, float64 ``()``.
        features: float64 ``(n, F)``.
        present: bool ``(n,)``.
        share: Weight of the solved row.
    """
    solved = solve_row(features, present, shrinkage)
    logits, trained = features @ solved, features @ weight + bias  # (n,)
    spread = logits.std()
    if spread == 0:  # it tells no image from another
        return weight, bias
    scale = trained.std() / spread
    shift = trained.mean() - scale * logits.mean()
    return (1 - share) * weight + share * scale * solved, (1 - share) * bias + share * shift


@torch.no_grad()
def solve_own_rows(network: Model, examples: LabelledExamples, share: float, shrinkage: float) -> Tensor:
    """Replace, in place, the head rows of classes that the site annotates by mixtures with their solved rows.

    A class with fewer than :data:`FEWEST_IMAGES` images on one side keeps its trained row.

    Returns:
        The new logits of the images, ``(n, rows)``.
    """
    received, _ = compute_features_and_logits(network, examples.images, "float32")  # (n, F)
    features = received.double().cpu()
    labels, head = examples.labels.cpu(), network.head
    for row in examples.annotated.cpu().nonzero().flatten().tolist():
        known = ~labels[:, row].isnan()
        present = labels[known, row] == 1
        if min(int(present.sum()), int((~present).sum())) < FEWEST_IMAGES:
            continue
        weight, bias = head.weight[row].double().cpu(), head.bias[row].double().cpu()
        weight, bias = mix_with_solved_row(weight, bias, features[known], present, share, shrinkage)
        head.weight[row] = weight.to(head.weight)
        head.bias[row] = bias.to(head.bias)
    logits: Tensor = head(received)
    return logits


# ---------------------------------------------------------------------- hospital


class PolyclinicParallelSite(SiteMethod):
    """The hospital's half: training as in surgical aggregation, then a round that solves the rows of its classes."""

    name = "polyclinic_parallel"
    table = PolyclinicParallelParameters
    parameters: PolyclinicParallelParameters
    declared = Payload(rows="own")
    multi_class = False
    looks_at_images = False

    @property
    def special_last_rounds(self) -> int:
        """Return how many rounds at the end differ: those whose models are averaged, and the round of solving."""
        return self.parameters.mean_rounds + 1

    def client(self, context: ClientContext) -> LocalRound:
        """Return the local round: training, or after ``training_rounds`` solved rows and no training."""
        training = super().client(context)
        if context.round <= self.parameters.training_rounds:
            return training
        parameters, examples = self.parameters, context.examples
        logits = solve_own_rows(context.network, examples, parameters.solved_share, parameters.shrinkage)
        loss = self.choose_training_loss(examples, context.spec)(logits, examples.labels, examples.annotated)

        def keep_model(model: Model, batch: Batch) -> Tensor:
            # No forward pass, which would move the running statistics of batch normalisation.
            return loss + 0 * model.head.bias.sum()

        return LocalRound(keep_model, lr_factor=0.0)

    def find_parameter_faults(self) -> list[Fault]:
        """Return the base class's faults, and one if the server's step is not the mean update, as solved rows need."""
        faults, optimizer = super().find_parameter_faults(), self.parameters.server_optimizer
        if optimizer is not None and (optimizer.kind != "momentum" or optimizer.lr not in (None, 1.0)):
            problem = f"makes no sense in {self.name}: solved rows would be taken for gradients, and changed again."
            remedy = 'Use { kind = "momentum", beta1 = 0.7 }, or beta1 = 0 for none.'
            faults.append(Fault("method.server_optimizer", problem, remedy))
        return faults


# ---------------------------------------------------------------------- coordinator


class PolyclinicParallel(Method):
    """The coordinator's half: surgical aggregation with momentum; training ends with the mean of the late models."""

    site_class = PolyclinicParallelSite
    site: PolyclinicParallelSite

    @property
    def head_mean_class(self) -> HeadMean:
        """Return the class that averages each head row over the sites that annotate the row's class."""
        return OwnersMean

    def finalize(self, server_round: int, model: ModelState, moments: Moments) -> tuple[ModelState, Moments]:
        """Return the model unchanged, or in the last round of training the mean of the models of the late rounds.

        The momentum ends with the training, so that the round of solving changes the rows alone.
        """
        parameters = self.site.parameters
        late = server_round - (parameters.training_rounds - parameters.mean_rounds)  # number of late models so far
        if late < 1 or server_round > parameters.training_rounds:
            return model, moments
        mean = model
        if late > 1 and (stored := select_arrays_with_prefix(LATE_MODELS, moments)):
            earlier = ModelGroups.from_named_arrays(stored, model.head.class_names).to_model()
            mean = mix_models(model, earlier, 1 / min(late, server_round))
        if server_round == parameters.training_rounds:
            return mean, {}
        named = ModelGroups.from_model(mean).to_named_arrays()
        return model, {**moments, **{f"{LATE_MODELS}/{name}": array for name, array in named.items()}}
