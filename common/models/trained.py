"""Which part of a network is trained, and which is frozen: ``model.train`` of an experiment."""

import math

from torch import Tensor, nn
from torch.nn import functional

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


def refuse_all_trained(backbone: nn.Module, spec: ModelSpec) -> None:
    """Raise :class:`BadInput` where ``model.train`` is not ``all`` and yet nothing is frozen."""
    if spec.train != "all" and not frozen_names(backbone, spec):
        raise BadInput([Fault("model.train", f'"{spec.train}" freezes nothing of this backbone.', 'Use "all".')])


class Standardised(nn.BatchNorm1d):
    """Features less their mean, over their standard deviation; running statistics are plain means over batches.

    A batch of one image has no variance: it is standardised by the running statistics, which it leaves as they are.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, affine=False, momentum=None)

    def forward(self, features: Tensor) -> Tensor:
        """Standardise ``(batch, width)``."""
        if self.training and len(features) == 1:
            return functional.batch_norm(features, self.running_mean, self.running_var, eps=self.eps)
        return super().forward(features)


def forget_batches(network: nn.Module) -> None:
    """Begin the means over batches anew, so that they follow from the images that are seen from now on alone."""
    for module in network.modules():
        if isinstance(module, Standardised) and module.num_batches_tracked is not None:
            module.num_batches_tracked.zero_()


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

    Batch normalisation without parameters. After each round's training a site's mean and variance are those over the
    round's batches, see :func:`forget_batches`; they are averaged over the sites as all batch normalisation is. With
    ``norm = "group"`` each image's features are standardised by themselves. For a head alone they are divided by the
    root of their number: a vector has length 1 then, and the head's biases, which first have to learn how rare the
    classes are, move as fast as all its weights together.
    """
    if not spec.backbone_frozen:
        return []
    grouped = spec.norm == "group"
    standard = nn.LayerNorm(width, elementwise_affine=False) if grouped else Standardised(width)
    return [standard, Scaled(math.sqrt(width))] if spec.train == "head" else [standard]
