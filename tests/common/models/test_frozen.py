"""The trained part of a network, low-rank factors too; the rest stays as it was, has a hash, comes back from disk."""

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from polyclinic.client.gate.plan_costs import estimate_network_cost
from polyclinic.client.site.memory import FrozenPartFiles
from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import (
    SplitNetwork,
    build_network,
    find_network_build_faults,
    freeze_batch_norm,
    set_train_mode,
    unfreeze_network,
)
from polyclinic.common.models.saved import load_model, save_model
from polyclinic.common.models.state import (
    FrozenPart,
    add_frozen_hash_to_spec,
    build_initial_frozen_part,
    hash_model_state,
    list_frozen_tensors,
    make_model_layout,
    read_model_state,
    write_model_state,
)
from polyclinic.common.models.trained import StandardisingLayer, merge_low_rank_factors
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.server.export.exported_model import ExportFormat, export_model

NAMES = ("1", "2", "3")
CONVOLUTIONS = ("0.conv1", "0.conv2", "1.conv1", "1.conv2")
UP = tuple(f"backbone.layer4.{name}.parametrizations.weight.0.up.weight" for name in CONVOLUTIONS)
"""Of a ResNet-18's layers with more than 300 rows and columns."""
LAST_NORM = tuple(f"backbone.layer4.1.bn2.{name}" for name in ("weight", "bias", "running_mean", "running_var"))
OVER_A_BATCH = (lambda batch: batch.mean(dim=0), lambda batch: batch.var(dim=0))


def spec(train: str, **more: object) -> ModelSpec:
    return ModelSpec.model_validate(
        {"architecture": "resnet18", "channels": 1, "image_size": 32, "train": train, **more}
    )


def network(train: str, seed: int = 1, **more: object) -> SplitNetwork:
    return build_network(spec(train, **more), NAMES, seed)


def images(count: int = 4) -> torch.Tensor:
    return torch.randint(0, 256, (count, 1, 32, 32), generator=torch.Generator().manual_seed(0)).float()


@pytest.mark.parametrize(
    ("train", "more", "trunk", "norm"),
    [
        ("head", {}, (), ("neck.0.running_mean", "neck.0.running_var")),
        ("head", {"norm": "group"}, (), ()),
        ("neck", {"neck": 8}, ("neck.1.weight", "neck.1.bias"), ("neck.0.running_mean", "neck.0.running_var")),
        ("last:1", {}, (), LAST_NORM),
        ("lora:300", {}, UP, ()),
        ("lora:300", {"norm": "group"}, UP, ()),
    ],
)
def test_what_travels_is_what_is_trained(
    train: str, more: dict[str, object], trunk: tuple[str, ...], norm: tuple[str, ...]
) -> None:
    layout = make_model_layout(network(train, **more))
    assert tuple(shape.name for shape in layout.trunk) == trunk
    assert tuple(shape.name for shape in layout.norm) == norm


