"""The hospital's half of a round: what it keeps, what it is lent, and which of its own parts it is tested with."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyclinic.client.site.memory import SiteRoundStateFolder
from polyclinic.client.site.site import Site
from polyclinic.client.training.layers import evaluate_with_privacy_layers, train_with_privacy_layers
from polyclinic.client.training.local_round import warm_up_head
from polyclinic.client.training.task import LocalTask, get_unfilled_network, prepare_local_task
from polyclinic.common.errors import WireError
from polyclinic.common.models.network import build_network, freeze_backbone
from polyclinic.common.models.saved import load_model
from polyclinic.common.models.state import read_model_state, write_model_state
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.strategies.engine.state import select_site_model_groups
from polyclinic.strategies.local.objective import plain
from polyclinic.strategies.local.optimisation import make_optimizer
from polyclinic.strategies.local.training import (
    FrozenNetworkParts,
    TrainingTask,
    make_training_reproducible,
    train_epoch,
    validate_network,
)
from polyclinic.strategies.registry import STRATEGIES, build_site_method
from tests.client.rounds import OWN, beginning, evaluation, images, plan, request, site

EVERY = ("a", "b", "c")
SURGICAL, PFL = plan(), plan("pfl")
INITIAL = beginning(PFL).head.weight.tobytes()


def evaluated_head(at: Site, counted: int, best: int, rounds: int) -> bytes:
    """The head rows of the model that the site tests, as it lies on its disk."""
    evaluate_with_privacy_layers(at, evaluation(PFL, beginning(PFL), rounds, counted=counted, best=best))
    return read_model_state(load_model(at.folder / "model")).head.weight.tobytes()


def trained_head(at: Site, server_round: int, counted: int, best: int = -1) -> bytes:
    """Train a round; return the head rows in the site's memory of it."""
    train_with_privacy_layers(at, request(PFL, None, server_round, counted, best))
    return (
        SiteRoundStateFolder(at.folder / "memory" / "run")
        .read_last_counted_state(server_round)
        .parts.head.weight.tobytes()
    )


NO_WARM_UP: dict[str, dict[str, Any]] = {
    "fedseq": {},
    "polyclinic": {},
    "polyclinic_passing": {},
    "scaffold": {},
    "server_only": {},
    "sfedkd": {},
    "unifed": {},
}
"""Methods that refuse one: those that pass the model on, and one that reads gradients off all steps."""


@pytest.mark.parametrize("method", sorted(STRATEGIES))
def test_what_a_site_is_lent_stays_as_it_was_and_what_it_sends_is_the_difference(method: str, tmp_path: Path) -> None:
    of = plan(method, NO_WARM_UP.get(method, {"warm_up_epochs": 1}), reset_optimizer=True)
    model, lent = beginning(of), beginning(of)
    reply = train_with_privacy_layers(site(tmp_path), request(of, lent))
    for group in ("trunk", "norm"):
        assert getattr(lent, group).tobytes() == getattr(model, group).tobytes()
    assert lent.head.weight.tobytes() == model.head.weight.tobytes()
    assert lent.head.class_names == model.head.class_names
    rule = build_site_method(of)
    sent = {name for name in ("trunk", "norm", "head") if getattr(reply.update, name) is not None}
    declared = {"trunk": rule.payload.trunk, "norm": rule.parts.sends_batch_norm, "head": rule.payload.head}
    assert sent == {name for name, sends in declared.items() if sends}


def test_the_update_is_new_minus_received(tmp_path: Path) -> None:
    update = train_with_privacy_layers(site(tmp_path / "pfl"), request(PFL)).update
    alone = train_with_privacy_layers(site(tmp_path / "alone"), request(plan("individual"), beginning(PFL)))
    own = SiteRoundStateFolder(tmp_path / "alone" / "memory" / "run").read_last_counted_state(1).parts
    assert alone.update.trunk is None
    np.testing.assert_allclose(beginning(PFL).trunk + update.trunk, own.trunk, rtol=0, atol=1e-7)


def test_a_hospital_says_that_its_state_is_lost_and_takes_part_anew_from_the_next_round_on(tmp_path: Path) -> None:
    trained_head(at := site(tmp_path), 1, 0)
    (at.folder / "memory" / "run" / "round-000001.safetensors").unlink()
    with pytest.raises(WireError, match="state after round 1 is missing: memory/run/round-000001"):
        evaluate_with_privacy_layers(at, evaluation(PFL, beginning(PFL), 1, counted=1, best=-1))
    with pytest.raises(WireError, match="state after round 1 is missing: memory/run/round-000001"):
        train_with_privacy_layers(at, request(PFL, None, 2, 1))
    assert trained_head(at, 3, 1) == trained_head(site(tmp_path / "other"), 3, 0)


