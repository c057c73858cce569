"""Differential privacy at one site: privacy cost, noise on an update, and checks of the plan's settings.

Cost: Abadi et al., "Deep Learning with Differential Privacy", CCS 2016. ``rdp``: Mironov, Talwar and Zhang, "Renyi
Differential Privacy of the Sampled Gaussian Mechanism", 2019. ``prv``: Gopi, Lee and Wutschitz, "Numerical Composition
of Differential Privacy", NeurIPS 2021, or ``rdp`` if that is smaller; both are upper bounds. One step adds Gaussian
noise to a sum over images or patients, each drawn independently with probability ``sample_rate``; at 1 it is the plain
Gaussian mechanism. Opacus computes both.

Noise on an update: McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR
2018. Here the site itself adds the noise, so that nobody needs to be trusted with the update. Clipped update and
clipped statistics are one Gaussian mechanism in each round. Any two data sets give updates of length at most C, at a
distance of at most 2 C, so the sensitivity is twice the bound. Update and statistics, each relative to its bound,
together change by at most ``2 sqrt(2)``; so each part's noise is multiplied by the root of the number of parts.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from polyclinic.common.config import STEP_NOISE_LEVELS, Experiment, HospitalPlan, PrivacySection
from polyclinic.common.errors import Fault
from polyclinic.common.models.zoo.networks import is_batch_norm
from polyclinic.common.models.zoo.registry import build_meta_backbone
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.wire.records import Arrays, ModelGroups
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.local.updates import clip_update_to_norm, scale_array
from polyclinic.strategies.privacy.gradients import PrivateEpochTrainer
from polyclinic.strategies.privacy.noise import ROUNDING_MARGIN_FACTOR, NoiseQuantizationGrid, NoiseSource

Accountant = Literal["rdp", "prv"]
PRV_MOST_EPSILON: Final = 50.0
PRV_MOST_STEPS: Final = 1_000_000
"""Beyond either limit only ``rdp`` is used, because the ``prv`` distribution would not fit into memory."""
_TOLERANCE: Final = 0.01


@dataclass(frozen=True)
class NoisySteps:
    """A number of training steps or releases with equal noise and sampling rate.

    Attributes:
        noise_multiplier: Standard deviation of the noise over the sensitivity.
        sample_rate: Probability with which a step draws an image or patient, above 0 and at most 1.
    """

    noise_multiplier: float
    sample_rate: float
    count: int


def compute_epsilon(sequence: Sequence[NoisySteps], delta: float, accountant: Accountant) -> float:
    """Return the total epsilon of these steps; 0 without steps, infinite if any step has no noise."""
    if not sequence:
        return 0.0
    if any(not steps.noise_multiplier for steps in sequence):
        return math.inf
    safe = _compute_cached_epsilon(tuple(sequence), delta, "rdp")
    beyond = safe > PRV_MOST_EPSILON or sum(steps.count for steps in sequence) > PRV_MOST_STEPS
    if accountant == "prv" and not beyond:
        safe = min(safe, _compute_cached_epsilon(tuple(sequence), delta, "prv"))
    return max(safe, 0.0)  # with a large delta an accountant can come out below


# It takes up to seconds. A ledger asks for the same steps several times a round, once while it is locked, and has as
# many sequences of steps as there are patients with different histories.
@lru_cache(maxsize=4096)
def _compute_cached_epsilon(sequence: tuple[NoisySteps, ...], delta: float, accountant: Accountant) -> float:
    from opacus.accountants import create_accountant

    counting = create_accountant(mechanism=accountant)
    counting.history = [(steps.noise_multiplier, steps.sample_rate, steps.count) for steps in sequence]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a wider range of orders could give a smaller epsilon
        return float(counting.get_epsilon(delta=delta))


@lru_cache(maxsize=64)
def find_noise_multiplier(
    epsilon: float, delta: float, *, sample_rate: float, count: int, accountant: Accountant
) -> float:
    """Return the smallest noise multiplier for which ``count`` steps keep epsilon and delta, within 0.01 of epsilon.

    Args:
        epsilon, delta: The privacy that all steps together must keep.
        sample_rate: Probability with which a step draws an image or patient.
        accountant: Method for the upper bound of the privacy cost.
    """
    from opacus.accountants.utils import get_noise_multiplier

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        goal: dict[str, Any] = {"target_epsilon": epsilon, "target_delta": delta, "sample_rate": sample_rate}
        enough = float(get_noise_multiplier(**goal, steps=count, accountant="rdp"))
    if accountant == "rdp":
        return enough

    def compute_epsilon_of_noise(noise_multiplier: float) -> float:
        return compute_epsilon([NoisySteps(noise_multiplier, sample_rate, count)], delta, accountant)

    too_little = enough / 2
    while compute_epsilon_of_noise(too_little) <= epsilon:
        too_little /= 2
    while epsilon - compute_epsilon_of_noise(enough) > _TOLERANCE and enough - too_little > _TOLERANCE**2 * enough:
        middle = (enough + too_little) / 2
        enough, too_little = (middle, too_little) if compute_epsilon_of_noise(middle) <= epsilon else (enough, middle)
    return enough


# ---------------------------------------------------------------------- noise on an update

Array = NDArray[np.float32]


@dataclass(frozen=True)
class ReplyNoise:
    """Adds Gaussian noise to a site's update and statistics, for differential privacy of the site's whole data set.

    Attributes:
        max_update_norm: Largest Euclidean norm of the update; a longer update is scaled down to it.
        max_statistics_norm: Largest Euclidean norm of the statistics together; longer ones are scaled down to it.
        noise_multiplier: Standard deviation of the noise over the sensitivity; 0 adds no noise.
        noise: Source of the random noise.
    """

    max_update_norm: float
    max_statistics_norm: float
    noise_multiplier: float
    noise: NoiseSource

    def __call__(self, update: ModelGroups, statistics: Arrays) -> tuple[ModelGroups, Arrays]:
        """Return update and statistics with noise.

        If any value of the update is not finite, the whole update counts as 0; a NaN in the statistics counts as 0. The
        noise hides both cases.
        """
        parts = bool(update.to_named_arrays()) + bool(statistics)
        spread = 2 * self.noise_multiplier * parts**0.5
        if not all(np.isfinite(array).all() for array in update.to_named_arrays().values()):
            update = update.apply_to_arrays(np.zeros_like)  # that training diverged says something too
        short = clip_update_to_norm(update, self.max_update_norm * ROUNDING_MARGIN_FACTOR)
        numbers = {name: np.nan_to_num(array, nan=0.0) for name, array in sorted(statistics.items())}
        bounded = clip_arrays_to_norm(numbers, self.max_statistics_norm * ROUNDING_MARGIN_FACTOR)
        of_update = NoiseQuantizationGrid(spread * self.max_update_norm, self.max_update_norm)
        of_statistics = NoiseQuantizationGrid(spread * self.max_statistics_norm, self.max_statistics_norm)
        noisy = {name: self._add_noise(array, of_statistics) for name, array in bounded.items()}
        return short.apply_to_arrays(lambda array: self._add_noise(array, of_update)), noisy

    def _add_noise(self, array: Array, grid: NoiseQuantizationGrid) -> Array:
        steps = grid.round_values_to_grid_steps(torch.from_numpy(np.array(array, np.float64)))
        return grid.add_noise_to_sum(steps, self.noise).numpy()


def clip_arrays_to_norm(arrays: Mapping[str, Array], bound: float) -> Mapping[str, Array]:
    """Clip arrays, taken as one vector, to a length of at most ``bound``."""
    length = float(np.sqrt(sum(np.square(array, dtype=np.float64).sum() for array in arrays.values())))
    return arrays if length <= bound else {name: scale_array(array, bound / length) for name, array in arrays.items()}


# ---------------------------------------------------------------------- the privacy of a plan


@dataclass(frozen=True)
class SitePrivacySettings:
    """The settings of differential privacy at one site, equal in every round of a run.

    Attributes:
        section: The plan's privacy settings.
        noise_multiplier: Standard deviation of the noise over the sensitivity.
        sample_rate: Probability with which a step draws an image or patient.
        steps: Noisy steps in an epoch; 1 if the noise is on the update.
        epochs: Epochs in a round.
        images: Number of training images as the site states it; this number is public.
    """

    section: PrivacySection
    noise_multiplier: float
    sample_rate: float
    steps: int
    epochs: int
    images: int

    @property
    def noisy_steps_per_round(self) -> NoisySteps:
        """Return the noisy steps of one round, for accounting."""
        return NoisySteps(self.noise_multiplier, self.sample_rate, self.steps * self.epochs)

    def noisy_steps_with_honest_sites(self, honest: int) -> NoisySteps:
        """Return the noisy steps of one round, for accounting, if only ``honest`` sites keep their noise shares secret.

        Dishonest sites tell the coordinator their noise shares, which it subtracts from the sum.
        """
        promised = self.section.honest_sites or 1
        return replace(
            self.noisy_steps_per_round,
            noise_multiplier=self.noise_multiplier * math.sqrt(min(honest, promised) / promised),
        )

    def make_reply_noise(self, noise: NoiseSource) -> ReplyNoise:
        """Return the object that adds noise to an update and a method's statistics."""
        section = self.section
        own = self.noise_multiplier if section.noise == "local" else 0.0  # else a share goes on before the mask
        return ReplyNoise(section.max_update_norm, section.max_statistics_norm, own, noise)

    def make_private_trainer(
        self, method: SiteMethod, noise: NoiseSource, patients: NDArray[np.str_]
    ) -> PrivateEpochTrainer:
        """Return the trainer that adds noise to each step.

        Args:
            patients: Patient of each training image.
        """
        by_patient = self.section.level == "patient"
        return PrivateEpochTrainer(
            loss=method.loss,
            max_norm=self.section.max_grad_norm,
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.sample_rate,
            steps=self.steps,
            expected=self.sample_rate * self.images,
            noise=noise,
            owners=torch.from_numpy(np.unique(patients, return_inverse=True)[1]) if by_patient else None,
        )


