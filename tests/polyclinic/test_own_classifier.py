"""A classifier of a user's own, which brings its head: taken at the layer that he names, or refused with the line."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import polyclinic as pc
from polyclinic.common.errors import BadInput
from polyclinic.common.models.zoo.networks import SingleValueSafeBatchNorm, make_batch_norms_single_value_safe
from polyclinic.common.models.zoo.registry import describe_missing_batch_norm
from polyclinic.common.models.zoo.spec import ModelSpec
from tests.polyclinic.pictures import SMALL, pictures


class Classifier(nn.Module):
    """As a tutorial of PyTorch has it: two scores for two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, 8, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(72, 12), nn.ReLU())
        self.out = nn.Linear(12, 2)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.out(self.trunk(images))
        return scores


class FlatteningByView(nn.Module):
    """A network for beginners, which flattens its maps by ``view``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dense, self.out = nn.Conv2d(1, 8, 5, stride=4), nn.Linear(72, 12), nn.Linear(12, 2)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.first(images).relu()
        scores: Tensor = self.out(self.dense(maps.view(len(maps), -1)).relu())
        return scores


class LazyClassifier(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.trunk[3], self.out = nn.LazyLinear(12), nn.LazyLinear(2)


def ending(end: Callable[[Any, Tensor], Any], width: int = 2, **parts: Tensor) -> type[Classifier]:
    """Make a classifier that changes its scores at the end, with parameters and buffers for that."""

    class Ending(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(12, width)
            for name, part in parts.items():
                if isinstance(part, nn.Parameter):
                    setattr(self, name, part)
                else:
                    self.register_buffer(name, part)

        def forward(self, images: Tensor) -> Any:
            return end(self, super().forward(images))

    return Ending


IMAGENET = 1000
"""Classes of ImageNet, which a run has fewer of."""
Wide = ending(lambda net, scores: scores, IMAGENET)
Sigmoid = ending(lambda net, scores: scores.sigmoid())
Tanh = ending(lambda net, scores: scores.tanh(), IMAGENET)


class Patches(Wide):  # type: ignore[valid-type, misc]
    """The highest score over the places of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, 12, 5, stride=4), nn.ReLU(), nn.Flatten(2))

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.out(self.trunk(images).transpose(1, 2))  # (batch, places, classes)
        return scores.amax(1)


class PatchByPatch(Patches):
    """The same by a layer that is called for each place; the last one is the highest where all are equal."""

    def forward(self, images: Tensor) -> Tensor:
        return torch.stack([self.out(place) for place in self.trunk(images).unbind(2)]).amax(0)


