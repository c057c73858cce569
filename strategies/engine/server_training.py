"""What the coordinator does with images of its own: train, mix, judge the mixture (specs 2.4, steps 5 to 7)."""

import math
import time
from dataclasses import dataclass, field

from common.config import Plan
from common.data.base.image_set import ImageSet, Splits
from common.data.images.pixels import pixels_of
from common.models.frozen import FrozenPart
from common.models.gpu.placement import on_device
from common.models.network import SplitNetwork, build, unfreeze
from common.models.state import ModelState, read_state, write_state
from common.system.seeds import seed_of
from strategies.aggregation.server_optimizer import Moments
from strategies.engine.round_record import (
    CoordinatorRound,
    FederationValidation,
)
from strategies.local.optimisation import optimizer_arrays, optimizer_for, restore_optimizer
from strategies.local.site_method import SiteMethod
from strategies.local.training import (
    Examples,
    Exercise,
    Frozen,
    Judge,
    examples_of,
    plain,
    refuse_diverged,
    reproducible,
    train_until_settled,
    validate,
)
from strategies.methods.base import ServerTraining

COORDINATOR = "coordinator"
"""Under this name its figures stand beside the sites'."""


@dataclass
class OwnTraining:
    """The coordinator's images and the network it trains on them."""

    images: Splits
    plan: Plan
    method: SiteMethod
    class_names: tuple[str, ...]
    device: str = "cpu"
    frozen: FrozenPart | None = None
    network: SplitNetwork = field(init=False)

    def __post_init__(self) -> None:
        network = build(self.plan.model.model_copy(update={"weights": None}), self.class_names, self.plan.run.seed)
        if self.frozen is not None:
            self.frozen.write_to(network)
        self.network = on_device(network, self.device)
        self.train = self._examples(self.images.train)
        self.validation = self._examples(self.images.validation)

    def _examples(self, images: ImageSet) -> Examples:
        return examples_of(images, pixels_of(images, self.device), self.class_names)

    def put(self, model: ModelState) -> None:
        """Load a model into the network."""
        write_state(self.network, trunk=model.trunk, norm=model.norm, head=model.head)

    def trained(
        self, model: ModelState, server_round: int, server: ServerTraining, optimizer_state: Moments
    ) -> tuple[ModelState, Moments, CoordinatorRound]:
        """Train until the loss settles, from a model and from the optimiser's state; return both as they are then.

        Raises:
            FloatingPointError: If training diverged.
        """
        began, spec = time.monotonic(), self.plan.training
        self.put(model)
        unfreeze(self.network)
        optimizer = optimizer_for(self.network, spec, spec.lr)
        if not spec.reset_optimizer:
            restore_optimizer(self.network, optimizer, optimizer_state)
        frozen = Frozen(norm=self.method.frozen_norm)
        objective = plain(self.method.training_loss(self.train, spec))
        exercise = Exercise(self.train, objective, spec, self.plan.augmentation, frozen)
        judge = Judge(self.validation, self.method.loss, server.settling)
        with reproducible(seed_of(self.plan.run.seed, server_round, "\0", COORDINATOR), spec.threads) as generator:
            done = train_until_settled(self.network, exercise, optimizer, generator, judge)
        record = CoordinatorRound(done.last_loss, done.epochs, time.monotonic() - began)
        state = read_state(self.network)
        refuse_diverged(state, done.last_loss)
        return state, {} if spec.reset_optimizer else optimizer_arrays(self.network, optimizer), record

    def judged(self, model: ModelState) -> FederationValidation:
        """How good a model is on the coordinator's validation part."""
        self.put(model)
        with reproducible(0, self.plan.training.threads):
            found = validate(self.network, self.validation, self.method.loss, self.plan.training)
        return FederationValidation(_named(found.loss), _named(found.mean_auroc))


def _named(value: float | None) -> dict[str, float]:
    return {} if value is None or not math.isfinite(value) else {COORDINATOR: value}
