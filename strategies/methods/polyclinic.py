"""Our own method: one model passes through the hospitals in random order; the result is a mean of the last pass.

The method is sequential training (``fedseq``) with two changes, each with its own key:

- *Mean*: the last round ends with the mean of the models after each hospital. Sequential training ends with the model
  of the last hospital, which has forgotten some of the classes of the others.
- *Random order*: each round visits the hospitals in another order, so that the last hospitals are not always the same.

Labels that a hospital does not annotate are omitted from the loss. docs/results.md has the effect of each change.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from polyclinic.common.models.state import ModelState
from polyclinic.common.system.hashing import derive_seed
from polyclinic.strategies.aggregation.means import mix_models
from polyclinic.strategies.local.losses import Missing
from polyclinic.strategies.local.method_traits import Parameters, SequentialTraits
from polyclinic.strategies.local.site_method import SequentialSite
from polyclinic.strategies.local.stages import Stage
from polyclinic.strategies.methods.base import RoundContext, SequentialMethod

VisitOrder = Literal["drawn", "name"]
"""Order of the hospitals in a round: drawn at random for each round, or by name."""


class PolyclinicParameters(Parameters):
    """The ``[method]`` table of ``polyclinic``.

    Attributes:
        order: Order of the hospitals in a round: ``drawn`` at random for each round, or by ``name``.
        mean_rounds: Number of rounds at the end of the run whose result is the mean of the models after each hospital.
        missing: How the loss treats classes that a hospital does not annotate, as in ``fedseq``.
    """

    order: VisitOrder = "drawn"
    mean_rounds: int = Field(1, ge=0)
    missing: Missing = "masked"

    def list_stages(self) -> tuple[Stage, ...]:
        """Return the round in which the last of the rounds with a mean ends."""
        return (Stage("the last of the rounds with a mean is", self.mean_rounds, ("mean_rounds",)),)


class PolyclinicSite(SequentialSite):
    """The hospital's half: training on the site's own classes for the experiment's number of epochs."""

    traits = SequentialTraits("polyclinic", parameters_class=PolyclinicParameters)
    parameters: PolyclinicParameters

    @property
    def special_last_rounds(self) -> int:
        """Return how many rounds at the end of the run result in the mean of the models after each hospital."""
        return self.parameters.mean_rounds


def arrange_visits(context: RoundContext, sites: Sequence[str], order: VisitOrder) -> Sequence[str]:
    """Return the sites, which are sorted by name, in their order of a round.

    A random order depends only on the run's seed and the round.
    """
    if order == "name":
        return sites
    generator = np.random.default_rng(derive_seed(context.seed, context.round, "order"))
    return [sites[place] for place in generator.permutation(len(sites))]


class Polyclinic(SequentialMethod):
    """The coordinator's half: one model passes through the hospitals in random order; the last pass is averaged."""

    site_class = PolyclinicSite
    site: PolyclinicSite

    def order_sites(self, context: RoundContext, sites: Sequence[str]) -> Sequence[str]:
        """Return the sites in a random order that depends only on the run's seed and the round, or sorted by name."""
        return arrange_visits(context, sites, self.site.parameters.order)

    def result_after_site_visit(
        self, server_round: int, left: int, hops: int, result: ModelState, passed: ModelState
    ) -> ModelState:
        """Return the round's result after this site: the model that the site returned.

        In the last ``mean_rounds`` rounds it is the mean of the models that all sites so far returned.

        Args:
            server_round: Number of this round.
            left: Number of rounds after this one.
            hops: Number of sites visited in this round, including this site.
            result: Result after the previous site.
            passed: The model that the site returned.
        """
        return mix_models(passed, result, 1 / hops) if left < self.site.parameters.mean_rounds else passed
