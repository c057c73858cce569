"""Mistakes that a user of ``polyclinic.flower`` makes: each is refused, or left out with the node; none is trained."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from common.errors import BadInput
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
from polyclinic.flower.labels import UnknownLabels, shorten_error
from polyclinic.flower.records import pack_arrays, unpack_arrays
from polyclinic.flower.site import HeadedModel
from tests.polyclinic.apps import (
    CLASSES,
    HALVES,
    HEAD,
    SITES,
    App,
    FedMLPApp,
    altered,
    data,
    joins_late,
    network,
    received,
    run,
)

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
    return received(content)


LOGITS = torch.zeros(4, 3)
GOOD = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, torch.nan, 0.0], [1.0, 0.0, 7.0]])


def good_but(row: int, column: int, value: float) -> Tensor:
    return GOOD.clone().index_put((torch.tensor(row), torch.tensor(column)), torch.tensor(value))


@pytest.mark.parametrize("prior", [None, [0.5, 0.5, 0.0]])
@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (GOOD[:, :1], r"\(batch, 3\) here, got \(4, 1\)"),
        (GOOD[:1], r"\(4, 3\), \(1, 3\)"),
        (GOOD[0], r"got \(3,\)"),
        (torch.tensor([0, 1, 0, 1]), r"got \(4,\)"),
        (good_but(1, 0, 255.0), "got 255$"),
        (good_but(1, 1, -1.0), "got -1$"),
        (GOOD * 0.5, r"got 0\.5$"),
        (good_but(1, 1, torch.inf), "got inf$"),
    ],
)
def test_targets_that_no_loss_is_meant_for_are_refused(targets: Tensor, words: str, prior: list[float] | None) -> None:
    site = Site(message_to(prior=prior))
    assert torch.isfinite(site.loss(LOGITS, GOOD))
    with pytest.raises(ValueError, match=words):
        site.loss(LOGITS, targets)


@pytest.mark.parametrize("logits", [LOGITS[:, :2], LOGITS[:, :1], LOGITS[0], LOGITS.unsqueeze(0)])
def test_logits_of_another_form_are_refused(logits: Tensor) -> None:
    with pytest.raises(ValueError, match="differ in shape"):
        Site(message_to()).loss(logits, GOOD)


def test_an_image_of_two_exclusive_classes_is_refused() -> None:
    site = Site(message_to("multi_class"))
    both = torch.tensor([[1.0, 1.0, 0.0]])
    with pytest.raises(ValueError, match=r"exclude one another.*several classes"):
        site.loss(LOGITS[:1], both)
    assert torch.isfinite(site.loss(LOGITS[:1], torch.tensor([[1.0, 0.0, 1.0]])))  # the third is not this site's


@pytest.mark.parametrize("task", ["multi_label", "multi_class"])
def test_a_class_that_was_counted_as_never_shown_is_refused_where_an_image_shows_it(task: str) -> None:
    site = Site(message_to(task, prior=[0.0, 1.0, 0.0]))
    assert torch.isfinite(site.loss(LOGITS[:1], torch.tensor([[0.0, 1.0, 1.0]])))
    with pytest.raises(ValueError, match=r"labels of \['a'"):
        site.loss(LOGITS[:2], torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))


def test_a_class_that_was_counted_as_always_shown_is_refused_where_an_image_lacks_it() -> None:
    site = Site(message_to(prior=[0.5, 1.0, 0.0]))
    with pytest.raises(ValueError, match=r"labels of \['b'\]"):
        site.loss(LOGITS[:1], torch.tensor([[1.0, 0.0, 0.0]]))


def test_fedmlp_leaves_out_the_one_site_that_does_not_finish(flowers_log: pytest.LogCaptureFixture) -> None:
    app = altered(lambda reply: reply.pop("polyclinic-statistics"), kind=FedMLPApp)
    result = run(FedMLP(stage_one_rounds=1, **HEAD), app, rounds=1)
    assert "reply of node 3 is left out: it sent no 'polyclinic-statistics'" in flowers_log.text
    np.testing.assert_allclose(result.arrays["0.bias"].numpy(), app.mean("0.bias", 2, 4), rtol=1e-5)


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
    with pytest.raises(ValueError, match=rf"no parameter '{name}'.*; it has \['consistency', (?!.*proximal)"):
        FedMLP(stage_one_rounds=1, parameters={name: "own"}, **HEAD)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda site, rows, images: site.round_loss(rows, [images] * 2), r"round_loss\(rows, \*views\)"),
        (lambda site, rows, images: site.round_loss(rows, images), "takes 2 views of a batch"),
        (lambda site, rows, images: site.round_loss(rows, images, images[:7]), "takes 2 views of a batch"),
    ],
    ids=["a_list", "too_few", "of_another_length"],
)
def test_views_that_do_not_fit_are_refused_with_the_call_that_is_right(call: Any, words: str) -> None:
    class Listed(FedMLPApp):
        def _trained(self, message: Message, context: Context) -> RecordDict:
            images, targets = data(int(context.node_config["partition-id"]), SITES)
            call(FedMLPSite(message, context, network(), "4", images, targets), torch.arange(8), images[:8])
            raise AssertionError

    with pytest.raises(RuntimeError, match=f"node 3: it failed: .*{words}"):
        run(FedMLP(stage_one_rounds=1, **HEAD), Listed(), rounds=1)


def with_array(name: str, change: Callable[[Any], Any]) -> Callable[[RecordDict], None]:
    def spoil(reply: RecordDict) -> None:
        reply["arrays"][name] = Array(change(reply["arrays"][name].numpy()))

    return spoil


narrow = with_array("0.bias", lambda values: values[:3])
MISFITS: list[tuple[Callable[[RecordDict], Any], str]] = [
    (with_array("0.bias", lambda values: np.r_[values[:3], np.float32(np.nan), values[4:]]), "'0.bias' holds values"),
    (narrow, "'0.bias' has the shape (3,), not (8,)"),
    (lambda reply: reply["arrays"].pop("0.bias"), "its model lacks '0.bias'"),
    (with_array("4.weight", lambda values: values.astype(np.float64)), "'4.weight' is float64"),
    (lambda reply: reply["metrics"].update({"num-examples": 0}), "'num-examples' must be above 0, got 0"),
    (lambda reply: reply["metrics"].pop("num-examples"), "it sent no 'num-examples' in its metrics"),
    (
        lambda reply: reply.update({"more": ArrayRecord({"x": Array(np.zeros(1, np.float32))})}),
        "it needs one ArrayRecord and one MetricRecord",
    ),
]


@pytest.mark.parametrize("strategy", [SurgicalAggregation, SequentialTraining])
@pytest.mark.parametrize(("change", "words"), MISFITS)
def test_a_reply_that_does_not_fit_is_left_out_and_its_node_named(
    strategy: Any, change: Callable[[RecordDict], Any], words: str, flowers_log: pytest.LogCaptureFixture
) -> None:
    app = altered(change)
    result = run(strategy(**HEAD), app, rounds=1)
    assert f"round 1: the reply of node 3 is left out: {words}" in flowers_log.text
    assert all(np.isfinite(array.numpy()).all() for array in result.arrays.values())
    if strategy is SurgicalAggregation:
        np.testing.assert_allclose(result.arrays["0.weight"].numpy(), app.mean("0.weight", 2, 4), rtol=1e-5)


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


@pytest.mark.parametrize("positives", [range(1, 3), np.array([1, 2]), torch.tensor([1, 2]), [1, np.int64(2)]])
def test_counts_of_any_kind_of_number_are_taken(positives: Any) -> None:
    counts = SiteLabels(["a", "b"], positives, np.int64(5))
    assert (counts.classes, counts.positives, counts.images) == (("a", "b"), (1, 2), 5)
    assert all(type(count) is int for count in (*counts.positives, counts.images))


def test_fedsld_names_each_node_without_counts_and_goes_on_without_a_late_one(
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

    with pytest.raises(UnknownLabels) as caught:
        run(PartialLoss(**HEAD), app, rounds=1)
    assert "node 2 did not say which classes it labels: labels.csv" in str(caught.value)
    assert "@polyclinic" not in str(caught.value)


RAY = (
    "<class 'ray.exceptions.RayTaskError(ClientAppException)'>:<'ray::ClientAppActor.run()\n  File \"a.py\"\n"
    "flwr.clientapp.client_app.ClientAppException: \nException ClientAppException occurred. Message: labels.csv'>"
)


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        (RAY, "labels.csv"),
        ("<class 'FileNotFoundError'>:<'labels.csv'>", "labels.csv"),
        ("<class 'StopIteration'>:<''>", "StopIteration"),
        ("", "no reason given"),
    ],
)
def test_a_reason_with_a_whole_traceback_is_told_by_its_last_line(reason: str, line: str) -> None:
    assert shorten_error(reason) == line


def test_an_app_without_labels_is_told_what_it_needs() -> None:
    assert "@polyclinic.flower.labels(app)" in shorten_error("No query function registered with name 'labels'")


ANY_HEAD = {"head": "4"}
CONTEXT = Context(1, 2, {}, RecordDict(), {})
NO_CLASSES = [("abc", "in an order, got 'abc'"), *((names, "in an order") for names in ({"a", "b"}, {"a": 1}, 5, ()))]
NO_CLASSES += [(("a", "a"), "different names")]
NO_COUNTS = [[0.5, 1], ["1", "2"], [None, 1], {"a": 1, "b": 2}, 3]
CALLS: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    *((SiteLabels, {"classes": classes}, words) for classes, words in NO_CLASSES),
    *((SurgicalAggregation, {**ANY_HEAD, "classes": classes}, words) for classes, words in NO_CLASSES),
    *((SiteLabels, {"classes": ["a", "b"], "positives": counts, "images": 5}, "int|iterable") for counts in NO_COUNTS),
    (SiteLabels, {"classes": ("a",), "positives": (-1,), "images": 5}, "must not be below 0"),
    *((FedSLD, {**HEAD, "reduction": value}, r"reduction\n.*sum_over_batch") for value in ("mean", "nonsense", None)),
    *((UniFed, {**HEAD, "alpha": value}, r"alpha\n") for value in ("a", None, -0.1, 1.1, float("nan"))),
    (EarlyStopping, {"patience": 0}, "at least 1"),
    (EarlyStopping, {"patience": 3, "cap": 0}, "at least 1"),
    (EarlyStopping, {"patience": 3, "tolerance": -0.1}, "below 0"),
    (SurgicalAggregation, {**HEAD, "task": "multiclass"}, "task must be one of"),
    (FedMLP, {**HEAD, "stage_one_rounds": 1, "task": "multi_class"}, "classes exclude others"),
    (FedMLP, {**HEAD, "stage_one_rounds": 1, "parameters": {"tag_rate_negative": 2.0}}, "tag_rate"),
    (HeadedModel, {"model": network(), "head": "0", "class_names": CLASSES}, "no torch.nn.Linear '0'"),
    (Site, {"message": received(RecordDict({"config": ConfigRecord({"lr": 0.1})}))}, "did not send it"),
    (
        FedMLPSite,
        {
            "message": message_to(),
            "context": CONTEXT,
            "model": network(),
            "head": "4",
            "images": LOGITS,
            "targets": GOOD,
        },
        "FedMLPSite needs the strategy FedMLP",
    ),
]


@pytest.mark.parametrize(("call", "arguments", "words"), CALLS)
def test_a_call_that_cannot_be_meant_is_refused(call: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError, BadInput), match=words):
        call(**arguments)


@pytest.mark.parametrize(
    ("choices", "own", "error", "words"),
    [
        ({"head": "4.weight"}, HALVES, ValueError, r"are \['0', '1', '4'\]"),
        ({"head": "5"}, HALVES, ValueError, r"no '5.weight'; .* are \['0', '1', '4'\]"),
        ({"classes": ("a", "b", "c")}, HALVES, ValueError, r"'4.weight' has the shape \(10, 288\); 3 classes need"),
        ({}, (CLASSES, ("mass",), CLASSES), UnknownLabels, r"node 3 labels \['mass'\]; .* \['0', '1'"),
        ({}, (*HALVES[:2], ()), UnknownLabels, "node 4 .*different names"),
    ],
)
def test_a_head_or_labels_that_do_not_fit_the_model_are_refused(
    choices: dict[str, Any], own: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        run(SurgicalAggregation(**{**HEAD, **choices}), App(own=own, counts=False), rounds=1)
