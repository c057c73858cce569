"""Volumes: first decoding and later epochs beside bare nibabel and MONAI's PersistentDataset; a step's time and memory.

    PYTHONPATH=. python benchmarks/volumes.py                                   # decoding, about a CPU minute
    PYTHONPATH=. python benchmarks/volumes.py --masks                           # the same with a mask for each volume
    PYTHONPATH=. python benchmarks/volumes.py --step monai:DenseNet121 --side 128 --batch 2
    PYTHONPATH=. python benchmarks/volumes.py --patches train --stored-side 256 --side 128 --batch 2
    PYTHONPATH=. python benchmarks/volumes.py --patches predict --stored-side 256 --side 128
    PYTHONPATH=. python benchmarks/volumes.py --round                           # four hospitals segment 48³

It needs the extra ``monai``. Times are CPU seconds of this process.
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import monai.data
import monai.transforms
import nibabel
import numpy as np
import torch
from rich.console import Console

from polyclinic.common.config import TrainingSection, read_experiment
from polyclinic.common.models.network import build_network, decide_class_areas
from polyclinic.common.models.segmenting import iterate_logits
from polyclinic.common.models.zoo.spec import ModelSpec, Task
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.base.masks import LazyMasks, MaskSet
from polyclinic.data.base.spec import AugmentationSpec, PictureRenderingOptions
from polyclinic.data.images import store
from polyclinic.data.images.pixel_cache import MIN_FILE_AGE_S, PixelCache
from polyclinic.data.images.pixels import load_pixels_on_device
from polyclinic.data.images.reading import DecodedImageFormat
from polyclinic.data.tables.files import LazyPicturePaths
from polyclinic.data.tables.masks import MaskFiles, read_table_masks
from polyclinic.server.simulation.simulate import simulate
from polyclinic.strategies.local.objective import pair_pixels_with_labels, plain, read_in_patches
from polyclinic.strategies.local.segmentation_losses import marginal_and_exclusion_loss
from polyclinic.strategies.local.training import FrozenNetworkParts, TrainingTask, train_epoch

LOW, HIGH = -250.0, 750.0
"""Values that are black and white."""
GIB = 2**30


def write_volumes(folder: Path, count: int, side: int) -> list[Path]:
    """Write volumes of noise with a bright part that differs, ``.nii.gz`` with 16-bit voxels of 1 mm."""
    random, files = np.random.default_rng(0), list[Path]()
    noise, depth = random.normal(0, 30, (side, side, side)), np.arange(side)[:, None, None]
    for number in range(count):
        voxels = np.roll(noise, number, axis=0) + 500 * (depth < side * (number % 7) / 7)
        files.append(folder / f"{number:03}.nii.gz")
        image: Any = nibabel.Nifti1Image(voxels.astype(np.int16), np.eye(4))  # type: ignore[no-untyped-call]
        nibabel.save(image, files[-1])
    return files


def write_masks(folder: Path, count: int, side: int) -> list[Path]:
    """Write a label map with two organs for each volume of :func:`write_volumes`."""
    files, middle = list[Path](), side // 2
    for number in range(count):
        values = np.zeros((side, side, side), np.uint8)
        values[:middle, number : number + middle, :middle] = 1
        values[middle:, middle:, number : number + middle] = 2
        files.append(folder / f"{number:03}-mask.nii.gz")
        image: Any = nibabel.Nifti1Image(values, np.eye(4))  # type: ignore[no-untyped-call]
        nibabel.save(image, files[-1])
    return files


def measure_cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds that a call takes."""
    began = time.process_time()
    work()
    return time.process_time() - began


def read_ours(files: Sequence[Path], side: int, spacing: float, cache: Path) -> store.DecodedPictures:
    """Decode the volumes into a cache, or open it if it has them."""
    window = ((LOW + HIGH) / 2, HIGH - LOW)
    rendering = PictureRenderingOptions(window=window, spacing=(spacing, spacing, spacing))
    return store.decode_pictures(
        [file.name for file in files],
        lambda row: files[row],
        DecodedImageFormat((side, side, side), False, "pad", rendering),
        store.DecodedImageStore(cache, workers=1),
        identify=lambda row: store.FileIdentity.identify_file(files[row]),
    )


def read_our_masks(files: Sequence[Path], masks: Sequence[Path], side: int, spacing: float, cache: Path) -> MaskSet:
    """Read the masks into a cache, or open it if it has them."""
    columns = MaskFiles(Path(), np.array([[str(file)] for file in masks], object), ("a", "b"), (1, 2), "masks")
    pictures = LazyPicturePaths.from_folder_and_names(files[0].parent, [file.name for file in files])
    rendering = PictureRenderingOptions(spacing=(spacing, spacing, spacing))
    form = DecodedImageFormat((side, side, side), False, "pad", rendering)
    return read_table_masks(columns, pictures, form, store.DecodedImageStore(cache, workers=1))[0]


