"""Networks that are not ours: timm's, torchvision's, MONAI's, TorchXRayVision's and plug-ins."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from polyclinic.client.gate.plan_costs import estimate_network_cost
from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import build_network, find_network_build_faults
from polyclinic.common.models.saved import load_model
from polyclinic.common.models.state import make_model_layout, read_model_state, write_model_state
from polyclinic.common.models.zoo import registry
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.plugins import MODELS, find_plugin_entry_point, identify_plugin
from polyclinic.server.export.weights import convert_pretrained_weights
from tests.federations import federation
from tests.missing_packages import hide_packages
from tests.third_parties import install

CLASSES = ("edema", "mass")
NETWORKS = [
    ("timm:resnet18", 1, 32, 512),
    ("timm:test_vit", 3, 32, 64),
    ("timm:convnext_atto", 1, 32, 320),
    ("torchvision:mobilenet_v3_small", 1, 32, 1024),
    ("torchvision:shufflenet_v2_x0_5", 3, 32, 1024),
    ("monai:DenseNet121", 1, 32, 1024),
    ("monai:SEResNet50", 3, 32, 2048),
    ("monai:resnet18", 1, 32, 512),
    ("monai:efficientnet-b0", 3, 32, 1280),
    ("torchxrayvision:densenet121", 1, 32, 1024),
    ("plugin:stairs", 1, 16, 64),
]


@pytest.fixture(autouse=True)
def stairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return install(tmp_path / "site-packages", monkeypatch)


def spec(name: str, channels: int = 1, size: int = 32, **more: object) -> ModelSpec:
    return ModelSpec.model_validate({"architecture": name, "channels": channels, "image_size": size, **more})


STAIRS = ("plugin:stairs", 1, 16)


@pytest.mark.parametrize(("name", "channels", "size", "width"), NETWORKS, ids=[network[0] for network in NETWORKS])
def test_it_is_built_the_same_for_the_same_seed_and_its_state_can_be_put_back(
    name: str, channels: int, size: int, width: int
) -> None:
    first, second = (build_network(spec(name, channels, size), CLASSES, 3) for _ in range(2))
    other = build_network(spec(name, channels, size), CLASSES, 4)
    assert first.head.in_features == width
    state = read_model_state(first)
    np.testing.assert_array_equal(state.trunk, read_model_state(second).trunk)
    assert (state.trunk != read_model_state(other).trunk).any()
    write_model_state(other, trunk=state.trunk, norm=state.norm, head=state.head)
    images = torch.randint(0, 256, (2, channels, size, size), dtype=torch.uint8)
    with torch.no_grad():
        torch.testing.assert_close(first.eval()(images), other.eval()(images))
    assert make_model_layout(first) == make_model_layout(other)
    assert make_model_layout(first).architecture == name


TRAINED = ("timm:test_resnet", "timm:test_vit", "plugin:stairs")
LARGE = ("torchvision:shufflenet_v2_x0_5", "torchxrayvision:densenet121", "monai:efficientnet-b0")


@pytest.mark.parametrize("name", [*TRAINED, *(pytest.param(name, marks=pytest.mark.long) for name in LARGE)])
def test_a_federation_trains_it_and_the_saved_model_is_read_back(name: str, tmp_path: Path) -> None:
    choices = (f"model.architecture={name}", "model.image_size=32", "run.rounds=1")
    summary, again = (federation(tmp_path, *choices, out=out) for out in ("run", "again"))
    assert summary["model_sha256"] == again["model_sha256"]
    assert load_model(tmp_path / "run").spec.architecture == name


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("timm:resnet19", 32, 'Did you mean "timm:resnet'),
        ("torchvision:resnt18", 32, 'Did you mean "torchvision:resnet18"?'),
        ("monai:densenet121", 32, 'Did you mean "monai:DenseNet121"?'),
        ("torchxrayvision:resnet50", 32, 'torchxrayvision has no network "torchxrayvision:resnet50".'),
        ("torchvision:squeezenet1_1", 32, "has no dense layer at its end"),
        ("plugin:stair", 32, 'There are "stairs"'),
        ("plugin:stairs", 2, "does not take images of 2 pixels and 1 channels"),
        ("torchvision:vit_b_16", 24, "does not take images of 24 pixels: Input shape indivisible by patch size."),
    ],
)
def test_a_network_that_cannot_be_made_is_a_fault_before_anything_is_trained(name: str, size: int, words: str) -> None:
    (fault,) = find_network_build_faults(spec(name, size=size), Path())
    assert words in str(fault)


@pytest.mark.parametrize("package", ["monai", "torchxrayvision"])
def test_a_library_that_is_not_installed_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_packages(monkeypatch, package)
    (fault,) = find_network_build_faults(spec(f"{package}:densenet121"), Path())
    assert f"pip install 'polyclinic[{package}]'" in str(fault)


@pytest.mark.parametrize(
    ("architecture", "whole"),
    [
        ("timm:resnet18", lambda: import_module("timm").create_model("resnet18")),
        ("torchxrayvision:densenet121", lambda: import_module("torchxrayvision").models.DenseNet(num_classes=3)),
        (
            "monai:resnet18",
            lambda: import_module("monai.networks.nets").resnet18(spatial_dims=2, n_input_channels=1, num_classes=3),
        ),
    ],
)
def test_a_librarys_own_weights_become_a_trunk_that_says_the_same(
    architecture: str, whole: Callable[[], nn.Module], tmp_path: Path
) -> None:
    torch.manual_seed(3)
    original = whole().eval()
    torch.save(original.state_dict(), tmp_path / "theirs.pth")
    sha256 = convert_pretrained_weights(
        architecture, tmp_path / "theirs.pth", tmp_path / "trunk.safetensors", image_size=64
    )
    channels = 3 if architecture.startswith("timm") else 1
    more = {"weights": "trunk.safetensors", "weights_sha256": sha256}
    network = build_network(spec(architecture, channels, 64, **more), ("a",), 0, tmp_path).eval()
    pixels = torch.rand(2, channels, 64, 64)
    last = [module for module in original.modules() if isinstance(module, nn.Linear)][-1]
    features: list[Tensor] = []
    last.register_forward_hook(lambda module, inputs, output: features.append(inputs[0]))
    with torch.no_grad():
        original(pixels)
        assert torch.allclose(network.backbone(pixels), features[0].flatten(1), atol=1e-5)
    with pytest.raises(BadInput, match="exists"):
        convert_pretrained_weights(architecture, tmp_path / "theirs.pth", tmp_path / "trunk.safetensors")


@pytest.mark.parametrize("name", ["timm:", "timm:../x", "keras:resnet18", "plugin:a b", "timm:" + "x" * 200])
def test_a_name_of_another_form_is_none_of_ours(name: str) -> None:
    with pytest.raises(ValidationError, match="densenet121"):
        spec(name)


def test_group_normalisation_is_refused_where_batch_normalisation_does_more() -> None:
    with pytest.raises(BadInput, match="cannot take the place of BatchNormAct2d"):
        build_network(spec("timm:resnetv2_50", 3, 32, norm="group"), CLASSES, 3)
    build_network(spec("timm:resnet18", 3, 32, norm="group"), CLASSES, 3)


@pytest.mark.parametrize(
    ("product", "words"),
    [
        (lambda channels, size: "a network", "made a str, not a torch.nn.Module"),
        (lambda channels, size: nn.Identity(), r"returns \(1, 1, 16, 16\) for one image"),
        (lambda channels, size: nn.LSTM(16, 4), "does not take images|gives"),
    ],
)
def test_a_plug_in_that_makes_something_else_is_named(
    product: object, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "load_plugin_entry_point", lambda group, name: product)
    with pytest.raises(BadInput, match=words):
        build_network(spec(*STAIRS), CLASSES, 3)


def test_a_changed_file_changes_the_stamp_and_nothing_is_imported_for_it(stairs: Path) -> None:
    before = identify_plugin(MODELS, "stairs")
    assert (before.package, before.version) == ("stairs", "1.0")
    stairs.write_text(stairs.read_text().replace("GELU", "ReLU"))
    assert identify_plugin(MODELS, "stairs").sha256 != before.sha256
    stairs.write_text("raise SystemExit('imported')\n")
    assert identify_plugin(MODELS, "stairs").version == "1.0"
    stairs.unlink()
    with pytest.raises(BadInput, match="the files of stairs cannot be read"):
        identify_plugin(MODELS, "stairs")


def test_two_packages_with_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = tmp_path / "more" / "other-2.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 2.0\n")
    (facts / "entry_points.txt").write_text("[polyclinic.models]\nstairs = other:network\n")
    monkeypatch.syspath_prepend(str(facts.parent))
    with pytest.raises(BadInput, match='several packages bring it: "other", "stairs"'):
        find_plugin_entry_point(MODELS, "stairs")


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        ("raise RuntimeError('no licence')", "cannot be imported: RuntimeError: no licence"),
        ("def network(channels, image_size): raise TypeError('no')", "cannot be made for 1 channels and 16 pixels"),
        ("def network(channels, image_size): raise SystemExit(3)", "cannot be made for 1 channels and 16 pixels"),
    ],
)
def test_a_package_or_factory_that_raises_is_a_fault(module: str, problem: str, stairs: Path) -> None:
    stairs.write_text(module)
    (fault,) = find_network_build_faults(spec(*STAIRS), Path())
    assert problem in str(fault)


def test_code_that_looks_at_values_can_be_built_and_counted(stairs: Path) -> None:
    looks = "_ = [r.item() for r in __import__('torch').ones(2)]"
    stairs.write_text(stairs.read_text().replace("return nn.Sequential(", f"{looks}\n    return nn.Sequential("))
    assert find_network_build_faults(spec(*STAIRS), Path()) == []
    assert estimate_network_cost(spec(*STAIRS), rows=2).parameters > 5000


def test_what_runs_keeps_the_stamp_of_the_files_that_were_imported(stairs: Path) -> None:
    build_network(spec(*STAIRS), CLASSES, 3)
    before = identify_plugin(MODELS, "stairs")
    stairs.write_text(stairs.read_text() + "\n")
    assert identify_plugin(MODELS, "stairs") == before