def convolution(*activation: nn.Module) -> nn.Sequential:
    """End as SqueezeNet does: a convolution of 1,000 maps, and their means."""
    maps = nn.Conv2d(8, 1000, 1)
    return nn.Sequential(nn.Conv2d(1, 8, 5), nn.ReLU(), maps, *activation, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class SqueezeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classifier = convolution(nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(images)
        return scores


class TwoNames(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.fc = self.out


class CosineHead(nn.Linear):
    def forward(self, features: Tensor) -> Tensor:
        return super().forward(nn.functional.normalize(features, dim=1))


class OtherHead(Classifier):
    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "forward":
            self.out = CosineHead(12, 2)
        elif kind == "hook":
            self.out.register_forward_pre_hook(lambda layer, inputs: (2 * inputs[0],))
        else:
            nn.utils.parametrizations.weight_norm(self.out)


class PlainStatistics(Classifier):
    """A batch normalisation whose statistics are plain attributes, which no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(12)

    def forward(self, images: Tensor) -> Tensor:
        features = self.trunk(images)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * features.detach().mean(0)
        scores: Tensor = self.out(features - self.mean)
        return scores


def run(out: Path, **more: Any) -> pc.FinishedRun:
    return pc.simulate(SMALL, dataset=pictures(), out=out, **more)


def faults_of(out: Path, **more: Any) -> list[tuple[str, str, str]]:
    """Return place, problem and remedy of each fault; the run must not have begun."""
    with pytest.raises(BadInput) as refused:
        run(out, **more)
    assert not out.exists()
    return [(fault.where, fault.problem, fault.remedy) for fault in refused.value.faults]


def fault_at(key: str, out: Path, **more: Any) -> tuple[str, str]:
    """Return problem and remedy of the one fault of a run, which is at this key or argument."""
    [(where, problem, remedy)] = faults_of(out, **more)
    assert where.endswith(key) or where.startswith(f"{key}=")
    return problem, remedy


UNNAMED = {
    "two scores": Classifier,
    "lazy": LazyClassifier,
    "sigmoid": Sigmoid,
    "wide": Wide,
    "wide sigmoid": ending(lambda net, scores: scores.sigmoid(), IMAGENET),  # as CheXNet ends
    "tempered": ending(lambda net, scores: scores / 1.5, IMAGENET),
    "softmax": ending(lambda net, scores: scores.softmax(1), IMAGENET),
    "tanh": Tanh,
    "patches": Patches,
    "patch by patch": PatchByPatch,
    "convolution": convolution,
    "SqueezeNet": SqueezeNet,
}
FORMS: dict[str, Callable[[Callable[[], nn.Module]], Any]] = {
    "class": lambda kind: kind,
    "module": lambda kind: kind(),
    "function": lambda kind: lambda channels, size: kind(),
}


@pytest.mark.parametrize(
    ("name", "form"), [*((name, "module") for name in UNNAMED), ("lazy", "class"), ("wide", "function")]
)
def test_a_classifier_whose_head_is_not_named_is_refused_with_the_line_to_write(
    name: str, form: str, tmp_path: Path
) -> None:
    _, remedy = fault_at("model.head", tmp_path / "run", model=FORMS[form](UNNAMED[name]))
    assert ('head="new"' if name in ("convolution", "SqueezeNet") else 'head="out"') in remedy


@pytest.mark.parametrize("last", [nn.ReLU, nn.GELU, nn.LeakyReLU, nn.Identity])
def test_features_behind_an_activation_or_in_a_residual_block_are_features(
    last: type[nn.Module], tmp_path: Path
) -> None:
    class Features(Classifier):
        def forward(self, images: Tensor) -> Tensor:
            features: Tensor = self.trunk(images)
            return features + self.more(features) if last is nn.Identity else last()(self.more(features))

    model = Features()
    model.more = nn.Linear(12, 12)
    assert run(tmp_path / "run", model=model).network().head.weight.shape == (2, 12)  # type: ignore[union-attr]


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_class_rows_are_at_the_named_layer_behind_a_trunk_with_a_norm_of_its_weights_but_not_in_one(
    norm: Any, tmp_path: Path
) -> None:
    model = Classifier()
    model.trunk[3] = norm(model.trunk[3])
    network = run(tmp_path / "run", model=model, head="out").network()
    assert isinstance(network.backbone.out, nn.Identity)  # type: ignore[union-attr]
    assert network.head.weight.shape == (2, 12)  # type: ignore[union-attr]
    model.out = norm(model.out)
    with pytest.raises(BadInput, match='has a head "out" with a parametrization of its weights'):
        run(tmp_path / "refused", model=model, head="out")


def keep_mean(net: nn.Module, scores: Tensor) -> Tensor:
    """Store a mean over images, in training or in evaluation."""
    if net.training == bool(net.in_training):
        net.seen.lerp_(scores.detach().mean(), 0.5)  # type: ignore[operator, union-attr]
    return scores


@pytest.mark.parametrize("training", [True, False])
def test_a_mean_of_images_that_has_no_noise_is_refused_before_round_1(training: bool, tmp_path: Path) -> None:
    private = {
        "model.norm": "group",
        "evaluation.checkpoint": "last",
        "privacy.level": "sample",
        "privacy.epsilon": 8.0,
        "privacy.delta": 1e-3,
    }
    model = ending(keep_mean, seen=torch.zeros(1), in_training=torch.tensor(training))
    problem, _ = fault_at("model.architecture", tmp_path / "run", model=model, head="out", settings=private)
    assert '"seen"' in problem


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_a_norm_of_weights_that_cannot_be_copied_is_refused_by_its_layer(norm: Any, tmp_path: Path) -> None:
    model = Classifier()
    norm(model.out)
    problem, _ = fault_at("model", tmp_path / "run", model=model, head="out")
    assert '"out"' in problem


@pytest.mark.parametrize(
    ("model", "head", "word"),
    [
        (None, "fc", "a network of your own"),  # only that has a head to name
        (Classifier, "outt", '"out"'),  # a typing error: the layers are listed
        (Classifier, "trunk.3", '"trunk.3"'),  # dense, and not the last
        (Classifier, "trunk", '"trunk"'),  # not dense
        (Sigmoid, "out", '"out"'),  # the loss applies the sigmoid
        (ending(lambda net, scores: nn.functional.dropout(scores, training=net.training)), "out", '"out"'),
        (Tanh, "out", '"out"'),
        (Patches, "out", '"out"'),
        (PatchByPatch, "out", '"out"'),
        (ending(lambda net, scores: scores.clamp(-50, 50)), "out", '"out"'),
        (ending(lambda net, scores: scores.reshape(-1, 2)), "out", '"out"'),
        # At the start the scores of these two are those of the head.
        (ending(lambda net, scores: scores / net.heat, heat=nn.Parameter(torch.ones(()))), "out", '"out"'),
        (ending(lambda net, scores: scores + net.prior, prior=torch.zeros(2)), "out", '"out"'),
        (partial(OtherHead, "forward"), "out", "a forward of its own"),
        (partial(OtherHead, "hook"), "out", "hooks"),
        (partial(OtherHead, "weight_norm"), "out", "a parametrization"),
    ],
)
def test_a_head_that_is_not_the_last_dense_layer_is_refused(
    model: Callable[[], nn.Module] | None, head: str, word: str, tmp_path: Path
) -> None:
    problem, _ = fault_at("model.head", tmp_path / "run", model=model, head=head)
    assert word in problem


INCEPTION = ending(lambda net, scores: (scores, scores) if net.training else scores)
"""Another form of output in training."""


@pytest.mark.parametrize(
    ("model", "word"),
    [(PlainStatistics, 'changes "mean" in training'), (INCEPTION, "tuple"), ("resnet18", "str"), (3, "int")],
)
def test_what_cannot_train_is_named_before_round_1(model: Any, word: str, tmp_path: Path) -> None:
    problem, _ = fault_at("model", tmp_path / "run", model=model, head="out")
    assert word in problem


def test_a_trunk_that_its_owner_froze_is_not_trained_without_a_word(tmp_path: Path) -> None:
    model = Classifier()
    model.trunk.requires_grad_(False)
    problem, remedy = fault_at("model.train", tmp_path / "all", model=model, head="out")
    assert '"trunk.0.weight"' in problem
    assert 'model.train = "head"' in remedy
    trunk = run(tmp_path / "head", model=model, head="out", settings={"model.train": "head"}).network().backbone.trunk
    assert torch.equal(trunk[0].weight, model.trunk[0].weight)  # type: ignore[index, union-attr]


def test_last_layers_of_which_their_owner_froze_a_part_are_refused(tmp_path: Path) -> None:
    own = {"model.train": "last:1", "evaluation.checkpoint": "last"}
    model, other = Classifier(), Classifier()
    model.trunk[3].bias.requires_grad_(False)
    problem, _ = fault_at("model.train", tmp_path / "run", model=model, head="out", settings=own)
    assert '"last:1" would train "trunk.3.bias"' in problem
    other.trunk[0].bias.requires_grad_(False)
    trunk = run(tmp_path / "one", model=other, head="out", settings=own).network().backbone.trunk
    assert torch.equal(trunk[0].bias, other.trunk[0].bias)  # type: ignore[index, union-attr]
    assert not torch.equal(trunk[3].weight, other.trunk[3].weight)  # type: ignore[index, union-attr]


def test_a_head_with_two_names_is_replaced_under_both(tmp_path: Path) -> None:
    backbone = run(tmp_path / "run", model=TwoNames(), head="fc").network().backbone
    assert not any(isinstance(layer, nn.Linear) and layer.out_features == 2 for layer in backbone.modules())  # type: ignore[union-attr]


def test_features_that_end_in_a_dense_layer_are_taken_where_the_user_says_so(tmp_path: Path) -> None:
    network = run(tmp_path / "run", model=Wide(), head="new").network()
    assert network.head.weight.shape == (2, 1000)  # type: ignore[union-attr]


def test_a_compiled_classifier_is_split_as_it_was_before(tmp_path: Path) -> None:
    torch.manual_seed(3)
    plain = Classifier()
    models = {"plain": plain, "compiled": torch.compile(plain)}
    hashes = {run(tmp_path / name, model=model, head="out").model_sha256 for name, model in models.items()}
    assert len(hashes) == 1


class WithLogits(Classifier):
    """A classifier whose output has a field ``logits``, as those of the transformers library."""

    def forward(self, images: Tensor) -> Any:
        return SimpleNamespace(logits=super().forward(images), loss=None)


def test_an_output_with_logits_is_taken_as_the_logits(tmp_path: Path) -> None:
    plain = Classifier()
    wrapped = WithLogits()
    wrapped.load_state_dict(plain.state_dict())
    runs = {name: run(tmp_path / name, model=model, head="out") for name, model in (("a", plain), ("b", wrapped))}
    weights = [done.network().head.weight for done in runs.values()]  # type: ignore[union-attr]
    assert torch.equal(*weights)


def broken(scores: Any, labels: Any) -> Any:
    return scores.missing


@pytest.mark.parametrize(
    ("argument", "part"),
    [
        ("loss", nn.BCEWithLogitsLoss(pos_weight=torch.ones(2))),  # one site has one class
        ("loss", lambda logits, labels, annotated: nn.functional.binary_cross_entropy(logits, labels)),
        ("loss", lambda logits, labels, annotated: torch.zeros(())),  # nothing would be trained
        ("loss", lambda logits, labels, annotated: logits),  # no scalar
        ("transform", lambda images: images[1:]),
        ("transform", lambda images, generator: images[:, :, 1:]),
        ("optimizer", torch.optim.LBFGS),  # has no weight decay
        ("schedule", lambda server_round: 1.0),
        ("schedule", lambda server_round, rounds: -1.0),
        ("metrics", [broken]),
    ],
)
def test_a_part_that_fails_is_called_once_before_round_1_and_named_as_its_user_names_it(
    argument: str, part: Any, tmp_path: Path
) -> None:
    faults = faults_of(tmp_path / "run", **{argument: part})  # "bars" alone is annotated by one site: a NaN
    assert [where.partition("=")[0] for where, _, _ in faults] == [argument]
    assert "plugin:" not in str(faults)


class OwnNormByHand(nn.Module):
    """Batch normalisation whose parts have names of their own."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("mu", torch.zeros(channels))
        self.register_buffer("sigma", torch.ones(channels))

    def forward(self, maps: Tensor) -> Tensor:
        if self.training:
            self.mu.lerp_(maps.detach().mean(dim=(0, 2, 3)), 0.1)
            self.sigma.lerp_(maps.detach().std(dim=(0, 2, 3)), 0.1)
        mu, sigma, scale, shift = (value.reshape(-1, 1, 1) for value in (self.mu, self.sigma, self.scale, self.shift))
        return (maps - mu) / sigma * scale + shift


@pytest.mark.parametrize(
    "norm", [pytest.param(nn.BatchNorm2d, id="torch"), pytest.param(OwnNormByHand, id="other names")]
)
def test_under_fedbn_the_statistics_of_any_batch_normalisation_stay_at_the_site(
    norm: Callable[[int], nn.Module], tmp_path: Path
) -> None:
    trunk = nn.Sequential(nn.Conv2d(1, 8, 5, stride=4), norm(8), nn.ReLU(), nn.Flatten(), nn.Linear(72, 12), nn.ReLU())
    done = run(tmp_path / "run", model=trunk, settings={"method.trunk": "fedbn", "evaluation.checkpoint": "last"})
    by_site = [load_file(path) for path in sorted(done.folder.glob("sites/*/model/model.safetensors"))]
    assert len(by_site) == 2
    apart = {name for name, value in by_site[0].items() if not torch.equal(value, by_site[1][name])}
    assert {name for name in apart if name.startswith("backbone.")} == {
        f"backbone.1.{name}" for name in trunk[1].state_dict() if name != "num_batches_tracked"
    }


def test_running_means_over_all_batches_are_those_of_the_round_at_every_number_of_sites(tmp_path: Path) -> None:
    model = trunk_with(nn.Conv2d(1, 8, 5, stride=4), nn.BatchNorm2d(8, momentum=None))
    settings = {"training.lr": 1e-9, "evaluation.checkpoint": "last"}
    network = run(tmp_path / "run", model=model, head="new", settings=settings).network()
    images = torch.from_numpy(pictures().images)[:, None]  # (120, 1, 16, 16)
    maps = network.backbone[0](network.preprocess_images(images))  # type: ignore[index, operator]
    ratio = network.backbone[1].running_var / maps.detach().var(dim=(0, 2, 3))  # type: ignore[index, union-attr]
    assert ratio.median().item() == pytest.approx(1, rel=0.2)


@pytest.mark.parametrize("memory_format", ["channels_last", "contiguous"])
def test_a_network_that_flattens_by_view_trains_in_the_memory_that_it_needs(memory_format: str, tmp_path: Path) -> None:
    settings = {"training.memory_format": memory_format}
    network = run(tmp_path / "run", model=FlatteningByView(), head="out", settings=settings).network()
    assert network.needs_contiguous
    assert not run(tmp_path / "other", model=Classifier(), head="out", settings=settings).network().needs_contiguous


class ConvolutionWithStatistics(OwnNormByHand):
    """A convolution that normalises its own output, as one module; or one whose scale an embedding gives."""

    def __init__(self, conditional: bool) -> None:
        super().__init__(8)
        self.convolution = nn.Conv2d(1, 8, 5, stride=4)
        self.embedding = nn.Embedding(6, 8) if conditional else None

    def forward(self, images: Tensor) -> Tensor:
        maps = super().forward(self.convolution(images))
        return maps if self.embedding is None else maps * self.embedding.weight[0].view(-1, 1, 1)


class PositionEmbedding(nn.Module):
    """A constant that its owner gave as a frozen parameter, as position embeddings of sines are."""

    def __init__(self, frozen: bool = True) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.full((8, 1, 1), 0.3), requires_grad=not frozen)

    def forward(self, maps: Tensor) -> Tensor:
        return maps * self.gate


def trunk_with(first: nn.Module, *more: nn.Module) -> nn.Sequential:
    return nn.Sequential(first, *more, nn.ReLU(), nn.Flatten(), nn.Linear(72, 12), nn.ReLU())


@pytest.mark.parametrize("setting", [{"method.trunk": "fedbn"}, {"model.norm": "group"}])
@pytest.mark.parametrize("conditional", [False, True])
def test_statistics_in_a_layer_that_does_more_are_refused_where_they_are_kept_or_replaced(
    setting: dict[str, str], conditional: bool, tmp_path: Path
) -> None:
    trunk = trunk_with(ConvolutionWithStatistics(conditional))
    problem, _ = fault_at(next(iter(setting)), tmp_path / "run", model=trunk, settings=setting)
    assert '"0.mu", "0.sigma"' in problem
    assert run(tmp_path / "plain", model=trunk).model_sha256


FEDBN = {"method.trunk": "fedbn"}


@pytest.mark.parametrize(
    ("more", "settings"),
    [((), {}), ((nn.GroupNorm(2, 8),), {}), ((nn.BatchNorm2d(8),), {"model.norm": "group"})],
    ids=["no norm", "another norm", "group normalisation in its place"],
)
def test_fedbn_is_refused_for_a_network_without_batch_normalisation(
    more: tuple[nn.Module, ...], settings: dict[str, str], tmp_path: Path
) -> None:
    trunk = trunk_with(nn.Conv2d(1, 8, 5, stride=4), *more)
    problem, _ = fault_at("method.trunk", tmp_path / "run", model=trunk, settings=FEDBN | settings)
    assert "has none" in problem
    assert run(tmp_path / "group", model=trunk, settings={"model.norm": "group"}).model_sha256


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"architecture": "tiny_cnn"}, ""),
        ({"architecture": "tiny_cnn", "norm": "group"}, "tiny_cnn with group normalisation has no batch normalisation"),
        ({"architecture": "torchvision:vgg11"}, "torchvision:vgg11 has no batch normalisation"),
    ],
)
def test_a_network_without_batch_normalisation_is_named_under_fedbn(model: dict[str, Any], expected: str) -> None:
    sentence = describe_missing_batch_norm(ModelSpec(image_size=32, channels=3, **model))
    assert expected in sentence
    assert bool(sentence) == bool(expected)


