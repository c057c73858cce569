"""Refusals of networks, losses and metrics, each in a run of one round."""

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import monai
import numpy as np
import torch
from monai.metrics import ROCAUCMetric
from sklearn.metrics import f1_score
from torch import Tensor, nn
from torchvision.transforms.v2 import ColorJitter

import polyclinic as pc
from tests.polyclinic.pictures import SMALL, pictures
from tests.remedies.cases import Case, evaluate, take

REGISTRY, CALLS = "common/models/zoo/registry.py", "strategies/local/plugin_calls.py"


def train(folder: Path, settings: dict[str, Any] | None = None, **parts: Any) -> pc.FinishedRun:
    """Train a round, and check that the model gives each image a probability of each class."""
    out = next(path for number in itertools.count() if not (path := folder / f"run{number}").exists())
    done = pc.simulate(SMALL, dataset=pictures(), settings=settings or {}, out=out, **parts)
    table = done.predict(pictures().images[:4]).to_numpy()  # type: ignore[arg-type]
    assert table.shape == (4, 2)
    assert ((table > 0) & (table < 1)).all()
    return done


def trains(settings: dict[str, Any] | None = None, **parts: Any) -> Callable[[Path], object]:
    return lambda folder: train(folder, settings, **parts)


def features(*more: nn.Module) -> nn.Module:
    """A network of features ``(batch, 8)``."""
    layers = (nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, *more)


class Classifier(nn.Module):
    """A network with a head of its own; what happens to its logits is an argument."""

    def __init__(self, after: nn.Module | None = None, head: nn.Module | None = None) -> None:
        super().__init__()
        self.trunk, self.fc = features(), head or nn.Linear(8, 5)
        self.after = after or nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        return self.after(self.fc(self.trunk(images)))  # type: ignore[no-any-return]


def try_head(folder: Path, message: str) -> None:
    done = train(folder, model=Classifier(), head=take(message, r'head="(\w+)"'))
    assert done.network().head.out_features == 2


def try_near_head(folder: Path, message: str) -> None:
    train(folder, model=Classifier(), head=take(message, r'Its dense layers are "(\w+)"'))


def try_logits(folder: Path, message: str) -> None:
    assert "without sigmoid, softmax or dropout" in message
    train(folder, model=Classifier(), head="fc")


class TwiceTheScores(nn.Linear):
    def forward(self, values: Tensor) -> Tensor:
        return 2 * super().forward(values)


def try_plain_head(folder: Path, message: str) -> None:
    assert "End in a plain torch.nn.Linear" in message
    train(folder, model=Classifier(), head="fc")


class LooksAtItsHead(Classifier):
    def forward(self, images: Tensor) -> Tensor:
        values = self.fc(self.trunk(images))
        return values.reshape(len(images), self.fc.out_features)  # type: ignore[no-any-return]


def try_output_as_it_is(folder: Path, message: str) -> None:
    assert "Return the output of that layer as it is" in message
    train(folder, model=Classifier(), head="fc")


def try_function_of_channels_and_size(folder: Path, message: str) -> None:
    assert "(channels, image_size)" in message
    train(folder, model=lambda channels, image_size: features())


def build_wrongly(channels: int, image_size: int) -> nn.Module:
    raise RuntimeError("no such size")


def with_old_norm(old: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(old(nn.Conv2d(1, 8, 3)), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def try_parametrization(folder: Path, message: str) -> None:
    new = evaluate(message, r"torch\.nn\.utils\.parametrizations\.\w+")
    train(folder, model=lambda channels, image_size: with_old_norm(new))
    remove = evaluate(message, r"torch\.nn\.utils\.remove_\w+")
    old = with_old_norm(torch.nn.utils.spectral_norm)
    remove(old[0])  # type: ignore[index]
    train(folder, model=old)


class Fixed(nn.Module):
    """A network of images of one size."""

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images.reshape(len(images), 32 * 32))  # type: ignore[no-any-return]

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32 * 32, 8), nn.ReLU())


def try_size(folder: Path, message: str) -> None:
    size = int(take(message, r"It takes (\d+) pixels"))
    train(folder, {"model.image_size": size}, model=Fixed())


class Counting(nn.Module):
    """A network with a running mean, in a plain attribute or in a buffer."""

    def __init__(self, *, is_buffer: bool) -> None:
        super().__init__()
        self.trunk = features()
        if is_buffer:
            self.register_buffer("mean", torch.zeros(8))
        else:
            self.mean = torch.zeros(8)

    def forward(self, images: Tensor) -> Tensor:
        values = self.trunk(images)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * values.detach().mean(0)
        return values - self.mean  # type: ignore[no-any-return]


