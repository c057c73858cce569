"""A site's budget: what is written down before anything leaves, and when the site stops."""

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from polyclinic.client.app import answer_roll_call
from polyclinic.client.connection.status import ClientStatus, format_client_status
from polyclinic.client.gate.incoming_request import RequestTimeExceeded, hash_plan
from polyclinic.client.site.memory import SiteRoundState, SiteRoundStateFolder
from polyclinic.client.site.policy import SitePolicy
from polyclinic.client.site.site import Site
from polyclinic.client.training.layers import evaluate_with_privacy_layers, train_with_privacy_layers
from polyclinic.client.training.privacy import PrivacyBudgetLedger, make_privacy_status, open_privacy_ledger
from polyclinic.common.config import HospitalPlan
from polyclinic.common.errors import BadInput
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.plugins import MODELS, identify_plugin, register_local_plugin
from polyclinic.common.wire.records import RollCall, TrainReply
from polyclinic.data.base.image_set import ImageSet
from polyclinic.strategies.privacy.mechanism import NoisySteps, compute_epsilon
from tests.client.rounds import Killed, beginning, changed_plan, evaluation, images, plan, private_plan, request, site

FIVE_STEPS = NoisySteps(2.0, 0.2, 5)  # of 40 images, in batches of 8


def noisy(level: str = "sample", **keys: Any) -> HospitalPlan:
    return private_plan(plan("fedavg"), **{"level": level, "noise_multiplier": 2.0, **keys})


def private_site(folder: Path, **policy: Any) -> Site:
    return replace(site(folder), policy=SitePolicy(smallest_count=0, **policy), durable=True)


def first_round(at: Site, of: HospitalPlan, server_round: int = 1) -> TrainReply:
    return train_with_privacy_layers(at, request(of, server_round=server_round, counted=server_round - 1))


def entries(folder: Path) -> int:
    return len(PrivacyBudgetLedger(folder).entries)


def cost(count: int = 5) -> float:
    return compute_epsilon([replace(FIVE_STEPS, count=count)], 1e-5, "prv")


def test_what_a_round_cost_is_on_the_disk_when_its_reply_leaves(tmp_path: Path) -> None:
    at, of = private_site(tmp_path), noisy()
    assert [first_round(at, of, number).epsilon for number in (1, 2)] == [cost(), cost(10)]
    assert PrivacyBudgetLedger(tmp_path).compute_total_epsilon(1e-5) == cost(10)


def test_the_same_request_gets_the_same_reply_and_costs_once(tmp_path: Path) -> None:
    at, of = private_site(tmp_path, epsilon=40.0), noisy("update")
    first, again = first_round(at, of), first_round(replace(at), of)
    np.testing.assert_array_equal(first.update.trunk, again.update.trunk)
    assert replace(first, update=again.update) == again
    assert entries(tmp_path) == 1


@pytest.mark.parametrize(("lost", "count"), [("ledger.json", 1), ("last-reply.safetensors", 2)])
def test_a_lost_ledger_counts_the_reply_again_and_a_lost_reply_a_new_one(lost: str, count: int, tmp_path: Path) -> None:
    """The ledger is written after the reply: a site may die between them."""
    at, of = private_site(tmp_path), noisy()
    first_round(at, of)
    (tmp_path / "privacy" / lost).unlink()
    first_round(at, of)
    assert entries(tmp_path) == count
    assert PrivacyBudgetLedger(tmp_path).compute_total_epsilon(1e-5) == cost(5 * count)


def one_step(by_whom: HospitalPlan, count: int, **drawn: dict[str, Any]) -> HospitalPlan:
    """One step over all patients, of plain descent at a rate of 1: the update is the sum of gradients."""
    tree = by_whom.model_dump(mode="json")
    tree["training"] |= {"batch_size": count, "lr": 1.0, "optimizer": "sgd", "momentum": 0.0}
    tree["run"]["rounds"] = 1
    return HospitalPlan.model_validate({**tree, **{table: {**tree[table], **keys} for table, keys in drawn.items()}})


AUGMENTED = {"augmentation": {"rotation": 0.5, "horizontal_flip": True, "contrast": 0.9}}
DROPPED = {"model": {"neck": 64, "dropout": 0.5}}


