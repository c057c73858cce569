"""Federations that train a part of the network: the rest is sent once, never changes, and never comes back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from polyclinic.client.site.memory import FrozenPartFiles
from polyclinic.client.training import task
from polyclinic.common.errors import BadInput, WireError
from polyclinic.common.models.saved import load_model
from polyclinic.common.models.state import FrozenPart, ModelState, build_initial_frozen_part, read_model_state
from polyclinic.common.wire.codec import decode_record
from polyclinic.common.wire.records import EvaluateRequest, TrainRequest
from polyclinic.server.federation.checkpoints import CheckpointFolder
from polyclinic.server.runs.verify import verify_run
from polyclinic.server.simulation.backends import inline as backends
from polyclinic.strategies.registry import STRATEGIES
from tests.federations import Traffic, experiment, federation, finished, json_lines, needs_of, of_type
from tests.server.killing import Killed, kill_at

HEAD = ("model.train=head",)
NECK = ("model.train=neck", "model.neck=24")
LAST = ("model.train=last:2",)
LORA = ("model.train=lora:4",)
SHORT = {
    *((name, HEAD) for name in ("surgical", "fedsld", "unifed", "individual")),
    *((name, LORA) for name in ("surgical", "fedmlp", "fedbn")),
}
"""What ``make test`` tries; ``make torture`` tries all."""
WITHOUT_BATCH_NORM = {"fedbn_plus": ("model.norm=group",)}
"""It freezes the layer that would standardise the features."""


def frozen_of(folder: Path, *overrides: str) -> FrozenPart:
    """The frozen part that a run of these choices begins with."""
    file = experiment(folder, *overrides)
    return build_initial_frozen_part(file.experiment.model, file.experiment.run.seed, folder)


def whole_model() -> ModelState:
    return read_model_state(load_model(finished()[0]))


@pytest.mark.parametrize(
    ("method", "part"),
    [
        pytest.param(name, part, id=f"{name}-{part[0]}", marks=() if (name, part) in SHORT else pytest.mark.torture)
        for name in sorted(STRATEGIES)
        for part in (HEAD, LORA)
    ],
)
def test_every_method_trains_only_the_part(method: str, part: tuple[str, ...], tmp_path: Path) -> None:
    choices = (*part, *(WITHOUT_BATCH_NORM.get(method, ()) if part == HEAD else ()))
    summary = federation(tmp_path, f"run.method={method}", *needs_of(method), *choices, "run.keep_updates=true")
    sha256 = frozen_of(tmp_path, *choices).sha256
    assert summary["experiment"]["model"]["frozen_sha256"] == sha256
    models = [path.parent for path in tmp_path.rglob("model.safetensors")]
    assert models
    assert all(FrozenPart.from_network(load_model(model)).sha256 == sha256 for model in models)
    assert not verify_run(tmp_path / "run").faults


@pytest.mark.parametrize("choices", [HEAD, NECK, LAST])
def test_the_frozen_part_is_sent_once_a_site(choices: tuple[str, ...], tmp_path: Path, traffic: Traffic) -> None:
    backbone = sum(len(array) for array in (whole_model().trunk, whole_model().norm))
    traffic.down.clear()
    traffic.up.clear()
    federation(tmp_path, *choices)
    size = len(frozen_of(tmp_path, *choices).values)
    evaluations = [decode_record(content, EvaluateRequest) for content in of_type(traffic.down, "evaluate")]
    carried = [request for request in (*traffic.requests, *evaluations) if request.frozen.trunk is not None]
    assert [request.round for request in carried] == [1, 1, 1]
    assert all(len(request.frozen.trunk) == size for request in carried if request.frozen.trunk is not None)
    of_neck = {HEAD: 2 * 96, NECK: 2 * 96 + 97 * 24, LAST: 0}[choices]  # means and variances, then the dense layer
    for reply in traffic.replies:
        assert len(reply.update.trunk) + len(reply.update.norm) == backbone - size + of_neck


def test_features_train_the_model_that_pixels_train_and_the_frozen_backbone_sees_augmentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    through = finished(*HEAD)[1]["model_sha256"]
    assert federation(tmp_path, *HEAD, "augmentation.rotation=0.1", out="turned")["model_sha256"] != through
    monkeypatch.setattr(task, "trains_on_cached_features", lambda plan, method: False)
    assert federation(tmp_path, *HEAD)["model_sha256"] == through


WRAPPED = (
    ("privacy.secure_aggregation=true", "run.method=vanilla", "partition.sites=4", "partition.shared=10"),
    ("privacy.level=update", "privacy.noise_multiplier=0.5", "model.norm=group", "evaluation.checkpoint=last"),
    ("privacy.level=sample", "privacy.noise_multiplier=0.5", "model.norm=group", "evaluation.checkpoint=last"),
    ("method.compress_update=int8", "run.method=partial_loss"),
    ('method.server_optimizer={kind="adam"}', "run.method=partial_loss"),
    ('method.mean="coordinate_median"', "run.method=partial_loss"),
    ("training.reset_optimizer=false",),
)


def test_products_go_with_noise_on_updates_and_with_masks(tmp_path: Path) -> None:
    masked, noisy, by_image = WRAPPED[0], WRAPPED[1], WRAPPED[2]
    federation(tmp_path, *LORA, *masked, out="masked")
    federation(tmp_path, *LORA, *noisy[:-2], *noisy[-1:], out="noisy")
    with pytest.raises(BadInput, match="no image's own gradient is at hand"):
        federation(tmp_path, *LORA, *by_image, out="by-image")


@pytest.mark.parametrize("choices", [("run.method=fedbn_plus", "partition.shared=10"), ("method.trunk=fedbn_plus",)])
def test_a_standardising_layer_that_would_be_frozen_is_refused(choices: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r'Set model\.norm = "group"'):
        federation(tmp_path, *HEAD, *choices)
    federation(tmp_path, *HEAD, *choices, "model.norm=group")


@pytest.mark.parametrize("wrapped", WRAPPED, ids=lambda wrapped: wrapped[0])
def test_it_works_with_what_is_around_a_method(wrapped: tuple[str, ...], tmp_path: Path) -> None:
    summary = federation(tmp_path, *HEAD, *wrapped)
    assert summary["rounds"] == 2
    assert all(site["epochs"] for site in summary["sites"].values())
    assert not verify_run(tmp_path / "run").faults


@pytest.mark.parametrize("choices", [HEAD, pytest.param(LAST, marks=pytest.mark.long), LORA])
def test_killed_and_resumed_it_ends_in_the_same_model(choices: tuple[str, ...], tmp_path: Path) -> None:
    through = finished(*choices, "run.rounds=3")[1]
    with pytest.MonkeyPatch.context() as patched:
        kill_at(patched, CheckpointFolder, "save_checkpoint", 2)
        with pytest.raises(Killed):
            federation(tmp_path, *choices, "run.rounds=3")
    assert federation(tmp_path, *choices, "run.rounds=3", resume=True)["model_sha256"] == through["model_sha256"]


@pytest.mark.long
def test_ray_ends_in_the_same_model(tmp_path: Path) -> None:
    on_ray = federation(tmp_path, *HEAD, "simulation.backend=ray", "simulation.workers=2")
    assert on_ray["model_sha256"] == finished(*HEAD)[1]["model_sha256"]


def test_a_site_that_lost_its_file_is_sent_it_again(
    tmp_path: Path, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In round 2 the first site asked has no file any more, and its process is new."""
    read, answered, lost = FrozenPartFiles.read_frozen_part, backends.InlineGrid.answer_message, list[int]()

    def missing(parts: FrozenPartFiles, sha256: str) -> FrozenPart:
        if len(lost) == 1:
            lost.append(2)
            (parts._folder / f"{sha256}.f32").rename(tmp_path / "away")
            try:
                return read(parts, sha256)
            finally:
                (tmp_path / "away").rename(parts._folder / f"{sha256}.f32")
        return read(parts, sha256)

    def losing(grid: Any, message: Any) -> Any:
        train = message.metadata.message_type == "train"
        if train and not lost and decode_record(message.content, TrainRequest).round == 2:
            lost.append(1)
            task.get_cached_networks.cache_clear()
        return answered(grid, message)

    monkeypatch.setattr(FrozenPartFiles, "read_frozen_part", missing)
    monkeypatch.setattr(backends.InlineGrid, "answer_message", losing)
    federation(tmp_path, *HEAD, "run.rounds=3", "participation.min_sites=1")
    assert [request.round for request in traffic.requests if request.frozen.trunk is not None] == [1, 1, 1, 3]
    rounds = json_lines(tmp_path / "run" / "rounds.jsonl")
    assert [len(line["sites"]) for line in rounds] == [3, 2, 3]
    assert "the frozen part of the model is not on this site's disk" in str(rounds[1])


