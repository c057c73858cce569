"""``polyclinic.flower``: surgical aggregation, FedSLD, UniFed and the baselines in a stock Flower app."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.serverapp.strategy import FedAvg, Strategy
from sklearn.metrics import roc_auc_score

import polyclinic.flower
from polyclinic.flower import (
    FedSLD,
    PartialLoss,
    SequentialTraining,
    Site,
    SurgicalAggregation,
    UniFed,
    VanillaFL,
)
from polyclinic.flower.records import unpack_arrays
from polyclinic.strategies.local.losses import partial_loss
from polyclinic.strategies.methods.fedsld import compute_label_prior, compute_weighted_binary_loss
from tests.polyclinic.apps import CLASSES, HALVES, HEAD, SITES, App, data, joins_late, network, received, run

STRATEGIES = [FedSLD, PartialLoss, SequentialTraining, SurgicalAggregation, UniFed, VanillaFL]


def bits(arrays: ArrayRecord) -> dict[str, bytes]:
    return {name: array.numpy().tobytes() for name, array in arrays.items()}


def test_everything_public_is_documented() -> None:
    for name in polyclinic.flower.__all__:
        assert getattr(polyclinic.flower, name).__doc__, name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_is_a_flower_strategy_that_trains_over_sites_with_different_labels(strategy: Any) -> None:
    app = App()
    assert issubclass(strategy, Strategy)
    result = run(strategy(head="4", classes=CLASSES), app, rounds=2)
    assert set(result.train_metrics_clientapp) == {1, 2}
    losses = [float(result.evaluate_metrics_clientapp[number]["loss"]) for number in (1, 2)]
    assert losses[1] < losses[0]
    assert len(app.nodes_of("labels")) == SITES  # once each


class InOrder(FedAvg):
    """Flower's FedAvg, which adds replies in the random order in which it drew the sites, on replies in one order."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        return super().aggregate_train(server_round, sorted(replies, key=lambda reply: reply.metadata.src_node_id))


def test_with_the_same_labels_everywhere_surgical_aggregation_is_flowers_fedavg_bit_for_bit() -> None:
    ours = run(SurgicalAggregation(**HEAD), App(own=[CLASSES] * SITES), rounds=3)
    theirs = run(InOrder(fraction_evaluate=0.0), App(stock=True), rounds=3)
    counter = "1.num_batches_tracked"  # 10 at every site: kept in its type, where Flower's mean is float64
    assert ours.arrays[counter].numpy() == 30
    assert float(theirs.arrays[counter].numpy()) == pytest.approx(30)
    assert ours.arrays[counter].numpy().dtype == np.int64
    assert dict(ours.train_metrics_clientapp[3]) == dict(theirs.train_metrics_clientapp[3])
    del ours.arrays[counter], theirs.arrays[counter]
    assert bits(ours.arrays) == bits(theirs.arrays)


def test_vanilla_is_flowers_fedavg_in_which_missing_is_negative() -> None:
    targets = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    logits = torch.tensor([[0.3, -2.0], [1.0, 0.5]])
    config = {"polyclinic-classes": ["a", "b"], "polyclinic-annotated": [True, False], "polyclinic-parameters": "{}"}
    config |= {"polyclinic-task": "multi_label"}

    def loss(method: str) -> float:
        return float(Site(message({**config, "polyclinic-method": method})).loss(logits, targets))

    negative = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    assert loss("vanilla") == pytest.approx(float(negative))
    unknown = torch.tensor([[1.0, torch.nan], [0.0, torch.nan]])
    masked = partial_loss(logits, unknown, torch.tensor([True, False]))
    assert loss("partial_loss") == pytest.approx(float(masked))


def message(config: dict[str, Any]) -> Any:
    return received(RecordDict({"config": ConfigRecord(config)}))