@pytest.mark.parametrize("drawn", [AUGMENTED, DROPPED], ids=["augmentation", "dropout"])
def test_who_knows_the_seed_cannot_tell_whether_a_patient_took_part(drawn: dict[str, Any], tmp_path: Path) -> None:
    """At an epsilon of 1, of 20 guesses 15 are right at best; of numbers that follow from the seed all 20 were."""
    with_her, trials = images(1, 100), 20
    without = with_her.select_rows(np.arange(1, 100))

    def update(patients: ImageSet, folder: str, **privacy: Any) -> NDArray[np.float64]:
        at = replace(private_site(tmp_path / folder), train=patients)
        of = one_step(noisy("patient", **privacy), 400, **drawn)
        return first_round(at, of).update.trunk.astype(np.float64) * len(patients)

    # As the coordinator works them out.
    yes, no = update(with_her, "with", noise_multiplier=0.0), update(without, "without", noise_multiplier=0.0)
    updates = [
        update(with_her if trial % 2 else without, str(trial), noise_multiplier=None, epsilon=1.0)
        for trial in range(trials)
    ]
    guesses, half = [vector @ (yes - no) for vector in updates], (yes + no) @ (yes - no) / 2
    assert sum((guess > half) == bool(trial % 2) for trial, guess in enumerate(guesses)) < 19


def test_a_network_that_draws_by_itself_is_refused(tmp_path: Path) -> None:
    def restless(channels: int, image_size: int) -> nn.Module:
        class Restless(nn.Module):
            def forward(self, values: Tensor) -> Tensor:
                return functional.dropout(values.flatten(1), 0.5, self.training)

        return nn.Sequential(Restless(), nn.Linear(channels * image_size**2, 8))

    name = register_local_plugin(MODELS, restless)
    of = one_step(noisy("patient"), 40, model={"architecture": f"plugin:{name}", "norm": "batch"})
    with pytest.raises(BadInput, match="draws random numbers of its own in training"):
        first_round(private_site(tmp_path), of.model_copy(update={"plugins": (identify_plugin(MODELS, name),)}))


@pytest.mark.parametrize("simulated", [False, True])
def test_a_simulations_noise_can_be_drawn_again_and_a_hospitals_cannot(simulated: bool, tmp_path: Path) -> None:
    sites = [replace(private_site(tmp_path / name), simulated=simulated) for name in ("a", "b")]
    first, second = (first_round(at, noisy()).update.trunk for at in sites)
    assert np.array_equal(first, second) == simulated


def test_a_site_stops_before_its_budget_is_exceeded_over_all_runs(tmp_path: Path) -> None:
    at, of = private_site(tmp_path, epsilon=(cost(10) + cost(15)) / 2), noisy()
    first_round(at, of)
    call = RollCall("another-run", of.model_dump_json())
    answer_roll_call(at, call)
    last = replace(request(of), run="another-run")
    epsilon = train_with_privacy_layers(at, last).epsilon
    with pytest.raises(BadInput, match="this site allows"):
        first_round(at, of, 2)
    with pytest.raises(BadInput, match="It takes no further part"):
        answer_roll_call(at, call)
    assert train_with_privacy_layers(at, last).epsilon == epsilon  # paid for before
    assert entries(tmp_path) == 2


@pytest.mark.parametrize("outside", [False, True])
def test_losses_and_test_results_stay_at_home_unless_the_policy_says_otherwise(outside: bool, tmp_path: Path) -> None:
    of, at = noisy(), private_site(tmp_path, metrics_outside_privacy=outside)
    reply = first_round(at, of)
    tested = evaluate_with_privacy_layers(at, evaluation(of, beginning(of), 1, 1, -1))
    figures = (reply.train_loss, reply.validation_loss, reply.validation_auroc, tested.validation_loss)
    assert [value is not None for value in figures] == [outside] * 4
    assert bool(tested.class_names) is outside


@pytest.mark.parametrize("level", ["sample", "patient", "update"])
def test_that_training_diverged_is_told_by_nothing_that_noise_does_not_cover(level: str, tmp_path: Path) -> None:
    of = changed_plan(noisy(level), training={"lr": 1e30})
    received = beginning(of)
    received.head.weight[:] = 1e30  # the logits overflow, and with them every loss
    reply = train_with_privacy_layers(private_site(tmp_path), request(of, received))
    assert (reply.seconds, reply.train_loss) == (0.0, None)
    if level == "update":
        assert all(np.isfinite(array).all() for array in reply.update.to_named_arrays().values())
        assert reply.update.trunk.std() > 1.0  # noise, not silence


