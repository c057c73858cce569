"""Mistakes that a user of ``polyclinic.flower`` makes: each is refused, or left out with the node; none is trained."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from polyclinic.common.errors import BadInput
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
    App,
    FedMLPApp,
    altered,
    data_of,
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


@pytest.mark.parametrize(
    ("task", "prior", "shown", "fits"),
    [
        ("multi_label", [0.0, 1.0, 0.0], "a", [0.0, 1.0, 1.0]),
        ("multi_class", [0.0, 1.0, 0.0], "a", [0.0, 1.0, 1.0]),
        ("multi_label", [0.5, 1.0, 0.0], "b", [1.0, 1.0, 0.0]),
    ],
    ids=["never shown", "never shown, exclusive", "always shown"],
)
def test_an_image_that_contradicts_the_counts_of_a_class_is_refused(
    task: str, prior: list[float], shown: str, fits: list[float]
) -> None:
    site = Site(message_to(task, prior=prior))
    assert torch.isfinite(site.loss(LOGITS[:1], torch.tensor([fits])))
    with pytest.raises(ValueError, match=rf"labels of \['{shown}'"):
        site.loss(LOGITS[:2], torch.tensor([[1.0, 0.0, 0.0], fits]))


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
            images, targets = data_of(context)
            call(FedMLPSite(message, context, network(), "4", images, targets), torch.arange(8), images[:8])
            raise AssertionError

    with pytest.raises(RuntimeError, match=f"node 3: it failed: .*{words}"):
        run(FedMLP(stage_one_rounds=1, **HEAD), Listed(), rounds=1)


def with_array(name: str, change: Callable[[Any], Any]) -> Callable[[RecordDict], None]:
    def spoil(reply: RecordDict) -> None:
        reply["arrays"][name] = Array(change(reply["arrays"][name].numpy()))

    return spoil


def under_names_of_a_compiled_model(reply: RecordDict) -> None:
    reply["arrays"] = ArrayRecord({f"_orig_mod.{name}": array for name, array in reply["arrays"].items()})


def with_prototypes(*shape: int) -> Callable[[RecordDict], None]:
    def spoil(reply: RecordDict) -> None:
        statistics = unpack_arrays(reply["polyclinic-statistics"])
        reply["polyclinic-statistics"] = pack_arrays({**statistics, "prototypes": np.zeros(shape, np.float32)})

    return spoil


narrow = with_array("0.bias", lambda values: values[:3])
MISFITS: list[tuple[Callable[[RecordDict], Any], str]] = [
    (with_array("0.bias", lambda values: np.r_[values[:3], np.float32(np.nan), values[4:]]), "'0.bias' holds values"),
    (narrow, "'0.bias' has the shape (3,), not (8,)"),
    (lambda reply: reply["arrays"].pop("0.bias"), "its model lacks '0.bias'"),
    (under_names_of_a_compiled_model, "its model lacks '0.bias'"),
    (with_array("4.weight", lambda values: values.astype(np.float64)), "'4.weight' is float64"),
    (lambda reply: reply["metrics"].update({"num-examples": 0}), "'num-examples' must be above 0, got 0"),
    (lambda reply: reply["metrics"].pop("num-examples"), "it sent no 'num-examples' in its metrics"),
    (
        lambda reply: reply.update({"more": ArrayRecord({"x": Array(np.zeros(1, np.float32))})}),
        "it needs one ArrayRecord and one MetricRecord",
    ),
]
FEDMLP_MISFITS: list[tuple[Callable[[RecordDict], Any], str]] = [
    (lambda reply: reply.pop("polyclinic-statistics"), "it sent no 'polyclinic-statistics'"),
    *((with_prototypes(*shape), "its prototypes have the shape") for shape in ((10, 2, 7), (9, 2, 288), (10,))),
]


@pytest.mark.parametrize(
    ("strategy", "change", "words"),
    [
        *((SurgicalAggregation, *misfit) for misfit in MISFITS),
        *((SequentialTraining, *misfit) for misfit in MISFITS),
        *((FedMLP, *misfit) for misfit in FEDMLP_MISFITS),
        (UniFed, lambda reply: reply["metrics"].pop("loss-slope"), "it sent no 'loss-slope'"),
    ],
)
def test_a_reply_that_does_not_fit_is_left_out_and_its_node_named(
    strategy: Any, change: Callable[[RecordDict], Any], words: str, flowers_log: pytest.LogCaptureFixture
) -> None:
    options, kind = ({"stage_one_rounds": 1}, FedMLPApp) if strategy is FedMLP else ({}, App)
    app, ours = altered(change, kind=kind), strategy(**options, **HEAD)
    result = run(ours, app, rounds=1)
    server_round = 0 if strategy is UniFed else 1  # UniFed's sites are ranked before round 1
    assert f"round {server_round}: the reply of node 3 is left out: {words}" in flowers_log.text
    assert bool(ours.statistics) == (strategy in (FedMLP, UniFed))
    assert all(np.isfinite(array.numpy()).all() for array in result.arrays.values())
    if strategy in (SurgicalAggregation, FedMLP):
        np.testing.assert_allclose(result.arrays["0.weight"].numpy(), app.mean("0.weight", 2, 4), rtol=1e-5)


@pytest.mark.parametrize("strategy", [*AVERAGING, SequentialTraining, UniFed])
def test_a_run_in_which_no_reply_fits_ends_with_the_reasons(strategy: Any) -> None:
    with pytest.raises(RuntimeError, match=r"round \d: no reply can be used:\n.*node 2: '0.bias' has the shape"):
        run(strategy(**HEAD), altered(narrow, node=None), rounds=1)


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
    with pytest.raises(UnknownLabels, match=r"node 3 .*positives and images(.|\n)*node 4 .*positives and images"):
        run(FedSLD(**HEAD), App(counted=(2,)), rounds=1)
    late = App(counted=(2, 3))
    run(FedSLD(**HEAD), late, rounds=2, prepare=joins_late(late, 4))
    assert sorted(late.replies) == [2, 3]
    assert "left out of this round: node 4" in flowers_log.text


def answering(answer: Callable[[Context], SiteLabels]) -> ClientApp:
    app = ClientApp()
    labels(app)(answer)
    return app


def answering_raw(fields: dict[str, Any]) -> ClientApp:
    app = ClientApp()
    app.query("labels")(
        lambda message, context: Message(RecordDict({"labels": ConfigRecord(fields)}), reply_to=message)
    )
    return app


UNREADABLE: list[dict[str, Any]] = [
    {"classes": "all"},
    {"classes": ["1"], "positives": ["many"]},
    {"classes": ["1"], "images": "some"},
    {"classes": ["1", "2"], "positives": [1], "images": 5},
    {"classes": ["1"], "positives": [7], "images": 5},
    {"classes": ["1"], "positives": [2], "images": 0},
]


@pytest.mark.parametrize(
    ("app", "words"),
    [
        (ClientApp(), r"node 2 did not say .* @polyclinic.flower.labels"),
        (answering(lambda context: Path("labels.csv").stat()), r"node 2 did not say which classes it labels: .*csv'\n"),
        (answering(lambda context: SiteLabels(CLASSES[:2], (40, 30), 48)), "node 2 counts 70 positives in 48 images"),
        *((answering_raw(fields), "node 2 sent labels that cannot be read") for fields in UNREADABLE),
    ],
)
def test_labels_that_cannot_be_used_are_refused_with_the_node_and_one_line(app: ClientApp, words: str) -> None:
    with pytest.raises(UnknownLabels, match=words):
        run(FedSLD(task="multi_class", **HEAD), app, rounds=1)


RAY = (
    "<class 'ray.exceptions.RayTaskError(ClientAppException)'>:<'ray::ClientAppActor.run()\n  File \"a.py\"\n"
    "flwr.clientapp.client_app.ClientAppException: \nException ClientAppException occurred. Message: labels.csv'>"
)


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        (RAY, "labels.csv"),
        ("<class 'StopIteration'>:<''>", "StopIteration"),
        ("", "no reason given"),
    ],
)
def test_a_reason_with_a_whole_traceback_is_told_by_its_last_line(reason: str, line: str) -> None:
    assert shorten_error(reason) == line


CONTEXT = Context(1, 2, {}, RecordDict(), {})
NO_CLASSES = [("abc", "in an order, got 'abc'"), *((names, "in an order") for names in ({"a", "b"}, {"a": 1}, 5, ()))]
NO_CLASSES += [(("a", "a"), "different names")]
NO_COUNTS = [[0.5, 1], ["1", "2"], [None, 1], {"a": 1, "b": 2}, 3]
CALLS: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    *((SiteLabels, {"classes": classes}, words) for classes, words in NO_CLASSES),
    (SurgicalAggregation, {"head": "4", "classes": "abc"}, "in an order, got 'abc'"),
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
    *(
        (
            FedMLP,
            {**HEAD, "stage_one_rounds": 1, "parameters": {name: "own"}},
            rf"no parameter '{name}'.*; it has \['consistency', (?!.*proximal)",
        )
        for name in ("heads", "weighting", "clip_update", "stage_one_rounds", "tau")
    ),
    (HeadedModel, {"model": network(), "head": "0", "class_names": CLASSES}, "no torch.nn.Linear '0'"),
    (Site, {"message": received(RecordDict({"config": ConfigRecord({"lr": 0.1})}))}, "did not send it"),
    (
        partial(FedMLPSite, message_to(), CONTEXT, network(), "4", LOGITS, GOOD),
        {},
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
        run(SurgicalAggregation(**{**HEAD, **choices}), App(own=own, counted=()), rounds=1)