def test_each_head_row_is_the_mean_over_its_owners_and_the_rest_is_fedavg() -> None:
    app = App()
    result = run(SurgicalAggregation(**HEAD), app, rounds=1)
    for row, name in enumerate(CLASSES):
        owners = [node for node, own in zip((2, 3, 4), HALVES, strict=True) if name in own]
        for part in ("4.weight", "4.bias"):
            expected = app.mean(part, *owners)[row]
            np.testing.assert_allclose(result.arrays[part].numpy()[row], expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(result.arrays["0.weight"].numpy(), app.mean("0.weight", 2, 3, 4), rtol=1e-5)


def test_a_row_whose_owners_all_failed_stays_as_it_was_and_flowers_log_counts_the_failure(
    flowers_log: pytest.LogCaptureFixture,
) -> None:
    app = App(broken={4})  # the third site, the only owner of 8 and 9
    result = run(SurgicalAggregation(**HEAD), app, rounds=1)
    before = network().state_dict()["4.weight"].numpy()
    after = result.arrays["4.weight"].numpy()
    np.testing.assert_array_equal(after[8:], before[8:])
    assert all((after[row] != before[row]).any() for row in range(8))
    assert "Received 2 results and 1 failures" in flowers_log.text
    assert "No space left on device" in flowers_log.text


def test_the_model_of_all_finds_classes_that_one_site_labels_where_vanilla_does_not() -> None:
    images, targets = data()

    def auroc(strategy: Any) -> float:
        net = network()
        arrays = run(strategy(**HEAD), App(own=(CLASSES[:4], CLASSES[4:7], CLASSES[7:])), rounds=6).arrays
        net.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            return float(roc_auc_score(targets, net.eval()(images), average="macro"))

    surgical, vanilla = auroc(SurgicalAggregation), auroc(VanillaFL)
    assert surgical > 0.95
    assert surgical > vanilla + 0.02


def test_fedsld_sends_each_site_the_prior_of_its_own_classes_and_weighs_by_it() -> None:
    app = App()
    run(FedSLD(**HEAD), app, rounds=1)
    positives, images = np.full((SITES, 10), np.nan), np.full((SITES, 10), np.nan)
    for part, own in enumerate(HALVES):
        _, targets = data(part, SITES)
        rows = [CLASSES.index(name) for name in own]
        positives[part, rows], images[part, rows] = targets.sum(dim=0).numpy()[rows], len(targets)
    everywhere = compute_label_prior(positives, images)
    for node, own in zip(sorted(app.sent), HALVES, strict=True):
        sent = app.sent[node]
        expected = np.where([name in own for name in CLASSES], everywhere, 0).astype(np.float32)
        np.testing.assert_array_equal(unpack_arrays(sent["polyclinic-statistics"])["prior"], expected)
        logits, (_, targets) = torch.randn(6, 10), data()
        labels = torch.where(torch.tensor([name in own for name in CLASSES]), targets[:6], torch.nan)
        loss = Site(received(sent)).loss(logits, targets[:6])
        weighted = compute_weighted_binary_loss(logits, labels, torch.tensor(expected), "sum_over_batch")
        assert float(loss) == pytest.approx(float(weighted))


def test_unifed_ranks_the_sites_by_their_slopes_and_passes_the_model_from_one_to_the_next() -> None:
    def steep(node: int, reply: RecordDict) -> None:
        reply["metrics"]["loss-slope"] = {2: -0.1, 3: -0.3, 4: -0.2}[node]

    app = App(change=steep)
    run(UniFed(**HEAD), app, rounds=1)
    trained = app.nodes_of("train")
    assert sorted(trained[:SITES]) == [2, 3, 4]
    assert trained[SITES:] == [3, 4, 2]
    for earlier, later in itertools.pairwise(trained[SITES:]):
        assert bits(app.sent[later]["arrays"]) == bits(app.replies[earlier]["arrays"])


def test_unifed_mixes_in_what_the_coordinator_trains() -> None:
    rounds: list[int] = []

    def at_server(server_round: int, arrays: ArrayRecord) -> ArrayRecord:
        rounds.append(server_round)
        return ArrayRecord({name: torch.zeros_like(value) for name, value in arrays.to_torch_state_dict().items()})

    app = App()
    result = run(UniFed(train_at_server=at_server, alpha=0.25, **HEAD), app, rounds=1)
    last = app.replies[app.requests[-1][0]]["arrays"]
    np.testing.assert_allclose(result.arrays["0.weight"].numpy(), last["0.weight"].numpy() * 0.25, rtol=1e-6)
    counter = "1.num_batches_tracked"
    assert result.arrays[counter].numpy() == last[counter].numpy()
    assert rounds == [1]


@pytest.mark.parametrize("strategy", [SequentialTraining, UniFed])
def test_a_site_that_fails_is_skipped_and_the_pass_goes_on(strategy: Any) -> None:
    app = App(broken={3})
    result = run(strategy(**HEAD), app, rounds=1)
    visited = app.nodes_of("train")[-SITES:]
    assert sorted(visited) == [2, 3, 4]
    last = [node for node in visited if node != 3][-1]
    assert bits(result.arrays) == bits(app.replies[last]["arrays"])


def test_a_head_of_another_precision_is_refused() -> None:
    class Double(SurgicalAggregation):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            wide = {name: value.double() for name, value in arrays.to_torch_state_dict().items()}
            return super().configure_train(server_round, ArrayRecord(wide), config, grid)

    with pytest.raises(ValueError, match="weight' is float64"):
        run(Double(**HEAD), App(), rounds=1)


def test_every_site_is_ranked_though_few_are_drawn() -> None:
    app, strategy = App(), UniFed(**{**HEAD, "fraction_train": 0.4, "min_train_nodes": 1})
    run(strategy, app, rounds=1)
    assert set(map(int, strategy.statistics)) == {2, 3, 4}
    assert len(app.nodes_of("train")) == SITES + 1


def test_a_late_site_that_cannot_say_its_labels_is_left_out_and_the_run_goes_on() -> None:
    app = App(own=(CLASSES, CLASSES, ("mass",)), counted=())
    result = run(SurgicalAggregation(**HEAD), app, prepare=joins_late(app, 4))
    assert sorted(app.replies) == [2, 3]
    assert result.arrays
