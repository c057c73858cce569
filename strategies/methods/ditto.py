"""Ditto: beside the federation's model each site trains a whole model of its own, held to the federation's.

Li, Hu, Beirami, Smith: "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021 (algorithm 1, and
algorithm 2 with FedAvg as the solver of the federation's model).

The paper's method. The federation's model w is trained by FedAvg. In a round a site also takes steps on its own v:
``v <- v - eta (grad F(v) + pull (v - w))``, where F is the site's loss and w the model that it received in this round.
v never leaves the site, is kept from round to round, and is the model that the site uses. So a site learns from the
others through w alone, and nobody learns anything from v.

As in the authors' code (litian96/ditto), both models see the same batches, and the default of ``pull`` (the paper's
lambda) is that of its scripts, 1; the choice of lambda by validation loss is not here. There a batch trains v, then w;
here a round trains w on all batches, then v on the same ones. That is the same, because v's steps use the received w
and not the trained one. The optimiser is the experiment's, with a state of its own for v. Before its first round a
site's own model is the one it received.

Partial labels, which the paper does not have: both models have a row for every class of the run, and learn from the
site's own labels. v's rows of other classes are held to w's.
"""

from dataclasses import replace

from pydantic import Field

from polyclinic.strategies.local.method_traits import MethodTraits, Parameters
from polyclinic.strategies.local.objective import ClientContext, LocalRound, add_proximal_term
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.methods.base import Method, make_method


class DittoParameters(Parameters):
    """The ``[method]`` table of ``ditto``.

    Attributes:
        pull: The paper's lambda: how strongly a site's own model is held to the federation's; 0 trains it alone.
    """

    pull: float = Field(1.0, ge=0)


class DittoSite(SiteMethod):
    """The hospital's half of Ditto: FedAvg's training, then that of the site's own model."""

    traits = MethodTraits(
        "ditto",
        parameters_class=DittoParameters,
        looks_at_images=False,
        reason_for_global_norm="a site's own model is held to the whole model that it receives",
        trains_own_model=True,
    )
    parameters: DittoParameters

    def make_round(self, context: ClientContext) -> LocalRound:
        """Return FedAvg's local round; the own model's objective adds ``pull / 2`` times the squared distance."""
        shared = super().make_round(context)
        held = add_proximal_term(super().make_round, self.parameters.pull, head=True, norm=True)(context)
        return replace(shared, own_objective=held.objective)


Ditto = make_method(Method, DittoSite)
"""The coordinator's half, with the rules of FedAvg."""
