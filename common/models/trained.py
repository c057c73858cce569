"""Which part of a network is trained, and which is frozen: ``model.train`` of an experiment."""

from torch import nn

from common.errors import BadInput, Fault
from common.models.zoo.spec import ModelSpec


def trained_layers(backbone: nn.Module, train: str) -> frozenset[str]:
    """The names of the backbone's layers that are trained; a layer is a module that owns parameters itself.

    Args:
        train: As :attr:`ModelSpec.train` has it.

    Raises:
        BadInput: If ``last:N`` names more layers than there are.
    """
    if train in ("head", "neck"):
        return frozenset()
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


def standardising(width: int, spec: ModelSpec) -> list[nn.Module]:
    """The layer that brings a frozen backbone's features to mean 0 and variance 1; none for other networks.

    A head on features of any scale would learn next to nothing at the usual rates. Batch normalisation without
    parameters: its means and variances are averaged over the sites as all batch normalisation is. With
    ``norm = "group"`` each image's features are standardised by themselves.
    """
    if not spec.backbone_frozen:
        return []
    if spec.norm == "group":
        return [nn.LayerNorm(width, elementwise_affine=False)]
    return [nn.BatchNorm1d(width, affine=False)]
