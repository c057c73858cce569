"""Flower apps as a user of ``polyclinic.flower`` writes them: an ordinary network, scikit-learn's digits."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result, Strategy
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from polyclinic.flower import FedMLPSite, Site, SiteLabels, labels, loss_slope
from polyclinic.flower.records import unpack_arrays
from polyclinic.server.simulation.backends.inline import run_with_inline_grid
from polyclinic.strategies.local.losses import partial_loss
from tests.flower_internals import enter_flower_runtime

CLASSES = tuple("0123456789")
SITES = 3
HEAD: dict[str, Any] = {"head": "4", "classes": CLASSES, "fraction_evaluate": 0.0}
HALVES = (CLASSES[:5], CLASSES[3:8], CLASSES[7:])
"""What each site labels: 8 and 9 are the third's own, 3, 4 and 7 have two owners."""


def network() -> nn.Module:
    """The same for the same seed; its head is called ``4``."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))


@cache
def digits() -> Any:
    """scikit-learn's own, read once."""
    return load_digits()


def data(part: int = 0, of: int = 1) -> tuple[Tensor, Tensor]:
    """Images ``(n, 1, 8, 8)`` and targets ``(n, 10)``."""
    own = slice(part, None, of)
    images = torch.tensor(digits().images, dtype=torch.float32).unsqueeze(1)[own] / 16
    return images, functional.one_hot(torch.tensor(digits().target), 10).float()[own]


def data_of(context: Context) -> tuple[Tensor, Tensor]:
    """The images and targets of a site."""
    return data(int(context.node_config["partition-id"]), SITES)


def loaded(message: Message) -> nn.Module:
    """The network that a site received."""
    net = network()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return net


def fit(net: nn.Module, count: int, loss: Callable[[Tensor], Tensor]) -> list[float]:
    """Train for one epoch over so many images by the loss of some rows of them; return each batch's loss."""
    losses, optimizer = [], torch.optim.SGD(net.parameters(), lr=0.2)
    for rows in torch.arange(count).split(64):
        optimizer.zero_grad()
        value = loss(rows)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


