"""Networks of volumes: ours, MONAI's and a user's own; which name takes which images; frozen parts and LoRA."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import build_network, convert_pixels, find_network_build_faults
from polyclinic.common.models.saved import load_model, save_model
from polyclinic.common.models.state import read_model_state
from polyclinic.common.models.zoo.spec import ModelSpec
from tests.third_parties import install_module

SIZE = (32, 32, 48)
CUBES = '''
from torch import nn

def network(channels, image_size):
    """Volumes in, class scores out; image_size is (depth, height, width)."""
    depth, height, width = image_size
    return nn.Sequential(
        nn.Conv3d(channels, 4, 3, stride=4, padding=1), nn.GELU(), nn.Flatten(),
        nn.Linear(4 * (depth // 4) * (height // 4) * (width // 4), 8), nn.GELU(), nn.Linear(8, 2),
    )
'''


def spec(architecture: str, image_size: Any = SIZE, **more: Any) -> ModelSpec:
    return ModelSpec.model_validate({"architecture": architecture, "channels": 1, "image_size": image_size, **more})


def volumes(image_size: tuple[int, ...] = SIZE, batch: int = 2, channels: int = 1) -> Tensor:
    shape = (batch, channels, *image_size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("tiny_cnn_3d", 64),
        ("monai:DenseNet121", 1024),
        ("monai:resnet10", 512),
        pytest.param("monai:SEResNet50", 2048, marks=pytest.mark.long),
        pytest.param("monai:efficientnet-b0", 1280, marks=pytest.mark.long),
    ],
)
def test_it_is_built_the_same_for_the_same_seed_and_trains(name: str, width: int) -> None:
    first, second = (build_network(spec(name), ("a", "b"), 3) for _ in range(2))
    assert first.head.in_features == width
    assert (read_model_state(first).trunk == read_model_state(second).trunk).all()
    logits = first.train()(volumes())
    logits.square().sum().backward()
    assert logits.shape == (2, 2)
    assert all(value.grad is not None and value.grad.isfinite().all() for value in first.parameters())


def test_the_encoder_of_swin_unetr_makes_features_of_volumes() -> None:
    pytest.importorskip("einops", reason="MONAI needs it for this network")
    network = build_network(spec("monai:SwinUNETR", (32, 32, 32)), ("a", "b"), 3)
    assert network.head.in_features == 768
    assert network(volumes((32, 32, 32))).shape == (2, 2)


@pytest.mark.parametrize(
    ("name", "image_size", "words"),
    [
        ("resnet18", SIZE, "resnet18 takes pictures, whose image_size is one number; volumes go into"),
        ("timm:resnet18", SIZE, "takes pictures, whose image_size is one number"),
        ("torchvision:resnet18", SIZE, "takes pictures, whose image_size is one number"),
        ("tiny_cnn_3d", 32, r"takes volumes: write \[depth, height, width\] in voxels, got 32"),
        ("tiny_cnn_3d", [4, 32, 32], "needs images of at least 8 pixels a side, got 4"),
        ("tiny_cnn_3d", [32, 32], r"\[depth, height, width\] in voxels for volumes"),
        ("tiny_cnn_3d", [32, 0, 32], "greater than 0"),
    ],
)
def test_a_network_that_does_not_take_such_images_is_refused(name: str, image_size: Any, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        spec(name, image_size)


def test_a_size_that_a_library_s_network_does_not_take_is_a_fault_with_one_that_it_takes() -> None:
    (fault,) = find_network_build_faults(spec("monai:DenseNet121", (16, 32, 32)), Path())
    assert "does not take images of 16 × 32 × 32 voxels and 1 channels" in fault.problem
    assert fault.remedy == "It takes 32 × 32 × 32 voxels, for instance."


def test_grey_volumes_go_into_a_network_of_three_channels() -> None:
    network = build_network(spec("tiny_cnn_3d", (8, 8, 8), channels=3), ("a",), 0).eval()
    grey = volumes((8, 8, 8))
    torch.testing.assert_close(network(grey), network(grey.expand(-1, 3, -1, -1, -1)))


def test_volumes_of_another_size_are_resized_worked_by_hand() -> None:
    line = torch.tensor([0.0, 8.0]).reshape(1, 1, 2, 1, 1).expand(1, 1, 2, 2, 2)
    resized = convert_pixels(line, 1, (4, 2, 2))
    assert resized[0, 0, :, 0, 0].tolist() == [0, 2, 6, 8]  # at 0.25, 0.75, 1.25 and 1.75 of two voxels


def test_a_network_of_one_s_own_gets_the_three_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_module(tmp_path, monkeypatch, "cubes", CUBES, {"polyclinic.models": {"cubes": "cubes:network"}})
    network = build_network(spec("plugin:cubes", (8, 12, 16), head="5"), ("a", "b", "c"), 0)
    assert network.head.in_features == 8
    assert network(volumes((8, 12, 16))).shape == (2, 3)
    with pytest.raises(BadInput, match=r"has no torch.nn.Linear \"6\""):
        build_network(spec("plugin:cubes", (8, 12, 16), head="6"), ("a",), 0)


@pytest.mark.parametrize("train", ["head", "last:2", "lora:4"])
def test_parts_of_a_network_of_volumes_are_frozen_like_those_of_pictures(train: str, tmp_path: Path) -> None:
    network = build_network(spec("tiny_cnn_3d", (8, 8, 8), train=train), ("a", "b"), 0)
    assert network.frozen
    whole = build_network(spec("tiny_cnn_3d", (8, 8, 8)), ("a", "b"), 0)
    trained = [name for name, _ in network.named_parameters() if name not in network.frozen]
    assert 2 <= len(trained) < len(list(whole.parameters())) + 2
    assert network(volumes((8, 8, 8))).isfinite().all()


def test_group_norm_takes_the_place_of_batch_norm_in_three_dimensions() -> None:
    network = build_network(spec("tiny_cnn_3d", (8, 8, 8), norm="group"), ("a",), 0)
    assert not any(isinstance(layer, nn.BatchNorm3d) for layer in network.modules())
    assert sum(isinstance(layer, nn.GroupNorm) for layer in network.modules()) == 3


def test_a_saved_model_of_volumes_is_read_back_and_says_what_it_takes(tmp_path: Path) -> None:
    network = build_network(spec("tiny_cnn_3d", (8, 12, 16)), ("a", "b"), 0).eval()
    saved = save_model(tmp_path, network, label_contract_sha256="0" * 64)
    assert "batch x channels x depth x height x width" in saved.preprocessing
    assert "trilinear resize to 8 x 12 x 16" in saved.preprocessing
    again = load_model(tmp_path)
    assert again.spec.image_size == (8, 12, 16)
    assert torch.equal(again(volumes((8, 12, 16))), network(volumes((8, 12, 16))))
