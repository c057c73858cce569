"""Mistakes that a user of ``polyclinic.flower`` makes: each is refused, or left out with the node; none is trained."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from polyclinic.flower import (
    EarlyStopping,
    FedMLP,
    FedMLPSite,
    FedSLD,
    PartialLoss,
    SequentialTraining,
    Site,
    SiteLabels,
    SurgicalAggregation,
    UniFed,
    VanillaFL,
    labels,
)
from polyclinic.flower.checks import pack_arrays, unpack_arrays
from polyclinic.flower.labels import UnknownLabels
from server.simulation.backends.inline import run_inline
from tests.polyclinic.apps import CLASSES, HALVES, SITES, App, FedMLPApp, altered, data, joins_late, network, run

HEAD: dict[str, Any] = {"head": "4", "classes": CLASSES, "fraction_evaluate": 0.0}
AVERAGING = [FedSLD, PartialLoss, SurgicalAggregation, VanillaFL]


def message_to(task: str = "multi_label", method: str = "partial_loss", prior: list[float] | None = None) -> Any:
    """A message to a site that labels the first two of three classes."""
    config = ConfigRecord(
        {
            "polyclinic-classes": ["a", "b", "c"],
            "polyclinic-annotated": [True, True, False],
            "polyclinic-task": task,
            "polyclinic-method": "fedsld" if prior else method,
            "polyclinic-parameters": "{}",
        }
    )
    content = RecordDict({"config": config})
    if prior:
        content["polyclinic-statistics"] = pack_arrays({"prior": np.array(prior, np.float32)})
    return type("Given", (), {"content": content})()


LOGITS = torch.zeros(4, 3)
GOOD = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, torch.nan, 0.0], [1.0, 0.0, 7.0]])


@pytest.mark.parametrize("prior", [None, [0.5, 0.5, 0.0]])
@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (GOOD[:, :1], r"targets must be \(batch, classes\), \(4, 3\) here, got \(4, 1\)"),
        (GOOD[:1], r"got \(1, 3\)"),
        (GOOD[0], r"got \(3,\)"),
        (torch.tensor([0, 1, 0, 1]), r"got \(4,\).*one_hot"),
        (GOOD.clone().index_put((torch.tensor(1), torch.tensor(0)), torch.tensor(255.0)), r"NaN for unknown, got 255$"),
        (GOOD.clone().index_put((torch.tensor(1), torch.tensor(1)), torch.tensor(-1.0)), r"NaN for unknown, got -1$"),
        (GOOD * 0.5, r"NaN for unknown, got 0\.5$"),
        (
            GOOD.clone().index_put((torch.tensor(1), torch.tensor(1)), torch.tensor(torch.inf)),
            r"NaN for unknown, got inf$",
        ),
    ],
)
def test_targets_that_no_loss_is_meant_for_are_refused(targets: Tensor, words: str, prior: list[float] | None) -> None:
    site = Site(message_to(prior=prior))
    assert torch.isfinite(site.loss(LOGITS, GOOD))
    with pytest.raises(ValueError, match=words):
        site.loss(LOGITS, targets)


def test_logits_of_another_form_are_refused() -> None:
    for logits in (LOGITS[:, :2], LOGITS[:, :1], LOGITS[0], LOGITS.unsqueeze(0)):
        with pytest.raises(ValueError, match=r"logits must be \(batch, 3\)"):
            Site(message_to()).loss(logits, GOOD)


def test_an_image_of_two_exclusive_classes_is_refused() -> None:
    site = Site(message_to("multi_class"))
    both = torch.tensor([[1.0, 1.0, 0.0]])
    with pytest.raises(ValueError, match=r"exclude one another.*2 classes"):
        site.loss(LOGITS[:1], both)
    assert torch.isfinite(site.loss(LOGITS[:1], torch.tensor([[1.0, 0.0, 1.0]])))  # the third is not this site's


def test_an_image_of_no_class_is_refused_where_the_site_labels_all() -> None:
    site = Site(message_to("multi_class"))
    none = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert torch.isfinite(site.loss(LOGITS[:2], none))  # it may be of the third class
    site.annotated[:] = True
    assert torch.isfinite(site.loss(LOGITS[:2], torch.where(none.any(dim=1, keepdim=True), none, torch.nan)))
    with pytest.raises(ValueError, match="1 images show no class"):
        site.loss(LOGITS[:2], none)


def test_what_is_no_tensor_is_refused_with_the_call_that_makes_one() -> None:
    with pytest.raises(TypeError, match=r"targets must be a torch.Tensor, got ndarray: use torch.as_tensor\(targets\)"):
        Site(message_to()).loss(LOGITS, GOOD.numpy())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"logits must be a torch.Tensor, got list"):
        Site(message_to()).loss([[0.0] * 3] * 4, GOOD)  # type: ignore[arg-type]


@pytest.mark.parametrize("task", ["multi_label", "multi_class"])
def test_a_class_that_was_counted_as_never_shown_is_refused_where_an_image_shows_it(task: str) -> None:
    site = Site(message_to(task, prior=[0.0, 1.0, 0.0]))
    assert torch.isfinite(site.loss(LOGITS[:1], torch.tensor([[0.0, 1.0, 1.0]])))
    with pytest.raises(ValueError, match=r"positives of \['a'\], of which the sites' SiteLabels count none"):
        site.loss(LOGITS[:2], torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))


def test_a_class_that_was_counted_as_always_shown_is_refused_where_an_image_lacks_it() -> None:
    site = Site(message_to(prior=[0.5, 1.0, 0.0]))
    with pytest.raises(ValueError, match=r"targets hold negatives of \['b'\]"):
        site.loss(LOGITS[:1], torch.tensor([[1.0, 0.0, 0.0]]))


@pytest.mark.parametrize("reduction", ["mean", "nonsense", None])
def test_a_reduction_that_there_is_not_is_refused(reduction: Any) -> None:
    with pytest.raises(ValueError, match=r"reduction\n.*sum_over_batch"):
        FedSLD(reduction=reduction, **HEAD)


def test_fedmlp_leaves_out_the_one_site_that_does_not_finish(flowers_log: pytest.LogCaptureFixture) -> None:
    app = altered(lambda reply: reply.pop("polyclinic-statistics"), kind=FedMLPApp)
    result = run(FedMLP(stage_one_rounds=1, **HEAD), app, rounds=1)
    assert "round 1: the reply of node 3 is left out: it sent no 'polyclinic-statistics'" in flowers_log.text
    others = [app.replies[node]["arrays"]["0.bias"].numpy() for node in (2, 4)]
    weights = [float(app.replies[node]["metrics"]["num-examples"]) for node in (2, 4)]
    np.testing.assert_allclose(result.arrays["0.bias"].numpy(), np.average(others, axis=0, weights=weights), rtol=1e-5)


@pytest.mark.parametrize("shape", [(10, 2, 7), (9, 2, 288), (10,)])
def test_prototypes_of_another_shape_are_left_out(shape: Any, flowers_log: pytest.LogCaptureFixture) -> None:
    def change(reply: RecordDict) -> None:
        statistics = unpack_arrays(reply["polyclinic-statistics"])
        reply["polyclinic-statistics"] = pack_arrays({**statistics, "prototypes": np.zeros(shape, np.float32)})

    strategy = FedMLP(stage_one_rounds=1, **HEAD)
    run(strategy, altered(change, kind=FedMLPApp), rounds=1)
    assert "node 3 is left out: its prototypes have the shape" in flowers_log.text
    assert strategy.statistics


@pytest.mark.parametrize(
    "name",
    ["heads", "weighting", "proximal_mu", "clip_update", "mean", "trunk", "warm_up_lr", "stage_one_rounds", "tau"],
)
def test_parameters_of_fedmlp_that_do_nothing_here_are_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"FedMLP has no parameter '{name}'.*; it has \['consistency', (?!.*proximal)"
    ):
        FedMLP(stage_one_rounds=1, parameters={name: "own"}, **HEAD)


def test_a_fedmlp_site_under_another_strategy_or_with_another_head_is_refused() -> None:
    images, targets = data(0, SITES)
    with pytest.raises(ValueError, match=r"FedMLPSite needs the strategy FedMLP"):
        FedMLPSite(message_to(), Context(1, 2, {}, RecordDict(), {}), network(), "4", images, targets)

    class Other(FedMLPApp):
        head, columns = "fc2", 10

        def _trained(self, message: Message, context: Context) -> RecordDict:
            site = FedMLPSite(message, context, network(), self.head, images, targets[:, : self.columns])
            raise AssertionError(site)

    def why(app: App) -> str:
        with pytest.raises(RuntimeError) as caught:
            run(FedMLP(stage_one_rounds=1, **HEAD), app, rounds=1)
        return str(caught.value)

    assert "the model has no layer 'fc2'; its linear layers are" in why(Other())
    narrow = Other()
    narrow.head, narrow.columns = "4", 9
    assert "targets must be (batch, classes)" in why(narrow)


def test_views_in_a_list_are_refused_with_the_call_that_is_right() -> None:
    said: list[str] = []

    class Listed(FedMLPApp):
        def _trained(self, message: Message, context: Context) -> RecordDict:
            images, targets = data(int(context.node_config["partition-id"]), SITES)
            site = FedMLPSite(message, context, network(), "4", images, targets)
            rows = torch.arange(8)
            wrong: list[Callable[[], Any]] = [
                lambda: site.round_loss(rows, [images[:8]] * 2),  # type: ignore[arg-type]
                lambda: site.round_loss(rows, images[:8]),
                lambda: site.round_loss(rows, images[:8], images[:7]),
                lambda: site.round_loss(torch.ones(8, dtype=torch.bool), images[:8], images[:8]),
                lambda: site.round_loss(list(range(8)), images[:8], images[:8]),  # type: ignore[arg-type]
            ]
            for call in wrong:
                with pytest.raises((ValueError, TypeError)) as caught:
                    call()
                said.append(str(caught.value))
            raise OSError("enough")

    with pytest.raises(RuntimeError, match="node 3: it failed: enough"):
        run(FedMLP(stage_one_rounds=1, **HEAD), Listed(), rounds=1)
    assert "round_loss(rows, *views)" in said[0]
    assert "takes 2 views of a batch, got 1" in said[1]
    assert "8 rows and a view of 7 images" in said[2]
    assert "rows must be whole numbers" in said[3]
    assert "rows must be a torch.Tensor, got list" in said[4]


def nan(reply: RecordDict) -> None:
    values = reply["arrays"]["0.bias"].numpy().copy()
    values[3] = np.nan
    reply["arrays"]["0.bias"] = Array(values)


def narrow(reply: RecordDict) -> None:
    reply["arrays"]["0.bias"] = Array(np.zeros(3, np.float32))


def lost(reply: RecordDict) -> None:
    del reply["arrays"]["0.bias"]


def double(reply: RecordDict) -> None:
    reply["arrays"]["4.weight"] = Array(reply["arrays"]["4.weight"].numpy().astype(np.float64))


def weightless(reply: RecordDict) -> None:
    reply["metrics"] = MetricRecord({"num-examples": 0})


def mute(reply: RecordDict) -> None:
    reply["metrics"] = MetricRecord({"loss": 0.5})


def twice(reply: RecordDict) -> None:
    reply["more"] = ArrayRecord({"x": Array(np.zeros(1, np.float32))})


MISFITS: list[tuple[Callable[[RecordDict], None], str]] = [
    (nan, "'0.bias' holds values that are not finite"),
    (narrow, "'0.bias' has the shape (3,), not (8,)"),
    (lost, "its model lacks '0.bias'"),
    (double, "'4.weight' is float64"),
    (weightless, "'num-examples' must be above 0, got 0"),
    (mute, "it sent no 'num-examples' in its metrics"),
    (twice, "it needs one ArrayRecord and one MetricRecord"),
]


@pytest.mark.parametrize("strategy", [SurgicalAggregation, SequentialTraining])
@pytest.mark.parametrize(("change", "words"), MISFITS)
def test_a_reply_that_does_not_fit_is_left_out_and_its_node_named(
    strategy: Any, change: Callable[[RecordDict], None], words: str, flowers_log: pytest.LogCaptureFixture
) -> None:
    app = altered(change)
    result = run(strategy(**HEAD), app, rounds=1)
    assert f"round 1: the reply of node 3 is left out: {words}" in flowers_log.text
    assert all(np.isfinite(array.numpy()).all() for array in result.arrays.values())
    if strategy is SurgicalAggregation:
        others = [app.replies[node]["arrays"]["0.weight"].numpy() for node in (2, 4)]
        weights = [float(app.replies[node]["metrics"]["num-examples"]) for node in (2, 4)]
        expected = np.average(others, axis=0, weights=weights)
        np.testing.assert_allclose(result.arrays["0.weight"].numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("strategy", [*AVERAGING, SequentialTraining, UniFed])
def test_a_run_in_which_no_reply_fits_ends_with_the_reasons(strategy: Any) -> None:
    with pytest.raises(RuntimeError, match=r"round \d: no reply can be used:\n.*node 2: '0.bias' has the shape"):
        run(strategy(**HEAD), altered(narrow, node=0), rounds=1)


def test_unifed_leaves_out_a_site_without_a_slope(flowers_log: pytest.LogCaptureFixture) -> None:
    app = altered(lambda reply: reply["metrics"].pop("loss-slope"))
    run(UniFed(**HEAD), app, rounds=1)
    assert "the reply of node 3 is left out: it sent no 'loss-slope'" in flowers_log.text


def test_a_class_that_no_site_labels_is_said_once(flowers_log: pytest.LogCaptureFixture) -> None:
    app = App(own=(CLASSES[:5], CLASSES[3:8], CLASSES[7:9]))
    result = run(SurgicalAggregation(**HEAD), app, rounds=2)
    assert flowers_log.text.count("no site labels ['9']") == 1
    before = network().state_dict()["4.weight"].numpy()[9]
    np.testing.assert_array_equal(result.arrays["4.weight"].numpy()[9], before)


def test_a_site_without_any_class_is_refused() -> None:
    with pytest.raises(UnknownLabels, match=r"node 4 .*at least one class"):
        run(SurgicalAggregation(**HEAD), App(own=(*HALVES[:2], ()), counts=False), rounds=1)


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        ("abc", "list of names in an order, got 'abc'"),
        ({"a", "b"}, "list of names in an order"),
        ({"a": 1}, "list of names in an order"),
        ((0, 1), "names of classes are texts, got 0"),
        (5, "list of names"),
        ((), "at least one class"),
    ],
)
def test_names_of_classes_of_another_form_are_refused(classes: Any, words: str) -> None:
    for made in (
        lambda: SiteLabels(classes),
        lambda: SurgicalAggregation(head="4", classes=classes),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            made()


@pytest.mark.parametrize(
    "positives", [range(1, 3), np.array([1, 2]), torch.tensor([1, 2]), torch.tensor([1.0, 2.0]), [1.0, np.int64(2)]]
)
def test_counts_of_any_kind_of_number_are_taken(positives: Any) -> None:
    said = SiteLabels(["a", "b"], positives, np.int64(5))  # type: ignore[arg-type]
    assert (said.classes, said.positives, said.images) == (("a", "b"), (1, 2), 5)
    assert all(type(count) is int for count in (*said.positives, said.images))


@pytest.mark.parametrize("positives", [[0.5, 1], ["1", "2"], [None, 1], {"a": 1, "b": 2}, 3])
def test_counts_that_are_no_whole_numbers_are_refused(positives: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"whole number"):
        SiteLabels(["a", "b"], positives, 5)


def test_fedsld_names_each_node_without_counts_and_a_late_one_does_not_end_the_run(
    flowers_log: pytest.LogCaptureFixture,
) -> None:
    class Some(App):
        silent = frozenset({3, 4})

        def client(self) -> ClientApp:
            app = super().client()
            ask = app._registered_funcs["query.labels"]

            def answer(message: Message, context: Context) -> Message:
                self.counts = context.node_id not in self.silent
                return ask(message, context)

            app._registered_funcs["query.labels"] = answer
            return app

    with pytest.raises(UnknownLabels, match=r"node 3 .*positives and images(.|\n)*node 4 .*positives and images"):
        run(FedSLD(**HEAD), Some(), rounds=1)
    late = Some()
    late.silent = frozenset({4})
    run(FedSLD(**HEAD), late, rounds=2, prepare=joins_late(late, 4))
    assert sorted(late.replies) == [2, 3]
    assert "left out of this round: node 4" in flowers_log.text


def test_a_labels_function_that_fails_is_told_in_one_line_without_advice_on_something_else() -> None:
    app = ClientApp()

    @labels(app)
    def own(context: Context) -> SiteLabels:
        raise FileNotFoundError("labels.csv")

    def main(grid: Any) -> None:
        PartialLoss(**HEAD).start(grid=grid, initial_arrays=ArrayRecord(network().state_dict()), num_rounds=1)

    with pytest.raises(UnknownLabels) as caught:
        run_inline(main, app, SITES)
    assert "node 2 did not say which classes it labels: labels.csv" in str(caught.value)
    assert "@polyclinic" not in str(caught.value)


def test_a_reason_with_a_whole_traceback_is_told_by_its_last_line() -> None:
    from polyclinic.flower.labels import shorten_error as why

    ray = (
        "<class 'ray.exceptions.RayTaskError(ClientAppException)'>:<'ray::ClientAppActor.run()\n  File \"a.py\"\n"
        "flwr.clientapp.client_app.ClientAppException: \nException ClientAppException occurred. Message: labels.csv'>"
    )
    assert why(ray) == "labels.csv"
    assert why("<class 'FileNotFoundError'>:<'labels.csv'>") == "FileNotFoundError: labels.csv"
    assert why("<class 'StopIteration'>:<''>") == "StopIteration"
    assert "needs @polyclinic.flower.labels(app)" in why("No query function registered with name 'labels'")
    assert why("") == "no reason given"


def test_labels_used_wrongly_says_how_it_is_used() -> None:
    with pytest.raises(TypeError, match=r"@labels\(app\)"):
        labels(lambda context: SiteLabels(("a",)))  # type: ignore[arg-type]

    app = ClientApp()

    @labels(app)
    def own(context: Context) -> Any:
        return (("a",), (1,), 5)

    def main(grid: Any) -> None:
        PartialLoss(**HEAD).start(grid=grid, initial_arrays=ArrayRecord(network().state_dict()), num_rounds=1)

    with pytest.raises(UnknownLabels, match=r"must return SiteLabels, got tuple"):
        run_inline(main, app, SITES)


@pytest.mark.parametrize("wrong", [{"patience": 0}, {"patience": 3, "cap": 0}, {"patience": 3, "tolerance": -0.1}])
def test_a_settling_that_cannot_train_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|below 0"):
        EarlyStopping(**wrong)


@pytest.mark.parametrize("alpha", ["a", None, -0.1, 1.1, float("nan")])
def test_an_alpha_that_is_no_share_is_refused(alpha: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"alpha\n"):
        UniFed(alpha=alpha, **HEAD)


@pytest.mark.parametrize("head", ["4.weight", "4.bias"])
def test_the_name_of_a_tensor_as_head_is_answered_with_the_layers_name(head: str) -> None:
    with pytest.raises(ValueError, match=r"Did you mean '4'"):
        run(SurgicalAggregation(**{**HEAD, "head": head}), App())


def test_several_heads_are_refused_with_what_is_meant() -> None:
    with pytest.raises(TypeError, match=r"head is the name of one layer"):
        SurgicalAggregation(head=["a", "b"], classes=CLASSES)  # type: ignore[arg-type]
