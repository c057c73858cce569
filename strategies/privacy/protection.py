"""What a plan's privacy means at one site: how much noise, over which steps, at what cost; or why it makes no sense."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from common.config import BY_STEP, Experiment, Plan, PrivacySection, TrainingSection
from common.errors import Fault
from common.models.network import BATCH_NORM, Head, SplitNetwork
from common.models.state import ModelState, read_state, write_state
from common.models.zoo.registry import meta_backbone
from common.models.zoo.spec import ModelSpec
from strategies.local.site_method import SiteMethod
from strategies.local.training import Epoch, refuse_diverged
from strategies.privacy.accounting import Steps, noise_multiplier_for
from strategies.privacy.gradients import PrivateEpochs
from strategies.privacy.noise import NoiseSource
from strategies.privacy.updates import NoisyReply


@dataclass(frozen=True)
class Shield:
    """What makes a round private; nothing where both are None.

    Attributes:
        epoch: Trains an epoch.
        reply: Makes an update and a method's statistics noisy.
    """

    epoch: Epoch | None = None
    reply: NoisyReply | None = None

    def refuse_diverged(self, state: ModelState, loss: float) -> None:
        """Raise if training diverged, unless only the images say so: then noise has to hide that too.

        Raises:
            FloatingPointError: Naming what would help.
        """
        if self.reply is None:
            refuse_diverged(state, 0.0 if self.epoch else loss)

    def outcome(
        self,
        network: SplitNetwork,
        received: ModelState,
        loss: float,
        optimizer: torch.optim.Optimizer,
        instead: Callable[[str], None] | None,
    ) -> ModelState:
        """What training made; where it diverged, and masks or noise have to hide that, the model as received.

        A reply that fails names this site, and a model can be made that diverges on one patient's images alone, or
        whose change is longer than a number can be. A change of zero disappears in the sum; of noisy steps it is one
        more result, and paid for.

        Args:
            instead: Receives a line about it, where that has to be hidden.

        Raises:
            FloatingPointError: If training diverged and nothing has to hide that.
        """
        state = read_state(network)
        try:
            self.refuse_diverged(state, loss)
            if instead is not None:
                refuse_diverged(_change(state, received), 0.0)
        except FloatingPointError as error:
            if instead is None:
                raise
            instead(f"nothing of this round is in the update: {error}")
            write_state(network, trunk=received.trunk, norm=received.norm, head=received.head)
            optimizer.state.clear()
            return received
        return state


def _change(trained: ModelState, received: ModelState) -> ModelState:
    """New minus received: infinite where the two are further apart than a float32 reaches."""
    with np.errstate(over="ignore", invalid="ignore"):
        weight, bias = trained.head.weight - received.head.weight, trained.head.bias - received.head.bias
        head = Head(trained.head.class_names, weight, bias)
        return replace(trained, trunk=trained.trunk - received.trunk, norm=trained.norm - received.norm, head=head)


BARE: Final = Shield()


@dataclass(frozen=True)
class Protection:
    """How every round of a run is made private at one site.

    Attributes:
        steps: In an epoch; 1 where the noise is on the update.
        images: As the site tells them: its steps are made by the number that everybody knows.
    """

    section: PrivacySection
    noise_multiplier: float
    sample_rate: float
    steps: int
    epochs: int
    images: int

    @property
    def cost(self) -> Steps:
        """Privacy cost of one round."""
        return Steps(self.noise_multiplier, self.sample_rate, self.steps * self.epochs)

    def cost_with(self, honest: int) -> Steps:
        """Privacy cost of one round where only so many sites of a sum add their share of distributed noise.

        Against the coordinator together with the others, who know their own shares and take them off.
        """
        promised = self.section.honest_sites or 1
        return replace(self.cost, noise_multiplier=self.noise_multiplier * math.sqrt(min(honest, promised) / promised))

    def shield(self, method: SiteMethod, noise: NoiseSource, patients: NDArray[np.str_]) -> Shield:
        """What makes one round private.

        Args:
            patients: Of each training image.
        """
        section = self.section
        if section.level == "update":
            bounds = section.max_update_norm, section.max_statistics_norm
            own = self.noise_multiplier if section.noise == "local" else 0.0  # else a share goes on before the mask
            return Shield(reply=NoisyReply(*bounds, own, noise))
        by_patient = section.level == "patient"
        epoch = PrivateEpochs(
            loss=method.loss,
            max_norm=section.max_grad_norm,
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.sample_rate,
            steps=self.steps,
            expected=self.sample_rate * self.images,
            noise=noise,
            owners=torch.from_numpy(np.unique(patients, return_inverse=True)[1]) if by_patient else None,
        )
        return Shield(epoch)


def protection_of(plan: Plan, method: SiteMethod, images: int) -> Protection | None:
    """The plan's privacy at a site with so many training images; None where it asks for none."""
    section, training = plan.privacy, plan.training
    if section.level == "none":
        return None
    if section.level == "update":
        rate, steps, epochs = 1.0, 1, 1
    else:
        rate, steps = min(1.0, training.batch_size / images), math.ceil(images / training.batch_size)
        epochs = training.epochs
    ranked = method.ranks_sites  # a reply before round 1
    count = steps * epochs * (plan.run.rounds + ranked)
    if section.epsilon is None:
        assert section.noise_multiplier is not None, "one of them is set, the schema says"
        noise_multiplier = section.noise_multiplier
    else:
        noise_multiplier = noise_multiplier_for(
            section.epsilon, section.delta, sample_rate=rate, count=count, accountant=section.accountant
        )
    return Protection(section, noise_multiplier, rate, steps, epochs, images)