@pytest.mark.parametrize(
    ("train", "more"), [("head", {}), ("neck", {"neck": 8}), ("last:5", {}), ("last:39", {}), ("lora:4", {})]
)
def test_a_step_moves_all_that_is_trained_and_nothing_else(train: str, more: dict[str, object]) -> None:
    model = network(train, **more)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    set_train_mode(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(images()).square().sum().backward()
    optimizer.step()
    after, layout = model.state_dict(), make_model_layout(model)
    trained = {shape.name for shape in (*layout.trunk, *layout.norm)} | {"head.weight", "head.bias"}
    assert {name for name, tensor in before.items() if not torch.equal(after[name], tensor)} == trained
    assert before.keys() - trained == model.frozen
    assert not any(value.requires_grad for name, value in model.named_parameters() if name in model.frozen)


def test_all_is_as_it_was() -> None:
    """``all`` has no frozen tensor, the layout and the hash that a model had before there was a choice."""
    model = network("all")
    assert not model.frozen
    assert make_model_layout(model).layout_sha256 == "d0153d05dad0414abe10d91c84e27b638ea99182ba8ddac0ae1c9423fcbb6768"


def test_unfreezing_and_freezing_batch_norm_leave_the_frozen_part_frozen() -> None:
    model = network("last:4")
    freeze_batch_norm(model)
    unfreeze_network(model)
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert learning == {name for name, _ in model.named_parameters()} - model.frozen
    assert not model.backbone.bn1.training
    assert model.backbone.layer4[1].bn2.training


def test_features_are_standardised_for_the_head_and_have_length_1_together() -> None:
    features = network("head").train().features(images(64)).detach() * math.sqrt(512)
    assert features.mean(dim=0).abs().max() < 1e-4
    assert (features.std(dim=0, unbiased=False) - 1).abs().median() < 1e-2


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"train": "lora:0"}, "String should match pattern"),
        ({"train": "neck"}, "there is no neck to train"),
        ({"train": "head", "neck": 8}, "the neck would keep its random weights"),
        ({"train": "last:0"}, "String should match pattern"),
        ({"train": "lora"}, "String should match pattern"),
    ],
)
def test_what_makes_no_sense_is_refused(choices: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        ModelSpec.model_validate({"architecture": "tiny_cnn", "image_size": 16, **choices})


def test_the_frozen_part_goes_from_network_to_network() -> None:
    ours, other = network("last:3"), network("last:3", seed=2)
    part = FrozenPart.from_network(ours)
    assert FrozenPart.from_network(other).sha256 != part.sha256
    part.write_to_network(other)
    assert FrozenPart.from_network(other).sha256 == part.sha256
    for name, tensor in list_frozen_tensors(other).items():
        assert torch.equal(tensor, list_frozen_tensors(ours)[name]), name
    with pytest.raises(ValueError, match="holds 3 values"):
        FrozenPart(np.zeros(3, np.float32)).write_to_network(other)


def test_another_frozen_part_is_another_model() -> None:
    model = network("head")
    state, layout = read_model_state(model), make_model_layout(model)
    named = make_model_layout(
        build_network(add_frozen_hash_to_spec(spec("head"), FrozenPart.from_network(model)), NAMES, 1)
    )
    assert named.layout_sha256 != layout.layout_sha256
    assert hash_model_state(state, named) != hash_model_state(state, layout)


def test_a_saved_model_is_whole_and_refused_where_its_frozen_part_was_exchanged(tmp_path: Path) -> None:
    chosen = spec("last:2")
    model = build_network(add_frozen_hash_to_spec(chosen, build_initial_frozen_part(chosen, 1, Path())), NAMES, 1)
    save_model(tmp_path, model, label_contract_sha256="")
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path)(images()), model.eval()(images()))
    description = json.loads((tmp_path / "model.json").read_text())
    description["model"]["frozen_sha256"] = "0" * 64
    (tmp_path / "model.json").write_text(json.dumps(description))
    with pytest.raises(BadInput, match="its frozen part has SHA-256"):
        load_model(tmp_path)


