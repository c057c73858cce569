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

How a row is solved is in :mod:`polyclinic.strategies.local.solved_rows`. A site sends its rows as in each round of
surgical aggregation, and a row is averaged over the sites that annotate its class. So nothing new leaves a hospital,
and masked sums suffice.
"""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from polyclinic.common.errors import Fault
from polyclinic.common.models.state import ModelState
from polyclinic.common.wire.records import ModelGroups, select_arrays_with_prefix
from polyclinic.strategies.aggregation.means import HeadMean, mix_models
from polyclinic.strategies.aggregation.server_optimizer import Moments, ServerOptimizer
from polyclinic.strategies.local.method_traits import MethodTraits, Parameters, Payload
from polyclinic.strategies.local.objective import ClientContext, LocalRound
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.local.solved_rows import make_solving_round
from polyclinic.strategies.local.stages import ALL_BUT_THE_LAST, RoundDefault, Settings, Stage
from polyclinic.strategies.methods.base import Method
from polyclinic.strategies.methods.surgical import OwnersMean

LATE_MODELS = "late models"
"""Name of the mean of the late models among the moments."""


def _choose_mean_rounds(rounds: int, settings: Settings) -> int:
    return max(1, rounds // 4)


class PolyclinicParallelParameters(Parameters):
    """The ``[method]`` table of ``polyclinic_parallel``.

    Attributes:
        server_optimizer: Momentum of the mean update; ``beta1 = 0`` turns it off.
        training_rounds: Number of rounds with training. In the round after them, sites solve head rows.
        mean_rounds: Number of rounds at the end of training whose models are averaged; 1 takes the last model.
        solved_share: Weight of a solved row in its mixture with the trained row.
        shrinkage: Multiple of the mean variance of a feature that is added to each variance before a row is solved.
    """

    round_defaults: ClassVar[Mapping[str, RoundDefault]] = {
        "training_rounds": ALL_BUT_THE_LAST,
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


# ---------------------------------------------------------------------- hospital


class PolyclinicParallelSite(SiteMethod):
    """The hospital's half: training as in surgical aggregation, then a round that solves the rows of its classes."""

    traits = MethodTraits(
        "polyclinic_parallel",
        parameters_class=PolyclinicParallelParameters,
        payload=Payload(rows="own"),
        looks_at_images=False,
        supports_multi_class=False,
        reason_against_segmentation="it solves head rows from the features of whole images",
    )
    parameters: PolyclinicParallelParameters

    @property
    def special_last_rounds(self) -> int:
        """Return how many rounds at the end differ: those whose models are averaged, and the round of solving."""
        return self.parameters.mean_rounds + 1

    def make_round(self, context: ClientContext) -> LocalRound:
        """Return the local round: training, or after ``training_rounds`` solved rows and no training."""
        if context.round <= self.parameters.training_rounds:
            return super().make_round(context)
        loss = self.choose_training_loss(context.examples, context.spec)
        return make_solving_round(context, loss, self.parameters.solved_share, self.parameters.shrinkage)

    def find_own_parameter_faults(self) -> list[Fault]:
        """Return a fault if the server's step is not the mean update, which solved rows need."""
        optimizer = self.parameters.server_optimizer
        if optimizer is None or (optimizer.kind == "momentum" and optimizer.lr in (None, 1.0)):
            return []
        problem = f"makes no sense in {self.name}: solved rows would be taken for gradients, and changed again."
        remedy = 'Use { kind = "momentum", beta1 = 0.7 }, or beta1 = 0 for none.'
        return [Fault("method.server_optimizer", problem, remedy)]


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
            # With more mean_rounds than training_rounds, all models so far are late ones.
            mean = mix_models(model, earlier, 1 / min(late, server_round))
        if server_round == parameters.training_rounds:
            return mean, {}
        named = ModelGroups.from_model(mean).to_named_arrays()
        return model, {**moments, **{f"{LATE_MODELS}/{name}": array for name, array in named.items()}}