def everything_known(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all entries by the product's loss: torch's own mean rounds otherwise."""
    return partial_loss(logits, targets, torch.ones(targets.shape[1], dtype=torch.bool))


@dataclass
class App:
    """The sites' half, and what passed.

    Attributes:
        own: The classes of each site, in the order of partitions.
        counted: Nodes that say how many images show a class.
        requests: Node and message type, in the order in which sites were asked.
        replies: Of ``train``, by node, the last one.
        broken: Nodes that fail in training.
        change: Changes the reply of a node.
    """

    own: Sequence[Sequence[str]] = HALVES
    counted: Collection[int] = (2, 3, 4)
    stock: bool = False
    requests: list[tuple[int, str]] = field(default_factory=list)
    sent: dict[int, RecordDict] = field(default_factory=dict)
    replies: dict[int, RecordDict] = field(default_factory=dict)
    broken: set[int] = field(default_factory=set)
    change: Callable[[int, RecordDict], object] = lambda node, reply: None

    def client(self) -> ClientApp:
        app = ClientApp()

        @labels(app)
        def own(context: Context) -> SiteLabels:
            self.requests.append((context.node_id, "labels"))
            part = int(context.node_config["partition-id"])
            names = self.own[part]
            if context.node_id not in self.counted:
                return SiteLabels(names)
            _, targets = data(part, SITES)
            shown = targets.sum(dim=0)
            return SiteLabels(names, [int(shown[CLASSES.index(name)]) for name in names], len(targets))

        @app.train()
        def train(message: Message, context: Context) -> Message:
            self.requests.append((context.node_id, "train"))
            self.sent[context.node_id] = message.content
            if context.node_id in self.broken:
                raise OSError("No space left on device")
            reply = self._trained(message, context)
            self.change(context.node_id, reply)
            self.replies[context.node_id] = reply
            return Message(reply, reply_to=message)

        @app.evaluate()
        def evaluate(message: Message, context: Context) -> Message:
            self.requests.append((context.node_id, "evaluate"))
            images, targets = data_of(context)
            with torch.no_grad():
                loss = float(Site(message).loss(loaded(message).eval()(images), targets))
            metrics = MetricRecord({"loss": loss, "num-examples": len(images)})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)

        return app

    def nodes_of(self, kind: str) -> list[int]:
        """The nodes that were asked for this, in order."""
        return [node for node, request in self.requests if request == kind]

    def mean(self, name: str, *nodes: int) -> Any:
        """The mean of what these nodes sent last under this name, by their numbers of examples."""
        arrays = [self.replies[node]["arrays"][name].numpy() for node in nodes]
        return np.average(arrays, axis=0, weights=[self.replies[node]["metrics"]["num-examples"] for node in nodes])

    def _trained(self, message: Message, context: Context) -> RecordDict:
        net, (images, targets) = loaded(message), data_of(context)
        loss = everything_known if self.stock else Site(message).loss
        losses = fit(net, len(images), lambda rows: loss(net(images[rows]), targets[rows]))
        metrics = MetricRecord(
            {"loss": losses[-1], "num-examples": len(images) + context.node_id, "loss-slope": loss_slope(losses)}
        )
        return RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})


@dataclass
class FedMLPApp(App):
    """Sites that train with FedMLP's loss.

    Attributes:
        images: Changes the images and targets of a round.
        model: Changes the received network.
        layer: Name of its head.
        tags: Of the first site, after each round.
        modes: Of the layers of each site's network, after a round.
    """

    images: Callable[[int, Tensor, Tensor], tuple[Any, Any]] = lambda number, images, targets: (images, targets)
    model: Callable[[nn.Module], nn.Module] = lambda net: net
    layer: str = "4"
    tags: list[np.ndarray] = field(default_factory=list)
    modes: list[list[bool]] = field(default_factory=list)

    def _trained(self, message: Message, context: Context) -> RecordDict:
        number = int(message.content["config"]["server-round"])
        net, (images, targets) = self.model(loaded(message)), self.images(number, *data_of(context))
        site = FedMLPSite(message, context, net, self.layer, images, targets)
        fit(net, len(images), lambda rows: site.round_loss(rows, *[images[rows]] * site.views))
        metrics = MetricRecord({"num-examples": len(images)})
        record = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics, **site.finish()})
        self.modes.append([module.training for module in net])
        if context.node_id == 2:
            self.tags.append(unpack_arrays(context.state["polyclinic-fedmlp"])["tags"])
        return record


def altered(change: Callable[[RecordDict], None], node: int | None = 3, kind: type[App] = App) -> App:
    """Sites of which one changes its reply; all do where no node is named."""
    return kind(change=lambda sender, reply: change(reply) if node in (None, sender) else None)


def run(
    strategy: Strategy,
    app: App | ClientApp,
    rounds: int = 2,
    prepare: Callable[[Any], None] = lambda grid: None,
    **options: Any,
) -> Result:
    """Flower's own loop over :data:`SITES` sites, on a grid that ``prepare`` may change."""
    results: list[Result] = []

    def main(grid: Any) -> None:
        enter_flower_runtime()
        prepare(grid)
        arrays = options.pop("initial", None) or ArrayRecord(network().state_dict())
        results.append(strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds, **options))

    run_with_inline_grid(main, app.client() if isinstance(app, App) else app, SITES)
    return results[0]


def received(content: RecordDict) -> Any:
    """A message with this content, as a site has it."""
    return type("Received", (), {"content": content})()


def joins_late(app: App, node: int) -> Callable[[Any], None]:
    """A grid on which a node is not there before a site has trained."""

    def prepare(grid: Any) -> None:
        nodes = list(grid.get_node_ids())
        grid.get_node_ids = lambda: [other for other in nodes if other != node or app.replies]

    return prepare


def silent(kind: str, *nodes: int, waited: list[float] | None = None) -> Callable[[Any], None]:
    """A grid on which nodes do not answer a kind of message; notes how long each call would wait."""

    def prepare(grid: Any) -> None:
        send = grid.send_and_receive

        def answered(messages: Any, *, timeout: float | None = None) -> Any:
            every = list(messages)
            of_kind = [message for message in every if message.metadata.message_type.startswith(kind)]
            if waited is not None and of_kind:
                waited.append(float(timeout or 0))
            silent = [message for message in of_kind if message.metadata.dst_node_id in nodes]
            return send([message for message in every if message not in silent], timeout=timeout)

        grid.send_and_receive = answered

    return prepare
