"""The coordinator: Flower's own FedAvg, which notes when each round was aggregated."""

import time
from collections.abc import Iterable
from pathlib import Path

from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from stock_flower.task import model_named

app = ServerApp()


class Stamped(FedAvg):
    """One line a round: seconds of the system-wide monotonic clock."""

    stamps = Path()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        done = super().aggregate_train(server_round, replies)
        assert done[0] is not None, f"round {server_round} has no model"
        with self.stamps.open("a", encoding="ascii") as file:
            file.write(f"{time.monotonic()}\n")
        return done


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Rounds of training only; the model is not evaluated."""
    config = context.run_config
    sites = int(config["sites"])
    strategy = Stamped(fraction_evaluate=0.0, min_train_nodes=sites, min_available_nodes=sites)
    strategy.stamps = Path(str(config["stamps"]))
    initial = ArrayRecord(model_named(str(config["model"])).state_dict())
    strategy.start(grid, initial, num_rounds=int(config["rounds"]))
