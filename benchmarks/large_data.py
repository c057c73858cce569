"""A data set larger than memory: time of the first and the second start, memory, and images a second.

    python benchmarks/large_data.py make FOLDER --images 100000 --side 224
    python benchmarks/large_data.py start FOLDER        # twice; in a memory cgroup where a limit is wanted
    python benchmarks/large_data.py speed FOLDER        # training from the cache, ours and a bare DataLoader's
    python benchmarks/large_data.py run FOLDER --backend ray --sites 16

``make`` writes JPEG files of a hundred phantoms, each with a comment of its own, so that no two have one content.
"""

import argparse
import io
import resource
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch
from PIL import Image
from rich.console import Console
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from polyclinic.common.config import ExperimentFile, TrainingSection, validate_experiment
from polyclinic.common.models.network import build_network
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.data.base.image_set import DatasetSplits, ImageSet
from polyclinic.data.base.spec import AugmentationSpec, FolderDatasetSpec
from polyclinic.data.images.pixel_cache import MemoryMappedPictures
from polyclinic.data.images.pixels import convert_to_channels_first, load_pixels_on_device
from polyclinic.data.images.store import open_user_image_store
from polyclinic.data.load import load_dataset
from polyclinic.data.sources.built_in import draw_phantom_images
from polyclinic.server.simulation.simulate import simulate
from polyclinic.strategies.local.losses import partial_loss
from polyclinic.strategies.local.objective import pair_pixels_with_labels, plain
from polyclinic.strategies.local.training import FrozenNetworkParts, TrainingTask, train_epoch
from polyclinic.strategies.registry import find_method_faults

TEMPLATES = 100
CLASSES = ("a", "b", "c")


def make_files(folder: Path, images: int, side: int, quality: int) -> None:
    """Write the pictures and their table."""
    (folder / "images").mkdir(parents=True)
    phantoms, random = draw_phantom_images(TEMPLATES, 112, np.random.default_rng(0)).images, np.random.default_rng(1)
    templates = []
    for phantom in phantoms:
        content = io.BytesIO()
        Image.fromarray(phantom).resize((side, side)).save(content, "JPEG", quality=quality)
        templates.append(content.getvalue())
    lines = ["image,patient," + ",".join(CLASSES)]
    for number in range(images):
        template, comment = templates[number % TEMPLATES], f"{number:08d}".encode()
        segment = b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment
        (folder / "images" / f"{number:06d}.jpg").write_bytes(template[:2] + segment + template[2:])
        lines.append(f"{number:06d}.jpg,p{number // 2}," + ",".join(map(str, random.integers(0, 2, len(CLASSES)))))
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")


def data_spec(side: int) -> dict[str, object]:
    """The table ``[data]`` of the files."""
    columns = {"image_column": "image", "patient_column": "patient", "label_columns": list(CLASSES)}
    return {"kind": "folder", "images": "images", "labels": "labels.csv", "image_size": side, **columns}


def load_images(folder: Path, side: int) -> DatasetSplits:
    """Load the images through the cache in the folder, and print the time and the memory."""
    began = time.monotonic()
    store = open_user_image_store(partial(print, flush=True), str(folder / "cache"))
    splits = load_dataset(FolderDatasetSpec.model_validate(data_spec(side)), folder, store)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    own = psutil.Process().memory_full_info()
    print(
        f"{sum(map(len, splits.parts)):,} images in {time.monotonic() - began:.1f} s; peak {peak} MiB resident with",
        end="",
    )
    print(f" mapped pages, {(own.rss - own.shared) >> 20} MiB of its own", flush=True)
    return splits


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """The cache's rows as a stock data set."""

    def __init__(self, images: ImageSet, count: int) -> None:
        assert isinstance(images.stored, MemoryMappedPictures)
        assert images.places is not None
        self.stored, self.places, self.labels = images.stored.array, images.places[:count], images.labels

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        pixels = torch.from_numpy(np.array(self.stored[self.places[row]]))
        return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1), torch.from_numpy(self.labels[row])


def cpu_seconds() -> float:
    """The CPU seconds of this process and of its ended children."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def compare_speed(folder: Path, side: int, count: int, batch: int, workers: int) -> None:
    """Train one epoch on ``count`` images: our loop, and a bare loop over a DataLoader of the same rows."""
    images = load_images(folder, side).train
    images = images.select_rows(np.arange(min(count, len(images))))
    spec = ModelSpec.model_validate({"architecture": "tiny_cnn", "channels": 1, "image_size": 32})
    training = TrainingSection(batch_size=batch, precision="float32")
    examples = pair_pixels_with_labels(images, load_pixels_on_device(images, "cpu"), CLASSES)
    task = TrainingTask(examples, plain(partial_loss), training, AugmentationSpec(), FrozenNetworkParts())
    torch.set_num_threads(1)
    for _ in range(2):
        for name in ("bare", "ours"):
            network = build_network(spec, CLASSES, seed=0)
            optimizer, generator = torch.optim.SGD(network.parameters(), lr=0.01), torch.Generator().manual_seed(0)
            began, used = time.monotonic(), cpu_seconds()
            if name == "ours":
                train_epoch(network, task, optimizer, generator)
            else:
                loader = DataLoader(Rows(images, count), batch, shuffle=True, num_workers=workers, generator=generator)
                for pixels, labels in loader:
                    optimizer.zero_grad(set_to_none=True)
                    loss = partial_loss(network(pixels.float()), labels, examples.annotated)
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
            rate, cpu = len(images) / (time.monotonic() - began), len(images) / (cpu_seconds() - used)
            print(f"{name}: {rate:.0f} images a second, {cpu:.0f} a CPU second", flush=True)
    began = time.monotonic()
    for start in range(0, len(images), batch):
        convert_to_channels_first(images.select_rows(np.arange(start, min(start + batch, len(images)))).images)
    print(f"reading alone: {len(images) / (time.monotonic() - began):.0f} images a second", flush=True)


def run_federation(folder: Path, side: int, sites: int, rounds: int, **simulation: object) -> None:
    """Run a federation of all images, and print its time and the model's hash."""
    tree = {
        "run": {"method": "vanilla", "rounds": rounds},
        "model": {"architecture": "tiny_cnn", "channels": 1, "image_size": 32},
        "data": data_spec(side),
        "partition": {"kind": "class_subsets", "sites": sites, "shared": len(CLASSES)},
        "training": {"batch_size": 64, "epochs": 1},
        "simulation": {"image_cache": "cache", **simulation},
    }
    file: ExperimentFile = validate_experiment(tree, folder / "experiment.toml", [], find_method_faults)
    began, out = time.monotonic(), folder / f"run-{time.time_ns()}"
    summary = simulate(file, out, Console())
    print(f"{rounds} rounds in {time.monotonic() - began:.1f} s, model {summary['model_sha256'][:16]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("make", "start", "speed", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--quality", type=int, default=50)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--backend", default="inline")
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    match options.step:
        case "make":
            make_files(options.folder, options.images, options.side, options.quality)
        case "start":
            load_images(options.folder, options.side)
        case "speed":
            compare_speed(options.folder, options.side, options.images, options.batch, options.workers)
        case "run":
            simulation = {"backend": options.backend, "workers": options.workers}
            run_federation(options.folder, options.side, options.sites, options.rounds, **simulation)


if __name__ == "__main__":
    main()
