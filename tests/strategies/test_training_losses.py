"""The losses that ``[training]`` offers: what they compute, against others' code, and where they are refused."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from polyclinic.common.config import TrainingSection
from polyclinic.common.errors import BadInput
from polyclinic.common.models.zoo.spec import Task
from polyclinic.strategies.local.losses import (
    LOSSES_OF_KNOWN_LABELS,
    PLAIN_LOSSES,
    LossFunction,
    Missing,
    make_training_loss,
)
from polyclinic.strategies.local.objective import LabelledExamples
from polyclinic.strategies.registry import STRATEGIES, build_site_method
from tests.federations import experiment, federation, finished
from tests.third_parties import install, stairs

NAN = float("nan")
ROWS, EVERY = 3, torch.tensor([True, True, True])


def drawn(images: int = 40) -> tuple[Tensor, Tensor]:
    """Logits and labels of a site that annotates every class."""
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(images, ROWS, generator=generator)
    return logits.requires_grad_(), (torch.rand(images, ROWS, generator=generator) < 0.3).float()


def of_classes(images: int = 40) -> tuple[Tensor, Tensor]:
    logits, _ = drawn(images)
    truth = torch.arange(images) % 7 % ROWS  # 0 more often than the others
    return logits, torch.eye(ROWS)[truth]


def chosen(labels: Tensor, task: Task = "multi_label", missing: Missing = "masked", **training: object) -> LossFunction:
    spec = TrainingSection.model_validate(training)
    return make_training_loss(spec, PLAIN_LOSSES[task, missing], task, missing, labels)


def test_without_a_choice_it_is_the_methods_own_loss() -> None:
    plain = PLAIN_LOSSES["multi_label", "masked"]
    assert make_training_loss(TrainingSection(), plain, "multi_label", "masked", drawn()[1]) is plain


LABELS_BY_TASK = {"multi_label": drawn, "multi_class": of_classes}


@pytest.mark.parametrize("images", [1, 2, 3, 31, 32, 198, 500])
@pytest.mark.parametrize(("task", "missing"), PLAIN_LOSSES)
def test_where_all_labels_are_known_a_faster_loss_has_the_same_bits(task: Task, missing: Missing, images: int) -> None:
    logits, labels = LABELS_BY_TASK[task](images)
    plain = PLAIN_LOSSES[task, missing]
    faster = LabelledExamples(labels, labels, EVERY).simplify_loss(plain)
    values, gradients = [], []
    for loss in (plain, faster):
        value = loss(logits, labels, EVERY)
        values.append(value.detach())
        gradients += torch.autograd.grad(value, logits)
    assert faster is dict(LOSSES_OF_KNOWN_LABELS)[plain]
    assert torch.equal(*values)
    assert torch.equal(*gradients)


@pytest.mark.parametrize(("task", "missing"), PLAIN_LOSSES)
def test_the_faster_loss_is_not_taken_where_a_label_is_unknown(task: Task, missing: Missing) -> None:
    plain, (_, labels) = PLAIN_LOSSES[task, missing], LABELS_BY_TASK[task]()
    labels[7, 1] = NAN
    assert LabelledExamples(labels, labels, EVERY).simplify_loss(plain) is plain


@pytest.mark.parametrize("missing", ["masked", "negative"])
def test_the_faster_loss_is_not_taken_where_an_image_has_no_class(missing: Missing) -> None:
    plain, (_, labels) = PLAIN_LOSSES["multi_class", missing], of_classes()
    labels[7] = 0
    assert LabelledExamples(labels, labels, EVERY).simplify_loss(plain) is plain


def test_the_faster_loss_is_not_taken_where_a_class_is_not_annotated() -> None:
    plain, (_, labels) = PLAIN_LOSSES["multi_label", "negative"], drawn()
    annotated = torch.tensor([True, False, True])
    assert LabelledExamples(labels, labels, annotated).simplify_loss(plain) is plain


def test_a_loss_of_a_method_itself_is_not_replaced() -> None:
    _, labels = drawn()
    own = chosen(labels, loss="focal")
    assert LabelledExamples(labels, labels, EVERY).simplify_loss(own) is own


@pytest.mark.parametrize("gamma", [0.0, 1.0, 2.0, 5.0])
def test_focal_is_torchvisions_without_alpha(gamma: float) -> None:
    from torchvision.ops import sigmoid_focal_loss  # here: each worker collects this module, and one runs it

    logits, labels = drawn()
    ours = chosen(labels, loss="focal", focal_gamma=gamma)(logits, labels, EVERY)
    assert torch.allclose(ours, sigmoid_focal_loss(logits, labels, alpha=-1, gamma=gamma, reduction="mean"))


@pytest.mark.parametrize("gammas", [(1.0, 4.0), (0.0, 4.0), (0.0, 0.0)])
@pytest.mark.parametrize("margin", [0.0, 0.05, 0.3])
def test_asymmetric_is_timms(gammas: tuple[float, float], margin: float) -> None:
    logits, labels = drawn()
    ours = chosen(labels, loss="asymmetric", asymmetric_gammas=gammas, asymmetric_margin=margin)
    from timm.loss import AsymmetricLossMultiLabel  # here as torchvision is above

    theirs = AsymmetricLossMultiLabel(gamma_neg=gammas[1], gamma_pos=gammas[0], clip=margin, reduction="mean")
    assert torch.allclose(ours(logits, labels, EVERY), theirs(logits, labels), rtol=1e-4)


def test_class_weights_are_torchs_positive_weights() -> None:
    logits, labels = drawn()
    weights = len(labels) / labels.sum(dim=0)
    entries = binary_cross_entropy_with_logits(logits, labels, pos_weight=weights)
    assert torch.allclose(chosen(labels, class_weights=True)(logits, labels, EVERY), entries)


@pytest.mark.parametrize("gamma", [None, 2.0])
def test_class_weights_of_exclusive_classes_are_torchs_weights(gamma: float | None) -> None:
    logits, labels = of_classes()
    counts = labels.sum(dim=0)
    weights, truth = len(labels) / (ROWS * counts), labels.argmax(dim=1)
    focal = {"loss": "focal", "focal_gamma": gamma} if gamma else {}
    ours = chosen(labels, "multi_class", class_weights=True, **focal)(logits, labels, EVERY)
    if gamma is None:
        assert torch.allclose(ours, cross_entropy(logits, truth, weight=weights))
    else:
        p = logits.softmax(dim=1).gather(1, truth[:, None])[:, 0]
        terms = weights[truth] * (1 - p) ** gamma * -p.log()
        assert torch.allclose(ours, terms.sum() / weights[truth].sum())
    assert torch.allclose(weights[truth].sum(), torch.tensor(float(len(labels))))


KINDS: list[dict[str, object]] = [
    {"loss": "focal"},
    {"loss": "asymmetric"},
    {"class_weights": True},
    {"loss": "focal", "class_weights": True},
    {"loss": "asymmetric", "class_weights": True},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_unknown_entry_moves_nothing(kind: dict[str, object]) -> None:
    logits, labels = drawn()
    labels[3:20, 1] = NAN
    loss = chosen(labels, **kind)(logits, labels, EVERY)
    loss.backward()
    assert not logits.grad[3:20, 1].any()
    assert logits.grad[:3].any()
    assert loss.isfinite()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_class_that_counts_as_absent_does(kind: dict[str, object]) -> None:
    logits, labels = drawn()
    labels[:, 2] = NAN
    annotated = torch.tensor([True, True, False])
    absent = torch.where(annotated, labels, 0.0)
    weighed = chosen(labels, missing="negative", **kind)(logits, labels, annotated)
    assert torch.equal(weighed, chosen(labels, **kind)(logits, absent, EVERY))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("logit", [-200.0, 200.0])
def test_sure_logits_give_finite_losses_and_gradients(kind: dict[str, object], logit: float) -> None:
    logits, labels = torch.full((4, ROWS), logit, requires_grad=True), torch.eye(4)[:, :ROWS]
    loss = chosen(labels, **kind)(logits, labels, EVERY)
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()


def test_a_batch_of_which_nothing_is_known_gives_0() -> None:
    logits, labels = drawn()
    nothing = torch.full_like(labels, NAN)
    for task, kinds in (("multi_label", KINDS), ("multi_class", [{"loss": "focal"}, {"class_weights": True}])):
        for kind in kinds:
            assert chosen(labels, task, **kind)(logits, nothing, EVERY) == 0


NOISE = ("privacy.noise_multiplier=1", "evaluation.checkpoint=last", "model.norm=group")


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (("training.loss=asymmetric", "model.task=multi_class", "run.method=fedavg"), "here classes exclude others"),
        (("training.class_weights=true", "run.method=fedmlp"), "the method has a loss of its own"),
        (("training.loss=focal", "run.method=fedsld"), "the method has a loss of its own"),
        (("training.loss=hinge",), "training.loss"),
        (("training.loss=plugin:",), "training.loss"),
        (("training.loss=plugin:nobodys", "training.class_weights=true"), "gets no weights"),
        (("training.focal_gamma=-1",), "training.focal_gamma"),
        (("training.loss=focal", "privacy.level=sample", *NOISE), "each image's plain loss is minimised"),
        (("training.class_weights=true", "privacy.level=update", *NOISE), "no noise covers that"),
    ],
)
def test_what_makes_no_sense_is_refused_before_training(overrides: tuple[str, ...], fault: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refused:
        build_site_method(experiment(tmp_path, *overrides).experiment)
    assert fault in str(refused.value)


def test_every_method_says_whether_it_takes_another_loss() -> None:
    taking = {name for name, method in STRATEGIES.items() if method.site_class.traits.allows_other_loss}
    assert taking == {
        "surgical", "vanilla", "partial_loss", "pfl", "individual", "centralised", "fedavg", "fedbn", "fedbn_plus",
        "fedprox", "fedavg_scaled", "unifed", "fedseq", "polyclinic", "server_only", "polyclinic_passing",
        "scaffold", "fedrep", "condistfl", "polyclinic_parallel", "ditto", "sfedkd", "moon",
    }  # fmt: skip


@pytest.mark.slow
def test_each_choice_trains_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site-packages", monkeypatch)
    choices = (
        "loss=focal", "loss=focal focal_gamma=1", "loss=asymmetric", "class_weights=true", "loss=plugin:absolute",
        "loss=focal focal_gamma=0",
    )  # fmt: skip
    plain = finished("run.rounds=1")[1]["model_sha256"]
    *others, same = (
        federation(tmp_path, "run.rounds=1", *(f"training.{key}" for key in choice.split()), out=choice)["model_sha256"]
        for choice in choices
    )
    assert len({plain, *others}) == 6
    assert same == plain


@pytest.mark.slow
def test_a_loss_that_returns_no_scalar_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site-packages", monkeypatch)
    monkeypatch.setattr(stairs(), "absolute", lambda logits, labels, annotated: logits.mean(dim=1))
    with pytest.raises(BadInput, match=r"plugin:absolute: returned a tensor of shape \(4,\)"):
        federation(tmp_path, "run.rounds=1", "training.loss=plugin:absolute")