def test_a_frozen_constant_stays_while_all_else_is_trained(tmp_path: Path) -> None:
    values = {}
    for frozen in (True, False):
        trunk = trunk_with(nn.Conv2d(1, 8, 5, stride=4), PositionEmbedding(frozen))
        done = run(tmp_path / str(frozen), model=trunk, settings={"evaluation.checkpoint": "last"})
        backbone = done.network().backbone
        assert not torch.equal(backbone[0].weight, trunk[0].weight)  # type: ignore[index, union-attr]
        values[frozen] = backbone[1].gate  # type: ignore[index, union-attr]
    assert (values[True] == torch.tensor(0.3)).all()
    assert (values[False] != torch.tensor(0.3)).any()


def test_the_last_layer_with_a_norm_of_its_weights_is_trained_with_its_bias(tmp_path: Path) -> None:
    trunk = trunk_with(nn.Conv2d(1, 8, 5, stride=4))
    parametrizations.weight_norm(trunk[3])
    settings = {"model.train": "last:1", "evaluation.checkpoint": "last"}
    backbone = run(tmp_path / "run", model=trunk, settings=settings).network().backbone
    for name, value in trunk.state_dict().items():
        assert torch.equal(value, backbone.state_dict()[name]) == (not name.startswith("3.")), name


