"""Experiments of three hospitals that outline two of four drawn organs each: pictures, volumes, and patches."""

from tests.organs import UNLIKE

ORGANS = f"""
[run]
method = "surgical"
rounds = 3
seed = 3

[model]
task = "exclusive_segmentation"
architecture = "tiny_unet"
channels = 1
image_size = 32

[training]
batch_size = 8
lr = 0.003

[simulation]
backend = "inline"

[data]
kind = "organs"
images = 90
image_size = 32

[partition]
kind = "class_lists"
{UNLIKE}
"""

VOLUMES = ORGANS.replace("image_size = 32\n\n[training]", "image_size = [8, 24, 24]\n\n[training]").replace(
    "images = 90\nimage_size = 32", "images = 60\nimage_size = 24\ndepth = 8"
)

PATCHES = VOLUMES.replace("[training]", "patch_size = [8, 16, 16]\n\n[training]\npatches_per_volume = 2")
