"""Low-rank adaptation: where it begins, what a mean of updates is, and that it can be taken off again."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from client.gate.plan_costs import estimate_network_cost
from common.errors import BadInput
from common.models.network import SplitNetwork, build_network, find_network_build_faults, set_train_mode
from common.models.saved import load_model, save_model
from common.models.state import FrozenPart, make_model_layout, read_model_state, write_model_state
from common.models.trained import add_low_rank_factors, merge_low_rank_factors
from common.models.zoo.spec import ModelSpec
from server.export.exported_model import ExportFormat, export_model

NAMES = ("a", "b")
ARCHITECTURES = ("resnet18", "timm:vit_tiny_patch16_224", "torchvision:vit_b_16", "efficientnet_lite0")


def spec(train: str, architecture: str = "resnet18", **more: object) -> ModelSpec:
    return ModelSpec.model_validate({"architecture": architecture, "image_size": 32, "train": train, **more})


def images(count: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, 32, 32), generator=torch.Generator().manual_seed(0)).float()


def trained(train: str = "lora:4", seed: int = 0, architecture: str = "resnet18") -> SplitNetwork:
    """A network whose products are not zero."""
    network = build_network(spec(train, architecture), NAMES, 1)
    set_train_mode(network)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
            assert ("up.weight" in name or not name.startswith("backbone.")) == parameter.requires_grad, name
    return network


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_begins_as_the_network_that_it_adapts_and_can_be_merged_into_one(architecture: str) -> None:
    plain, adapted = (build_network(spec(train, architecture), NAMES, 1).eval() for train in ("all", "lora:4"))
    with torch.no_grad():
        assert torch.allclose(adapted(images()), plain(images()), atol=1e-5)
        adapted = trained(architecture=architecture).eval()
        moved = adapted(images())
        assert not torch.allclose(moved, plain(images()), atol=1e-3)
        merge_low_rank_factors(adapted.backbone)
        assert torch.allclose(adapted(images()), moved, atol=1e-4)
    assert adapted.backbone.state_dict().keys() == plain.backbone.state_dict().keys()


def test_the_mean_of_updates_is_the_update_of_the_mean_weights() -> None:
    """With both factors trained it would not be."""
    sites = [trained(seed=seed) for seed in (1, 2, 3)]
    together = build_network(spec("lora:4"), NAMES, 1)
    write_model_state(together, trunk=sum(read_model_state(site).trunk for site in sites) / len(sites))
    for network in (together, *sites):
        merge_low_rank_factors(network.backbone)
    states = [site.backbone.state_dict() for site in sites]
    for name, weight in together.backbone.state_dict().items():
        if weight.is_floating_point():
            assert torch.allclose(weight, torch.stack([state[name] for state in states]).mean(dim=0), atol=1e-5), name


def test_what_is_frozen_follows_from_the_weights_alone(tmp_path: Path) -> None:
    """A hospital that has the weights file needs no other byte, whatever the run's seed."""
    save_model(tmp_path, build_network(spec("all"), NAMES, 7), label_contract_sha256="")
    weights = str(tmp_path / "model.safetensors")
    first, second = (build_network(spec("lora:4", weights=weights), NAMES, seed) for seed in (1, 2))
    assert FrozenPart.from_network(first).sha256 == FrozenPart.from_network(second).sha256
    other = build_network(spec("lora:5", weights=weights), NAMES, 1)
    assert FrozenPart.from_network(other).sha256 != FrozenPart.from_network(first).sha256


def test_it_travels_little_and_the_costs_count_it() -> None:
    network = build_network(spec("lora:4"), NAMES, 1)
    layout = make_model_layout(network)
    size, whole = (
        sum(part.size for part in each.trunk)
        for each in (layout, make_model_layout(build_network(spec("all"), NAMES, 1)))
    )
    assert size < 0.01 * whole
    assert estimate_network_cost(spec("lora:4"), rows=2).trained == size + 2 * 513


def test_a_finished_model_is_loaded_exported_and_begun_from(tmp_path: Path) -> None:
    network = trained().eval()
    part = FrozenPart.from_network(network).sha256
    named = build_network(spec("lora:4", frozen_sha256=part), NAMES, 1)
    named.load_state_dict(network.state_dict())
    save_model(tmp_path, named, label_contract_sha256="")
    with torch.no_grad():
        expected = network(images())
        assert torch.equal(load_model(tmp_path)(images()), expected)
        again = build_network(spec("all", weights=str(tmp_path / "model.safetensors")), NAMES, 2)
        again.head = network.head
        assert torch.allclose(again.eval()(images()), expected, atol=1e-4)
    pixels = [images().to(torch.uint8).numpy()]
    check = export_model(tmp_path, ExportFormat.torchscript, tmp_path / "model.pt", pixels)
    assert check.largest_difference < 1e-4


def test_a_file_of_products_that_do_not_fit_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, build_network(spec("lora:4", frozen_sha256="0" * 64), NAMES, 1), label_contract_sha256="")
    tensors = load_file(tmp_path / "model.safetensors")
    down = "backbone.conv1.parametrizations.weight.0.down"
    without = {key: tensor for key, tensor in tensors.items() if key != down}
    for spoilt in (without, {**tensors, down: torch.zeros(3, 147)}):
        save_file(spoilt, tmp_path / "spoilt.safetensors")
        with pytest.raises(BadInput, match=r"lacks tensors|unknown tensors"):
            build_network(spec("all", weights=str(tmp_path / "spoilt.safetensors")), NAMES, 1)


def test_a_rank_that_no_layer_has_is_a_fault() -> None:
    (fault,) = find_network_build_faults(spec("lora:600"), Path())
    assert "asks for rank 600" in str(fault)
    with pytest.raises(ValueError, match="pattern"):
        spec("lora:0")


def test_a_copy_is_adapted_too() -> None:
    network = nn.Sequential(nn.Linear(8, 8))
    add_low_rank_factors(network, "lora:2")
    assert torch.equal(copy.deepcopy(network)(torch.ones(1, 8)), network(torch.ones(1, 8)))
