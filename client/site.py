"""A hospital as its own program sees it: name, labels, images, disk, device."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from torch import Tensor

from client.policy import Policy
from common.contract import Declaration
from common.data.image_set import ImageSet
from common.inference import channels_first
from strategies.masking.site import Identity


@dataclass(frozen=True)
class Site:
    """One site.

    Attributes:
        declaration: Its name and labels.
        train, validation, test: Its images; label columns are its canonical class names in its own order.
        folder: Where it keeps its memory and its own models.
        device: ``cpu`` or ``cuda``.
        policy: What else may leave.
        identity: The key that it is admitted with; None in simulation.
        durable: Flush memory to disk; off in simulation, where a crash ends the sites with everything else.
    """

    declaration: Declaration
    train: ImageSet
    validation: ImageSet
    test: ImageSet
    folder: Path
    device: str = "cpu"
    policy: Policy = field(default_factory=Policy)
    durable: bool = True
    identity: Identity | None = None

    @property
    def name(self) -> str:
        return self.declaration.site

    def pixels(self, part: str) -> Tensor:
        """Images of ``train``, ``validation`` or ``test`` as uint8 ``(n, channels, height, width)``, on the device.

        Training and validation images stay there; test images, which simulated sites share, come when they are needed.
        """
        if part == "test":
            return channels_first(self.test.images).to(self.device)
        return self._resident[part]

    @cached_property
    def _resident(self) -> dict[str, Tensor]:
        parts = {"train": self.train, "validation": self.validation}
        return {name: channels_first(images.images).to(self.device) for name, images in parts.items()}
