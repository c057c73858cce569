"""A hospital as its own program sees it: name, labels, images, disk, device."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from client.policy import Policy
from common.contract import Declaration
from common.data.image_set import ImageSet
from common.pixels import Pixels, pixels_of
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

    def pixels(self, part: str) -> Pixels:
        """Pictures of ``train``, ``validation`` or ``test``, for the device."""
        return self._pixels[part]

    @cached_property
    def _pixels(self) -> dict[str, Pixels]:
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: pixels_of(images, self.device) for name, images in parts.items()}