def privacy_faults(method: SiteMethod, experiment: Experiment | Plan) -> list[Fault]:
    """Where noise would not mean what it says."""
    level = experiment.privacy.level
    if level == "none":
        return []
    trains_norm = experiment.model.norm == "batch" and has_batch_norm(experiment.model)
    instead = "" if experiment.model.backbone_frozen else ', or method.trunk = "fedbn_plus"'
    found = _faults_of_updates(method, trains_norm, instead)
    if level in BY_STEP:
        found = _faults_of_images(method, trains_norm, instead) + _faults_of_steps(experiment.training)
        if experiment.augmentation.transform is not None:
            found.append("a plug-in's transform may mix the images of a batch; leave out augmentation.transform")
        if experiment.model.train.startswith("lora:"):
            found.append('of a product of matrices no image\'s own gradient is at hand; use "update"')
    if method.pooled != "no" or method.shares_nothing or not method.hospitals_train:
        found = [f"{method.name} sends nothing that noise could protect"]
    return [Fault("privacy.level", f'"{level}" makes no sense here: {reason}.') for reason in found]


def _faults_of_images(method: SiteMethod, trains_norm: bool, instead: str) -> list[str]:
    reasons = []
    if not method.plain_client:
        reasons.append(
            f"{method.name} minimises more than each image's own loss, so that one image's gradient does not hold all "
            'that it changes; use "update"'
        )
    if method.warm_up.epochs:
        reasons.append("method.warm_up_epochs are trained without noise; leave it out")
    if method.parameters.proximal_mu:
        reasons.append("the pull of method.proximal_mu would be clipped with each image's gradient; leave it out")
    if trains_norm and not method.frozen_norm:
        frozen = f"{instead}, which freezes it" if instead else ""
        reasons.append(f'batch normalisation mixes the images of a batch; set model.norm = "group"{frozen}')
    return reasons


def _faults_of_steps(training: TrainingSection) -> list[str]:
    set_here = {
        "clip_gradients": training.clip_gradients is not None,
        "gradient_accumulation_steps": training.gradient_accumulation_steps > 1,
        'precision = "fp16"': training.precision == "fp16",
    }
    return [
        f"each image's own gradient is clipped and the noise goes into each batch's step; leave out training.{key}"
        for key, is_set in set_here.items()
        if is_set
    ]


def _faults_of_updates(method: SiteMethod, trains_norm: bool, instead: str) -> list[str]:
    if not (trains_norm and method.sends_norm):
        return []
    unsent = f'{instead} or "fedbn", which do not send it' if instead else ""
    return [f'noise can make a running variance of batch normalisation negative; set model.norm = "group"{unsent}']


@lru_cache
def has_batch_norm(spec: ModelSpec) -> bool:
    """Whether a model has any that is trained, before ``norm`` replaces it.

    Raises:
        BadInput: If it is an external network that cannot be built.
    """
    if spec.norm_frozen:
        return spec.backbone_frozen  # it standardises the features
    backbone = meta_backbone(spec.architecture, spec.channels, spec.image_size).module
    return any(isinstance(module, BATCH_NORM) for module in backbone.modules())
