"""What a user found in whole rounds of ``polyclinic.flower``: means, metrics, wrappers, starts and silent sites."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping

from polyclinic.flower import (
    FedMLP,
    FedSLD,
    PartialLoss,
    SequentialTraining,
    SiteLabels,
    SurgicalAggregation,
    UniFed,
    UnknownLabels,
    VanillaFL,
    labels,
)
from polyclinic.flower.records import copy_head
from tests.polyclinic.apps import CLASSES, HALVES, HEAD, App, FedMLPApp, altered, joins_late, network, run, silent

PASSING = [SequentialTraining, UniFed]
AVERAGING = [FedSLD, PartialLoss, SurgicalAggregation, VanillaFL]


def everywhere(values: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return dict.fromkeys((2, 3, 4), values)


def aggregated(strategy: Any, models: dict[int, dict[str, Any]], sent: dict[str, Any]) -> ArrayRecord:
    """The mean of models whose weights are 13, 29 and 7: shares that do not sum to 1 in floating point."""
    arrays = ArrayRecord(network().state_dict())
    arrays.update({name: Array(np.asarray(value)) for name, value in sent.items()})

    class Held(App):
        def _trained(self, message: Any, context: Any) -> RecordDict:
            values = {name: Array(np.asarray(value)) for name, value in models[context.node_id].items()}
            model = ArrayRecord({**message.content["arrays"], **values})
            weight = {2: 13, 3: 29, 4: 7}[context.node_id]
            return RecordDict({"arrays": model, "metrics": MetricRecord({"num-examples": weight, "loss-slope": -1.0})})

    return run(strategy, Held(), rounds=1, initial=arrays).arrays


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, np.bool_])
def test_an_index_that_all_sites_hold_stays_what_it_is(kind: Any) -> None:
    index = (np.arange(225) % 200).astype(kind)
    mean = aggregated(SurgicalAggregation(**HEAD), everywhere({"index": index}), {"index": index})["index"].numpy()
    assert mean.dtype == kind
    np.testing.assert_array_equal(mean, index)


def test_of_whole_numbers_that_differ_only_the_equal_entries_are_kept() -> None:
    held = {node: {"index": np.array([3, 5, node])} for node in (2, 3, 4)}
    mean = aggregated(PartialLoss(**HEAD), held, {"index": np.array([3, 5, 0])})["index"].numpy()
    np.testing.assert_array_equal(mean[:2], [3, 5])
    assert mean[2] == pytest.approx((2 * 13 + 3 * 29 + 4 * 7) / 49)


@pytest.mark.parametrize("strategy", [SurgicalAggregation, UniFed])
def test_an_infinite_mask_that_was_sent_is_no_fault_and_a_new_infinity_is(strategy: Any) -> None:
    mask = np.array([[0.0, -np.inf], [0.0, 0.0]], np.float32)
    whole: dict[str, Any] = {"train_at_server": lambda number, arrays: arrays, "alpha": 1}
    options = {**HEAD, **(whole if strategy is UniFed else {})}
    mean = aggregated(strategy(**options), everywhere({"mask": mask}), {"mask": mask})["mask"].numpy()
    np.testing.assert_array_equal(mean, mask)
    infinite, undefined = mask.copy(), mask.copy()
    infinite[1, 1], undefined[1, 1] = np.inf, np.nan
    all_undefined = np.full_like(mask, np.nan)
    for returned, sent in ((infinite, mask), (undefined, mask), (all_undefined, all_undefined)):
        with pytest.raises(RuntimeError, match="'mask' holds values that are not finite"):
            aggregated(strategy(**options), everywhere({"mask": returned}), {"mask": sent})


# ---------------------------------------------------------------------- wrappers and overrides


@pytest.mark.parametrize(
    ("strategy", "options"), [(SequentialTraining, {}), (UniFed, {}), (FedMLP, {"stage_one_rounds": 1})]
)
def test_a_strategy_whose_rounds_no_wrapper_covers_is_not_wrapped(strategy: Any, options: dict[str, Any]) -> None:
    app = FedMLPApp() if strategy is FedMLP else App()
    wrapped = DifferentialPrivacyServerSideFixedClipping(strategy(**options, **HEAD), 0.0, 1e9, 3)
    with pytest.raises(TypeError, match="cannot be wrapped by another strategy"):
        run(wrapped, app, rounds=1)
    assert not app.replies
    with pytest.raises(TypeError, match="cannot be wrapped"):
        strategy(**options, **HEAD).aggregate_train(1, [])


def test_a_wrapped_averaging_strategy_still_runs() -> None:
    app = App(own=[CLASSES] * 3)
    wrapped = DifferentialPrivacyServerSideFixedClipping(VanillaFL(**HEAD), 0.0, 1e9, 3)
    assert set(run(wrapped, app).train_metrics_clientapp) == {1, 2}


@pytest.mark.parametrize("strategy", [SurgicalAggregation, *PASSING])
def test_an_override_of_aggregate_train_gets_each_rounds_replies_and_its_model_is_used(strategy: Any) -> None:
    nodes: list[tuple[int, list[int]]] = []

    class Saving(strategy):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            received = list(replies)
            nodes.append((server_round, sorted(reply.metadata.src_node_id for reply in received)))
            arrays, metrics = super().aggregate_train(server_round, received)
            arrays["0.bias"] = Array(np.full(8, float(server_round), np.float32))
            return arrays, metrics

    result = run(Saving(**HEAD), App(), rounds=2)
    assert nodes == [(1, [2, 3, 4]), (2, [2, 3, 4])]
    np.testing.assert_array_equal(result.arrays["0.bias"].numpy(), np.full(8, 2.0, np.float32))


# ---------------------------------------------------------------------- the coordinator's own training


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[int, ArrayRecord], ArrayRecord]:
    def train(server_round: int, arrays: ArrayRecord) -> ArrayRecord:
        state = arrays.to_torch_state_dict()
        return ArrayRecord({**state, name: change(state[name])})

    return train


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (changed("4.weight", lambda value: value[:1]), r"'4.weight' has the shape \(1, 288\), not \(10, 288\)"),
        (changed("0.bias", lambda value: value * torch.nan), "'0.bias' holds values"),
        (lambda number, arrays: ArrayRecord({"4.bias": arrays["4.bias"]}), "its model lacks '0.bias'"),
    ],
)
def test_what_the_coordinator_trains_is_checked_as_a_reply_is(train: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        run(UniFed(train_at_server=train, **HEAD), App(), rounds=1)


# ---------------------------------------------------------------------- the head


@pytest.mark.parametrize("strategy", [SurgicalAggregation, SequentialTraining])
def test_the_names_of_a_compiled_model_do_not_fit(strategy: Any) -> None:
    def change(reply: RecordDict) -> None:
        reply["arrays"] = ArrayRecord({f"_orig_mod.{name}": array for name, array in reply["arrays"].items()})

    with pytest.raises(RuntimeError, match=r"its model lacks '0.bias'"):
        run(strategy(**HEAD), altered(change, node=0), rounds=1)


def test_a_head_inside_a_compiled_model_or_under_weight_norm_is_no_head() -> None:
    state = network().state_dict()
    compiled = ArrayRecord({f"_orig_mod.{name}": value for name, value in state.items()})
    with pytest.raises(ValueError, match=r"'_orig_mod.4'"):
        copy_head(compiled, "4", CLASSES)
    normed = network()
    torch.nn.utils.parametrizations.weight_norm(normed[4])
    with pytest.raises(ValueError, match=r"the model has no '4.weight'"):
        copy_head(ArrayRecord(normed.state_dict()), "4", CLASSES)


# ---------------------------------------------------------------------- starts


@pytest.mark.parametrize("strategy", [*AVERAGING, *PASSING])
def test_each_start_asks_the_labels_anew(strategy: Any) -> None:
    again = strategy(**HEAD)
    run(again, App(), rounds=2)
    others = App(own=HALVES[::-1])
    result = run(again, others, rounds=1)
    fresh = run(strategy(**HEAD), App(own=HALVES[::-1]), rounds=1)
    assert len(others.nodes_of("labels")) == 3
    for node, own in zip((2, 3, 4), HALVES[::-1], strict=True):
        assert others.sent[node]["config"]["polyclinic-annotated"] == [name in own for name in CLASSES]
    for name, array in fresh.arrays.items():
        np.testing.assert_array_equal(result.arrays[name].numpy(), array.numpy())


def test_a_wrapped_strategy_started_again_asks_anew_too() -> None:
    wrapped = DifferentialPrivacyServerSideFixedClipping(PartialLoss(**HEAD), 0.0, 1e9, 3)
    run(wrapped, App(), rounds=1)
    others = App(own=HALVES[::-1])
    run(wrapped, others, rounds=1)
    assert len(others.nodes_of("labels")) == 3


def test_fedmlp_started_again_sends_no_old_prototypes() -> None:
    strategy = FedMLP(stage_one_rounds=1, **HEAD)
    run(strategy, FedMLPApp(), rounds=2)
    app = FedMLPApp()
    run(strategy, app, rounds=1)
    assert all("polyclinic-statistics" not in sent for sent in app.sent.values())


# ---------------------------------------------------------------------- metrics


def extra(reply: RecordDict) -> None:
    reply["metrics"]["sensitivity"] = 0.9


@pytest.mark.parametrize("strategy", [*AVERAGING, *PASSING])
def test_a_metric_of_some_sites_has_no_mean(strategy: Any) -> None:
    metrics = run(strategy(**HEAD), altered(extra), rounds=2).train_metrics_clientapp[1]
    assert "loss" in metrics
    assert "sensitivity" not in metrics


def test_lists_of_different_length_have_no_mean() -> None:
    class Listing(App):
        def _trained(self, message: Any, context: Any) -> RecordDict:
            reply = super()._trained(message, context)
            reply["metrics"]["per-class"] = [0.5] * context.node_id
            reply["metrics"]["pair"] = [float(context.node_id), 1.0]
            return reply

    app = Listing()
    metrics = run(SurgicalAggregation(**HEAD), app, rounds=1).train_metrics_clientapp[1]
    assert "per-class" not in metrics
    weights = [float(app.replies[node]["metrics"]["num-examples"]) for node in (2, 3, 4)]
    np.testing.assert_allclose(metrics["pair"], [np.average([2, 3, 4], weights=weights), 1.0])


def test_an_own_function_for_metrics_gets_every_reply_as_it_is() -> None:
    def best(records: list[RecordDict], key: str) -> MetricRecord:
        return MetricRecord({"best": max(float(record["metrics"].get("sensitivity", 0)) for record in records)})

    result = run(SurgicalAggregation(train_metrics_aggr_fn=best, **HEAD), altered(extra), rounds=1)
    assert dict(result.train_metrics_clientapp[1]) == {"best": 0.9}


def test_records_of_another_name_are_taken() -> None:
    def renamed(reply: RecordDict) -> None:
        reply["model"], reply["figures"] = reply.pop("arrays"), reply.pop("metrics")

    app = altered(renamed)
    result = run(SurgicalAggregation(**HEAD), app, rounds=1)
    app.replies[3] = RecordDict({"arrays": app.replies[3]["model"], "metrics": app.replies[3]["figures"]})
    np.testing.assert_allclose(result.arrays["0.weight"].numpy(), app.mean("0.weight", 2, 3, 4), rtol=1e-5)


def test_evaluation_leaves_out_a_reply_without_a_weight_and_goes_on(flowers_log: pytest.LogCaptureFixture) -> None:
    app = App()
    client = app.client()
    evaluate = client._registered_funcs["evaluate.default"]

    def odd(message: Message, context: Any) -> Message:
        reply = evaluate(message, context)
        if context.node_id == 3:
            del reply.content["metrics"]["num-examples"]
        if context.node_id == 4:
            reply.content["metrics"]["sensitivity"] = 0.5
        return reply

    client._registered_funcs["evaluate.default"] = odd
    app.client = lambda: client
    result = run(PartialLoss(**{**HEAD, "fraction_evaluate": 1.0}), app, rounds=1)
    assert result.evaluate_metrics_clientapp[1].keys() == {"loss"}
    assert "the reply of node 3 is left out: it sent no 'num-examples'" in flowers_log.text


# ---------------------------------------------------------------------- sites that do not answer


@pytest.mark.parametrize("strategy", [SurgicalAggregation, *PASSING])
def test_a_run_in_which_every_site_fails_ends_with_each_nodes_reason(strategy: Any) -> None:
    words = r"round \d: no reply can be used:\nnode 2: .* No space left.*\nnode 3: it failed.*\nnode 4: no reply"
    with pytest.raises(RuntimeError, match=words):
        run(strategy(**HEAD), App(broken={2, 3}), rounds=1, prepare=silent("train", 4), timeout=17)


@pytest.mark.parametrize("strategy", [SurgicalAggregation, *PASSING])
@pytest.mark.parametrize(("timeout", "waits"), [(17.0, 17.0), (3600.0, 600.0)])
def test_the_roll_call_waits_no_longer_than_the_timeout(strategy: Any, timeout: float, waits: float) -> None:
    waited: list[float] = []
    with pytest.raises(UnknownLabels, match=f"node 3 did not say .*: no reply within {waits:g} s"):
        run(strategy(**HEAD), App(), prepare=silent("query", 3, waited=waited), timeout=timeout)
    assert waited == [waits]


def test_a_silent_late_site_is_waited_for_once_a_round() -> None:
    app, waited = App(), list[float]()

    def prepare(grid: Any) -> None:
        joins_late(app, 4)(grid)
        silent("query", 4, waited=waited)(grid)

    run(PartialLoss(**{**HEAD, "fraction_evaluate": 1.0}), app, rounds=2, prepare=prepare, timeout=5)
    assert sorted(app.replies) == [2, 3]
    assert waited == [5.0] * 3  # the two that are there; the late one after round 1, and in round 2


def test_counts_of_exclusive_classes_that_exceed_the_images_are_refused() -> None:
    app = ClientApp()
    labels(app)(lambda context: SiteLabels(CLASSES[:2], (40, 30), 48))
    with pytest.raises(UnknownLabels, match="node 2 counts 70 positives in 48 images"):
        run(FedSLD(task="multi_class", **HEAD), app, rounds=1)
