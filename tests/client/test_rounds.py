"""The hospital's half of a round: what it keeps, what it is lent, and which of its own parts it is tested with."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from client.site.memory import MemoryFolder
from client.site.site import Site
from client.training.layers import evaluate_round, train_round
from client.training.local_round import warm_up
from client.training.task import LocalTask, prepare_task
from common.errors import WireError
from common.models.network import Head, build
from common.models.saved import load_model
from common.models.state import read_state
from common.wire.records import EvaluateRequest, TrainReply
from strategies.engine.state import select_groups_to_send
from strategies.local.objective import plain
from strategies.local.optimisation import make_optimizer
from strategies.local.training import FrozenParts, TrainingTask, reproducible_training, train_epoch, validate
from strategies.registry import STRATEGIES, build_site_method
from tests.client.rounds import OWN, beginning, evaluation, images, plan, request, site

EVERY = ("a", "b", "c")


def head_on_trial(at: Site, asked: EvaluateRequest) -> Head:
    """The head of the model that the site tests, as it lies on its disk."""
    evaluate_round(at, asked)
    return read_state(load_model(at.folder / "model")).head


def kept_head(at: Site, server_round: int) -> Head:
    """The head as trained in a round, from the site's memory of it."""
    head = MemoryFolder(at.folder / "memory" / "run").recall(server_round).parts.head
    assert head is not None
    return head


def equal(left: Head, right: Head) -> bool:
    return left.class_names == right.class_names and left.weight.tobytes() == right.weight.tobytes()


NO_WARM_UP: dict[str, dict[str, Any]] = {"fedseq": {}, "polyclinic": {}, "server_only": {}, "unifed": {}}
"""Methods that pass the model on refuse one."""


@pytest.mark.parametrize("method", sorted(STRATEGIES))
def test_what_a_site_is_lent_stays_as_it_was_and_what_it_sends_is_the_difference(method: str, tmp_path: Path) -> None:
    of = plan(method, NO_WARM_UP.get(method, {"warm_up_epochs": 1}), reset_optimizer=True)
    model, lent = beginning(of), beginning(of)
    reply = train_round(site(tmp_path), request(of, lent))
    for group in ("trunk", "norm"):
        assert getattr(lent, group).tobytes() == getattr(model, group).tobytes()
    assert equal(lent.head, model.head)
    rule = build_site_method(of)
    sent = {name for name in ("trunk", "norm", "head") if getattr(reply.update, name) is not None}
    declared = {"trunk": rule.traffic.trunk, "norm": rule.sends_norm, "head": rule.traffic.head}
    assert sent == {name for name, sends in declared.items() if sends}


def test_the_update_is_new_minus_received(tmp_path: Path) -> None:
    of = plan("pfl", {})
    model = beginning(of)
    at = site(tmp_path)
    reply = train_round(at, request(of, model))
    assert reply.update.trunk is not None
    moved = replace(model, trunk=model.trunk + reply.update.trunk)
    again = train_round(site(tmp_path / "other"), request(plan("individual", {}), model))
    own = MemoryFolder(tmp_path / "other" / "memory" / "run").recall(1).parts
    assert again.update.trunk is None
    assert own.trunk is not None
    np.testing.assert_allclose(moved.trunk, own.trunk, rtol=0, atol=1e-7)


def test_a_repeated_round_gives_the_same_update_bit_for_bit(tmp_path: Path) -> None:
    of = plan("surgical", {})
    at, model = site(tmp_path), beginning(of)
    train_round(at, request(of, model))
    first = train_round(at, request(of, model, 2, counted=1))
    train_round(at, request(of, model, 3, counted=1))  # its reply never arrived
    second = train_round(at, request(of, model, 2, counted=1))
    assert first.update.trunk is not None
    assert second.update.trunk is not None
    assert first.update.trunk.tobytes() == second.update.trunk.tobytes()