def test_a_repeated_round_gives_the_same_update_bit_for_bit(tmp_path: Path) -> None:
    at = site(tmp_path)
    rounds = ((1, 0), (2, 1), (3, 1), (2, 1))  # the reply of round 3 never arrived
    replies = [train_with_privacy_layers(at, request(SURGICAL, None, number, counted)) for number, counted in rounds]
    assert replies[1].update.trunk.tobytes() == replies[3].update.trunk.tobytes()


def test_the_optimiser_is_kept_over_rounds_unless_the_experiment_resets_it(tmp_path: Path) -> None:
    trunks: list[bytes] = []
    for reset in (False, True):
        of, at = plan(reset_optimizer=reset), site(tmp_path / str(reset))
        for number in (1, 2):
            reply = train_with_privacy_layers(at, request(of, None, number, counted=number - 1))
            trunks.append(reply.update.trunk.tobytes())
    assert trunks[0] == trunks[2]
    assert trunks[1] != trunks[3]
    assert not (tmp_path / "True" / "memory").exists()


@pytest.mark.parametrize(
    ("rounds", "best", "expected"),
    [
        *(((1, 2, 3), best, best) for best in range(4)),
        *(((1, 5), best, expected) for best, expected in enumerate((0, 1, 1, 1, 1, 5))),
    ],
)
def test_a_site_is_tested_with_its_head_of_the_best_round_or_of_the_last_before_it_that_it_took_part_in(
    rounds: tuple[int, ...], best: int, expected: int, tmp_path: Path
) -> None:
    at, heads, last = site(tmp_path), {0: INITIAL}, 0
    for number in rounds:
        # The loss of a round's model is known one round later.
        heads[number] = trained_head(at, number, last, min(best, number - 2))
        last = number
    assert len(set(heads.values())) == len(heads)
    assert evaluated_head(at, counted=last, best=best, rounds=last) == heads[expected]


@pytest.mark.parametrize(
    ("trained", "before", "counted", "best", "rounds"),
    [(1, 0, 1, 4, 6), (4, 3, 4, 1, 4)],
    ids=["it left after the best round began", "its disk was lost"],
)
def test_a_site_without_a_memory_of_the_best_round_is_tested_with_its_last_head(
    trained: int, before: int, counted: int, best: int, rounds: int, tmp_path: Path
) -> None:
    at = site(tmp_path)
    at.open_run_state_folder("run").store_empty_state(before)
    last = trained_head(at, trained, before, min(best, before - 1))
    assert last != INITIAL
    assert evaluated_head(at, counted, best, rounds) == last


@pytest.mark.parametrize("trunk", ["fedavg", "fedbn_plus"])
def test_warming_up_keeps_the_backbone_and_the_epoch_with_the_lowest_loss(trunk: str, tmp_path: Path) -> None:
    of = plan("surgical", {"warm_up_epochs": 5, "warm_up_lr": 0.2, "trunk": trunk})
    train = request(of, beginning(of))
    work = prepare_local_task(site(tmp_path), train)
    by_hand = replace(work, network=copy.deepcopy(work.network))  # requests share one network, one after another
    with make_training_reproducible(1, 1) as generator:
        warm_up_head(work, work.make_labelled_examples("validation"), generator)
    loss, spec = by_hand.method.loss, of.training
    optimizer, losses = make_optimizer(by_hand.network, spec, 0.2), []
    with make_training_reproducible(1, 1) as generator:
        for _ in range(5):
            frozen = FrozenNetworkParts(norm=trunk == "fedbn_plus", backbone=True)
            examples = by_hand.make_labelled_examples("train")
            exercise = TrainingTask(examples, plain(loss), spec, of.augmentation, frozen)
            train_epoch(by_hand.network, exercise, optimizer, generator)
            losses.append(
                validate_network(by_hand.network, by_hand.make_labelled_examples("validation"), loss, spec).loss
            )
    assert losses.index(min(losses)) < 4  # else the last epoch would do
    assert validate_network(work.network, work.make_labelled_examples("validation"), loss, spec).loss == min(losses)
    fresh, backbone = (
        build_network(of.model, OWN, of.run.seed).backbone.state_dict(),
        work.network.backbone.state_dict(),
    )
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in backbone.items() if tensor.is_floating_point())


