"""Ditto: both models are those of the authors' steps, the own one stays at its site, and what is refused."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from polyclinic.client.app import train_with_privacy_layers
from polyclinic.client.site.memory import SiteRoundStateFolder
from polyclinic.client.site.site import Site
from polyclinic.common.config import HospitalPlan
from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import SplitNetwork, build_network
from polyclinic.common.models.saved import load_model
from polyclinic.common.models.state import ModelState, read_model_state, write_model_state
from polyclinic.common.system.hashing import derive_seed
from polyclinic.common.wire.records import TrainReply
from polyclinic.strategies.engine.state import serialize_federation_state
from polyclinic.strategies.local.losses import partial_loss
from polyclinic.strategies.local.objective import pair_pixels_with_labels
from polyclinic.strategies.local.training import make_training_reproducible, shuffle_into_batches
from polyclinic.strategies.registry import build_experiment_strategy, build_strategy
from tests.client.rounds import OWN, beginning, plan, private_plan, request, site
from tests.federations import experiment, finished
from tests.strategies.leading import lead

SGD = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.0}


def stored_own_model(at: Site, server_round: int) -> ModelState:
    folder = SiteRoundStateFolder(at.folder / "memory" / "run")
    return folder.read_last_counted_state(server_round, forget=False).parts.to_model()


def build_filled(of: HospitalPlan, state: ModelState) -> SplitNetwork:
    network = build_network(of.model, OWN, of.run.seed)
    write_model_state(network, trunk=state.trunk, norm=state.norm, head=state.head)
    return network


def take_authors_steps(
    of: HospitalPlan, at: Site, received: ModelState, own: ModelState, pull: float
) -> list[ModelState]:
    """The authors' loop: on each batch v takes its step, then w; return w and v."""
    seed = derive_seed(of.run.seed, 1, at.name)
    w, v, anchor = (build_filled(of, state) for state in (received, own, received))
    anchors = [value.detach().clone() for value in anchor.parameters()]
    examples = pair_pixels_with_labels(at.train, at.pixels["train"], OWN)
    w.train()
    v.train()
    with make_training_reproducible(seed, 1) as generator:
        batches = shuffle_into_batches(len(examples), of.training.batch_size, generator)
        draws = torch.get_rng_state()  # of dropout; each model draws as if it were alone
        states = {id(w): draws, id(v): draws}
        for rows in batches:
            for network, strength in ((v, pull), (w, 0.0)):
                torch.set_rng_state(states[id(network)])
                network.zero_grad()
                labels = examples.labels[rows]
                partial_loss(network(examples.images[rows].float()), labels, examples.annotated).backward()
                states[id(network)] = torch.get_rng_state()
                with torch.no_grad():
                    for value, at_first in zip(network.parameters(), anchors, strict=True):
                        value -= of.training.lr * (value.grad + strength * (value - at_first))
    return [read_model_state(network) for network in (w, v)]


