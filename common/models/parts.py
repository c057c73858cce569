"""A network's modules and parameters, listed once: walking through a small network takes longer than using it.

Each request of a site switches a network between training and evaluation, resets which parameters are trained, and
reads and writes its values. The lists hold where a tensor is stored, not the tensor, so that a tensor that is replaced
is found. The modules of our own networks are never replaced after the network is built. Networks of others may do so,
and their lists are made anew each time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from polyclinic.common.models.zoo.spec import is_external_network

TensorSlot = tuple[dict[str, Tensor | None], str]
"""The dictionary of a module's parameters or buffers, and the tensor's key in it."""


@dataclass(frozen=True)
class NetworkParts:
    """Where a network keeps its modules and parameters.

    Attributes:
        modules: All modules below the network; not the network itself, which would then never be freed.
        parameters: Where each parameter is stored, each once, in the order of ``network.parameters()``.
        buffers: Where each buffer is stored, by its name as in ``network.named_buffers()``.
        switches_plainly: True if ``train()`` only sets the flag of each module.
    """

    modules: tuple[nn.Module, ...]
    parameters: tuple[TensorSlot, ...]
    buffers: Mapping[str, TensorSlot]
    switches_plainly: bool


_PARTS: WeakKeyDictionary[nn.Module, NetworkParts] = WeakKeyDictionary()


def list_parts(network: nn.Module, *, fixed: bool | None = None) -> NetworkParts:
    """Return where a network keeps its modules and parameters.

    Args:
        network: A network, or a part of one such as its backbone.
        fixed: True if the modules are never replaced; None to find out, see :func:`has_fixed_modules`.
    """
    parts = _PARTS.get(network)
    if parts is None:
        parts = _make_parts(network)
        if has_fixed_modules(network) if fixed is None else fixed:
            _PARTS[network] = parts
    return parts


def has_fixed_modules(network: nn.Module) -> bool:
    """Return True if no module of the network is replaced after the network is built."""
    spec = getattr(network, "spec", None)
    return spec is not None and not is_external_network(spec.architecture)


def _make_parts(network: nn.Module) -> NetworkParts:
    modules = list(network.modules())
    slots = list[TensorSlot]()
    listed = set[int]()
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in listed:
                listed.add(id(parameter))
                slots.append((module._parameters, name))  # type: ignore[arg-type]
    stored = find_tensor_slots(network)
    buffers = {name: stored[name] for name, _ in network.named_buffers()}
    plain = all(type(module).train is nn.Module.train for module in modules)
    return NetworkParts(tuple(modules[1:]), tuple(slots), buffers, plain)


def find_tensor_slots(network: nn.Module) -> dict[str, TensorSlot]:
    """Return where each tensor of the network's ``state_dict`` is stored, by its name."""
    slots = dict[str, TensorSlot]()
    for path, module in network.named_modules(remove_duplicate=False):
        for tensors in (module._parameters, module._buffers):
            for key in tensors:
                slots[f"{path}.{key}" if path else key] = (tensors, key)
    return slots


def get_tensor(slot: TensorSlot) -> Tensor:
    """Return the tensor that is stored there now."""
    owner, key = slot
    tensor = owner[key]
    assert tensor is not None, key
    return tensor


def iterate_parameters(network: nn.Module, *, fixed: bool | None = None) -> Iterator[Tensor]:
    """Iterate over the network's parameters, each once, in the order of ``network.parameters()``.

    Args:
        fixed: As in :func:`list_parts`.
    """
    return map(get_tensor, list_parts(network, fixed=fixed).parameters)


def set_training_flag(network: nn.Module, *, training: bool) -> None:
    """Switch a network to training or evaluation mode, like ``network.train(training)``."""
    parts = list_parts(network)
    if not parts.switches_plainly:
        network.train(training)
        return
    network.training = training
    for module in parts.modules:
        module.__dict__["training"] = training  # nn.Module's own setter looks for parameters and buffers first


def require_gradients(network: nn.Module, *, fixed: bool | None = None) -> None:
    """Have all parameters trained, like ``network.requires_grad_(True)``.

    Args:
        fixed: As in :func:`list_parts`.
    """
    for parameter in iterate_parameters(network, fixed=fixed):
        if not parameter.requires_grad:
            parameter.requires_grad_(True)