def test_the_optimiser_is_kept_over_rounds_unless_the_experiment_resets_it(tmp_path: Path) -> None:
    updates: list[TrainReply] = []
    for name, reset in (("kept", False), ("reset", True)):
        of = plan("surgical", {}, reset_optimizer=reset)
        at, model = site(tmp_path / name), beginning(of)
        updates += [train_round(at, request(of, model)), train_round(at, request(of, model, 2, counted=1))]
    kept, reset_ = updates[1].update.trunk, updates[3].update.trunk
    assert kept is not None
    assert reset_ is not None
    assert updates[0].update.trunk is not None
    assert updates[2].update.trunk is not None
    assert updates[0].update.trunk.tobytes() == updates[2].update.trunk.tobytes()
    assert kept.tobytes() != reset_.tobytes()
    assert not (tmp_path / "reset" / "memory").exists()


@pytest.mark.parametrize("best", [0, 1, 2, 3])
def test_a_site_of_every_round_is_tested_with_its_head_of_the_best(best: int, tmp_path: Path) -> None:
    of = plan("pfl", {})
    at, model = site(tmp_path), beginning(of)
    heads = [model.head]
    for server_round in (1, 2, 3):
        known = min(best, server_round - 2)  # the loss of a round's model is known one round later
        train_round(at, request(of, model, server_round, counted=server_round - 1, best=known))
        heads.append(kept_head(at, server_round))
    assert len({head.weight.tobytes() for head in heads}) == 4
    assert equal(head_on_trial(at, evaluation(of, model, 3, counted=3, best=best)), heads[best])


@pytest.mark.parametrize(("best", "from_round"), [(0, 0), (1, 1), (2, 1), (3, 1), (4, 1), (5, 5)])
def test_a_site_that_missed_rounds_is_tested_with_the_head_it_had_in_the_best(
    best: int, from_round: int, tmp_path: Path
) -> None:
    # It counts in rounds 1 and 5 only: its head after rounds 2, 3 and 4 is that after round 1.
    of = plan("pfl", {})
    at, model = site(tmp_path), beginning(of)
    heads = {0: model.head}
    train_round(at, request(of, model))
    heads[1] = kept_head(at, 1)
    train_round(at, request(of, model, 5, counted=1, best=min(best, 3)))
    heads[5] = kept_head(at, 5)
    assert equal(head_on_trial(at, evaluation(of, model, 5, counted=5, best=best)), heads[from_round])


def test_a_site_that_left_after_the_best_round_began_is_tested_with_its_last_head(tmp_path: Path) -> None:
    of = plan("pfl", {})
    at, model = site(tmp_path), beginning(of)
    train_round(at, request(of, model))
    last = kept_head(at, 1)
    assert equal(head_on_trial(at, evaluation(of, model, 6, counted=1, best=4)), last)


def test_a_site_whose_disk_was_lost_goes_on_from_what_it_is_sent(tmp_path: Path) -> None:
    of = plan("pfl", {})
    at, model = site(tmp_path), beginning(of)
    train_round(at, request(of, model, 4, counted=3, best=1))
    latest = kept_head(at, 4)
    assert not equal(latest, model.head)
    assert equal(head_on_trial(at, evaluation(of, model, 4, counted=4, best=1)), latest)


@pytest.mark.parametrize("trunk", ["fedavg", "fedbn_plus"])
def test_warming_up_leaves_the_backbone_alone_and_keeps_the_epoch_with_the_lowest_loss(
    trunk: str, tmp_path: Path
) -> None:
    of = plan("surgical", {"warm_up_epochs": 5, "warm_up_lr": 0.2, "trunk": trunk})
    asked = request(of, beginning(of))
    work = prepare_task(site(tmp_path), asked)
    by_hand = replace(work, network=copy.deepcopy(work.network))  # requests share one network, one after another
    with reproducible_training(1, 1) as generator:
        warm_up(work, work.examples("validation"), generator)
    loss, spec = by_hand.method.loss, of.training
    optimizer, losses = make_optimizer(by_hand.network, spec, 0.2), []
    with reproducible_training(1, 1) as generator:
        for _ in range(5):
            frozen = FrozenParts(norm=trunk == "fedbn_plus", backbone=True)
            examples = by_hand.examples("train")
            exercise = TrainingTask(examples, plain(loss), spec, of.augmentation, frozen)
            train_epoch(by_hand.network, exercise, optimizer, generator)
            losses.append(validate(by_hand.network, by_hand.examples("validation"), loss, spec).loss)
    assert losses.index(min(losses)) < 4  # else the last epoch would do
    assert validate(work.network, work.examples("validation"), loss, spec).loss == min(losses)
    fresh, backbone = build(of.model, OWN, of.run.seed).backbone.state_dict(), work.network.backbone.state_dict()
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in backbone.items() if tensor.is_floating_point())


