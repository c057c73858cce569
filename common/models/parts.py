"""Cached lists of a network's modules and parameters, because walking through a small network takes longer than using
it.

For each request, a site switches the network between training and evaluation, resets which parameters are trained, and
reads and writes its values. The lists contain the place where a tensor is stored, not the tensor itself, so that they
stay valid if a tensor is replaced. The modules of our networks are never replaced after the network is built. Networks
of other packages may replace modules, so their lists are made anew each time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from polyclinic.common.models.zoo.spec import is_external_network

TensorSlot = tuple[dict[str, Tensor | None], str]
"""The place of a tensor: the dictionary of a module's parameters or buffers, and the tensor's key in it."""


@dataclass(frozen=True)
class NetworkParts:
    """The modules of a network, and the places where its tensors are stored.

    Attributes:
        modules: All modules below the network. The network itself is left out, because it could then never be freed.
        parameters: The place of each parameter, once each, in the order of ``network.parameters()``.
        buffers: Name as in ``network.named_buffers()`` -> place of the buffer.
        switches_plainly: True if ``train()`` of each module only sets the module's flag.
    """

    modules: tuple[nn.Module, ...]
    parameters: tuple[TensorSlot, ...]
    buffers: Mapping[str, TensorSlot]
    switches_plainly: bool


_PARTS_BY_NETWORK: WeakKeyDictionary[nn.Module, NetworkParts] = WeakKeyDictionary()


def list_parts(network: nn.Module, *, fixed: bool | None = None) -> NetworkParts:
    """Return the modules of a network and the places of its tensors, from the cache if possible.

    Args:
        network: A network, or a part of one such as its backbone.
        fixed: True if the modules are never replaced; None to find out, see :func:`has_fixed_modules`.
    """
    parts = _PARTS_BY_NETWORK.get(network)
    if parts is None:
        parts = _make_parts(network)
        if has_fixed_modules(network) if fixed is None else fixed:
            _PARTS_BY_NETWORK[network] = parts
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
    """Return name -> place of each tensor of the network's ``state_dict``."""
    slots = dict[str, TensorSlot]()
    for path, module in network.named_modules(remove_duplicate=False):
        for tensors in (module._parameters, module._buffers):
            for key in tensors:
                slots[f"{path}.{key}" if path else key] = (tensors, key)
    return slots


def get_tensor(slot: TensorSlot) -> Tensor:
    """Return the tensor that is currently stored at a place."""
    owner, key = slot
    tensor = owner[key]
    assert tensor is not None, key
    return tensor


def iterate_parameters(network: nn.Module, *, fixed: bool | None = None) -> Iterator[Tensor]:
    """Iterate over the network's parameters, once each, in the order of ``network.parameters()``.

    Args:
        network: A network or a part of one.
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
        module.__dict__["training"] = training  # faster than nn.Module's setter, which checks for parameters first


def require_gradients(network: nn.Module, *, fixed: bool | None = None) -> None:
    """Make all parameters trained, like ``network.requires_grad_(True)``.

    Args:
        network: A network or a part of one.
        fixed: As in :func:`list_parts`.
    """
    for parameter in iterate_parameters(network, fixed=fixed):
        if not parameter.requires_grad:
            parameter.requires_grad_(True)
