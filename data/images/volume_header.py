"""The grid of a volume, in a module of its own, because the readers of volumes take a second to import."""

from dataclasses import dataclass

from polyclinic.data.base.spec import Spacing, VolumeSize

ONE_SLICE = "one slice, which is no volume"
"""End of the reason why a file with one slice is refused."""


@dataclass(frozen=True)
class VolumeHeader:
    """A volume's grid.

    Attributes:
        shape: Numbers of voxels along depth, height and width.
        spacing: Distance of neighbouring voxels in mm, in the same order.
        kind, knows_orientation: As in :class:`polyclinic.data.images.volumes.Volume`.
    """

    shape: VolumeSize
    spacing: Spacing
    kind: str
    knows_orientation: bool = True
