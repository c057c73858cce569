"""A malicious coordinator, simulated against a copy of the site with its gate, its policy and its own images.

The adversary knows only the site's answers, and the facts named in the attack's docstring. It obeys the policy if the
site would otherwise decline: it asks for as little noise as the policy accepts, and for the clipping that the policy
demands. Some attacks craft a network whose convolutions pass pixels on unchanged, so that its dense layer receives the
image.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Context, RecordDict
from numpy.typing import NDArray
from torch import nn

from polyclinic.client.app import make_client_app
from polyclinic.client.site.disclosure import mark_images_of_hidden_classes
from polyclinic.client.site.site import Site
from polyclinic.common.config import HospitalPlan
from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import SplitNetwork, build_network
from polyclinic.common.models.state import ModelState
from polyclinic.common.wire.codec import AnyRecord, decode_record, encode_record
from polyclinic.common.wire.flower_messages import make_request
from polyclinic.common.wire.records import (
    BenefitReply,
    BenefitRequest,
    EvaluateReply,
    EvaluateRequest,
    ModelGroups,
    Record,
    TrainReply,
    TrainRequest,
)
from polyclinic.data.base.image_set import PARTS, ImageSet
from polyclinic.data.images.pixels import convert_to_channels_first

Floats = NDArray[np.float64]
Picture = tuple[str, str]
"""An original image and the image recovered from it, both as PNG in base64."""


@dataclass
class AttackedSiteAnswers:
    """The number of records that an attacked site sent, and the distinct reasons of its refusals."""

    records: int = 0
    refusals: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class AttackResult:
    """The result of one attack.

    Attributes:
        name: Name in the JSON output and in tests.
        title: Title on the page.
        tried: Description of the attack in one or two sentences.
        recovered, of: Number of secrets found, and number of secrets looked for; ``of`` is 0 if the site has none.
        things: Noun for the secrets, in the plural.
        stops: Measures that stop the attack, in words; keys of the policy in backquotes.
        by_chance: Number of secrets that guessing finds on average.
        notes: Further figures.
        response: The attacked site's answers.
        pictures: Recovered images, the best first.
    """

    name: str
    title: str
    tried: str
    recovered: int
    of: int
    things: str
    stops: str
    by_chance: float = 0.0
    notes: Sequence[str] = ()
    response: AttackedSiteAnswers = field(default_factory=AttackedSiteAnswers)
    pictures: Sequence[Picture] = field(default=(), repr=False)
    seconds: float = 0.0

    @property
    def sentence(self) -> str:
        """The attack's result in one sentence."""
        if not self.of:
            return f"Nothing to find: here are no {self.things}."
        if self.declined:
            return (
                "Each request was declined, so nothing was tried: this says nothing of requests that are not declined."
            )
        guessed = f" (guessing finds {self.by_chance:.3g})" if self.by_chance else ""
        chance = ", which chance explains" if self.recovered and not self.succeeds else ""
        return f"{self.recovered} of {self.of} {self.things} were found{guessed}{chance}."

    @property
    def declined(self) -> bool:
        """True if the site refused every request, so that the result proves nothing."""
        return bool(self.response.refusals) and not self.response.records

    @property
    def succeeds(self) -> bool:
        """True if the attack found more than guessing: over two standard deviations above its mean (Poisson)."""
        return self.recovered > self.by_chance + 2 * math.sqrt(self.by_chance)


# ---------------------------------------------------------------------- the adversary


ATTACK_METHODS = ("surgical", "partial_loss", "vanilla", "fedavg")
"""Methods that average updates and need no other data of the site; the first that the policy allows is used."""
EPSILON_SHARE = 0.98
"""The attacker's plan spends this share of the site's privacy budget."""