def test_a_frozen_part_of_another_hash_is_refused_by_the_site(tmp_path: Path) -> None:
    """A coordinator that exchanges the frozen part: the plan, which is signed and shown, has the hash."""
    parts = FrozenPartFiles(tmp_path, None, durable=False)
    with pytest.raises(WireError, match=f"the plan names {'0' * 64}"):
        parts.store_received_frozen_part(FrozenPart(np.arange(5, dtype=np.float32)), "0" * 64)
    assert not list(tmp_path.iterdir())


def test_only_a_few_are_kept_and_a_damaged_file_is_removed_and_asked_for_again(tmp_path: Path) -> None:
    parts = FrozenPartFiles(tmp_path, None, durable=False)
    for value in range(5):
        part = FrozenPart(np.full(3, value, np.float32))
        parts.store_received_frozen_part(part, part.sha256)
    assert len(list(tmp_path.glob("*.f32"))) == 3
    assert parts.read_frozen_part(part.sha256).values.tolist() == [4.0, 4.0, 4.0]
    path = tmp_path / f"{part.sha256}.f32"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WireError, match="not on this site's disk: its file was damaged"):
        parts.read_frozen_part(part.sha256)
    assert not path.exists()


def test_a_weights_file_of_the_hospital_saves_the_transfer(tmp_path: Path) -> None:
    file = experiment(tmp_path, *HEAD)
    first = finished(*HEAD)[0]
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "another.safetensors").write_bytes(safetensors.numpy.save({"backbone.x": np.zeros(1, np.float32)}))
    (weights / "damaged.safetensors").write_bytes(b"no tensors")
    parts = FrozenPartFiles(tmp_path / "frozen", weights, durable=False)
    sha256 = json.loads((first / "summary.json").read_text())["experiment"]["model"]["frozen_sha256"]
    named = file.experiment.model.model_copy(update={"frozen_sha256": sha256})
    assert not parts.ensure_frozen_part_stored(named)
    (weights / "ours.safetensors").write_bytes((first / "model.safetensors").read_bytes())
    assert parts.ensure_frozen_part_stored(named)
    assert parts.read_frozen_part(sha256).sha256 == sha256