def test_the_status_says_what_is_spent_and_of_what(tmp_path: Path) -> None:
    at = private_site(tmp_path / "bare")
    assert first_round(at, plan("fedavg")).epsilon is None
    assert (open_privacy_ledger(at).entries, make_privacy_status(at)) == ((), {})
    assert not (at.folder / "privacy").exists()
    at = private_site(tmp_path / "private", epsilon=40.0)
    assert make_privacy_status(at) == {"epsilon": 0.0, "delta": 1e-5, "budget": 40.0}
    first_round(at, noisy())
    assert make_privacy_status(at) == {"epsilon": cost(), "delta": 1e-5, "budget": 40.0}
    status = asdict(ClientStatus("north", privacy=make_privacy_status(at)))
    assert f"epsilon {cost():.2f} of 40 at delta 1e-05" in format_client_status(status)


def second_round(at: Site, monkeypatch: pytest.MonkeyPatch, *, killed: bool) -> Mapping[str, NDArray[np.float32]]:
    """The update of round 2, of momentum after round 1, whose cost may not have been written down."""
    of = private_plan(
        plan(optimizer="sgd", momentum=0.9, reset_optimizer=False),
        **{"level": "update", "noise_multiplier": 0.0, "max_update_norm": 100.0},
    )
    with monkeypatch.context() as patched:
        if killed:
            patched.setattr(PrivacyBudgetLedger, "write_privacy_cost", kill)
        with pytest.raises(Killed) if killed else nullcontext():
            train_with_privacy_layers(at, request(of))
    return train_with_privacy_layers(at, request(of, server_round=2, counted=1)).update.to_named_arrays()


def kill(*arguments: Any, **more: Any) -> None:
    raise Killed


def test_no_round_goes_on_from_one_whose_cost_was_not_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After 25 such kills momentum held 25 rounds, and the ledger one."""
    whole, killed = (second_round(site(tmp_path / name), monkeypatch, killed=bool(name)) for name in ("", "killed"))
    assert any(not np.array_equal(whole[name], killed[name]) for name in whole)
    with monkeypatch.context() as patched:
        write = SiteRoundStateFolder.store_state_of_round
        patched.setattr(
            SiteRoundStateFolder,
            "store_state_of_round",
            lambda folder, state: write(folder, SiteRoundState(), state.round),
        )
        fresh = second_round(site(tmp_path / "alone"), monkeypatch, killed=False)
    assert all(np.allclose(fresh[name], killed[name], atol=1e-6) for name in fresh)


def stating(epsilon: float) -> HospitalPlan:
    """A plan of two rounds, whose noise follows from their number."""
    return changed_plan(
        noisy(), run={"rounds": 2}, privacy={"noise_multiplier": None, "epsilon": epsilon, "accountant": "rdp"}
    )


def test_a_run_gets_no_more_answers_than_its_plan_has_noise_for(tmp_path: Path) -> None:
    """Round numbers and models are the coordinator's: what its plan states holds for all of them together."""
    at, of = private_site(tmp_path), stating(8.0)
    first_round(at, of)
    first_round(at, of)  # the very same request
    first = beginning(of)
    train_with_privacy_layers(at, request(of, replace(first, trunk=first.trunk + np.float32(1))))
    for server_round in (1, 2, 3):
        with pytest.raises(BadInput, match="noise for 2 answers"):
            train_with_privacy_layers(at, request(of, replace(first, trunk=-first.trunk), server_round))
    train_with_privacy_layers(at, replace(request(of), run="another-run"))


@pytest.mark.parametrize(("level", "same"), [("none", True), ("update", False), ("patient", False)])
def test_rounds_of_a_plan_with_noise_are_part_of_what_the_run_was_announced_with(level: str, same: bool) -> None:
    """The noise of each round follows from their number."""
    runs = [{"rounds": rounds, "name": str(rounds)} for rounds in (3, 4)]
    hashes = [hash_plan(json.dumps({"run": run, "privacy": {"level": level}})) for run in runs]
    assert (hashes[0] == hashes[1]) == same


@pytest.mark.parametrize("level", ["sample", "patient"])
def test_noisy_steps_that_diverge_are_an_answer_that_is_paid_for(level: str, tmp_path: Path) -> None:
    """A step can be made that overflows if noise lies on one side: whether it did is one more noisy answer."""
    of = changed_plan(noisy(level), training={"lr": 1e38, "epochs": 2})
    reply = first_round(private_site(tmp_path), of)
    assert not any(array.any() for array in reply.update.to_named_arrays().values())
    assert entries(tmp_path) == 1