def make_monai_dataset(files: Sequence[Path], masks: Sequence[Path], side: int, spacing: float, cache: Path) -> Any:
    """Return MONAI's data set that does the same to the volumes, and to their masks."""
    transforms: Any = monai.transforms
    data: Any = monai.data
    keys = ["image", "label"] if masks else ["image"]
    steps = transforms.Compose(
        [
            transforms.LoadImaged(keys),
            transforms.EnsureChannelFirstd(keys),
            transforms.Orientationd(keys, axcodes="RAS", labels=None),
            transforms.Spacingd(keys, pixdim=(spacing,) * 3, mode=["bilinear", "nearest"][: len(keys)]),
            transforms.ScaleIntensityRanged("image", LOW, HIGH, 0, 1, clip=True),
            transforms.ResizeWithPadOrCropd(keys, (side, side, side)),
        ]
    )
    rows = [dict(zip(keys, map(str, pair), strict=True)) for pair in zip(files, *[masks] * bool(masks), strict=True)]
    return data.PersistentDataset(rows, steps, cache_dir=cache)


def compare_decoding(count: int, stored_side: int, side: int, *, has_masks: bool) -> None:
    """Print the CPU seconds of the first decoding and of later epochs, and their ratios."""
    spacing = stored_side / side
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write_volumes(folder, count, stored_side)
        masks = write_masks(folder, count, stored_side) if has_masks else []
        time.sleep(MIN_FILE_AGE_S + 0.5)  # younger files are hashed again
        store.CACHE_THRESHOLD_BYTES = 0

        def read_all_by_nibabel() -> None:
            for file in (*files, *masks):
                np.asarray(nibabel.load(file).dataobj)  # type: ignore[attr-defined]

        def read_epoch() -> None:
            decoded = read_ours(files, side, spacing, folder / "ours")
            outlined = read_our_masks(files, masks, side, spacing, folder / "ours") if masks else None
            for start in range(0, count, 4):
                decoded.stored[decoded.places[start : start + 4]].sum()
                if outlined is not None:
                    outlined.stored[outlined.places[start : start + 4]].sum()

        dataset = make_monai_dataset(files, masks, side, spacing, folder / "monai")

        def read_monai_epoch() -> None:
            for row in range(count):
                for value in dataset[row].values():
                    value.sum()

        works = (read_all_by_nibabel, read_epoch, read_epoch, read_monai_epoch, read_monai_epoch)
        bare, first, later, monai_first, monai_later = map(measure_cpu_seconds, works)
    print(f"{count} volumes{' with masks' * bool(masks)} of {stored_side}³ to {side}³, CPU seconds")
    print(f"bare nibabel {bare:.2f}; ours first {first:.2f}, later {later:.4f}")
    print(f"MONAI first {monai_first:.2f}, later {monai_later:.4f}")
    print(f"first: {first / bare:.2f} of nibabel, {first / monai_first:.2f} of MONAI")
    print(f"later: {later / bare:.4f} of nibabel, {later / monai_later:.2f} of MONAI")


def measure_step(architecture: str, side: int, batch: int) -> None:
    """Print the CPU seconds of a training step, and the memory of the process at its peak."""
    spec = ModelSpec.model_validate({"architecture": architecture, "channels": 1, "image_size": [side] * 3})
    network = build_network(spec, ("a", "b", "c"), 0).train()
    images = torch.randint(0, 256, (batch, *spec.input_shape), dtype=torch.uint8)
    optimizer = torch.optim.Adam(network.parameters())

    def train() -> None:
        optimizer.zero_grad()
        network(images).square().mean().backward()
        optimizer.step()

    train()
    seconds, peak = measure_cpu_seconds(train), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{architecture}, {batch} volumes of {side}³: {seconds:.1f} CPU s a step, {peak / GIB:.1f} GiB")


