"""SCAFFOLD: FedAvg whose sites correct each step by control variates, so that unlike data pull less apart.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML
2020 (algorithm 1, option II). Symbols: x is the received model, y a site's model in training, K the number of a site's
steps, eta its learning rate, c_i the control of site i (an estimate of its mean gradient), c the mean of the c_i.

The paper's method. A site's step is ``y <- y - eta (g(y) - c_i + c)``, where g is the gradient of its own loss. After K
steps ``c_i <- c_i - c + (x - y) / (K eta)``, which is the mean of the site's K gradients. The coordinator averages the
models, and moves c by the mean change of the c_i, so that c stays their mean over all sites.

Where the c_i are: in the paper a site keeps c_i and sends its change, which is as large as the model. But option II
needs only the update ``y - x``, which a site sends anyway, and ``K eta``. So a site sends this one number; the
coordinator computes c_i, stores it, and sends the site ``c - c_i`` with the model. It is the same arithmetic. The
upload is that of FedAvg, nothing is lost with a site's disk, and the ``c - c_i`` add up to zero over the sites even if
an update was clipped or compressed. The price is memory: the coordinator holds one model for each site that has
trained.

Partial labels, which the paper does not have: g is the gradient of the loss over the site's own classes, so the head
row of a class that a site does not annotate has a c_i of zero there, and moves by c, the mean step of its annotators.
Batch normalisation's running statistics have no gradient, and are averaged as in FedAvg.

Option II holds for plain SGD alone: momentum or Adam take other steps than ``eta`` times the gradient, and c_i would
not be a gradient. So they are refused. The loss that a site reports is its own, without the correction.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from polyclinic.common.config import TrainingSection
from polyclinic.common.errors import Fault, WireError
from polyclinic.common.models.network import Model
from polyclinic.common.models.state import read_model_state, write_model_state
from polyclinic.common.wire.records import NO_ARRAYS, Arrays, ModelGroups
from polyclinic.strategies.aggregation.means import Float32, Float64
from polyclinic.strategies.local.method_traits import MethodTraits, Payload, Statistic
from polyclinic.strategies.local.objective import Batch, ClientContext, LocalRound, Losses, copy_model_as_teacher
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.methods.base import Method, RoundContext, SiteReply

CORRECTION = "correction"
"""Name of ``c - c_i`` in a request: all numbers of a model in one flat array."""
RATE_SUM = "learning_rate_sum"
"""Name of ``K eta`` in a reply."""
STEPS_MEANING = (
    "number of training steps times the learning rate: one number, from which that of images follows to within a batch"
)

# ---------------------------------------------------------------------- maths


def compute_mean_control(controls: Mapping[str, Float32], weights: Mapping[str, float]) -> Float64:
    """Return c, the weighted mean of the sites' controls, ``(n,)``; a site without a control counts as zero.

    Args:
        controls: Site -> c_i ``(n,)``; not empty.
        weights: Site -> weight in the mean, for every site of the run.
    """
    total = np.zeros(len(next(iter(controls.values()))), np.float64)
    for site, weight in weights.items():
        if site in controls:
            total += weight * controls[site].astype(np.float64)
    return np.asarray(total / max(sum(weights.values()), 1.0), np.float64)


def compute_site_control(update: Float32, correction: Float32 | float, rate_sum: float) -> Float32:
    """Return a site's new control ``c_i - c + (x - y) / (K eta)`` (option II), ``(n,)``.

    Args:
        update: ``y - x``.
        correction: ``c - c_i`` in the steps that made the update.
        rate_sum: ``K eta``.
    """
    return np.asarray(-update.astype(np.float64) / rate_sum - correction, np.float32)


def flatten_groups(groups: ModelGroups) -> Float32:
    """Return all numbers of a model or update in one array: trunk, batch normalisation, head weights, head biases."""
    return np.concatenate([array.ravel() for array in groups.to_named_arrays().values()])


def unflatten_groups(flat: Float32, like: ModelGroups, name: str) -> ModelGroups:
    """Return the groups whose numbers :func:`flatten_groups` put into one array.

    Args:
        flat: All numbers ``(n,)``.
        like: Groups of the same shapes, with a head.
        name: Name of the array for the error message.

    Raises:
        WireError: If there are more or fewer numbers than in ``like``.
    """
    arrays = like.to_named_arrays()
    sizes = [array.size for array in arrays.values()]
    if flat.shape != (sum(sizes),):
        raise WireError(f"the {name} has shape {flat.shape}; the model has {sum(sizes):,} numbers.")
    parts = np.split(flat, np.cumsum(sizes[:-1]))
    named = {name: part.reshape(array.shape) for (name, array), part in zip(arrays.items(), parts, strict=True)}
    assert like.head is not None, "the classes are the head's"
    return ModelGroups.from_named_arrays(named, like.head.class_names)


def count_optimizer_steps(batches: int, epochs: int, batches_per_step: int) -> int:
    """Return K, the number of optimiser steps; the last step of an epoch may add up fewer batches than the others."""
    return epochs * -(-(batches // epochs) // batches_per_step)


# ---------------------------------------------------------------------- hospital


class ScaffoldSite(SiteMethod):
    """The hospital's half of SCAFFOLD: plain SGD, each gradient plus ``c - c_i``."""

    traits = MethodTraits(
        "scaffold",
        payload=Payload(statistics=(Statistic(RATE_SUM, "images", STEPS_MEANING, least=0.0),)),
        looks_at_images=False,
        reads_updates=True,
        stores_statistics_by_site=True,
    )

    def make_round(self, context: ClientContext) -> LocalRound:
        """Return the local round: the objective's gradient is the loss's plus ``c - c_i``, its value is the loss."""
        own = super().make_round(context).objective
        spec = context.spec
        rate = spec.lr * context.schedule_factor

        def compute_rate_sum(model: Model, losses: Losses) -> Arrays:
            steps = count_optimizer_steps(len(losses), spec.epochs, spec.gradient_accumulation_steps)
            return {RATE_SUM: np.array([steps * rate], np.float32)}

        sent = context.statistics.get(CORRECTION)
        if sent is None:  # nobody has a control yet
            return LocalRound(own, compute_rate_sum)
        corrections = self._split_by_parameter(context.network, sent)

        def objective(model: Model, batch: Batch) -> Tensor:
            pairs = zip(list_trained_parameters(model), corrections, strict=True)
            linear = torch.stack([(correction * value).sum() for value, correction in pairs]).sum()
            return own(model, batch) + (linear - linear.detach())  # a value of 0, and the gradient c - c_i

        return LocalRound(objective, compute_rate_sum)

    def _split_by_parameter(self, network: Model, flat: Float32) -> list[Tensor]:
        """Return the part of a flat correction for each trained parameter; zero for those that stay at the site.

        Raises:
            WireError: If the correction does not fit the network.
        """
        now = read_model_state(network)
        sent = ModelGroups(now.trunk, now.norm if self.parts.sends_batch_norm else None, now.head)
        correction = unflatten_groups(flat, sent, CORRECTION)
        shift = copy_model_as_teacher(network)
        for value in shift.parameters():
            value.zero_()
        write_model_state(shift, trunk=correction.trunk, norm=correction.norm, head=correction.head)
        trained = zip(shift.parameters(), network.parameters(), strict=True)
        return [change for change, value in trained if value.requires_grad]

    def find_own_parameter_faults(self) -> list[Fault]:
        """Return a fault if a warm-up moves the model by steps of another size."""
        if not self.parameters.warm_up_epochs:
            return []
        problem = f"makes no sense in {self.name}: its steps would be taken for gradients of the other rounds."
        return [Fault("method.warm_up_epochs", problem, "Leave it out.")]

    def find_training_faults(self, training: TrainingSection) -> list[Fault]:
        """Return a fault if the optimiser is not plain SGD."""
        why = f"{self.name} reads gradients off the steps of plain SGD"
        if training.optimizer != "sgd":
            problem = f'is "{training.optimizer}": {why}, and those of another optimiser are none.'
            remedy = 'Set training.optimizer = "sgd", and a training.lr for it: often ten times that of Adam or more.'
            return [Fault("training.optimizer", problem, remedy)]
        if training.momentum:
            problem = f"is {training.momentum:g}: {why}, and momentum makes steps longer than gradients."
            return [Fault("training.momentum", problem, "Leave it out.")]
        return []


