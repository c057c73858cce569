"""The site: loads the model, changes it a little, sends it back."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from stock_flower.task import model_named

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """One epoch of no images."""
    model = model_named(str(context.run_config["model"]))
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-6 * torch.randn_like(parameter))
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 1})}
    return Message(content=RecordDict(content), reply_to=message)
