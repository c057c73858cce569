"""ClientApp and ServerApp, as Flower's quickstart writes them."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from stock_simulation.task import loaders, model_named, test, train


@dataclass(frozen=True)
class Setting:
    """What the quickstart has in its run config."""

    model: str
    images: Path
    rounds: int
    epochs: int
    batch_size: int
    lr: float
    drawn: int
    validates: bool


def client_app(setting: Setting) -> ClientApp:
    """A site that loads the model it is sent, trains and sends it back."""
    app = ClientApp()

    def unpacked(message: Message, context: Context) -> tuple[Any, ...]:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        model = model_named(setting.model)
        arrays = message.content.array_records["arrays"]
        model.load_state_dict(arrays.to_torch_state_dict())
        config = context.node_config
        return model, *loaders(
            setting.images,
            int(config["partition-id"]),
            int(config["num-partitions"]),
            setting.batch_size,
            validates=setting.validates,
        )

    @app.train()
    def _(message: Message, context: Context) -> Message:
        model, training, _ = unpacked(message, context)
        loss = train(model, training, setting.epochs, setting.lr)
        metrics = MetricRecord({"train_loss": loss, "num-examples": len(training.dataset)})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def _(message: Message, context: Context) -> Message:
        model, _, validation = unpacked(message, context)
        metrics = MetricRecord({"eval_loss": test(model, validation), "num-examples": len(validation.dataset)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def server_app(setting: Setting, on_round: Callable[[], None]) -> ServerApp:
    """FedAvg over all sites or so many drawn ones, trained and, with validation, evaluated every round.

    Args:
        on_round: Called before the first round and after each.
    """
    app = ServerApp()

    class Stamped(FedAvg):
        def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
            done = super().aggregate_evaluate(server_round, replies)
            on_round()
            return done

    @app.main()
    def _(grid: Grid, context: Context) -> None:
        initial = ArrayRecord(model_named(setting.model).state_dict())
        on_round()
        share = setting.drawn / len(list(grid.get_node_ids())) if setting.drawn else 1.0
        strategy = Stamped(fraction_train=share, fraction_evaluate=share if setting.validates else 0.0)
        strategy.start(grid, initial, num_rounds=setting.rounds)

    return app
