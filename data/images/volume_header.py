"""The grid of a volume. This is a separate module, because the readers of volumes take a second to import."""

from dataclasses import dataclass

from polyclinic.data.base.spec import Spacing, VolumeSize

ONE_SLICE = "one slice, which is no volume"
"""End of the error message for a file with only one slice."""


@dataclass(frozen=True)
class VolumeHeader:
    """The grid of a volume.

    Attributes:
        shape: Numbers of voxels along depth, height and width.
        spacing: Distance between neighbouring voxels in mm, in the same order.
        kind, knows_orientation: As in :class:`polyclinic.data.images.volumes.Volume`.
    """

    shape: VolumeSize
    spacing: Spacing
    kind: str
    knows_orientation: bool = True