def try_buffer(folder: Path, message: str) -> None:
    assert "register_buffer" in message
    done = train(folder, model=Counting(is_buffer=True))
    assert done.network().backbone.mean.abs().sum() > 0  # averaged, and saved


class Auxiliary(nn.Module):
    """A network with a second output in training."""

    def __init__(self, *, auxiliary: bool) -> None:
        super().__init__()
        self.trunk, self.auxiliary = features(), auxiliary

    def forward(self, images: Tensor) -> Any:
        values = self.trunk(images)
        return (values, values) if self.training and self.auxiliary else values


def try_without_auxiliary_outputs(folder: Path, message: str) -> None:
    assert "Switch auxiliary outputs off" in message
    train(folder, model=Auxiliary(auxiliary=False))


def try_architecture(key: str, pattern: str) -> Callable[[Path, str], None]:
    def remedy(folder: Path, message: str) -> None:
        train(folder, {"model.image_size": 64, key: take(message, pattern)})

    return remedy


NEAR = r'Did you mean "([\w:]+)"'


def try_fedavg(folder: Path, message: str) -> None:
    train(folder, {"method.trunk": take(message, r'Use "(\w+)"')}, model=features())


def try_all(folder: Path, message: str) -> None:
    train(folder, {"model.train": take(message, r'Use "(\w+)"')}, model=features())


def try_smaller_rank(folder: Path, message: str) -> None:
    assert "Use a smaller rank" in message
    train(folder, {"model.train": "lora:2"}, model=features())


def half_frozen() -> nn.Module:
    network = features(nn.Linear(8, 8), nn.ReLU())
    network[0].requires_grad_(False)  # type: ignore[index]
    return network


def try_last_layers(folder: Path, message: str) -> None:
    assert '"last:N"' in message
    train(folder, {"model.train": "last:1"}, model=half_frozen())
    train(folder, {"model.train": take(message, r'model\.train = "(\w+)"')}, model=half_frozen())