def list_trained_parameters(model: Model) -> list[Tensor]:
    """Return the parameters that training changes, in the network's order."""
    return [value for value in model.parameters() if value.requires_grad]


# ---------------------------------------------------------------------- coordinator


class Scaffold(Method):
    """The coordinator's half of SCAFFOLD: FedAvg, and the control of each site, by site name in ``statistics``."""

    site_class = ScaffoldSite
    site: ScaffoldSite

    def statistics_for(self, context: RoundContext) -> Callable[[str], Arrays]:
        """Return a function that gives each site ``c - c_i``; no statistics before any site has a control."""
        samples = self.site.parameters.weighting == "samples"
        weights = {site: float(answer.train_samples) if samples else 1.0 for site, answer in context.answers.items()}
        stored = context.statistics
        controls = {site: stored[site] for site in weights if site in stored}
        if not controls:
            return lambda site: NO_ARRAYS
        mean = compute_mean_control(controls, weights)
        return lambda site: {CORRECTION: np.asarray(mean - stored.get(site, 0.0), np.float32)}

    def statistics_shape(self, context: RoundContext, site: str, features: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of ``K eta``: one number from every site, every round."""
        return {RATE_SUM: (1,)}

    def aggregate_statistics(self, context: RoundContext, replies: Mapping[str, SiteReply]) -> Arrays:
        """Return the controls of all sites, with new ones of those that replied.

        A site that says that it took no step keeps its control.
        """
        sent = self.statistics_for(context)
        controls = dict(context.statistics)
        for site, reply in replies.items():
            rate_sum = float(np.nan_to_num(reply.statistics[RATE_SUM][0]))
            if rate_sum > 0:
                correction = sent(site).get(CORRECTION, 0.0)
                controls[site] = compute_site_control(flatten_groups(reply.update), correction, rate_sum)
        return controls
