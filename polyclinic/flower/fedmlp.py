"""FedMLP for any Flower app, both halves: prototypes up, their means down, missing labels detected at the site."""

import copy
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from logging import WARNING, getLogger
from typing import Any, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray
from torch import Tensor, nn

from common.config import TrainingSection
from common.models.network import SplitNetwork
from common.wire.records import Arrays
from polyclinic.flower.heads import near
from polyclinic.flower.keys import FEDMLP, HEAD, START
from polyclinic.flower.replies import weight_in
from polyclinic.flower.site import Site, tensor
from polyclinic.flower.strategies import LabelledSites
from strategies.local.objective import ClientContext
from strategies.local.site_method import Parameters
from strategies.local.training import Batch, Examples
from strategies.methods.fedmlp import FedMLPParameters, FedMLPRound, global_statistics

log = getLogger("flwr")
FEDMLP_START = f"{FEDMLP}-start"
"""Name of the record in a site's state that says of which start its tags are."""
ROUND = "server-round"
"""Flower's own key of a round's number."""
PARAMETERS = FedMLPParameters.model_fields.keys() - Parameters.model_fields.keys() - {"heads", "stage_one_rounds"}
"""What the method itself reads. The rest is of the product's aggregation and training, and of no effect here."""


class FedMLP(LabelledSites):
    """FedAvg; sites learn to detect the classes that they do not label from everybody's prototypes.

    Sun et al., "FedMLP: Federated Multi-label Medical Image Classification under Task Heterogeneity", MICCAI 2024.

    Args:
        stage_one_rounds: Rounds before missing labels are detected.
        parameters: By name: ``tag_rate_negative``, ``tag_rate_positive`` (share tagged in a round at difficulty 1),
            ``sure_below``, ``sure_above`` (probabilities outside are sure), ``rounding`` (``ceil`` or ``floor``),
            ``weighted_partial_loss``, ``detection``, ``self_adaptive``, ``consistency``, ``consistency_stage_one``
            (parts of the ablation), ``prototype_weighting`` (``samples`` or ``uniform``).
        options: As for :class:`LabelledSites`.

    Raises:
        ValueError: For parameters that do not fit, and for ``task="multi_class"``: prototypes are of classes that an
            image shows or does not show.
    """

    not_wrapped = "clipping and noise on models would leave its prototypes as they are"

    def __init__(self, *, stage_one_rounds: int, parameters: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        if self.task == "multi_class":
            raise ValueError(
                'FedMLP is for task "multi_label" only; for "multi_class" use SurgicalAggregation or FedSLD'
            )
        given = parameters or {}
        if unknown := sorted(given.keys() - PARAMETERS):
            hint = ": it is an argument of its own" if unknown[0] == "stage_one_rounds" else ""
            raise ValueError(f"FedMLP has no parameter {unknown[0]!r}{hint}; it has {sorted(PARAMETERS)}")
        self.parameters = FedMLPParameters.model_validate({**given, "stage_one_rounds": stage_one_rounds})

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        *arguments: Any,
        **options: Any,
    ) -> Result:
        """As for all strategies; a warning where the rounds end before missing labels are detected."""
        if self.parameters.detection and num_rounds <= (first := self.parameters.stage_one_rounds):
            log.log(WARNING, "no missing label is detected: %s rounds, stage_one_rounds %s", num_rounds, first)
        return super().start(grid, initial_arrays, num_rounds, *arguments, **options)

    def begin(self, arrays: ArrayRecord) -> None:
        """Prototypes of an earlier start are forgotten, too."""
        super().begin(arrays)
        self._learned: Arrays = {}
        self._told: dict[int, Arrays] = {}
        self._start = secrets.token_hex(8)

    def told(self, node: int) -> dict[str, Any]:
        """The method's parameters, too."""
        parameters = self.parameters.model_dump_json()
        return {**super().told(node), FEDMLP: parameters, HEAD: self.head, START: self._start}

    def records(self) -> dict[str, ArrayRecord]:
        """The global prototypes and difficulties, once there are any."""
        return {FEDMLP: ArrayRecord({k: Array(v) for k, v in self._learned.items()})} if self._learned else {}

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """As for all strategies; prototypes and difficulties are taken out of the replies before.

        Raises:
            ValueError: If sites replied and no reply fits.
        """
        every = list(replies)
        came = {reply.metadata.src_node_id: reply.content for reply in every if reply.has_content()}
        records = {node: content.pop(FEDMLP) for node, content in came.items() if FEDMLP in content}
        self._told = {
            node: {name: array.numpy() for name, array in cast(ArrayRecord, record).items()}
            for node, record in records.items()
        }
        return super().aggregate_train(server_round, every)

    def fault_in(self, reply: Message) -> str:
        """A reply needs what :meth:`FedMLPSite.finish` returns."""
        node = reply.metadata.src_node_id
        if node not in self._told:
            return f"it sent no {FEDMLP!r}: use FedMLPSite and put what its finish() returns into the reply"
        return super().fault_in(reply) or self._other_statistics(self._told[node])

    def _other_statistics(self, told: Arrays) -> str:
        rows, features = self._sent[f"{self.head}.weight"].shape
        shapes = {"prototypes": (rows, 2, features), "difficulty": (rows,)} if told else {}
        for name, expected in shapes.items():
            if (shape := told[name].shape if name in told else ()) != expected:
                return f"its {name} have the shape {shape}, not {expected}"
        return ""

    def combined(self, replies: Sequence[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Flower's mean of the models; beside it the means of what the sites tell about classes."""
        told, own, images = dict[str, Arrays](), dict[str, NDArray[np.bool_]](), dict[str, float]()
        for reply in replies:
            if statistics := self._told.get(node := reply.metadata.src_node_id):
                site = f"{node:020d}"  # sums run in the order of names
                told[site], own[site] = statistics, self.roll_call.annotated(node)
                images[site] = weight_in(reply, self.weighted_by_key)
        if told:
            weighting = self.parameters.prototype_weighting
            self._learned = global_statistics(told, own, images, self._learned, weighting)
        return super().combined(replies)


class FedMLPSite(Site):
    """One round of FedMLP at a site, for the user's own training loop.

    Make it after the received model was loaded and before training; it copies the model as the teacher. In the second
    stage it tags images; tags last from round to round in Flower's ``context.state``, on the site's side, by the places
    of images: give the same images in the same order in every round of a start. Others are refused.

    Args:
        message: That the ``ClientApp``'s ``train`` function got.
        context: That the same function got.
        model: With the received model loaded.
        head: Name of its last layer, a submodule.
        images: All training images as the model takes them, ``(n, ...)``, n at least 1, without augmentation, in one
            order.
        targets: ``(n, classes)`` of 1, 0, or NaN for unknown.

    Raises:
        TypeError: If images or targets are no tensors.
        ValueError: If the coordinator's strategy is another one, the model has no such layer or it is not the
            coordinator's head as received, targets do not fit, there is no image, or the images are not those of the
            rounds before.
    """

    def __init__(
        self, message: Message, context: Context, model: nn.Module, head: str, images: Tensor, targets: Tensor
    ) -> None:
        super().__init__(message)
        config: Any = next((one for one in message.content.config_records.values() if FEDMLP in one), None)
        if config is None:
            raise ValueError("FedMLPSite needs the strategy FedMLP; the coordinator uses another: use Site")
        if len(tensor("images", images)) != len(tensor("targets", targets)):
            raise ValueError(f"{len(images)} images and {len(targets)} rows of targets")
        if not len(images):
            raise ValueError("FedMLPSite needs an image: a site without training images cannot take part, leave it out")
        parameters = FedMLPParameters.model_validate_json(config[FEDMLP])
        told = {key: array.numpy() for key, array in message.content.array_records.get(FEDMLP, {}).items()}
        self._start, self._marks = str(config[START]), _marks(images)
        notes = self._kept(context)
        self._context, self._split = context, _Split(model, head)
        self._split.check(message, str(config[HEAD]))
        examples = Examples(images, self.targets(targets), self.annotated.to(images.device))
        context_of_round = ClientContext(
            cast(SplitNetwork, self._split), examples, told, notes, int(config[ROUND]), TrainingSection()
        )
        self._round = FedMLPRound(context_of_round, parameters)

    def _kept(self, context: Context) -> Arrays:
        """The tags of this start's earlier rounds."""
        mark = context.state.config_records.get(FEDMLP_START, ConfigRecord()).get(START)
        if mark != self._start or (kept := context.state.array_records.get(FEDMLP)) is None:
            return {}
        before = kept["images"].numpy()
        if len(before) != len(self._marks):
            changed = f"{len(self._marks)} images where there were {len(before)}"
        elif other := int((~np.isclose(before, self._marks, rtol=1e-4, atol=1e-6, equal_nan=True)).sum()):
            changed = f"{other} of {len(before)} images differ"
        else:
            return {"tags": kept["tags"].numpy()}
        raise ValueError(
            f"the images are not those of the round before, {changed}: FedMLP tags images by their places. Give the "
            f"same images in the same order, without augmentation; or forget the tags: del context.state[{FEDMLP!r}]"
        )

    @property
    def views(self) -> int:
        """How many augmented views of a batch :meth:`round_loss` takes: two in the first stage, one in the second."""
        return 1 if self._round.second_stage else 2

    def round_loss(self, rows: Tensor, *views: Tensor) -> Tensor:
        """The loss of one batch, a scalar.

        Args:
            rows: Places of the batch among ``images``, ``(batch,)``.
            views: :attr:`views` augmented views of these images, as the model takes them.

        Raises:
            TypeError: If a view is no tensor, or rows are no whole numbers.
            ValueError: If there is another number of views, or one has another number of images.
        """
        tensor("rows", rows)
        if any(not isinstance(view, Tensor) for view in views):
            raise TypeError("a view is a tensor of images: write round_loss(rows, *views)")
        if rows.ndim != 1 or rows.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"rows must be whole numbers, (batch,), got {rows.dtype} {tuple(rows.shape)}")
        if len(views) != self.views:
            raise ValueError(f"this round takes {self.views} views of a batch, got {len(views)}")
        if other := [len(view) for view in views if len(view) != len(rows)]:
            raise ValueError(f"{len(rows)} rows and a view of {other[0]} images")
        batch = _Views(rows, self.annotated.to(rows.device), list(views))
        return self._round.objective(cast(SplitNetwork, self._split), cast(Batch, batch))

    def finish(self) -> dict[str, ArrayRecord]:
        """Keep the tags for the next round; return what goes into the reply's ``RecordDict`` beside the model.

        The coordinator leaves out a reply without it. It is empty before the first stage's last round.
        """
        network = cast(SplitNetwork, self._split)
        notes = {**self._round.notes(network), "images": self._marks}
        self._context.state[FEDMLP] = ArrayRecord({key: Array(value) for key, value in notes.items()})
        self._context.state[FEDMLP_START] = ConfigRecord({START: self._start})
        modes = [(module, module.training) for module in network.modules()]
        told = self._round.statistics(network, np.zeros(0, np.float32))
        for module, training in modes:  # statistics are taken in evaluation mode
            module.training = training
        return {FEDMLP: ArrayRecord({key: Array(value) for key, value in told.items()})}


def _marks(images: Tensor) -> NDArray[np.float32]:
    """A number for each image that another image, or another order of its pixels, is unlikely to have, ``(n,)``."""
    ramp = torch.linspace(0, 1, max(images[0].numel(), 1), device=images.device)
    with torch.no_grad():
        parts = [part.flatten(1).float() @ ramp / len(ramp) for part in torch.split(images, 256)]
    return torch.cat(parts).cpu().numpy()


class _Split(nn.Module):
    """Any classifier as two parts, the way our methods look at one: features, and a linear head on them."""

    def __init__(self, model: nn.Module, head: str) -> None:
        super().__init__()
        self.model, self._name = model, head
        layers = [found for found, module in model.named_modules() if isinstance(module, nn.Linear)]
        if head not in dict(model.named_modules()):
            raise ValueError(f"the model has no layer {head!r}; its linear layers are {layers}.{near(head, layers)}")
        if not isinstance(self.head, nn.Linear):
            raise ValueError(f"{head!r} is a {type(self.head).__name__}, not a torch.nn.Linear")

    def check(self, message: Message, head: str) -> None:
        """Whether the layer is the coordinator's head, as received.

        Raises:
            ValueError: If it is not.
        """
        key, layer = f"{head}.weight", cast(nn.Linear, self.head)
        (sent,) = (record[key].numpy() for record in message.content.array_records.values() if key in record)
        weight = layer.weight.detach().cpu()
        if weight.shape != sent.shape:
            shape = tuple(weight.shape)
            raise ValueError(f"{self._name!r} is not the coordinator's head {head!r}: {shape}, not {sent.shape}")
        if not torch.equal(weight, torch.from_numpy(sent.copy()).to(weight.dtype)):
            raise ValueError(
                f"the weight of {self._name!r} is not the one that came for {head!r}: it is another layer, or the "
                "received model was not loaded before FedMLPSite was made"
            )

    @property
    def head(self) -> nn.Module:
        return self.model.get_submodule(self._name)

    def forward(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.model(images))

    def features(self, images: Tensor) -> Tensor:
        """What the head sees of images, ``(batch, features)``."""
        with _watched(self.head) as seen:
            self.model(images)
        return seen[-1]

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Split":
        return _Split(copy.deepcopy(self.model, memo), self._name)


@contextmanager
def _watched(head: nn.Module) -> Iterator[list[Tensor]]:
    """Collect what goes into a layer."""
    seen: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda module, given: seen.append(given[0].detach()))
    try:
        yield seen
    finally:
        hook.remove()


@dataclass
class _Views:
    """A batch whose views the user has drawn."""

    rows: Tensor
    annotated: Tensor
    left: list[Tensor]

    def view(self) -> Tensor:
        return self.left.pop(0)

    def logits(self, network: nn.Module, view: Tensor) -> Tensor:
        return cast(Tensor, network(view)).float()