class Locked(nn.Module):
    """A network with an attribute that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.lock = features(), threading.Lock()

    def forward(self, images: Tensor) -> Any:
        return self.trunk(images)


def try_without_lock(folder: Path, message: str) -> None:
    assert "copy.deepcopy" in message
    network = Locked()
    del network.lock
    train(folder, model=network)


# ---------------------------------------------------------------------- losses and metrics


def loss_of_all(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    return (logits.sigmoid() - labels).abs().mean() / 0


def try_known_labels(folder: Path, message: str) -> None:
    assert take(message, r"known = ~labels\.isnan\(\), then the loss of logits\[known\] and labels\[known\]")
    try_loss_as_called_in_run(folder)


def loss_over_positives(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    shown = labels == 1
    return (1 - logits.sigmoid())[shown].sum() / shown.sum() + logits.square().mean()


def loss_over_positives_or_one(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    shown = labels == 1
    return (1 - logits.sigmoid())[shown].sum() / shown.sum().clamp(min=1) + 0.01 * logits.square()[shown].sum()


def try_sum_over_at_least_one(folder: Path, message: str) -> None:
    assert "divide its sum by at least 1" in message
    done = train(folder, loss=loss_over_positives_or_one)
    assert np.isfinite(done.rounds["train_loss"]).all()


def loss_of_nothing(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    return labels.nan_to_num().mean()


def loss_of_one(logits: Tensor) -> Tensor:
    return logits.abs().mean()


def loss_as_called(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    known = ~labels.isnan()
    return (logits.sigmoid() - labels.nan_to_num()).abs()[known].mean()


def try_loss_as_called(folder: Path, message: str) -> None:
    assert "loss(logits, labels, annotated)" in message
    try_loss_as_called_in_run(folder)


def try_loss_as_called_in_run(folder: Path) -> None:
    done = train(folder, loss=loss_as_called)
    assert np.isfinite(done.rounds["train_loss"]).all()


def mean_score(truth: Any, scores: Any) -> float:
    if not np.isin(truth, (0, 1)).all():
        raise ValueError("the truth is 0 or 1")
    return float(scores[truth == 1].mean())


def try_other_order(folder: Path, message: str) -> None:
    metric = evaluate(message, r"lambda scores, labels: NAME\(labels, scores\)", NAME=mean_score)
    done = train(folder, metrics=[metric])
    (values,) = done.summary["test"]["mean_more"].values()
    assert 0 < values < 1


def try_threshold(folder: Path, message: str) -> None:
    metric = evaluate(message, r"lambda scores, labels: NAME\(labels, scores >= 0\.5\)", NAME=f1_score)
    done = train(folder, metrics=[metric])
    (values,) = done.summary["test"]["mean_more"].values()
    assert 0 <= values <= 1


def share_of_hits(chosen: Any, labels: Any) -> float:
    if not np.isin([chosen, labels], (0, 1)).all():
        raise ValueError("both are 0 or 1")
    return float((chosen == labels).mean())


def try_threshold_of_scores(folder: Path, message: str) -> None:
    metric = evaluate(message, r"lambda scores, labels: NAME\(scores >= 0\.5, labels\)", NAME=share_of_hits)
    train(folder, metrics=[metric])


def try_number(folder: Path, message: str) -> None:
    assert "returns a number" in message
    train(folder, metrics=[lambda scores, labels: float(scores.mean())])


class OfWidth(nn.Module):
    """A network whose class is given instead of a function, as of MONAI."""

    def __init__(self, channels: int, size: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(channels * size**2, width), nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)  # type: ignore[no-any-return]


def try_function_that_makes_the_class(folder: Path, message: str) -> None:
    line = take(message, r"model=(lambda channels, size: OfWidth\(.*\))")
    values = {"channels=...": "channels=channels", "size=...": "size=size", "width=...": "width=8"}
    for blank, value in values.items():
        assert blank in line
        line = line.replace(blank, value)
    train(folder, model=eval(line, {"OfWidth": OfWidth}))


def try_function_of_monai(folder: Path, message: str) -> None:
    assert "y_pred or y must be a list/tuple" in message  # the text of MONAI's error
    line = take(message, r"(lambda scores, labels: .*\(labels\)\))")
    done = train(folder, metrics=[eval(line, {"monai": monai, "torch": torch})])
    (name,) = done.own_metrics
    defined = done.classes.dropna(subset=["auroc"])
    np.testing.assert_allclose(defined[name].astype(float), defined["auroc"].astype(float))


def try_object_of_the_class(folder: Path, message: str) -> None:
    assert take(message, r"loss=(\w+)\(\)") == "BCEWithLogitsLoss"
    train(folder, loss=nn.BCEWithLogitsLoss())


def try_softmax_or_sigmoid(folder: Path, message: str) -> None:
    train(folder, loss=evaluate(message, r"loss=(torch\.nn\.\w+\(\))"))
    settings = evaluate(message, r"settings=(\{.*?\})")
    shown = np.arange(120) % 2
    images = replace(pictures(), labels=shown, images=pictures().images[:120])
    tables = {
        **SMALL,
        "partition": {"kind": "class_lists", "lists": {name: ["lines", "bars"] for name in ("east", "north")}},
    }
    done = pc.simulate(tables, dataset=images, settings=settings, loss=nn.CrossEntropyLoss(), out=folder / "softmax")
    np.testing.assert_allclose(done.predict(images.images[:4]).sum(axis=1), 1, rtol=1e-5)  # type: ignore[index]


def try_class_weights(folder: Path, message: str) -> None:
    train(folder, evaluate(message, r"settings=(\{.*?\})"))


def try_scaled_transform(folder: Path, message: str) -> None:
    line = take(message, r"(lambda image: 255 \* NAME\(image / 255\))")
    train(folder, transform=eval(line, {"NAME": ColorJitter(0.3)}))


def of_channels(channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def try_channels(folder: Path, message: str) -> None:
    assert "model.image_size" not in message
    train(folder, evaluate(message, r"settings=(\{.*?\})"), model=of_channels(3))


class Named(nn.Module):
    """A network that returns a dictionary."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.trunk, self.key = features(), key

    def forward(self, images: Tensor) -> Any:
        return {self.key: self.trunk(images)}


def try_key_of_logits(folder: Path, message: str) -> None:
    train(folder, model=Named(take(message, r'call it "(\w+)"')))