def test_both_models_take_the_steps_of_the_authors_loop(tmp_path: Path) -> None:
    of, at = plan("ditto", {"pull": 0.7}, **SGD), site(tmp_path)
    received = beginning(of)
    reply = train_with_privacy_layers(at, request(of, copy.deepcopy(received)))
    w, v = take_authors_steps(of, at, received, received, 0.7)
    np.testing.assert_allclose(received.trunk + reply.update.trunk, w.trunk, rtol=1e-4, atol=1e-6)
    own = stored_own_model(at, 1)
    for group in ("trunk", "norm"):
        np.testing.assert_allclose(getattr(own, group), getattr(v, group), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(own.head.weight, v.head.weight, rtol=1e-4, atol=1e-6)
    assert np.abs(v.trunk - w.trunk).max() > 1e-4


def two_rounds(folder: Path, of: HospitalPlan) -> tuple[Site, list[TrainReply]]:
    """Two rounds at one site; the second begins from another model of the federation."""
    at, first = site(folder), beginning(of)
    other = beginning(of.model_copy(update={"run": of.run.model_copy(update={"seed": 9})}))
    replies = [
        train_with_privacy_layers(at, request(of, model, number, number - 1))
        for number, model in enumerate((first, other), start=1)
    ]
    return at, replies


@pytest.mark.parametrize("reset", [True, False])
def test_the_federations_half_is_that_of_the_partial_loss_bit_for_bit(reset: bool, tmp_path: Path) -> None:
    _, ditto = two_rounds(tmp_path / "ditto", plan("ditto", reset_optimizer=reset))
    _, plain = two_rounds(tmp_path / "plain", plan("partial_loss", reset_optimizer=reset))
    assert [reply.update.trunk.tobytes() for reply in ditto] == [reply.update.trunk.tobytes() for reply in plain]
    assert [reply.update.head.weight.tobytes() for reply in ditto] == [
        reply.update.head.weight.tobytes() for reply in plain
    ]


@pytest.mark.parametrize("reset", [True, False])
def test_without_a_pull_the_own_model_is_that_of_a_site_that_trains_alone(reset: bool, tmp_path: Path) -> None:
    own, _ = two_rounds(tmp_path / "ditto", plan("ditto", {"pull": 0.0}, reset_optimizer=reset))
    alone, _ = two_rounds(tmp_path / "alone", plan("individual", reset_optimizer=reset))
    for number in (1, 2):
        of_own, of_alone = (stored_own_model(at, number) for at in (own, alone))
        np.testing.assert_array_equal(of_own.trunk, of_alone.trunk)
        np.testing.assert_array_equal(of_own.head.weight, of_alone.head.weight)


def test_a_strong_pull_holds_the_own_model_at_the_received_one(tmp_path: Path) -> None:
    # A step of SGD leaves (1 - lr pull) of the distance; with lr 0.1 and pull 10 that is the gradient's step alone.
    far = {pull: two_rounds(tmp_path / str(pull), plan("ditto", {"pull": pull}, **SGD))[0] for pull in (0.0, 5.0)}
    other = beginning(plan("ditto").model_copy(update={"run": plan("ditto").run.model_copy(update={"seed": 9})}))
    distances = {pull: np.abs(stored_own_model(at, 2).trunk - other.trunk).mean() for pull, at in far.items()}
    assert distances[5.0] < 0.2 * distances[0.0]


def own_models(folder: Path) -> dict[str, bytes]:
    """The last state of each site, from its own disk."""
    last = {
        path.parent.parent.parent.name: path for path in sorted(folder.glob("sites/*/memory/*/round-*.safetensors"))
    }
    return {name: path.read_bytes() for name, path in last.items()}


def test_after_a_kill_each_site_goes_on_with_its_own_model(tmp_path: Path) -> None:
    file = experiment(tmp_path, "run.method=ditto", "partition.shared=2", "training.reset_optimizer=false")
    whole = lead(file, tmp_path / "whole", 3)
    begun = lead(file, tmp_path / "killed", 2)
    went_on = lead(file, tmp_path / "killed", 3, resumed=begun.states[0])  # the coordinator knows of round 1 alone
    assert serialize_federation_state(went_on.coordinator.state) == serialize_federation_state(whole.coordinator.state)
    models = own_models(tmp_path / "killed")
    assert len(models) == 3
    assert models == own_models(tmp_path / "whole")


def test_each_site_tests_the_model_of_its_own() -> None:
    run = ("run.method=ditto", "partition.shared=2", "run.rounds=2")
    folder, summary = finished(*run)
    saved = [read_model_state(load_model(path)) for path in sorted(folder.glob("sites/*/model"))]
    assert len({state.trunk.tobytes() for state in saved}) == 3
    _, plain = finished("run.method=partial_loss", *run[1:])
    assert summary["test"]["mean_auroc"] != plain["test"]["mean_auroc"]
    assert summary["model_sha256"] != plain["model_sha256"]


def test_normalisation_at_the_sites_is_refused_as_a_whole_model_holds_the_own_one() -> None:
    with pytest.raises(BadInput, match="held to the whole model") as refused:
        build_strategy("ditto", {"trunk": "fedbn"})
    assert [fault.where for fault in refused.value.faults] == ["method.trunk"]


@pytest.mark.parametrize("level", ["sample", "patient"])
def test_noise_in_each_step_is_refused_because_the_pull_is_no_images_loss(level: str) -> None:
    with pytest.raises(BadInput, match="more than each image's own loss"):
        build_experiment_strategy(private_plan(plan("ditto"), level=level, noise_multiplier=1.0))


@pytest.mark.parametrize("privacy", [{"level": "update", "noise_multiplier": 1.0}, {"secure_aggregation": True}])
def test_noise_on_updates_and_masks_go_with_it(privacy: dict[str, object]) -> None:
    assert build_experiment_strategy(private_plan(plan("ditto"), **privacy)).site.parts.keeps_local_parts
