"""Which part of a network is trained, and which is frozen: ``model.train`` of an experiment."""

import math

from torch import Tensor, nn

from common.errors import BadInput, Fault
from common.models.low_rank import PREFIX, trained_factors
from common.models.zoo.spec import ModelSpec


def trained_layers(backbone: nn.Module, train: str) -> frozenset[str]:
    """The names of the backbone's layers that are trained; a layer is a module that owns parameters itself.

    Args:
        backbone: With ``lora:RANK`` one that is adapted.
        train: As :attr:`ModelSpec.train` has it.

    Raises:
        BadInput: If ``last:N`` names more layers than there are.
    """
    if train in ("head", "neck"):
        return frozenset()
    if train.startswith(PREFIX):
        return frozenset(trained_factors(backbone))
    layers = [name for name, module in backbone.named_modules() if list(module.parameters(recurse=False))]
    if train == "all":
        return frozenset(layers)
    last = int(train.removeprefix("last:"))
    if last > len(layers):
        problem = f"asks for {last} layers, and the backbone has {len(layers)} with parameters."
        raise BadInput([Fault("model.train", problem, 'Use "all", or a smaller number.')])
    return frozenset(layers[-last:])


def frozen_names(backbone: nn.Module, spec: ModelSpec) -> frozenset[str]:
    """The names of the frozen tensors, as the whole network's ``state_dict`` has them; counters are not among them.

    Raises:
        BadInput: See :func:`trained_layers`.
    """
    if spec.train == "all":
        return frozenset()
    trained = trained_layers(backbone, spec.train)
    return frozenset(
        f"backbone.{name}"
        for name, tensor in backbone.state_dict().items()
        if tensor.is_floating_point() and name.rpartition(".")[0] not in trained
    )


class Scaled(nn.Module):
    """Features divided by a constant."""

    def __init__(self, divisor: float) -> None:
        super().__init__()
        self.divisor = divisor

    def forward(self, features: Tensor) -> Tensor:
        """Return ``features / divisor``."""
        return features / self.divisor


def standardising(width: int, spec: ModelSpec) -> list[nn.Module]:
    """The layers that bring a frozen backbone's features to mean 0 and variance 1; none for other networks.

    Batch normalisation without parameters: its means and variances are averaged over the sites as all batch
    normalisation is. With ``norm = "group"`` each image's features are standardised by themselves. For a head alone
    they are divided by the root of their number: a vector has length 1 then, and the head's biases, which first have
    to learn how rare the classes are, move as fast as all its weights together.
    """
    if not spec.backbone_frozen:
        return []
    grouped = spec.norm == "group"
    standard = nn.LayerNorm(width, elementwise_affine=False) if grouped else nn.BatchNorm1d(width, affine=False)
    return [standard, Scaled(math.sqrt(width))] if spec.train == "head" else [standard]