def test_only_the_first_round_that_a_site_takes_part_in_warms_up(tmp_path: Path) -> None:
    warm = plan(parameters={"warm_up_epochs": 2})
    for counted in (0, 4):
        requests = [request(of, beginning(warm), 5, counted) for of in (warm, plan())]
        sites = [site(tmp_path / f"{counted}{number}") for number in (0, 1)]
        for at in sites:
            at.open_run_state_folder("run").store_empty_state(counted)
        first, second = (train_with_privacy_layers(*pair).update.trunk for pair in zip(sites, requests, strict=True))
        assert np.array_equal(first, second) == bool(counted)


def test_frozen_batch_normalisation_stays_bit_for_bit_through_a_round(tmp_path: Path) -> None:
    of = plan("individual", {"trunk": "fedbn_plus"}, weight_decay=0.1)
    at, model = site(tmp_path), beginning(of)
    train_with_privacy_layers(at, request(of, model))
    evaluate_with_privacy_layers(at, evaluation(of, model, 1, counted=1, best=1))
    assert read_model_state(load_model(at.folder / "model")).norm.tobytes() == model.norm.tobytes()


def test_a_wide_head_learns_from_the_sites_own_classes_only(tmp_path: Path) -> None:
    of = plan("partial_loss")
    head = train_with_privacy_layers(site(tmp_path), request(of, beginning(of, EVERY))).update.head
    assert head.class_names == EVERY
    assert head.weight[:2].any(axis=1).all()
    np.testing.assert_array_equal(head.weight[2], 0)


def test_a_site_receives_the_rows_it_holds_in_its_own_order_and_refuses_others(tmp_path: Path) -> None:
    model = beginning(SURGICAL, EVERY)
    head = select_site_model_groups(model, OWN, "float32").head
    np.testing.assert_array_equal(head.weight, model.head.weight[[1, 0]])
    with pytest.raises(ValueError, match=r'"a", "b", "c", this site has "b", "a"\.'):
        train_with_privacy_layers(site(tmp_path), request(SURGICAL, model))


def test_a_site_without_training_images_says_so(tmp_path: Path) -> None:
    with pytest.raises(WireError, match="train_samples must be positive, not 0"):
        train_with_privacy_layers(
            replace(site(tmp_path), train=images(1, 4).select_rows(np.array([], np.intp))), request(SURGICAL)
        )


@pytest.mark.parametrize("simulated", [True, False])
def test_a_model_that_cannot_be_judged_is_an_error_in_simulation_and_an_answer_without_figures_at_a_hospital(
    simulated: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whether it fails, and how, can hang on one patient's image."""

    def fails(*anything: object) -> None:
        raise ValueError("Expected more than 1 value per channel")

    monkeypatch.setattr(LocalTask, "validate_current_network", fails)
    at, expectation = replace(site(tmp_path), simulated=simulated), pytest.raises(ValueError, match="more than 1")
    with expectation if simulated else nullcontext():
        judged = evaluate_with_privacy_layers(at, evaluation(SURGICAL, beginning(SURGICAL), 1, 0, -1))
        assert (judged.validation_loss, judged.class_names) == (None, ())
    with expectation if simulated else nullcontext():
        trained = train_with_privacy_layers(at, request(SURGICAL))
        assert trained.validation_loss is None
        assert trained.update.trunk.any()


SPEC = ModelSpec(architecture="tiny_cnn", channels=1, image_size=16, neck=8)


def test_a_filled_network_is_as_one_that_was_built_for_it() -> None:
    for names, seed in ((("a", "b"), 1), (("b",), 2), (("a", "b"), 3)):
        built = read_model_state(build_network(SPEC, names, seed))
        network = get_unfilled_network(SPEC, names, "cpu")
        write_model_state(network, trunk=built.trunk, norm=built.norm, head=built.head)
        filled = read_model_state(network)
        assert filled.head.class_names == names
        for name in ("trunk", "norm"):
            np.testing.assert_array_equal(getattr(filled, name), getattr(built, name))
        np.testing.assert_array_equal(filled.head.weight, built.head.weight)
        np.testing.assert_array_equal(filled.head.bias, built.head.bias)


def test_an_unfilled_network_is_shared_by_runs_of_one_model_and_bears_no_traces_of_them() -> None:
    first = get_unfilled_network(SPEC, ("a", "b"), "cpu")
    first.head.weight.sum().backward()  # type: ignore[no-untyped-call]
    freeze_backbone(first)
    again = get_unfilled_network(SPEC, ("a", "b"), "cpu")
    assert all(parameter.requires_grad and parameter.grad is None for parameter in again.parameters())
    second = get_unfilled_network(SPEC, ("c",), "cpu")
    assert first.backbone is second.backbone
    assert first.head is not second.head
    other = get_unfilled_network(SPEC.model_copy(update={"neck": 4}), ("a", "b"), "cpu")
    assert other.backbone is not first.backbone
