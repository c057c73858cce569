"""Our own method: one model passes from hospital to hospital on short ways, and ends as the mean of its last stops.

It is sequential training (``fedseq``, specs 2.4) with three changes, each of which is a key of its own:

- *Parts*: a hospital trains on one part of its images in a round, and on the next part in the next round. With two
  parts and twice the rounds as many images are trained on, and half as many between two visits: the model forgets less
  of a class that one hospital annotates. It costs twice the transfers.
- *Drawn order*: each round has another order of hospitals, so that none is always the last.
- *Mean*: in the last rounds the model that a round ends with is the mean of the models after each stop. The last
  stop's classes have no advantage then.

A label that a hospital does not annotate is left out of the loss. docs/results.md has what each change does.
"""

from typing import Literal

import numpy as np
import torch
from pydantic import Field

from common.data.images.pixels import at_rows
from common.models.state import ModelState
from common.system.seeds import seed_of
from strategies.base.method import Parameters
from strategies.local.losses import Missing
from strategies.local.objective import LocalRound, Situation
from strategies.local.training import Examples, plain
from strategies.unifed.passing import SequentialPassing
from strategies.unifed.server_training import mixture


class PolyclinicParameters(Parameters):
    """The ``[method]`` table of ``polyclinic``.

    Attributes:
        parts: Of a hospital's images, one of which is trained on in a round. Twice the parts need twice the rounds.
        order: Of the hospitals in a round: ``drawn`` anew, or by ``name``.
        mean_rounds: So many rounds at the end close with the mean of the models after each stop; 0 for none.
        missing: As in ``fedseq``.
    """

    parts: int = Field(2, ge=1)
    order: Literal["drawn", "name"] = "drawn"
    mean_rounds: int = Field(4, ge=0)
    missing: Missing = "masked"


class Polyclinic(SequentialPassing):
    """One model, short stops in a drawn order, the mean of the last rounds' stops."""

    name = "polyclinic"
    table = PolyclinicParameters
    parameters: PolyclinicParameters
    missing = "masked"
    plain_client = False
    looks_at_images = False

    def order(self, server_round: int) -> tuple[str, ...]:
        """The sites in an order that follows from the run's seed and the round."""
        sites = super().order(server_round)
        if self.parameters.order == "name":
            return sites
        generator = np.random.default_rng(seed_of(self.plan.run.seed, server_round, "order"))
        return tuple(sites[place] for place in generator.permutation(len(sites)))

    def after_hop(self, left: int, hops: int, result: ModelState, passed: ModelState) -> ModelState:
        """Return the mean of all stops up to this one in the last rounds, else the model as it was passed on."""
        return mixture(passed, result, 1 / hops) if left < self.parameters.mean_rounds else passed

    def client(self, situation: Situation) -> LocalRound:
        """The plain loss over one part of the images."""
        minimised = self.training_loss(situation.examples, situation.spec)
        return LocalRound(plain(minimised), part=part_of(situation.examples, self.parameters.parts, situation.round))


def part_of(examples: Examples, parts: int, server_round: int) -> Examples:
    """The part of a site's examples for this round: in ``parts`` rounds in a row each example is in one of them.

    Examples are divided anew after these. A site with fewer than two for each part trains on all in every round.
    """
    if parts == 1 or len(examples) < 2 * parts:
        return examples
    turn, number = divmod(server_round - 1, parts)
    shuffled = np.random.default_rng(seed_of("part", turn, len(examples))).permutation(len(examples))
    rows = np.sort(shuffled[number::parts])
    labels = examples.labels[torch.from_numpy(rows).to(examples.labels.device)]
    return Examples(at_rows(examples.images, rows), labels, examples.annotated)