def test_group_normalisation_takes_no_place_of_a_norm_that_may_do_more(tmp_path: Path) -> None:
    trunk = trunk_with(nn.Conv2d(1, 8, 5, stride=4), OwnNormByHand(8))
    problem, _ = fault_at("model.norm", tmp_path / "run", model=trunk, settings={"model.norm": "group"})
    assert "OwnNormByHand" in problem


class OwnNorm(nn.Module):
    """Batch normalisation that is no subclass of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.tensor([2.0, 0.0]))
        self.register_buffer("running_var", torch.tensor([4.0, 1.0]))

    def forward(self, maps: Tensor) -> Tensor:
        return nn.functional.batch_norm(maps, self.running_mean, self.running_var, training=self.training)  # type: ignore[arg-type]


def of_timm(name: str) -> nn.Module:
    import timm.layers  # here: each worker collects this module, and one runs it

    return getattr(timm.layers, name)(2)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.BatchNorm1d(2), (2,)),
        (lambda: nn.BatchNorm2d(2), (2, 1, 1)),
        (lambda: nn.BatchNorm3d(2), (2, 1, 1, 1)),
        (lambda: nn.BatchNorm2d(2, affine=False), (2, 1, 1)),
        (lambda: nn.BatchNorm2d(2, momentum=None), (2, 1, 1)),
        (nn.LazyBatchNorm2d, (2, 1, 1)),
        (OwnNorm, (2, 1, 1)),
        (partial(of_timm, "EvoNorm2dB0"), (2, 1, 1)),  # has a running variance alone
        (partial(of_timm, "BatchNormAct2d"), (2, 1, 1)),
    ],
)
def test_one_value_a_channel_is_normalised_as_in_evaluation(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    network = nn.Sequential(make())
    make_batch_norms_single_value_safe(network)
    network.train()(torch.randn(4, *shape))  # a lazy one has statistics from here on
    images = torch.tensor([6.0, -3.0]).reshape(1, *shape)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    trained = network(images)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert torch.equal(trained, network.eval()(images))


def test_one_value_without_running_statistics_has_no_variance() -> None:
    norm = nn.BatchNorm2d(2, track_running_stats=False)
    nn.init.constant_(norm.bias, 0.5)
    network = nn.Sequential(norm)
    make_batch_norms_single_value_safe(network)
    images = torch.tensor([6.0, -3.0]).reshape(1, 2, 1, 1)
    for mode in (network.train(), network.eval()):
        assert torch.allclose(mode(images).flatten(), torch.tensor([0.5, 0.5]), atol=1e-3)


def test_a_normalisation_of_timm_that_is_also_an_activation_stays_one() -> None:
    network = nn.Sequential(of_timm("BatchNormAct2d"))
    images = torch.from_numpy(np.random.default_rng(1).normal(size=(4, 2, 3, 3)).astype(np.float32))
    before = network.eval()(images)
    make_batch_norms_single_value_safe(network)
    assert torch.equal(network(images), before)
    assert isinstance(network[0], SingleValueSafeBatchNorm)