def test_only_the_first_round_that_a_site_takes_part_in_warms_up(tmp_path: Path) -> None:
    warm, cold = plan("surgical", {"warm_up_epochs": 2}), plan("surgical", {})
    model = beginning(warm)
    first, second = (
        [train_round(site(tmp_path / f"{n}{c}"), request(of, model, 5, counted=c)).update.trunk for c in (0, 4)]
        for n, of in (("warm", warm), ("cold", cold))
    )
    assert not np.array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])


def test_frozen_batch_normalisation_stays_bit_for_bit_through_a_round(tmp_path: Path) -> None:
    of = plan("individual", {"trunk": "fedbn_plus"}, weight_decay=0.1)
    at, model = site(tmp_path), beginning(of)
    train_round(at, request(of, model))
    evaluate_round(at, evaluation(of, model, 1, counted=1, best=1))
    assert read_state(load_model(at.folder / "model")).norm.tobytes() == model.norm.tobytes()


def test_head_rows_that_are_not_the_sites_own_are_refused(tmp_path: Path) -> None:
    of = plan("surgical", {})
    with pytest.raises(ValueError, match=r'the request has head rows "a", "b", "c", this site has "b", "a"\.'):
        train_round(site(tmp_path), request(of, beginning(of, EVERY)))


def test_a_wide_head_learns_from_the_sites_own_classes_only(tmp_path: Path) -> None:
    of = plan("partial_loss", {})
    model = beginning(of, EVERY)
    head = train_round(site(tmp_path), request(of, model)).update.head
    assert head is not None
    assert head.class_names == EVERY
    assert head.weight[:2].any(axis=1).all()
    np.testing.assert_array_equal(head.weight[2], 0)


def test_a_site_without_training_images_says_so(tmp_path: Path) -> None:
    of = plan("surgical", {})
    with pytest.raises(WireError, match="train_samples must be positive, not 0"):
        train_round(replace(site(tmp_path), train=images(1, 4).rows(np.array([], np.intp))), request(of, beginning(of)))


def test_a_site_receives_the_rows_it_holds_in_its_own_order() -> None:
    of = plan("surgical", {})
    model = beginning(of, EVERY)
    sent = select_groups_to_send(model, OWN).head
    assert sent is not None
    np.testing.assert_array_equal(sent.weight, model.head.weight[[1, 0]])


@pytest.mark.parametrize("simulated", [True, False])
def test_a_model_that_cannot_be_judged_is_an_error_in_simulation_and_an_answer_without_figures_at_a_hospital(
    simulated: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whether it fails, and how, can hang on one patient's image."""

    def fails(*anything: object) -> None:
        raise ValueError("Expected more than 1 value per channel")

    of = plan("surgical", {})
    at, model = replace(site(tmp_path), simulated=simulated), beginning(of)
    monkeypatch.setattr(LocalTask, "validate", fails)
    asked, training = evaluation(of, model, 1, 0, -1), request(of, model)
    if simulated:
        for work, record in ((evaluate_round, asked), (train_round, training)):
            with pytest.raises(ValueError, match="more than 1"):
                work(at, record)  # type: ignore[operator]
        return
    judged, trained = evaluate_round(at, asked), train_round(at, training)
    assert (judged.validation_loss, judged.class_names) == (trained.validation_loss, ()) == (None, ())
    assert trained.update.trunk is not None
    assert trained.update.trunk.any()
