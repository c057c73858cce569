import hashlib
import json
from pathlib import Path

import pytest
import torch

from common.errors import BadInput
from common.models.network import SplitNetwork, build_network
from common.models.saved import load_model, save_model
from common.models.state import hash_model_state, make_model_layout, read_model_state
from common.models.zoo.spec import ModelSpec


def network() -> SplitNetwork:
    return build_network(
        ModelSpec(architecture="tiny_cnn", channels=1, image_size=16, neck=5), ("Mass", "Effusion"), seed=0
    )


def test_a_saved_model_is_loaded_with_nothing_else_at_hand_and_described(tmp_path: Path) -> None:
    source = network().eval()
    saved = save_model(tmp_path, source, label_contract_sha256="c0ffee")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.json", "model.safetensors"]
    description = json.loads((tmp_path / "model.json").read_text())
    assert description["class_names"] == ["Mass", "Effusion"]
    assert description["label_contract_sha256"] == "c0ffee"
    assert description["model"]["mean"] == [0.5]
    tensors = (tmp_path / "model.safetensors").read_bytes()
    assert description["safetensors_sha256"] == hashlib.sha256(tensors).hexdigest()
    loaded = load_model(tmp_path)
    images = torch.arange(2 * 16 * 16, dtype=torch.float32).reshape(2, 1, 16, 16) % 256
    assert loaded.class_names == ("Mass", "Effusion")
    assert not loaded.training
    assert torch.equal(loaded(images), source(images))
    assert saved.model_sha256 == hash_model_state(read_model_state(loaded), make_model_layout(loaded))


def test_tensors_of_another_architecture_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path, network(), label_contract_sha256="")
    description = tmp_path / "model.json"
    description.write_text(description.read_text().replace('"neck": 5', '"neck": 6'))
    with pytest.raises(BadInput, match=r"neck\.0\.bias: expected \(6,\), got \(5,\)"):
        load_model(tmp_path)