def make_site_privacy_settings(plan: HospitalPlan, method: SiteMethod, images: int) -> SitePrivacySettings | None:
    """Return the settings of a plan's differential privacy at one site; None if the plan has no noise.

    Args:
        images: The site's number of training images.
    """
    section = plan.privacy
    training = plan.training
    if section.level == "none":
        return None
    if section.level == "update":
        rate, steps, epochs = 1.0, 1, 1
    else:
        rate = min(1.0, training.batch_size / images)
        steps = math.ceil(images / training.batch_size)
        epochs = training.epochs
    ranked = method.traits.ranks_sites  # a reply before round 1
    count = steps * epochs * (plan.run.rounds + ranked)
    if section.epsilon is None:
        assert section.noise_multiplier is not None, "one of them is set, the schema says"
        noise_multiplier = section.noise_multiplier
    else:
        epsilon = section.epsilon
        delta = section.delta
        accountant = section.accountant
        noise_multiplier = find_noise_multiplier(epsilon, delta, sample_rate=rate, count=count, accountant=accountant)
    return SitePrivacySettings(section, noise_multiplier, rate, steps, epochs, images)


def find_privacy_faults(method: SiteMethod, experiment: Experiment | HospitalPlan) -> list[Fault]:
    """Return the reasons why this method or experiment would break the promise of differential privacy."""
    level = experiment.privacy.level
    training = experiment.training
    if level == "none":
        return []
    trains_norm = experiment.model.norm == "batch" and has_trained_batch_norm(experiment.model)
    instead = "" if experiment.model.backbone_frozen else ', or method.trunk = "fedbn_plus"'
    if level not in STEP_NOISE_LEVELS:
        unsent = f'{instead} or "fedbn", which do not send it' if instead else ""
        negative = "noise can make a running variance of batch normalisation negative"
        reasons = {
            f'{negative}; set model.norm = "group"{unsent}': trains_norm and method.parts.sends_batch_norm,
            f"{method.name} divides each update by a number that the noise would change": method.traits.reads_updates,
        }
    else:
        frozen = f"{instead}, which freezes it" if instead else ""
        early = method.early_stopping is not None
        mixes = trains_norm and not method.parts.freezes_batch_norm
        pulls = method.parameters.proximal_mu > 0
        low_rank = experiment.model.train.startswith("lora:")
        augments = experiment.augmentation.transform is not None
        by_step = "each image's own gradient is clipped and the noise goes into each batch's step; leave out training."
        reasons = {
            f"{method.name} minimises more than each image's own loss, so that one image's gradient does not hold all "
            'that it changes; use "update"': not method.loss_is_per_image,
            'the loss decides how many steps a site trains, so their noise cannot be planned; use "update"': early,
            "method.warm_up_epochs are trained without noise; leave it out": method.parameters.warm_up_epochs > 0,
            "the pull of method.proximal_mu would be clipped with each image's gradient; leave it out": pulls,
            f'batch normalisation mixes the images of a batch; set model.norm = "group"{frozen}': mixes,
            f"{by_step}clip_gradients": training.clip_gradients is not None,
            f"{by_step}gradient_accumulation_steps": training.gradient_accumulation_steps > 1,
            f'{by_step}precision = "fp16"': training.precision == "fp16",
            "a plug-in's transform may mix the images of a batch; leave out augmentation.transform": augments,
            'of a product of matrices no image\'s own gradient is at hand; use "update"': low_rank,
        }
    faults = [reason for reason, holds in reasons.items() if holds]
    if method.pooled_missing_labels != "no" or method.parts.trains_alone or not method.traits.hospitals_train:
        faults = [f"{method.name} sends nothing that noise could protect"]
    return [Fault("privacy.level", f'"{level}" makes no sense here: {reason}.') for reason in faults]