CASES = (
    Case(f"{CALLS} _refuse_class", trains(loss=nn.BCEWithLogitsLoss), try_object_of_the_class),
    Case(f"{CALLS} _refuse_class_or_softmax", trains(loss=nn.CrossEntropyLoss()), try_softmax_or_sigmoid),
    Case(
        f"{CALLS} _make_few_classes_fault",
        trains(loss=nn.BCEWithLogitsLoss(pos_weight=torch.ones(2))),
        try_class_weights,
    ),
    Case(f"{CALLS} _test_plugin_transform", trains(transform=ColorJitter(0.3)), try_scaled_transform),
    Case(f"{REGISTRY} _find_other_channels_fault", trains(model=of_channels(3)), try_channels),
    Case(f"{REGISTRY} _probe_with_noise_image", trains(model=Named("scores")), try_key_of_logits),
    Case(f"{REGISTRY} _find_undeclared_head_faults", trains(model=Classifier()), try_head),
    Case(f"{REGISTRY} _detach_network_head", trains(model=Classifier(), head="fd"), try_near_head),
    Case(
        f"{REGISTRY} _detach_network_head",
        trains(model=Classifier(head=TwiceTheScores(8, 5)), head="fc"),
        try_plain_head,
    ),
    Case(f"{REGISTRY} _make_head_position_fault", trains(model=Classifier(nn.Softmax(1)), head="fc"), try_logits),
    Case(f"{REGISTRY} build_external_backbone", trains(model=LooksAtItsHead(), head="fc"), try_output_as_it_is),
    Case(f"{REGISTRY} _build_plugin_network", trains(model=3), try_function_of_channels_and_size),
    Case(f"{REGISTRY} _build_plugin_network", trains(model=build_wrongly), try_function_of_channels_and_size),
    Case(f"{REGISTRY} _build_plugin_network", trains(model=OfWidth), try_function_that_makes_the_class),
    Case(
        f"{REGISTRY} _build_plugin_network",
        trains(model=lambda channels, image_size: with_old_norm(torch.nn.utils.spectral_norm)),
        try_parametrization,
    ),
    Case(f"{REGISTRY} _probe_with_noise_image", trains(model=Fixed()), try_size),
    Case(f"{REGISTRY} _find_unsaved_state_faults", trains(model=Counting(is_buffer=False)), try_buffer),
    Case(
        f"{REGISTRY} _find_training_mode_faults",
        trains(model=Auxiliary(auxiliary=True)),
        try_without_auxiliary_outputs,
    ),
    Case(
        f"{REGISTRY} _make_unknown_network_error",
        trains({"model.architecture": "torchvision:squeezenet"}),
        lambda folder, message: take(message, NEAR),
    ),
    Case(
        f"{REGISTRY} _remove_last_dense_layer",
        trains({"model.architecture": "torchvision:squeezenet1_0", "model.image_size": 64}),
        try_architecture("model.architecture", r'such as "([\w:]+)"'),
    ),
    Case(
        f"{REGISTRY} _find_norm_faults",
        trains({"model.norm": "group"}, model=Counting(is_buffer=True)),
        lambda folder, message: train(
            folder, {"model.norm": take(message, r'Use "(\w+)"')}, model=Counting(is_buffer=True)
        ),
    ),
    Case(f"{REGISTRY} _find_norm_faults", trains({"method.trunk": "fedbn"}, model=features()), try_fedavg),
    Case("common/models/trained.py refuse_unfit_train_setting", trains(model=half_frozen()), try_last_layers),
    Case(
        "common/models/trained.py refuse_unfit_train_setting",
        trains({"model.train": "last:2"}, model=features()),
        try_all,
    ),
    Case("common/models/trained.py list_trained_layers", trains({"model.train": "last:9"}, model=features()), try_all),
    Case(
        "common/models/trained.py add_low_rank_factors",
        trains({"model.train": "lora:99"}, model=features()),
        try_smaller_rank,
    ),
    Case(f"{REGISTRY} _copy_network", trains(model=Locked()), try_without_lock),
    Case(f"{CALLS} _test_plugin_loss_once", trains(loss=loss_of_all), try_known_labels),
    Case(f"{CALLS} _test_plugin_loss_once", trains(loss=loss_over_positives), try_sum_over_at_least_one),
    Case(f"{CALLS} find_plugin_faults", trains(loss=loss_of_nothing), try_loss_as_called),
    Case(f"{CALLS} find_plugin_faults", trains(loss=loss_of_one), try_loss_as_called),
    Case("common/metrics/auroc.py compute_plugin_metric", trains(metrics=[mean_score]), try_other_order),
    Case("common/metrics/auroc.py compute_plugin_metric", trains(metrics=[f1_score]), try_threshold),
    Case("common/metrics/auroc.py compute_plugin_metric", trains(metrics=[share_of_hits]), try_threshold_of_scores),
    Case("common/metrics/auroc.py compute_plugin_metric", trains(metrics=[ROCAUCMetric()]), try_function_of_monai),
    Case(f"{CALLS} find_plugin_faults", trains(metrics=[lambda scores, labels: "much"]), try_number),
)
