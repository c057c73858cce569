"""The optimiser of local training, its learning rate over the rounds, and its state on the site's disk."""

import math
import operator
from collections.abc import Mapping
from inspect import unwrap
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from polyclinic.common.config import TrainingSection
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.models import network as networks
from polyclinic.common.models.network import Precision, SplitNetwork
from polyclinic.common.models.parts import iterate_parameters
from polyclinic.common.plugins import OPTIMIZERS, PLUGIN_PREFIX, SCHEDULES, load_plugin_entry_point

INITIAL_GRADIENT_SCALE = 1024.0
"""Loss scale at the start of each epoch. Torch's default of 65536 overflows in the first steps, and a small site has
few steps."""

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


def _make_uncompiled_optimizer(kind: type[Kind]) -> type[Kind]:
    """Return a subclass of an optimiser that computes the same bits without importing ``torch._dynamo``.

    Torch wraps three methods to exclude them from ``torch.compile``. The wrappers import ``torch._dynamo``, which costs
    each training process 1.2 CPU seconds and 150 MB. Training steps are never compiled here.
    """
    methods = {name: unwrap(getattr(kind, name)) for name in ("add_param_group", "zero_grad")}
    return type(kind.__name__, (kind,), methods | {"step": torch.no_grad()(unwrap(kind.step))})


_SGD = _make_uncompiled_optimizer(torch.optim.SGD)
_ADAM = _make_uncompiled_optimizer(torch.optim.Adam)
_ADAMW = _make_uncompiled_optimizer(torch.optim.AdamW)


def make_optimizer(network: nn.Module, spec: TrainingSection, lr: float) -> torch.optim.Optimizer:
    """Return an optimiser of the network's trainable parameters.

    Adam has Keras' epsilon (docs/papers.md#surgical-adam). Steps are fused: one pass over each tensor. The
    factory of a plug-in gets parameters, ``lr`` and ``weight_decay``.

    Raises:
        BadInput: If a plug-in is not installed, or does not return an optimiser.
    """
    learning = list(filter(operator.attrgetter("requires_grad"), iterate_parameters(network)))
    if spec.optimizer.startswith(PLUGIN_PREFIX):
        factory = load_plugin_entry_point(OPTIMIZERS, spec.optimizer.removeprefix(PLUGIN_PREFIX))
        optimizer = factory(learning, lr=lr, weight_decay=spec.weight_decay)
        if isinstance(optimizer, torch.optim.Optimizer):
            return optimizer
        problem = f'"{spec.optimizer}" made a {type(optimizer).__name__}, not a torch.optim.Optimizer.'
        raise BadInput([Fault("training.optimizer", problem)])
    if spec.optimizer != "sgd":
        kind = _ADAM if spec.optimizer == "adam" else _ADAMW
        return kind(learning, lr=lr, eps=1e-7, weight_decay=spec.weight_decay, fused=True)
    return _SGD(learning, lr=lr, momentum=spec.momentum, weight_decay=spec.weight_decay, fused=True)


def compute_learning_rate_factor(spec: TrainingSection, server_round: int, rounds: int) -> float:
    """Return the factor by which the schedule multiplies the learning rate in a round.

    In the first ``schedule_warm_up`` rounds the factor rises linearly. After them, built-in schedules return factors
    above 0 and at most 1, plug-ins 0 or more.

    Raises:
        BadInput: If a plug-in is not installed, or does not return such a number.
    """
    rising = spec.schedule_warm_up
    if server_round <= rising:
        return server_round / (rising + 1)
    if spec.schedule.startswith(PLUGIN_PREFIX):
        factor = load_plugin_entry_point(SCHEDULES, spec.schedule.removeprefix(PLUGIN_PREFIX))(server_round, rounds)
        try:
            value = float(factor)
        except (TypeError, ValueError):
            value = math.nan
        if 0 <= value < math.inf:
            return value
        returned = f'"{spec.schedule}" returned {factor!r} for round {server_round} of {rounds}'
        raise BadInput([Fault("training.schedule", f"{returned}, not a finite number of 0 or more.")])
    if spec.schedule == "constant" or rounds <= rising:
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * min(server_round - 1 - rising, rounds - 1 - rising) / (rounds - rising)))


def make_gradient_scaler(device: torch.device, precision: Precision) -> torch.amp.GradScaler:
    """Return a scaler that keeps small float16 gradients from being rounded to 0; with other formats it does nothing.

    A step whose gradients overflow is skipped, and the scale is lowered.
    """
    enabled = networks.resolve_precision(device.type, precision) == "fp16"
    return torch.amp.GradScaler(device.type, init_scale=INITIAL_GRADIENT_SCALE, enabled=enabled)


def save_optimizer_state(network: SplitNetwork, optimizer: torch.optim.Optimizer) -> dict[str, NDArray[np.float32]]:
    """Return the optimiser's state as arrays named ``parameter/key``, which the site stores for the next round.

    A parameter is omitted if any value of its state is neither a scalar nor of the parameter's shape: starting fresh is
    better than restoring half a state.
    """
    arrays: dict[str, NDArray[np.float32]] = {}
    for name, parameter in network.named_parameters():
        saved = dict[str, NDArray[np.float32]]()
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape in (torch.Size(), parameter.shape):
                saved[f"{name}/{key}"] = value.detach().cpu().numpy().copy()
            elif value is not None:
                break
        else:
            arrays |= saved
    return arrays


def restore_optimizer_state(
    network: SplitNetwork, optimizer: torch.optim.Optimizer, arrays: Mapping[str, NDArray[np.float32]]
) -> None:
    """Restore the arrays of :func:`save_optimizer_state`, for parameters whose shape is still the same."""
    parameters = dict(network.named_parameters())
    for path, array in arrays.items():
        name, _, key = path.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None or (array.ndim and array.shape != tuple(parameter.shape)):
            continue
        # In the parameter's memory format, because a fused step reads both in memory order.
        restored = torch.empty_like(parameter) if array.ndim else torch.empty((), device=parameter.device)
        optimizer.state[parameter][key] = restored.copy_(torch.from_numpy(array.copy()))
