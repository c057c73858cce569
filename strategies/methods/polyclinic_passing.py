"""Our own method for few rounds: one model passes through the hospitals, then each solves its head rows at once.

The method is :mod:`polyclinic.strategies.methods.polyclinic` with one more round. After the mean of the last pass, head
rows and trunk do not fit: each row was trained before other sites moved the trunk. So in the last round all sites
receive the mean model at the same time; nothing is trained; each site solves the rows of its own classes in closed form
(:mod:`polyclinic.strategies.local.solved_rows`), and a row is averaged over the sites that solved it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from polyclinic.common.models.network import Head
from polyclinic.common.models.state import ModelState
from polyclinic.strategies.aggregation.means import HeadMean
from polyclinic.strategies.local.objective import ClientContext, LocalRound
from polyclinic.strategies.local.solved_rows import make_solving_round
from polyclinic.strategies.local.stages import ALL_BUT_THE_LAST, RoundDefault, Stage
from polyclinic.strategies.methods.polyclinic import Polyclinic, PolyclinicParameters, PolyclinicSite
from polyclinic.strategies.methods.surgical import OwnersMean


class PolyclinicPassingParameters(PolyclinicParameters):
    """The ``[method]`` table of ``polyclinic_passing``.

    Attributes:
        mean_rounds: Number of rounds at the end of training that result in the mean of the models after each hospital.
        training_rounds: Number of rounds in which the model is passed on. In the round after them, sites solve rows.
        solved_share: Weight of a solved row in its mixture with the trained row.
        shrinkage: Multiple of the mean variance of a feature that is added to each variance before a row is solved.
    """

    round_defaults: ClassVar[Mapping[str, RoundDefault]] = {"training_rounds": ALL_BUT_THE_LAST}
    training_rounds: int = Field(99, ge=1)
    solved_share: float = Field(0.5, ge=0, le=1)
    shrinkage: float = Field(0.1, gt=0)

    def list_stages(self) -> tuple[Stage, ...]:
        """Return the rounds in which the last of the rounds with a mean ends, and in which the head rows are solved."""
        return (
            *super().list_stages(),
            Stage("the head rows are solved", self.training_rounds + 1, ("training_rounds",)),
        )


class ChangedRowsMean(OwnersMean):
    """The mean of each class's head row over the sites whose update changes the row."""

    def add(self, head: Head, share: float) -> None:
        """Add the rows of a site's update that are not zero, with weight ``share``."""
        changed = head.weight.any(axis=1) | (head.bias != 0)  # (rows,)
        names = [name for name, is_changed in zip(head.class_names, changed, strict=True) if is_changed]
        super().add(head.select_rows(tuple(names)), share)


class PolyclinicPassingSite(PolyclinicSite):
    """The hospital's half: training on the site's own classes, then a round that solves their rows."""

    traits = replace(
        PolyclinicSite.traits,
        name="polyclinic_passing",
        parameters_class=PolyclinicPassingParameters,
        looks_at_images=False,
        supports_multi_class=False,
        reason_against_segmentation="it solves head rows from the features of whole images",
        has_averaging_rounds=True,
    )
    parameters: PolyclinicPassingParameters

    @property
    def special_last_rounds(self) -> int:
        """Return how many rounds at the end differ: those with a mean, and the round of solving."""
        return self.parameters.mean_rounds + 1

    def averages_in_round(self, server_round: int) -> bool:
        """Return True in the round after the training, in which all sites solve their rows at once."""
        return server_round > self.parameters.training_rounds

    def make_round(self, context: ClientContext) -> LocalRound:
        """Return the local round: training, or after ``training_rounds`` solved rows and no training."""
        if context.round <= self.parameters.training_rounds:
            return super().make_round(context)
        loss = self.choose_training_loss(context.examples, context.spec)
        return make_solving_round(context, loss, self.parameters.solved_share, self.parameters.shrinkage)


class PolyclinicPassing(Polyclinic):
    """The coordinator's half: one model passes through the hospitals; at the end solved rows are averaged."""

    site_class = PolyclinicPassingSite
    site: PolyclinicPassingSite

    @property
    def head_mean_class(self) -> HeadMean:
        """Return the class that averages each solved row over the sites that solved it."""
        return ChangedRowsMean

    def result_after_site_visit(
        self, server_round: int, left: int, hops: int, result: ModelState, passed: ModelState
    ) -> ModelState:
        """Return the round's result after this site: that of ``polyclinic``, whose last round is that of training."""
        left_of_training = self.site.parameters.training_rounds - server_round
        return super().result_after_site_visit(server_round, left_of_training, hops, result, passed)
