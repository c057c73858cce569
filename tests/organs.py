"""Drawn organs for tests of segmentation: three hospitals that outline two of four organs each."""

from polyclinic.strategies.registry import STRATEGIES

TASKS = ("segmentation", "exclusive_segmentation")
SEGMENTING = sorted(
    name for name, method in STRATEGIES.items() if not method.site_class.traits.reason_against_segmentation
)
"""Methods that segment."""
UNLIKE = 'lists = { north = ["Kidney", "Liver"], east = ["Liver", "Pancreas"], south = ["Pancreas", "Spleen"] }'
EVERY = '["Kidney", "Liver", "Pancreas", "Spleen"]'
ALIKE = f"lists = {{ north = {EVERY}, east = {EVERY}, south = {EVERY} }}"
ORGANS = (
    "model.task=segmentation",
    "model.architecture=tiny_unet",
    "model.image_size=32",
    "training.batch_size=8",
    'data={kind = "organs", images = 60, image_size = 32}',
    f'partition={{kind = "class_lists", {UNLIKE}}}',
)
"""Overrides of the digits experiment of :mod:`tests.federations`."""
VOLUMES = (
    *ORGANS,
    "model.image_size=[8, 24, 24]",
    'data={kind = "organs", images = 48, image_size = 24, depth = 8}',
)
"""The same of volumes."""
ALL_OUTLINED = (*ORGANS, f'partition={{kind = "class_lists", {ALIKE}}}')
"""Every hospital outlines every organ."""
PATCHES = (*VOLUMES, "model.patch_size=[8, 16, 16]", "training.patches_per_volume=2")
"""Volumes that are trained in patches, and computed by a sliding window."""
