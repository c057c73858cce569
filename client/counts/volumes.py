"""The fingerprint of a hospital's training volumes: sums from which the coordinator plans a segmentation network."""

import numpy as np
from numpy.typing import NDArray

from polyclinic.client.site.site import Site
from polyclinic.common.volume_fingerprint import GREY_VALUES, VolumeFingerprint, group_volumes
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.images.volumes import read_volume_header

VolumeSides = tuple[float, ...]
"""Three numbers in mm, one for each axis of a volume."""


def make_volume_fingerprint(site: Site) -> VolumeFingerprint | None:
    """Return sums over the site's training volumes; None if their grids are unknown, or of too few patients."""
    images = site.reported_training_images
    grids = _list_volume_grids(site, images)
    if not grids:
        return None
    patients = images.patients.tolist()
    smallest = site.policy.smallest_count
    spacing = [group_volumes([grid[0][axis] for grid in grids], patients, smallest) for axis in range(3)]
    extent = [group_volumes([grid[1][axis] for grid in grids], patients, smallest) for axis in range(3)]
    if not all((*spacing, *extent)):
        return None
    grey = count_outlined_voxels(images).tolist() if _shares_grey_values(site) else ()
    return VolumeFingerprint.model_validate({"spacing": spacing, "extent": extent, "grey": grey})


def _list_volume_grids(site: Site, images: ImageSet) -> list[tuple[VolumeSides, VolumeSides]]:
    """Return voxel spacing and side lengths of each training volume, in mm; empty if the site does not know them.

    Volumes stored as arrays count as having voxels of 1 mm.
    """
    form = site.pixel_form
    if form is None or form.depth is None or not len(images):
        return []
    if not form.decoded:
        sides = tuple(map(float, images.stored.shape[1:4]))
        return [((1.0, 1.0, 1.0), sides)] * len(images)
    if site.find_picture_files is None or images.lines is None:
        return []
    files = site.find_picture_files()
    headers = [read_volume_header(files[line]) for line in images.lines.tolist()]
    return [
        (header.spacing, tuple(side * mm for side, mm in zip(header.shape, header.spacing, strict=True)))
        for header in headers
    ]


def _shares_grey_values(site: Site) -> bool:
    """Return True if a grey value has the same meaning in all volumes: they are arrays, or a window is set."""
    form = site.pixel_form
    return form is not None and (not form.decoded or "window" in form.rendering)


def count_outlined_voxels(images: ImageSet) -> NDArray[np.int64]:
    """Count the outlined voxels of all volumes by their stored grey value, int64 ``(256,)``."""
    assert images.masks is not None, "checked before"
    counts = np.zeros(GREY_VALUES, np.int64)
    for row, labels in enumerate(images.labels):
        annotated = [name for name, label in zip(images.class_names, labels, strict=True) if not np.isnan(label)]
        if not annotated:
            continue
        outlined = images.masks.read_class_areas(np.array([row]), annotated)[0].any(axis=0)
        volume = images.select_rows(np.array([row])).images[0][..., 0]
        counts += np.bincount(volume[outlined].astype(np.uint8), minlength=GREY_VALUES)
    return counts