@dataclass
class Adversary:
    """A simulated malicious coordinator, with the copy of the site that it attacks.

    Attributes:
        site: The copy of the site.
        folder: The copy's folder, which is removed afterwards.
        honest: The plan of the real run that the hospital was asked to join.
        response: The copy's answers so far.
    """

    site: Site
    folder: Path
    honest: HospitalPlan
    response: AttackedSiteAnswers = field(default_factory=AttackedSiteAnswers)

    def __post_init__(self) -> None:
        self.site = replace(
            self.site, folder=self.folder, ledger=None, approvals=None, durable=False, tell=lambda text: None
        )
        self._app = make_client_app(lambda context: self.site)
        self._runs = count(1)

    @property
    def head_class_names(self) -> tuple[str, ...]:
        """The site's class names, one for each head row of the models that the attacker sends."""
        return self.site.declaration.canonical_names

    def make_unused_run_name(self) -> str:
        """Return a run name that the site has not seen before."""
        return f"attack-{next(self._runs)}"

    def make_attack_plan(
        self, architecture: str, image_size: int, lr: float, batch_size: int = 0, **training: Any
    ) -> HospitalPlan:
        """Make the attacker's plan, which obeys the site's policy as far as possible.

        Args:
            batch_size: Number of images in a batch; 0 for all training images.
            training: Further keys of the plan's table ``[training]``.
        """
        policy = self.site.policy
        allowed = [name for name in ATTACK_METHODS if policy.methods is None or {name, "*"} & set(policy.methods)]
        clip = policy.maximum_update_norm
        unit = "patient" if policy.privacy_unit == "patient" else "sample"
        budget = policy.epsilon and {"level": unit, "epsilon": EPSILON_SHARE * policy.epsilon, "delta": policy.delta}
        model = {"architecture": architecture, "image_size": image_size, "channels": 1, "norm": "group"}
        batch = {"batch_size": batch_size or max(len(self.site.train), 1)}
        return HospitalPlan.model_validate(
            {
                "run": {"method": next(iter(allowed), self.honest.run.method), "rounds": 1, "seed": 1},
                "method": {} if clip is None else {"clip_update": clip},
                "model": {**model, "task": self.honest.model.task},
                "training": {"optimizer": "sgd", "lr": lr, **batch, **training},
                "augmentation": {},
                "evaluation": {"checkpoint": "last"},
                "privacy": budget or {},
                "weights_sha256": "0" * 64,  # no hospital has such a file, so none can check the initial model
            }
        )

    def build_attacked_network(self, plan: HospitalPlan, seed: int = 1) -> SplitNetwork:
        """Build a plan's network with head rows for this site's classes."""
        return build_network(plan.model, self.head_class_names, seed)

    def request_training(self, plan: HospitalPlan, model: ModelState, run: str = "") -> TrainReply | None:
        """Ask the site to train a model in round 1; return its reply, None after a refusal."""
        facts = self._make_attack_request_fields(plan, model, run)
        return self._send_request_record("train", TrainRequest(**facts), TrainReply)

    def request_evaluation(
        self, plan: HospitalPlan, model: ModelState, run: str = "", *, test: bool = False, counted: int = 0
    ) -> EvaluateReply | None:
        """Ask the site to evaluate a model; return its reply, None after a refusal.

        Args:
            run: Name of the run; empty for a new one.
            test: True to ask also for metrics of the test part.
            counted: Number of the round that the request names as the last one that counted.
        """
        facts = {**self._make_attack_request_fields(plan, model, run), "counted": counted}
        return self._send_request_record("evaluate", EvaluateRequest(**facts, test=test), EvaluateReply)

    def request_comparison(self, plan: HospitalPlan, model: ModelState, run: str) -> BenefitReply | None:
        """Ask the site to compare a model with one that it trains alone; return its reply, None after a refusal."""
        facts = self._make_attack_request_fields(plan, model, run)
        return self._send_request_record(
            "query.benefit", BenefitRequest(**facts, initial=facts["model"], epochs=1), BenefitReply
        )

    def _make_attack_request_fields(self, plan: HospitalPlan, model: ModelState, run: str) -> dict[str, Any]:
        return {
            "run": run or self.make_unused_run_name(),
            "round": 1,
            "plan": plan.model_dump_json(),
            "contract": "attack",
            "class_names": model.head.class_names,
            "counted": 0,
            "best": -1,
            "left_out": "",
            "model": ModelGroups.from_model(model),
        }

    def _send_request_record(self, kind: str, record: Record, expected: type[AnyRecord]) -> AnyRecord | None:
        """Send a record through the site's gate; return the decoded reply, None after a refusal."""
        message = make_request(encode_record(record), 2, kind)
        refusal = ""
        try:
            reply = self._app(message, Context(1, 2, {}, RecordDict(), {}))
            refusal = str(reply.error.reason) if reply.has_error() else ""
        except (BadInput, ValueError, FloatingPointError) as error:
            refusal = f"stopped: {type(error).__name__}"
        if not refusal:
            self.response.records += 1
            return decode_record(reply.content, expected)
        if refusal not in self.response.refusals:
            self.response.refusals.append(refusal)
        return None


