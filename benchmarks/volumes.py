"""Volumes: first decoding and later epochs beside bare nibabel and MONAI's PersistentDataset; a step's time and memory.

    PYTHONPATH=. python benchmarks/volumes.py                                   # decoding, about a CPU minute
    PYTHONPATH=. python benchmarks/volumes.py --step monai:DenseNet121 --side 128 --batch 2

It needs the extra ``monai``. Times are CPU seconds of this process.
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import monai.data
import monai.transforms
import nibabel
import numpy as np
import torch

from polyclinic.common.models.network import build_network
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.data.base.spec import PictureRenderingOptions
from polyclinic.data.images import store
from polyclinic.data.images.pixel_cache import SETTLED_S
from polyclinic.data.images.reading import DecodedImageFormat

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


def make_monai_dataset(files: Sequence[Path], side: int, spacing: float, cache: Path) -> Any:
    """Return MONAI's data set that does the same to the volumes."""
    transforms: Any = monai.transforms
    data: Any = monai.data
    steps = transforms.Compose(
        [
            transforms.LoadImaged("image"),
            transforms.EnsureChannelFirstd("image"),
            transforms.Orientationd("image", axcodes="RAS", labels=None),
            transforms.Spacingd("image", pixdim=(spacing, spacing, spacing)),
            transforms.ScaleIntensityRanged("image", LOW, HIGH, 0, 1, clip=True),
            transforms.ResizeWithPadOrCropd("image", (side, side, side)),
        ]
    )
    return data.PersistentDataset([{"image": str(file)} for file in files], steps, cache_dir=cache)


def compare_decoding(count: int, stored_side: int, side: int) -> None:
    """Print the CPU seconds of the first decoding and of later epochs, and their ratios."""
    spacing = stored_side / side
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write_volumes(folder, count, stored_side)
        time.sleep(SETTLED_S + 0.5)  # younger files are hashed again
        store.SMALL_BYTES = 0

        def read_all_by_nibabel() -> None:
            for file in files:
                np.asarray(nibabel.load(file).dataobj)  # type: ignore[attr-defined]

        def read_epoch() -> None:
            decoded = read_ours(files, side, spacing, folder / "ours")
            for start in range(0, count, 4):
                decoded.stored[decoded.places[start : start + 4]].sum()

        dataset = make_monai_dataset(files, side, spacing, folder / "monai")

        def read_monai_epoch() -> None:
            for row in range(count):
                dataset[row]["image"].sum()

        works = (read_all_by_nibabel, read_epoch, read_epoch, read_monai_epoch, read_monai_epoch)
        bare, first, later, monai_first, monai_later = map(measure_cpu_seconds, works)
    print(f"{count} volumes of {stored_side}³ to {side}³, CPU seconds")
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


def main() -> None:
    """Read the command line, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--stored-side", type=int, default=128)
    parser.add_argument("--side", type=int, default=48)
    parser.add_argument("--step", default="", help="a network, of which a training step is measured")
    parser.add_argument("--batch", type=int, default=4)
    given = parser.parse_args()
    if given.step:
        measure_step(given.step, given.side, given.batch)
    else:
        compare_decoding(given.count, given.stored_side, given.side)


if __name__ == "__main__":
    main()
