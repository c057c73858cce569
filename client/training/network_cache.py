"""The network that a process trains with: built once, and filled by every request anew."""

from dataclasses import dataclass, field
from functools import lru_cache

import torch

from client.site.site import Site
from common.models.gpu import on_device, use_gpus
from common.models.network import MemoryFormat, SplitNetwork, build, head_of, in_format, unfreeze
from common.models.state import FrozenPart
from common.models.zoo.spec import ModelSpec
from common.wire.errors import WireError
from common.wire.records import Groups


@dataclass
class KeptNetworks:
    """Networks by their head's rows, all around one backbone.

    Attributes:
        frozen_sha256: Of the frozen part that the backbone holds; empty where it is not filled yet.
        memory_format: Of all their convolutions; a new network's to begin with.
    """

    by_rows: dict[tuple[str, ...], SplitNetwork] = field(default_factory=dict)
    frozen_sha256: str = ""
    memory_format: MemoryFormat = "channels_last"


def empty_network(
    spec: ModelSpec,
    class_names: tuple[str, ...],
    device: str,
    memory_format: MemoryFormat | None = None,
    gpus: int = 1,
) -> SplitNetwork:
    """A network whose values mean nothing yet; its backbone and neck are those of the request before.

    Drawing the initial weights of a ResNet-18 takes longer than training it on ten images.

    Args:
        memory_format: None where it does not matter.
        gpus: How many GPUs each batch is split across, where the device is ``cuda``.
    """
    kept = _networks(spec, device)
    networks = kept.by_rows
    if memory_format not in (None, kept.memory_format):
        in_format(networks[()], memory_format)  # all have its backbone and neck
        kept.memory_format = memory_format
    if class_names not in networks:
        networks[class_names] = _headed(next(iter(networks.values())), class_names, device)
    network = networks[class_names]
    use_gpus(network.backbone, gpus)
    unfreeze(network)
    network.zero_grad(set_to_none=True)
    return network


def fill_frozen_part(network: SplitNetwork, site: Site, came: Groups) -> None:
    """Fill what nobody trains of a network of :func:`empty_network`: from the request, or from the site's disk.

    Raises:
        WireError: If it is neither here nor there, or another one than the plan names.
        ValueError: If it is not of this network.
    """
    if (sha256 := network.spec.frozen_sha256) is None:
        if network.frozen or came.trunk is not None:
            raise WireError("the plan does not name the frozen part of its model.")
        return
    if came.trunk is not None:
        site.frozen_parts.keep(FrozenPart(came.trunk), sha256)
    kept = _networks(network.spec, site.device)
    if kept.frozen_sha256 != sha256:
        site.frozen_parts.read(sha256).write_to(network)
        kept.frozen_sha256 = sha256


@lru_cache(maxsize=1)
def _networks(spec: ModelSpec, device: str) -> KeptNetworks:
    """Only those of the newest model are kept, so that a process that lasts for many runs does not fill the memory."""
    return KeptNetworks({(): on_device(build(spec, ("",), seed=0), device)})


def _headed(kept: SplitNetwork, class_names: tuple[str, ...], device: str) -> SplitNetwork:
    rows, features = len(class_names), kept.head.in_features
    head = head_of(torch.empty(rows, features, device=device), torch.empty(rows, device=device))
    return SplitNetwork(kept.spec, class_names, backbone=kept.backbone, neck=kept.neck, head=head).to(device)
