"""Small models of every kind, as files, for tests of evaluation."""

import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path

import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from polyclinic.common.models.network import build_network
from polyclinic.common.models.saved import save_model
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.data.base.pixel_form import PixelForm

SIDE = 32
TIMM = "test_resnet"
"""The smallest network of timm."""


class LinearModel(nn.Module):
    """Logits of grey images: sums of pixels with fixed weights."""

    def __init__(self, classes: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(classes, SIDE * SIDE, generator=generator) / SIDE)

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1) @ self.weight.T


def describe(
    path: Path, file: Path, classes: Sequence[str], *, more: str = "", pixels: str = "", sha256: str = ""
) -> Path:
    """Write the description of a model of grey images."""
    digest = sha256 or hashlib.sha256(file.read_bytes()).hexdigest()
    named = ", ".join(f'"{name}"' for name in classes)
    outputs = "" if "outputs" in more else 'outputs = "logits"\n'
    path.write_text(
        f'file = "{file.name}"\nsha256 = "{digest}"\nclasses = [{named}]\n{outputs}mean = [0.5]\nstd = [0.25]\n{more}\n'
        f"[pixels]\ncolor = false\nimage_size = {SIDE}\n{pixels}",
        encoding="utf-8",
    )
    return path


def write_run_model(folder: Path, classes: Sequence[str], seed: int = 0) -> Path:
    """Save a network as a run does."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = ModelSpec(architecture="tiny_cnn", channels=1, image_size=SIDE)
    form = PixelForm(color=False, height=SIDE, width=SIDE, resize="pad", decoded=True)
    save_model(folder, build_network(spec, classes, seed), label_contract_sha256="", pixels=form)
    return folder


def write_onnx_model(path: Path, classes: int, seed: int = 1, batch: int | None = None) -> Path:
    """Export a linear model; ``batch`` fixes the number of images that it takes at a time."""
    example = (torch.zeros(batch or 2, 1, SIDE, SIDE),)
    shapes = None if batch else {"images": {0: "batch"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            LinearModel(classes, seed), example, dynamic_shapes=shapes, dynamo=True, verbose=False
        )
    assert program is not None
    program.save(str(path), external_data=False)
    return path


def write_exported_program(path: Path, classes: int, seed: int = 1) -> Path:
    """Save a linear model by ``torch.export``."""
    example = (torch.zeros(2, 1, SIDE, SIDE),)
    shapes = {"images": {0: torch.export.Dim("batch")}}
    torch.export.save(torch.export.export(LinearModel(classes, seed), example, dynamic_shapes=shapes), path)
    return path


def make_timm_network(classes: int, seed: int = 2) -> nn.Module:
    """Return a network of timm with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network: nn.Module = timm.create_model(TIMM, num_classes=classes, in_chans=1)
    return network.eval()


def write_timm_tensors(path: Path, classes: int, seed: int = 2) -> Path:
    """Write the tensors of a network of timm."""
    save_file({name: tensor.clone() for name, tensor in make_timm_network(classes, seed).state_dict().items()}, path)
    return path