def read_peak_gib() -> float:
    """Return the most memory that this process has had, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def measure_patches(work: str, architecture: str, stored_side: int, side: int, batch: int) -> None:
    """Print time and peak memory of training on patches of volumes in a cache, or of a window over one of them.

    Args:
        work: ``train`` or ``predict``.
        stored_side: Side of the whole volumes.
        side: Side of a patch.
    """
    names: tuple[str, ...] = ("a", "b", "c", "d")
    task: Task = "exclusive_segmentation"
    model = {"architecture": architecture, "channels": 1, "task": task, "patch_size": [side] * 3}
    spec = ModelSpec.model_validate({**model, "image_size": [stored_side] * 3})
    sides = (stored_side, stored_side, stored_side)
    with tempfile.TemporaryDirectory() as name:
        cache, masks = PixelCache(Path(name) / "volumes", (*sides, 1)), PixelCache(Path(name) / "masks", sides)
        noise = np.random.default_rng(0).integers(0, 256, sides, dtype=np.uint8)
        for kind, content in ((cache, noise[..., None]), (masks, noise // 16)):
            with kind.open_cache_writer() as out:
                for number in range(2):
                    out.add_picture_to_cache(bytes([number]) * 32, content)
        bits = {each: 1 << column for column, each in enumerate(names)}
        outlined = LazyMasks(masks.open_cached_pictures(), sides, np.dtype(np.uint8), np.full(2, 15))
        images = ImageSet(
            cache.open_cached_pictures(),
            np.ones((2, len(names)), np.float32),
            names,
            np.array(["one", "two"]),
            np.array(["", ""]),
            masks=MaskSet(outlined, np.arange(2), bits),
        )
        del noise
        network, pixels = build_network(spec, names, 0), load_pixels_on_device(images, "cpu")
        if work == "train":
            training = TrainingSection(batch_size=batch, patches_per_volume=batch)
            examples = read_in_patches(pair_pixels_with_labels(images, pixels, names), spec, training)
            objective = plain(marginal_and_exclusion_loss)
            task_of_epoch = TrainingTask(examples, objective, training, AugmentationSpec(), FrozenNetworkParts())
            optimizer = torch.optim.Adam(network.parameters())
            generator = torch.Generator().manual_seed(0)
            seconds = measure_cpu_seconds(lambda: train_epoch(network, task_of_epoch, optimizer, generator)) / 2
            what = f"a step of {batch} patches of {side}³"
        else:
            first_volume = load_pixels_on_device(images.select_rows(np.array([0])), "cpu")

            def predict() -> None:
                for _, logits in iterate_logits(network, first_volume):
                    decide_class_areas(logits, task)

            seconds = measure_cpu_seconds(predict)
            what = f"a volume of {stored_side}³ by a window of {side}³"
    print(f"{architecture}, {what}: {seconds:.0f} CPU s, {read_peak_gib():.1f} GiB at most")


ROUND = """
[run]
method = "surgical"
[model]
task = "exclusive_segmentation"
architecture = "tiny_unet"
channels = 1
image_size = [48, 48, 48]
[training]
batch_size = 4
lr = 0.003
[simulation]
backend = "inline"
[data]
kind = "organs"
images = {count}
image_size = 48
depth = 48
[partition]
kind = "class_lists"
lists = {{ a = ["Kidney", "Liver"], b = ["Liver", "Pancreas"], c = ["Pancreas", "Spleen"], d = ["Spleen", "Kidney"] }}
"""


def measure_round(count: int) -> None:
    """Print the CPU seconds of a round of four hospitals that segment volumes of 48³, validation included."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "round.toml"
        file.write_text(ROUND.format(count=count), encoding="utf-8")

        def run(rounds: int) -> None:
            experiment = read_experiment(file, [f"run.rounds={rounds}"])
            simulate(experiment, Path(name) / f"run {rounds}", Console(quiet=True))

        one, two = (measure_cpu_seconds(partial(run, rounds)) for rounds in (1, 2))
    print(f"a round of four hospitals with {count} volumes of 48³: {two - one:.0f} CPU s")


def main() -> None:
    """Read the command line, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--stored-side", type=int, default=128)
    parser.add_argument("--side", type=int, default=48)
    parser.add_argument("--step", default="", help="a network, of which a training step is measured")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--masks", action="store_true", help="decode a mask for each volume, too")
    parser.add_argument("--patches", choices=("train", "predict"), help="measure patches, or a sliding window")
    parser.add_argument("--network", default="tiny_unet", help="the network of --patches")
    parser.add_argument("--round", action="store_true", help="measure a round of four hospitals that segment")
    given = parser.parse_args()
    if given.step:
        measure_step(given.step, given.side, given.batch)
    elif given.patches:
        measure_patches(given.patches, given.network, given.stored_side, given.side, given.batch)
    elif given.round:
        measure_round(given.count)
    else:
        compare_decoding(given.count, given.stored_side, given.side, has_masks=given.masks)


if __name__ == "__main__":
    main()
