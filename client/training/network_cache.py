"""The network that a process trains with: built once, and filled by every request anew."""

from functools import lru_cache

from torch import nn

from common.models.network import SplitNetwork, build
from common.models.zoo.spec import ModelSpec


def empty_network(spec: ModelSpec, class_names: tuple[str, ...], device: str) -> SplitNetwork:
    """A network whose values mean nothing yet; its backbone and neck are those of the request before.

    Drawing the initial weights of a ResNet-18 takes longer than training it on ten images.
    """
    networks = _networks(spec, device)
    if class_names not in networks:
        networks[class_names] = _headed(next(iter(networks.values())), class_names, device)
    network = networks[class_names]
    network.requires_grad_(True).zero_grad(set_to_none=True)
    return network


@lru_cache(maxsize=1)
def _networks(spec: ModelSpec, device: str) -> dict[tuple[str, ...], SplitNetwork]:
    """Networks by their head's rows, all around one backbone.

    Only those of the newest model are kept, so that a process that lasts for many runs does not fill the memory.
    """
    return {(): build(spec, ("",), seed=0).to(device)}


def _headed(kept: SplitNetwork, class_names: tuple[str, ...], device: str) -> SplitNetwork:
    head = nn.Linear(kept.head.in_features, len(class_names), device="meta").to_empty(device=device)
    return SplitNetwork(kept.spec, class_names, backbone=kept.backbone, neck=kept.neck, head=head).to(device)