def draw_random_images(images: ImageSet, most: int, seed: int = 0) -> ImageSet:
    """Draw at most ``most`` images at random; the drawn images keep their order."""
    rows = np.random.default_rng(seed).permutation(len(images))[:most]
    return images.select_rows(np.sort(rows))


def copy_site_with_images(site: Site, **parts: ImageSet) -> Site:
    """Copy the site with other images in the given parts; the copy hides the same classes as the site.

    Args:
        parts: New images for ``train``, ``validation`` or ``test``. Images of the site's own part have the same hidden
            labels in the copy; for other images, the site's rule decides which labels are hidden.
    """
    undisclosable_images = dict(site.undisclosable_images)
    for part, images in parts.items():
        if part in undisclosable_images:
            site_images: ImageSet = getattr(site, part)
            marks = site.undisclosable_images[part].tolist()
            mark_by_picture = dict(zip(_list_picture_indices(site_images), marks, strict=True))
            pictures = _list_picture_indices(images)
            if images.stored is site_images.stored and set(pictures) <= set(mark_by_picture):
                undisclosable_images[part] = np.array([mark_by_picture[picture] for picture in pictures], np.bool_)
            else:
                undisclosable_images[part] = mark_images_of_hidden_classes(
                    images, site.hidden_classes(part), site.policy.smallest_count
                )
    changes: dict[str, Any] = {
        "hidden": {part: site.hidden_classes(part) for part in PARTS},
        "undisclosable_images": undisclosable_images,
        **parts,
    }
    return replace(site, **changes)


def _list_picture_indices(images: ImageSet) -> list[int]:
    return list(range(len(images))) if images.places is None else images.places.tolist()


# ---------------------------------------------------------------------- crafted networks


DENSE_LAYER = "backbone.7"
"""The dense layer of ``fedsld_cnn``, behind two convolutions with pooling."""
FORWARD_BATCH_SIZE = 64


class FedsldCnnLayers(NamedTuple):
    """The two convolutions and the dense layer of the attacked network, a ``fedsld_cnn``."""

    first: nn.Conv2d
    second: nn.Conv2d
    dense: nn.Linear


def select_fedsld_cnn_layers(network: SplitNetwork) -> FedsldCnnLayers:
    """Return the two convolutions and the dense layer of a ``fedsld_cnn`` network."""
    first, second, dense = (network.get_submodule(f"backbone.{index}") for index in (0, 3, 7))
    assert isinstance(first, nn.Conv2d)
    assert isinstance(second, nn.Conv2d)
    assert isinstance(dense, nn.Linear)
    return FedsldCnnLayers(first, second, dense)


@torch.no_grad()
def zero_all_parameters(network: nn.Module) -> None:
    for value in network.parameters():
        value.zero_()


@torch.no_grad()
def set_pixel_passing_weights(network: SplitNetwork) -> None:
    """Set weights so that the convolutions pass an image's pixels, from 0 to 1, to the dense layer.

    All other parameters are 0, except small random weights in the head.
    """
    zero_all_parameters(network)
    layers = select_fedsld_cnn_layers(network)
    normalisation = network.spec.normalisation
    layers.first.weight[0, 0, 2, 2] = normalisation.std[0]
    layers.second.weight[0, 0, 2, 2] = 1.0
    assert layers.first.bias is not None
    layers.first.bias[0] = normalisation.mean[0]
    # Different weights for each class, so that the errors of an image's classes never cancel out.
    weights = torch.randn(len(network.class_names), 1, generator=torch.Generator().manual_seed(2))
    network.head.weight.copy_(1e-3 * weights.expand_as(network.head.weight))


@torch.no_grad()
def compute_dense_layer_input(network: SplitNetwork, images: ImageSet) -> Floats:
    """Compute the dense layer's input for each image, ``(n, side x side)``."""
    backbone = network.backbone
    assert isinstance(backbone, nn.Sequential)
    convolutions = backbone[:6]
    pixels = convert_to_channels_first(images.images).float()
    starts = range(0, len(pixels), FORWARD_BATCH_SIZE)
    parts = [
        convolutions(network.preprocess_images(pixels[start : start + FORWARD_BATCH_SIZE]))[:, 0] for start in starts
    ]
    return np.asarray(torch.cat(parts).flatten(1).double().numpy())


def read_trunk_tensor_update(reply: TrainReply | None, numbers: slice) -> NDArray[np.float32] | None:
    """Return the update of one tensor, which is the slice ``numbers`` of the trunk; None if no trunk was sent."""
    return None if reply is None or reply.update.trunk is None else reply.update.trunk[numbers]
