"""The coordinator: Flower's quickstart with another strategy."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from polyclinic.flower import SurgicalAggregation, VanillaFL  # Polyclinic
from quickstart.task import CLASSES, Net, test_auroc

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds, then test the model of all sites."""
    chosen = {"surgical": SurgicalAggregation, "vanilla": VanillaFL}[context.run_config["strategy"]]  # Polyclinic
    strategy = chosen(head="fc2", classes=CLASSES, fraction_evaluate=0.0)  # Polyclinic
    torch.manual_seed(0)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=context.run_config["num-server-rounds"],
        evaluate_fn=evaluate,
    )
    last = result.evaluate_metrics_serverapp[context.run_config["num-server-rounds"]]
    print("AUROC " + "  ".join(f"{name}: {last[name]:.3f}" for name in (*CLASSES, "mean")), flush=True)


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """AUROC of each class on the coordinator's own test images."""
    net = Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    found = test_auroc(net)
    return MetricRecord({**found, "mean": sum(found.values()) / len(found)})
