"""The network that a process trains with: built once, and filled by every request anew."""

from functools import lru_cache

from torch import nn

from common.models.network import SplitNetwork, build
from common.models.spec import ModelSpec


def empty_network(spec: ModelSpec, class_names: tuple[str, ...], device: str) -> SplitNetwork:
    """A network whose values mean nothing yet; its backbone and neck are those of the request before.

    Drawing the initial weights of a ResNet-18 takes longer than training it on ten images.
    """
    network = _headed(spec, class_names, device)
    network.requires_grad_(True).zero_grad(set_to_none=True)
    return network


@lru_cache(maxsize=64)
def _headed(spec: ModelSpec, class_names: tuple[str, ...], device: str) -> SplitNetwork:
    kept = _kept(spec, device)
    head = nn.Linear(kept.head.in_features, len(class_names), device="meta").to_empty(device=device)
    return SplitNetwork(spec, class_names, backbone=kept.backbone, neck=kept.neck, head=head).to(device)


@lru_cache(maxsize=1)
def _kept(spec: ModelSpec, device: str) -> SplitNetwork:
    return build(spec, ("",), seed=0).to(device)
