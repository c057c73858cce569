"""MOON: FedAvg over partial labels; a site's features stay near those of the received model, and leave its old ones.

Li, He, Song: "Model-Contrastive Federated Learning", CVPR 2021 (eq. 3); facts also from the authors' code
(QinbinLi/MOON at 8fcba3c).

The paper's method. Coordinator: FedAvg. A site minimises its loss plus ``contrast`` (mu) times

    -log( exp(cos(z, z_received) / tau) / (exp(cos(z, z_received) / tau) + exp(cos(z, z_previous) / tau)) ),

where z is an image's representation by the model in training, by the model received in this round, and by the site's
own model as it was after its last round. So what training at a site adds is pushed away if it leads back to where the
site's own data led before. The previous model stays at the site.

Departures. A representation is the input of our head; the authors add a projection of two layers, which none of our
networks has. In a site's first round there is no previous model, and the term, a constant then, is left out (the
authors' previous model is the first one, which gives the same constant). The loss is that over the site's own classes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, softplus

from polyclinic.common.models.network import Model
from polyclinic.common.models.state import read_model_state, write_model_state
from polyclinic.common.wire.records import Arrays, ModelGroups, select_arrays_with_prefix
from polyclinic.strategies.aggregation.means import Weighting
from polyclinic.strategies.local.method_traits import MethodTraits, Parameters
from polyclinic.strategies.local.objective import Batch, ClientContext, LocalRound, copy_model_as_teacher
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.methods.base import Method, make_method

PREVIOUS_MODEL = "previous"
"""Prefix of the arrays of the site's last trained model in the state that the site stores."""


class MoonParameters(Parameters):
    """The ``[method]`` table of ``moon``.

    Attributes:
        contrast: The paper's mu: weight of the contrastive term (its code has 1 by default; the paper tunes it).
        temperature: The paper's tau: divisor of the cosines.
    """

    weighting: Weighting = "samples"
    contrast: float = Field(1.0, ge=0)
    temperature: float = Field(0.5, gt=0)


def compute_model_contrast(current: Tensor, received: Tensor, previous: Tensor, temperature: float) -> Tensor:
    """Return the mean contrastive term (eq. 3) over images.

    Args:
        current, received, previous: Representations of the same images by the three models, ``(batch, features)``.
        temperature: Divisor of the cosines.
    """
    near, far = (cosine_similarity(current, other, dim=1) / temperature for other in (received, previous))
    return softplus(far - near).mean()  # -log(exp(near) / (exp(near) + exp(far)))


@contextmanager
def record_features(model: Model) -> Iterator[list[Tensor]]:
    """Yield a list that receives the head's input at each forward pass in this context."""
    features = list[Tensor]()

    def record(head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        features.append(inputs[0])

    hook = model.head.register_forward_pre_hook(record)
    try:
        yield features
    finally:
        hook.remove()


class MoonSite(SiteMethod):
    """The hospital's half of MOON: its own labels, and the contrast of its features with two other models'."""

    traits = MethodTraits(
        "moon",
        parameters_class=MoonParameters,
        reason_against_segmentation="it compares one representation of each image",
        keeps_method_state=True,
    )
    parameters: MoonParameters

    def make_round(self, context: ClientContext) -> LocalRound:
        """Return the local round: the loss plus the contrast; the trained model is stored for the next round."""
        parameters = self.parameters
        supervised = self.choose_training_loss(context.examples, context.spec)
        received = copy_model_as_teacher(context.network)
        previous = load_previous_model(context)

        def objective(model: Model, batch: Batch) -> Tensor:
            view = batch.view()
            with record_features(model) as current:
                loss = supervised(batch.logits(model, view), batch.labels, batch.annotated)
            if previous is None:
                return loss
            others = [compute_features(batch, other, view) for other in (received, previous)]
            contrast = compute_model_contrast(current[0].float(), others[0], others[1], parameters.temperature)
            return loss + parameters.contrast * contrast

        return LocalRound(objective, method_state=store_trained_model)


def compute_features(batch: Batch, model: Model, view: Tensor) -> Tensor:
    """Return a frozen model's representation of a view, float32 ``(batch, features)``."""
    with torch.no_grad(), record_features(model) as features:
        batch.logits(model, view)
    return features[0].float()


def load_previous_model(context: ClientContext) -> Model | None:
    """Return the site's model of its last round; None in its first."""
    stored = select_arrays_with_prefix(PREVIOUS_MODEL, context.method_state)
    if not stored:
        return None
    previous = copy_model_as_teacher(context.network)
    groups = ModelGroups.from_named_arrays(stored, context.network.class_names)
    write_model_state(previous, trunk=groups.trunk, norm=groups.norm, head=groups.head)
    return previous


def store_trained_model(model: Model) -> Arrays:
    """Return the trained model as arrays by name."""
    arrays = ModelGroups.from_model(read_model_state(model)).to_named_arrays()
    return {f"{PREVIOUS_MODEL}/{name}": array for name, array in arrays.items()}


Moon = make_method(Method, MoonSite)
"""The coordinator's half, with the rules of FedAvg."""
