"""Our own method: one model passes through the hospitals in a drawn order; the result is the mean of its last stops.

The method is sequential training (``fedseq``, specs 2.4) with two changes, each of which has a key of its own:

- *Mean*: the last round ends with the mean of the models after each stop. Sequential training ends with the model of
  the last hospital, which has forgotten some of what the others label; in the mean no hospital is the last.
- *Drawn order*: each round has another order of hospitals, so that the same classes are not always the oldest.

A label that a hospital does not annotate is left out of the loss. docs/results.md has what each change does.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from common.models.state import ModelState
from common.system.hashing import derive_seed
from strategies.aggregation.means import mix_models
from strategies.local.losses import Missing
from strategies.local.site_method import Parameters, SequentialSite
from strategies.methods.base import RoundContext, SequentialMethod


class PolyclinicParameters(Parameters):
    """The ``[method]`` table of ``polyclinic``.

    Attributes:
        order: Order of the hospitals in a round: ``drawn`` anew, or by ``name``.
        mean_rounds: Number of last rounds that end with the mean of the models after each stop.
        missing: How a class counts that a hospital does not annotate, as in ``fedseq``.
    """

    order: Literal["drawn", "name"] = "drawn"
    mean_rounds: int = Field(1, ge=0)
    missing: Missing = "masked"


class PolyclinicSite(SequentialSite):
    """The hospital's half: the experiment's number of epochs on the site's own classes."""

    name = "polyclinic"
    table = PolyclinicParameters
    parameters: PolyclinicParameters


class Polyclinic(SequentialMethod):
    """One model passes through the hospitals in a drawn order; the last round ends with the mean of its stops."""

    site_class = PolyclinicSite
    site: PolyclinicSite

    def order(self, context: RoundContext, sites: Sequence[str]) -> Sequence[str]:
        """Return the sites in an order that follows from the run's seed and the round."""
        if self.site.parameters.order == "name":
            return sites
        generator = np.random.default_rng(derive_seed(context.seed, context.round, "order"))
        return [sites[place] for place in generator.permutation(len(sites))]

    @property
    def last_rounds(self) -> int:
        """Return the number of last rounds that end with a mean."""
        return self.site.parameters.mean_rounds

    def after_hop(self, left: int, hops: int, result: ModelState, passed: ModelState) -> ModelState:
        """Return in the last rounds the mean of the models after all sites so far, else the model after this site."""
        return mix_models(passed, result, 1 / hops) if left < self.site.parameters.mean_rounds else passed