@pytest.mark.parametrize("failure", [RuntimeError("out of memory"), RequestTimeExceeded()])
def test_a_private_training_that_fails_costs_what_an_answer_costs(
    failure: BaseException, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same request comes again, with new noise: failures for free would be answers for free."""
    at, of = private_site(tmp_path), stating(8.0)

    def fails(*anything: Any, **layers: Any) -> None:
        raise failure

    monkeypatch.setattr("polyclinic.client.training.layers.answer_train_request", fails)
    for answers in (1, 2):
        with pytest.raises(type(failure)):
            first_round(at, of)
        assert entries(tmp_path) == answers
    with pytest.raises(BadInput, match="noise for 2 answers"):
        first_round(at, of)


def test_no_round_goes_on_from_a_training_that_is_not_paid_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Killed before the ledger has it, a training leaves a memory; the answer before it, asked again, is paid for."""
    at, train = private_site(tmp_path), request(noisy())
    paid, memory = train_with_privacy_layers(at, train), at.open_run_state_folder("run")
    assert memory.may_continue_from_round(1)
    with monkeypatch.context() as patched:
        patched.setattr(PrivacyBudgetLedger, "write_reply_and_cost", kill)
        with pytest.raises(Killed):
            train_with_privacy_layers(at, replace(train, contract="another"))
    assert train_with_privacy_layers(at, train).update.trunk.tolist() == paid.update.trunk.tolist()
    assert not memory.may_continue_from_round(1)


def test_a_network_that_gives_no_gradient_for_each_image_is_refused_and_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No image of the hospital takes part in the trial, so that it failed says nothing; a budget would be gone."""
    at, of = private_site(tmp_path), stating(8.0)

    def fails(*anything: Any) -> None:
        raise AttributeError("no attribute 'weight'")

    with monkeypatch.context() as patched:
        patched.setattr("polyclinic.strategies.privacy.gradients.check_image_gradients_separate", fails)
        with pytest.raises(BadInput, match="gives no gradient for each image: AttributeError"):
            first_round(at, of)
    assert entries(tmp_path) == 0
    first_round(at, of)
    assert entries(tmp_path) == 1


def keeping(numbers: int, keep: Callable[[nn.Module, Tensor], None]) -> str:
    """The name of a plug-in network with a buffer ``seen`` of so many numbers, in which it keeps what it is to."""

    class Keeps(nn.Sequential):
        def forward(self, images: Tensor) -> Tensor:
            keep(self, images)
            features: Tensor = super().forward(images)
            return features

    network = Keeps(nn.Conv2d(1, 8, 5), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network.register_buffer("seen", torch.zeros(numbers))
    return f"plugin:{register_local_plugin(MODELS, network)}"


def test_a_hospital_takes_no_part_with_a_network_that_keeps_a_mean_of_its_images(tmp_path: Path) -> None:
    def keep(network: nn.Module, images: Tensor) -> None:
        if network.training:
            network.seen.lerp_(images.detach().mean(), 0.5)

    of = changed_plan(stating(8.0), model={"architecture": keeping(1, keep)})
    with pytest.raises(BadInput, match='changes "seen" by itself'):
        answer_roll_call(private_site(tmp_path), RollCall("run", of.model_dump_json()))


@pytest.mark.parametrize("training", [True, False])
def test_a_buffer_that_only_real_images_change_ends_the_round_at_its_cost(training: bool, tmp_path: Path) -> None:
    def keep(network: nn.Module, images: Tensor) -> None:
        if network.training == training and images.abs().max() > 100:
            network.seen.copy_(images[0, 0].flatten())

    model = {"architecture": keeping(256, keep), "std": (1e-3,)}
    at, of = private_site(tmp_path), changed_plan(noisy(), model=model)
    with pytest.raises(BadInput, match='changes "seen" beside its training'):
        first_round(at, of)
    assert entries(tmp_path) == 1


@pytest.mark.parametrize("architecture", ["timm:test_vit", pytest.param("timm:test_convnext", marks=pytest.mark.long)])
def test_networks_with_layers_without_a_name_of_ours_train_privately(architecture: str, tmp_path: Path) -> None:
    spec = ModelSpec(architecture=architecture, channels=1, image_size=32, norm="batch")
    of = stating(8.0).model_copy(update={"model": spec})
    reply = first_round(private_site(tmp_path), of)
    assert any(array.any() for array in reply.update.to_named_arrays().values())