@lru_cache
def has_trained_batch_norm(spec: ModelSpec) -> bool:
    """Return True if a model trains batch normalisation, apart from the ``norm`` setting, which may replace it later.

    Raises:
        BadInput: If the model is an external network that cannot be built.
    """
    if spec.norm_frozen:
        return spec.backbone_frozen  # it standardises the features
    backbone = build_meta_backbone(spec).module
    return any(map(is_batch_norm, backbone.modules()))


def find_secure_aggregation_faults(method: SiteMethod) -> list[Fault]:
    """Return why this method does not work if the coordinator sees only sums of updates; empty if it works."""
    compresses = method.parameters.compress_update != "float32"
    reasons = {
        "there is one pseudo-site": method.pooled_missing_labels != "no",
        "the model is passed on from site to site": method.traits.sequential,
        "every site trains by itself, and nothing is summed": method.parts.trains_alone,
        "it weighs each update by what that update is": method.traits.weighs_updates,
        "its coordinator reads each update by itself": method.traits.reads_updates,
        "a robust mean looks at each update by itself (method.mean)": method.parameters.mean is not None,
        "its statistics would travel beside the update, unmasked": bool(method.payload.statistics),
        "masked numbers take the same room however coarse they are (method.compress_update)": compresses,
    }
    where = "privacy.secure_aggregation"
    problem = f"cannot be had with {method.name}"
    faults = [Fault(where, f"{problem}: {why}.", "Leave it out.") for why, holds in reasons.items() if holds]
    if method.parameters.weighting != "uniform" and not faults:
        problem = "is needed where updates are masked: known weights that differ tell in a sum which part is whose."
        faults.append(Fault("method.weighting", f'"uniform" {problem}', 'Set method.weighting = "uniform".'))
    return faults
