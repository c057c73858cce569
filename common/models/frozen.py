"""The part of a network that nobody trains: one flat array with a hash, which each site needs once."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.models.network import SplitNetwork, build
from common.models.zoo.spec import ModelSpec

NOT_HERE = "the frozen part of the model is not on this site's disk"
"""What a site says where it needs the coordinator to send it again."""


@dataclass(frozen=True, eq=False)
class FrozenPart:
    """The values of a network's frozen tensors.

    Attributes:
        values: float32 ``(n,)``, tensor after tensor in the order of the network's ``state_dict``.
    """

    values: NDArray[np.float32]

    @classmethod
    def of(cls, network: SplitNetwork) -> "FrozenPart":
        """A copy of a network's."""
        tensors = [tensor.detach().cpu().reshape(-1).numpy() for tensor in frozen_tensors(network).values()]
        return cls(np.concatenate(tensors).astype(np.float32, copy=False))

    @cached_property
    def sha256(self) -> str:
        """The hash of the little-endian bytes; names and shapes follow from the plan's architecture."""
        return hashlib.sha256(self.values.astype("<f4", copy=False).tobytes()).hexdigest()

    def write_to(self, network: SplitNetwork) -> None:
        """Overwrite a network's frozen tensors in place.

        Raises:
            ValueError: If the network has another number of frozen values; nothing is written then.
        """
        tensors = frozen_tensors(network)
        sizes = [tensor.numel() for tensor in tensors.values()]
        if len(self.values) != sum(sizes):
            has = f"has {sum(sizes):,} frozen values"
            raise ValueError(f"the frozen part of the model holds {len(self.values):,} values, and this network {has}.")
        values = torch.from_numpy(np.array(self.values, dtype=np.float32))
        with torch.no_grad():
            for tensor, part in zip(tensors.values(), torch.split(values, sizes), strict=True):
                tensor.copy_(part.view(tensor.shape))


def frozen_tensors(network: SplitNetwork) -> dict[str, Tensor]:
    """The live frozen tensors by name, in the network's order."""
    return {name: tensor for name, tensor in network.state_dict().items() if name in network.frozen}


def built_frozen(spec: ModelSpec, seed: int, base: Path) -> FrozenPart | None:
    """The frozen part of a new network of this kind; None where everything is trained.

    Raises:
        BadInput: See :func:`common.models.network.build`.
    """
    return None if spec.train == "all" else FrozenPart.of(build(spec, ("",), seed, base))


def naming(spec: ModelSpec, frozen: FrozenPart | None) -> ModelSpec:
    """The model that names its frozen part by the hash."""
    return spec if frozen is None else spec.model_copy(update={"frozen_sha256": frozen.sha256})
