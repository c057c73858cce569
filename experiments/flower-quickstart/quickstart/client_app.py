"""A site: Flower's quickstart, and the lines that say which classes it labels and leave the others out of the loss."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from polyclinic.flower import Site, SiteLabels, labels  # Polyclinic
from quickstart.task import Net, load_data, own_classes
from quickstart.task import train as train_fn

app = ClientApp()


@labels(app)  # Polyclinic
def labelled(context: Context) -> SiteLabels:  # Polyclinic
    part, labels_per_site = context.node_config["partition-id"], context.run_config["labels-per-site"]  # Polyclinic
    return SiteLabels(own_classes(part, labels_per_site))  # Polyclinic


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the received model on this site's images."""
    torch.manual_seed(0)
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    config = context.run_config
    partition, of = context.node_config["partition-id"], context.node_config["num-partitions"]
    loader = load_data(partition, of, config["batch-size"])
    site = Site(msg)  # Polyclinic
    loss = train_fn(net, loader, site.loss, config["local-epochs"], config["learning-rate"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=msg)
