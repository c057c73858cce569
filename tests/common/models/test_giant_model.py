"""A run folder that names a network far larger than its file takes no more memory than an honest one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import build_network, compute_logits
from polyclinic.common.models.saved import load_model, save_model
from polyclinic.common.models.zoo.spec import DESCRIPTION_FILE, ModelSpec
from tests.processes import ROOT, environment

MB = 10**6
TINY = ModelSpec(architecture="tiny_cnn", channels=1, image_size=16)
LOADS = """
import resource, sys
from pathlib import Path
from polyclinic.common.errors import BadInput
from polyclinic.common.models.saved import load_model
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    load_model(Path(sys.argv[1]))
except BadInput as bad:
    print(str(bad), file=sys.stderr)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def saved(folder: Path, spec: ModelSpec = TINY, **changes: Any) -> Path:
    """Save a model, and change the network in its description."""
    folder.mkdir()
    save_model(folder, build_network(spec, ("a", "b"), 1), label_contract_sha256="")
    tree = json.loads((folder / DESCRIPTION_FILE).read_text())
    tree["class_names"] = changes.pop("class_names", tree["class_names"])
    tree["model"] |= changes
    (folder / DESCRIPTION_FILE).write_text(json.dumps(tree))
    return folder


GIANTS: dict[str, dict[str, Any]] = {
    "a neck of 1 GB": {"architecture": "unifed_vgg11", "image_size": 32, "neck": 65_536},
    "a layer larger than the machine": {"architecture": "fedsld_cnn", "image_size": 4096},
    "another library's of 4.5 GB": {"architecture": "timm:vit_giant_patch14_224", "image_size": 224, "channels": 3},
    "a million classes": {"class_names": [str(number) for number in range(10**6)]},
    "low-rank factors": {"architecture": "unifed_vgg11", "image_size": 32, "train": "lora:500"},
}


@pytest.mark.parametrize("changes", GIANTS.values(), ids=GIANTS.keys())
def test_a_network_that_its_file_cannot_hold_is_refused_before_it_takes_memory(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = saved(tmp_path / "run", mean=None, std=None, **changes)
    command = [sys.executable, "-c", LOADS, str(folder)]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300, check=True
    )
    assert DESCRIPTION_FILE in ended.stderr
    assert int(ended.stdout) < 700 * MB


SPECS = [
    TINY,
    ModelSpec(architecture="resnet18", channels=3, image_size=32, neck=64),
    ModelSpec(architecture="torchvision:vgg11_bn", channels=1, image_size=32, norm="group"),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.architecture)
def test_an_honest_model_comes_back_as_it_was(spec: ModelSpec, tmp_path: Path) -> None:
    network = build_network(spec, ("a", "b", "c"), 1)
    save_model(tmp_path, network, label_contract_sha256="")
    back = load_model(tmp_path)
    images = torch.randint(0, 256, (2, spec.channels, 32, 32), dtype=torch.uint8)
    assert back.class_names == ("a", "b", "c")
    assert not back.training
    assert torch.equal(compute_logits(back, images), compute_logits(network, images))
    assert back.head.weight.is_leaf
    assert back.frozen == network.frozen


def test_no_limit_is_left_behind(tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        load_model(saved(tmp_path / "run", architecture="unifed_vgg11", image_size=32, neck=65_536))
    assert sum(value.numel() for value in torch.nn.Linear(10_000, 10_000).parameters()) > 10**8