def test_running_statistics_are_means_over_the_batches_of_a_round() -> None:
    """With a momentum they would lag behind at a site of few batches."""
    model = network("head")
    standard = model.neck[0]
    assert isinstance(standard, StandardisingLayer)
    for factor in (1.0, 5.0):
        batches = [factor * torch.randn(8, 512, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
        unfreeze_network(model)
        for batch in batches:
            standard(batch)
        means, variances = (torch.stack([of(batch) for batch in batches]).mean(dim=0) for of in OVER_A_BATCH)
        assert torch.allclose(standard.running_mean, means, atol=1e-5)
        assert torch.allclose(standard.running_var, variances, atol=1e-4)
    before = standard.running_mean.clone()
    assert standard(batches[0][:1]).isfinite().all()  # a batch of one has no variance
    assert torch.equal(standard.running_mean, before)


@pytest.mark.parametrize(
    ("train", "reason"),
    [
        ("last:40", "40"),
        ("last:41", "asks for 41 layers, and the backbone has 40 with parameters"),
        ("lora:600", "asks for rank 600"),
    ],
)
def test_what_freezes_nothing_or_a_rank_that_no_layer_has_is_a_fault(train: str, reason: str) -> None:
    (fault,) = find_network_build_faults(spec(train), Path())
    assert fault.where == "model.train"
    with pytest.raises(BadInput, match=reason):
        network(train)


def test_weights_that_are_no_numbers_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    whole = network("all")
    with torch.no_grad():
        whole.backbone.conv1.weight[0] = float("nan")
    save_model(tmp_path, whole, label_contract_sha256="")
    (fault,) = find_network_build_faults(spec("head", weights=str(tmp_path / "model.safetensors")), Path())
    assert "not finite" in str(fault)


def test_a_damaged_file_is_not_here_and_what_is_no_weights_file_is_not_read(tmp_path: Path) -> None:
    """What the roll call says decides whether the coordinator sends it."""
    part = FrozenPart.from_network(network("head"))
    named = add_frozen_hash_to_spec(spec("head"), part)
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "endless.safetensors").symlink_to("/dev/zero")
    with (weights / "large.safetensors").open("wb") as large:
        large.truncate(10**12)  # a hole: it takes no room
    parts = FrozenPartFiles(tmp_path / "frozen", weights, durable=False)
    assert not parts.ensure_frozen_part_stored(named)
    parts.store_received_frozen_part(part, part.sha256)
    assert parts.ensure_frozen_part_stored(named)
    (path,) = (tmp_path / "frozen").iterdir()
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    assert not parts.ensure_frozen_part_stored(named)
    assert not path.exists()


# ---------------------------------------------------------------------- low-rank adaptation


TINY = {"architecture": "tiny_cnn"}


def trained(seed: int = 0, **more: object) -> SplitNetwork:
    """A network whose products are not zero."""
    model = network("lora:4", **more)
    set_train_mode(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
            assert ("up.weight" in name or not name.startswith("backbone.")) == parameter.requires_grad, name
    return model


@pytest.mark.parametrize(
    "architecture",
    [
        *("resnet18", "timm:vit_tiny_patch16_224", "efficientnet_lite0"),
        pytest.param("torchvision:vit_b_16", marks=pytest.mark.long),
    ],
)
def test_it_begins_as_the_network_that_it_adapts_and_can_be_merged_into_one(architecture: str) -> None:
    more = {"architecture": architecture, "channels": 3}
    plain, adapted = (network(train, **more).eval() for train in ("all", "lora:4"))
    with torch.no_grad():
        assert torch.allclose(adapted(images()), plain(images()), atol=1e-5)
        adapted = trained(**more).eval()
        moved = adapted(images())
        assert torch.equal(copy.deepcopy(adapted)(images()), moved)
        assert not torch.allclose(moved, plain(images()), atol=1e-3)
        merge_low_rank_factors(adapted.backbone)
        assert torch.allclose(adapted(images()), moved, atol=1e-4)
    assert adapted.backbone.state_dict().keys() == plain.backbone.state_dict().keys()


def test_the_mean_of_updates_is_the_update_of_the_mean_weights() -> None:
    """With both factors trained it would not be."""
    sites = [trained(seed, **TINY) for seed in (1, 2, 3)]
    together = network("lora:4", **TINY)
    write_model_state(together, trunk=sum(read_model_state(site).trunk for site in sites) / len(sites))
    for model in (together, *sites):
        merge_low_rank_factors(model.backbone)
    states = [site.backbone.state_dict() for site in sites]
    for name, weight in together.backbone.state_dict().items():
        if weight.is_floating_point():
            assert torch.allclose(weight, torch.stack([state[name] for state in states]).mean(dim=0), atol=1e-5), name


def test_what_is_frozen_follows_from_the_weights_alone(tmp_path: Path) -> None:
    """A hospital that has the weights file needs no other byte, for any seed of the run."""
    save_model(tmp_path, network("all", seed=7, **TINY), label_contract_sha256="")
    weights = str(tmp_path / "model.safetensors")
    networks = [
        network(train, seed, weights=weights, **TINY) for train, seed in (("lora:4", 1), ("lora:4", 2), ("lora:5", 1))
    ]
    first, second, other = (FrozenPart.from_network(model).sha256 for model in networks)
    assert first == second != other


def test_it_travels_little_and_the_costs_count_it() -> None:
    layouts = [make_model_layout(network(train)) for train in ("lora:4", "all")]
    size, whole = (sum(part.size for part in layout.trunk) for layout in layouts)
    assert size < 0.01 * whole
    assert estimate_network_cost(spec("lora:4"), rows=2).trained == size + 2 * 513


def test_a_finished_model_is_loaded_exported_and_begun_from(tmp_path: Path) -> None:
    model = trained(**TINY).eval()
    named = network("lora:4", **TINY, frozen_sha256=FrozenPart.from_network(model).sha256)
    named.load_state_dict(model.state_dict())
    save_model(tmp_path, named, label_contract_sha256="")
    with torch.no_grad():
        expected = model(images())
        assert torch.equal(load_model(tmp_path)(images()), expected)
        again = network("all", seed=2, **TINY, weights=str(tmp_path / "model.safetensors"))
        again.head = model.head
        assert torch.allclose(again.eval()(images()), expected, atol=1e-4)
    pixels = [images().to(torch.uint8).numpy()]
    check = export_model(tmp_path, ExportFormat.torchscript, tmp_path / "model.pt", pixels)
    assert check.largest_difference < 1e-4


def test_a_file_of_products_that_do_not_fit_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, network("lora:4", **TINY, frozen_sha256="0" * 64), label_contract_sha256="")
    tensors = load_file(tmp_path / "model.safetensors")
    down = "backbone.0.0.parametrizations.weight.0.down"
    without = {key: tensor for key, tensor in tensors.items() if key != down}
    for spoilt in (without, {**tensors, down: torch.zeros(3, 9)}):
        save_file(spoilt, tmp_path / "spoilt.safetensors")
        with pytest.raises(BadInput, match=r"lacks tensors|unknown tensors"):
            network("all", **TINY, weights=str(tmp_path / "spoilt.safetensors"))
