"""What a user found in whole rounds of ``polyclinic.flower``: means, metrics, wrappers, starts and silent sites."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping

from polyclinic.flower import (
    FedMLP,
    FedSLD,
    PartialLoss,
    SequentialTraining,
    SurgicalAggregation,
    UniFed,
    UnknownLabels,
    VanillaFL,
)
from polyclinic.flower.records import copy_head
from tests.polyclinic.apps import CLASSES, HALVES, HEAD, App, FedMLPApp, altered, joins_late, network, run, silent

PASSING = [SequentialTraining, UniFed]
AVERAGING = [FedSLD, PartialLoss, SurgicalAggregation, VanillaFL]


def aggregated(strategy: Any, sent: dict[str, Any], returned: dict[str, Any]) -> dict[str, Any]:
    """Send arrays beside a model, of which each site returns others, by node in a list or all the same; their mean.

    The weights are 13, 29 and 7: shares that do not sum to 1 in floating point.
    """

    def answer(node: int, reply: RecordDict) -> None:
        values = {name: held[node - 2] if isinstance(held, list) else held for name, held in returned.items()}
        reply["arrays"].update({name: Array(np.asarray(value)) for name, value in values.items()})
        reply["metrics"] = MetricRecord({"num-examples": (13, 29, 7)[node - 2], "loss-slope": -1.0})

    class Plain(App):
        def _trained(self, message: Any, context: Any) -> RecordDict:
            return RecordDict({"arrays": ArrayRecord(dict(message.content["arrays"]))})

    arrays = ArrayRecord({**ArrayRecord(network().state_dict()), **{name: Array(sent[name]) for name in sent}})
    result = run(strategy, Plain(change=answer), rounds=1, initial=arrays)
    return {name: result.arrays[name].numpy() for name in sent}


@pytest.mark.parametrize("strategy", [SurgicalAggregation, PartialLoss])
def test_whole_numbers_that_all_sites_hold_stay_what_they_are_and_others_have_a_mean(strategy: Any) -> None:
    indices = {kind.__name__: (np.arange(225) % 200).astype(kind) for kind in (np.int64, np.int32, np.uint8, np.bool_)}
    returned = {**indices, "differs": [np.array([3, 5, node]) for node in (2, 3, 4)]}
    means = aggregated(strategy(**HEAD), {**indices, "differs": np.array([3, 5, 0])}, returned)
    for name, index in indices.items():
        assert means[name].dtype == index.dtype
        np.testing.assert_array_equal(means[name], index)
    np.testing.assert_array_equal(means["differs"][:2], [3, 5])
    assert means["differs"][2] == pytest.approx((2 * 13 + 3 * 29 + 4 * 7) / 49)


@pytest.mark.parametrize("strategy", [SurgicalAggregation, UniFed])
def test_an_infinite_mask_that_was_sent_is_no_fault_and_a_new_infinity_is(strategy: Any) -> None:
    mask = np.array([[0.0, -np.inf], [0.0, 0.0]], np.float32)
    whole: dict[str, Any] = {"train_at_server": lambda number, arrays: arrays, "alpha": 1}
    options = {**HEAD, **(whole if strategy is UniFed else {})}
    np.testing.assert_array_equal(aggregated(strategy(**options), {"mask": mask}, {"mask": mask})["mask"], mask)
    infinite, undefined = mask.copy(), mask.copy()
    infinite[1, 1], undefined[1, 1] = np.inf, np.nan
    all_undefined = np.full_like(mask, np.nan)
    for returned, sent in ((infinite, mask), (undefined, mask), (all_undefined, all_undefined)):
        with pytest.raises(RuntimeError, match="'mask' holds values that are not finite"):
            aggregated(strategy(**options), {"mask": sent}, {"mask": returned})


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


def test_a_wrapped_averaging_strategy_still_runs_and_asks_anew_when_started_again() -> None:
    wrapped = DifferentialPrivacyServerSideFixedClipping(VanillaFL(**HEAD), 0.0, 1e9, 3)
    assert set(run(wrapped, App(own=[CLASSES] * 3)).train_metrics_clientapp) == {1, 2}
    others = App(own=HALVES[::-1])
    run(wrapped, others, rounds=1)
    assert len(others.nodes_of("labels")) == 3


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


@pytest.mark.parametrize("strategy", [FedSLD, SurgicalAggregation, *PASSING])
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


# ---------------------------------------------------------------------- metrics


def with_more_metrics(node: int, reply: RecordDict) -> None:
    """Add a metric that one site has, a list that is as long at all sites, and one that is not."""
    if node == 3:
        reply["metrics"]["sensitivity"] = 0.9
    reply["metrics"]["per-class"] = [0.5] * node
    reply["metrics"]["pair"] = [float(node), 1.0]


@pytest.mark.parametrize("strategy", [SurgicalAggregation, *PASSING])
def test_metrics_that_all_sites_have_in_one_form_are_averaged_and_no_others(strategy: Any) -> None:
    app = App(change=with_more_metrics)
    metrics = run(strategy(**HEAD), app).train_metrics_clientapp[2]
    assert metrics.keys() >= {"loss", "pair"}
    assert not metrics.keys() & {"sensitivity", "per-class"}
    if strategy is SurgicalAggregation:
        weights = [float(app.replies[node]["metrics"]["num-examples"]) for node in (2, 3, 4)]
        np.testing.assert_allclose(metrics["pair"], [np.average([2, 3, 4], weights=weights), 1.0])


def test_an_own_function_for_metrics_gets_every_reply_as_it_is() -> None:
    def best(records: list[RecordDict], key: str) -> MetricRecord:
        return MetricRecord({"best": max(float(record["metrics"].get("sensitivity", 0)) for record in records)})

    result = run(SurgicalAggregation(train_metrics_aggr_fn=best, **HEAD), App(change=with_more_metrics), rounds=1)
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


@pytest.mark.parametrize(
    ("strategy", "timeout", "waits"),
    [(SurgicalAggregation, 17.0, 17.0), (SequentialTraining, 17.0, 17.0), (UniFed, 3600.0, 600.0)],
)
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
