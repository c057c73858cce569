"""Load the network of a saved model, also if it was a custom object of another process."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.plugins import (
    MODELS,
    PLUGIN_PREFIX,
    format_plugin_user_name,
    is_local_plugin_name,
    make_local_plugin_name,
    register_local_plugin_as,
)

if TYPE_CHECKING:
    from torch import nn

    from polyclinic.common.models.network import SplitNetwork
    from polyclinic.custom_parts import Network


class OtherNetworkWarning(UserWarning):
    """Warns that the network which the caller passes for a saved model may not be the one that was trained."""


@dataclass(frozen=True)
class GivenNetwork:
    """The custom network that a caller passes for a saved model, and its ``head=``; None where nothing is passed."""

    model: nn.Module | Network | None = None
    head: str | None = None


def load_given_network(folder: Path, given: GivenNetwork) -> SplitNetwork:
    """Load the model of a folder; its weights replace those of a given network.

    Warns:
        OtherNetworkWarning: If code or initial weights of the given network differ from those of the trained one.

    Raises:
        BadInput: If the saved model cannot be loaded, is no network of the user's own, or has other tensors or another
            ``head``.
    """
    from polyclinic.common.models.saved import load_model, read_model_description

    if given.model is None:
        return load_model(folder)
    model_spec = read_model_description(folder).model
    name = model_spec.architecture.removeprefix(PLUGIN_PREFIX)
    if not is_local_plugin_name(name):
        raise BadInput(
            [Fault("model", f"is not needed: the network of {folder} is {model_spec.architecture}.", "Leave it out.")]
        )
    if given.head is not None and given.head != model_spec.head:
        problem = f"is {given.head!r}; {folder} was trained with {model_spec.head!r}."
        raise BadInput([Fault("head", problem, "Leave it out: the run knows it.")])
    with register_local_plugin_as(MODELS, name, given.model):
        network = load_model(folder)
    if make_local_plugin_name(given.model) != name:
        name_for_user = format_plugin_user_name("model", name)
        warnings.warn(
            f"{folder} was trained with {name_for_user}, from which the given network differs in code or in initial "
            "weights. Initial weights do not matter, because those of the run replace them. Other code may give other "
            "results.",
            OtherNetworkWarning,
            stacklevel=4,
        )
    return network
