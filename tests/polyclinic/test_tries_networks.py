"""Networks as people have them: trained with their own scores, or refused with the wrong model as reason."""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import SplitNetwork, build_network
from polyclinic.common.models.state import read_model_state, write_model_state
from polyclinic.common.models.zoo.registry import find_plugin_network_faults
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.plugins import MODELS, PLUGIN_PREFIX, register_local_plugin

CLASSES = ("lines", "bars")
IMAGES = torch.randint(0, 256, (6, 1, 16, 16), generator=torch.Generator().manual_seed(3)).float()
MAPS = 8 * 6 * 6


def make_spec(model: Any, head: str | None = None, **more: Any) -> ModelSpec:
    name = PLUGIN_PREFIX + register_local_plugin(MODELS, model)
    table = {"architecture": name, "channels": 1, "image_size": 16, "head": head, "mean": [0.0], "std": [1.0], **more}
    return ModelSpec.model_validate(table)


def build(model: Any, head: str | None = None, **more: Any) -> SplitNetwork:
    """Check a network as a run does, build it and train one step; return it with the step's running statistics."""
    spec = make_spec(model, head, **more)
    assert [str(fault) for fault in find_plugin_network_faults(spec, len(CLASSES))] == []
    network = build_network(spec, CLASSES, seed=1)
    optimizer = torch.optim.SGD([value for value in network.parameters() if value.requires_grad], lr=0.01)
    network.train()(IMAGES).square().sum().backward()
    optimizer.step()
    return network.eval()


def check_travels(network: SplitNetwork) -> None:
    """Check that the state, which is what sites send, gives another network the same scores."""
    state = read_model_state(network)
    other = build_network(network.spec, CLASSES, seed=2).eval()
    write_model_state(other, trunk=state.trunk, norm=state.norm, head=state.head)
    with torch.no_grad():
        scores = network(IMAGES)
        torch.testing.assert_close(other(IMAGES), scores, rtol=1e-4, atol=1e-5)
    assert scores.shape == (6, 2)
    assert scores.isfinite().all()


class Trunk(nn.Module):
    """A convolution, and what a try puts after it."""

    def __init__(self, *after: nn.Module, forward: Callable[[Any, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 5, stride=2)
        self.after = nn.Sequential(*after)
        self.act = forward

    def forward(self, images: Tensor) -> Any:
        maps = self.after(self.first(images).relu())
        return maps.mean((2, 3)) if self.act is None else self.act(self, maps)


class RunningAverage(nn.Module):
    """Centres its maps by an own moving average in a buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, maps: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * maps.mean((0, 2, 3)).detach()
        return maps - self.mean[:, None, None]


class Counter(nn.Module):
    """Counts its calls in an integer buffer, and gets weaker with them."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, maps: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return maps / (1 + self.calls.float())


class Twice(nn.Module):
    """One convolution that is used twice, and one that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(8, 8, 3, padding=1)
        self.same = nn.Conv2d(8, 8, 3, padding=1)
        self.same.weight = self.one.weight

    def forward(self, maps: Tensor) -> Tensor:
        return self.same(self.one(self.one(maps)).relu())


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"wide": nn.Conv2d(8, 8, 1), "deep": nn.Conv2d(8, 8, 3, padding=1)})
        self.layers = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(2)])
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8, 1, 1)) for _ in range(2)])

    def forward(self, maps: Tensor) -> Tensor:
        for part in self.parts.values():
            maps = maps + part(maps)
        for layer, scale in zip(self.layers, self.scales, strict=True):
            maps = layer(maps) * scale
        return maps


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.position = nn.Parameter(torch.randn(1, 37, 8) / 10)

    def forward(self, maps: Tensor) -> Tensor:
        places = torch.cat([self.token.expand(len(maps), -1, -1), maps.flatten(2).mT], dim=1)
        encoded: Tensor = self.encoder(places + self.position)
        return encoded[:, 0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.LSTM(48, 12, batch_first=True)

    def forward(self, maps: Tensor) -> Tensor:
        _, (hidden, _) = self.rows(maps.permute(0, 2, 1, 3).flatten(2))
        return hidden[-1]


class Scripted(nn.Module):
    """Draws its own initial weights from torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(8, 8, 3)
        nn.init.kaiming_normal_(self.layer.weight, mode="fan_out")
        nn.init.orthogonal_(self.layer.weight.data.view(8, 72))

    def forward(self, maps: Tensor) -> Tensor:
        return self.layer(maps)


def constant_buffer() -> nn.Module:
    part = nn.Identity()
    part.register_buffer("grid", torch.linspace(0, 1, 6), persistent=False)
    return part


TRUNKS: dict[str, Callable[[], Any]] = {
    "mean": Trunk,
    "a dictionary with logits": lambda: Trunk(forward=lambda net, maps: {"logits": maps.mean((2, 3)), "maps": maps}),
    "view": lambda: Trunk(forward=lambda net, maps: maps.view(len(maps), -1)),
    "view of a fixed width": lambda: Trunk(forward=lambda net, maps: maps.view(-1, MAPS)),
    "view after a pooling": lambda: Trunk(nn.MaxPool2d(2), forward=lambda net, maps: maps.view(maps.size(0), -1)),
    "view after a transposition": lambda: Trunk(forward=lambda net, maps: maps.transpose(1, 2).reshape(len(maps), -1)),
    "reshape": lambda: Trunk(forward=lambda net, maps: maps.reshape(len(maps), -1)),
    "flatten": lambda: Trunk(forward=lambda net, maps: maps.flatten(1)),
    "torch.flatten": lambda: Trunk(forward=lambda net, maps: torch.flatten(maps, 1)),
    "squeeze": lambda: Trunk(nn.AdaptiveAvgPool2d(1), forward=lambda net, maps: maps.squeeze(-1).squeeze(-1)),
    "Sequential": lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveMaxPool2d(2), nn.Flatten()),
    "named Sequential": lambda: nn.Sequential(
        OrderedDict(body=nn.Conv2d(1, 8, 3), pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten())
    ),
    "BatchNorm2d": lambda: Trunk(nn.BatchNorm2d(8)),
    "BatchNorm2d(momentum=None)": lambda: Trunk(nn.BatchNorm2d(8, momentum=None)),
    "BatchNorm2d(momentum=0)": lambda: Trunk(nn.BatchNorm2d(8, momentum=0.0)),
    "BatchNorm2d(affine=False)": lambda: Trunk(nn.BatchNorm2d(8, affine=False)),
    "BatchNorm2d without statistics": lambda: Trunk(nn.BatchNorm2d(8, track_running_stats=False)),
    "InstanceNorm2d": lambda: Trunk(nn.InstanceNorm2d(8, affine=True)),
    "InstanceNorm2d with statistics": lambda: Trunk(nn.InstanceNorm2d(8, affine=True, track_running_stats=True)),
    "GroupNorm": lambda: Trunk(nn.GroupNorm(2, 8)),
    "LayerNorm": lambda: Trunk(nn.LayerNorm([8, 6, 6])),
    "LocalResponseNorm": lambda: Trunk(nn.LocalResponseNorm(2)),
    "an own moving average": lambda: Trunk(RunningAverage()),
    "spectral norm": lambda: Trunk(parametrizations.spectral_norm(nn.Conv2d(8, 8, 3))),
    "weight norm": lambda: Trunk(parametrizations.weight_norm(nn.Conv2d(8, 8, 3))),
    "orthogonal": lambda: Trunk(parametrizations.orthogonal(nn.Conv2d(8, 8, 3))),
    "tied weights": lambda: Trunk(Twice()),
    "Dropout2d": lambda: Trunk(nn.Dropout2d(0.2), nn.Dropout(0.1)),
    "ModuleDict, ModuleList, ParameterList": lambda: Trunk(Blocks()),
    "own initial weights": lambda: Trunk(Scripted()),
    "a constant buffer": lambda: Trunk(constant_buffer()),
    "ReLU in place": lambda: Trunk(nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
    "depthwise": lambda: Trunk(nn.Conv2d(8, 16, 3, groups=8, bias=False), nn.PReLU(16)),
    "transposed": lambda: Trunk(nn.ConvTranspose2d(8, 4, 2, stride=2)),
    "PixelShuffle": lambda: Trunk(nn.Conv2d(8, 16, 1), nn.PixelShuffle(2)),
    "attention": lambda: _with(Attention()),
    "LSTM": lambda: _with(Recurrent()),
    "checkpointing": lambda: Trunk(
        nn.Conv2d(8, 8, 3), forward=lambda net, maps: checkpoint(torch.tanh, maps, use_reentrant=False).mean((2, 3))
    ),
    "lazy convolution": lambda: Trunk(nn.LazyConv2d(4, 3)),
    "lazy normalisation by a function": lambda: lambda channels, size: Trunk(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d()),
    "lazy normalisation": lambda: Trunk(nn.LazyBatchNorm2d()),
    "SyncBatchNorm": lambda: Trunk(nn.SyncBatchNorm(8)),
    "a function of nothing": lambda: lambda: Trunk(),
    "float64": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double(),
    "half": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).half(),
    "bfloat16": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).bfloat16(),
    "given in evaluation mode": lambda: Trunk(nn.BatchNorm2d(8), nn.Dropout(0.3)).eval(),
    "wrapped by DataParallel": lambda: nn.DataParallel(Trunk(nn.BatchNorm2d(8))),
    "a function": lambda: lambda channels, image_size: Trunk(),
    "a class": lambda: _OfSizes,
    "a partial": lambda: partial(_OfSizes, width=4),
}


def _with(part: nn.Module) -> nn.Module:
    """Return a trunk that ends in a module from maps to vectors."""

    class Ending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.part = nn.Conv2d(1, 8, 5, stride=2), part

        def forward(self, images: Tensor) -> Tensor:
            features: Tensor = self.part(self.first(images).relu())
            return features

    return Ending()


class _OfSizes(nn.Module):
    def __init__(self, channels: int, image_size: int, width: int = 8) -> None:
        super().__init__()
        self.layer = nn.Conv2d(channels, width, image_size // 2)

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = self.layer(images)
        return maps.amax((2, 3))


@pytest.mark.filterwarnings("ignore::UserWarning")  # of nn.LSTM and lazy layers
@pytest.mark.parametrize("make", TRUNKS.values(), ids=TRUNKS)
def test_networks_that_return_features(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    network = build(make())
    check_travels(network)


# ---------------------------------------------------------------------- classifiers


class Net(nn.Module):
    """A classifier, whose scores a try may change at its end."""

    def __init__(
        self, end: Callable[[Any, Tensor], Any] = lambda net, scores: scores, head: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(MAPS, 12), nn.ReLU()
        )
        self.fc = nn.Linear(12, 2) if head is None else head
        self.end = end

    def forward(self, images: Tensor) -> Any:
        return self.end(self, self.fc(self.trunk(images)))


class HuggingFace(Net):
    def forward(self, images: Tensor) -> Any:
        return SimpleNamespace(logits=self.fc(self.trunk(images)), hidden_states=None)


class ModelOutput(OrderedDict[str, Tensor]):
    """A dictionary whose keys are attributes, as the transformers library has it."""

    @property
    def logits(self) -> Tensor:
        return self["logits"]


class HuggingFaceDictionary(Net):
    def forward(self, pixel_values: Tensor) -> Any:
        return ModelOutput(logits=self.fc(self.trunk(pixel_values)))


class MoreArguments(Net):
    def forward(self, images: Tensor, mask: Tensor | None = None, return_all: bool = False) -> Any:
        return super().forward(images)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()
        self.heads = nn.ModuleDict({"main": nn.Linear(8, 2), "age": nn.Linear(8, 1)})

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.heads["main"](self.trunk(images))
        return scores


def sequence() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)
    )


CLASSIFIERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "fc": (Net, "fc"),
    "a number of a Sequential": (sequence, "4"),
    "a dropout before the head": (lambda: Net(head=nn.Sequential(nn.Dropout(0.5), nn.Linear(12, 2))), "fc.1"),
    "two dense layers": (lambda: Net(head=nn.Sequential(nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 2))), "fc.2"),
    "1,000 classes of before": (lambda: Net(head=nn.Linear(12, 1000)), "fc"),
    "one score": (lambda: Net(head=nn.Linear(12, 1)), "fc"),
    "no bias": (lambda: Net(head=nn.Linear(12, 2, bias=False)), "fc"),
    "lazy": (lambda: Net(head=nn.LazyLinear(2)), "fc"),
    "in a ModuleDict": (Heads, "heads.main"),
    ".logits": (HuggingFace, "fc"),
    "a dictionary with .logits": (HuggingFaceDictionary, "fc"),
    "more arguments": (MoreArguments, "fc"),
    "half": (lambda: Net().half(), "fc"),
    "float64": (lambda: Net().double(), "fc"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("make", "head"), CLASSIFIERS.values(), ids=CLASSIFIERS)
def test_classifiers_have_their_own_scores_before_training(make: Callable[[], nn.Module], head: str) -> None:
    torch.manual_seed(0)
    original = make()
    network = build_network(make_spec(original, head), CLASSES, seed=1).eval()
    original.float().eval()
    with torch.no_grad():
        scores = original(IMAGES / 255)
        scores = getattr(scores, "logits", scores)
        layer = original.get_submodule(head)
        if layer.out_features == 2:
            network.head.weight.copy_(layer.weight)
            network.head.bias.copy_(torch.zeros(2) if layer.bias is None else layer.bias)
            torch.testing.assert_close(network(IMAGES), scores, rtol=2e-3, atol=2e-3)
    check_travels(build(original, head))


def test_torchvision_and_timm_by_their_usual_last_layers() -> None:
    timm, models = pytest.importorskip("timm"), pytest.importorskip("torchvision.models")
    makes = {
        "fc": lambda: models.shufflenet_v2_x0_5(weights=None),
        "classifier.3": lambda: models.mobilenet_v3_small(weights=None),
        "classifier": lambda: timm.create_model("mobilenetv3_small_050", in_chans=3),
        "head.fc": lambda: timm.create_model("convnext_atto", in_chans=3),
    }
    for head, make in makes.items():
        with torch.random.fork_rng(devices=[]):
            spec = make_spec(make(), head, channels=3, image_size=64, mean=[0.0] * 3, std=[1.0] * 3)
        assert find_plugin_network_faults(spec, 2) == [], head


# ---------------------------------------------------------------------- refused


class PlainStatistics(nn.Module):
    """Running statistics that no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = torch.zeros(8)

    def forward(self, maps: Tensor) -> Tensor:
        if self.training:
            self.seen = 0.9 * self.seen + maps.mean((0, 2, 3)).detach()
        return maps - self.seen[:, None, None]


class LostBuffer(RunningAverage):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8), persistent=False)


def convolution_head() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 5), nn.ReLU(), nn.Conv2d(8, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Cosine(nn.Linear):
    def forward(self, features: Tensor) -> Tensor:
        return super().forward(functional.normalize(features, dim=1))


class _HoldsGenerator(nn.Module):
    """Holds what Python cannot copy."""

    def __init__(self) -> None:
        super().__init__()
        self.log = (line for line in ())

    def forward(self, maps: Tensor) -> Tensor:
        return maps


class TwoInputs(Trunk):
    def forward(self, images: Tensor, ages: Tensor) -> Any:  # type: ignore[override]
        return super().forward(images)


REFUSED: dict[str, tuple[Callable[[], Any], str | None, str]] = {
    # wrong model: a second head behind the user's own
    "a classifier without head=": (Net, None, 'head="fc"'),
    "a convolution as the head": (convolution_head, None, "as a classifier with its own head"),
    "features as wide as the classes": (lambda: Trunk(nn.Conv2d(8, 2, 3)), None, 'head="new"'),
    # wrong model: the loss takes logits
    "sigmoid": (lambda: Net(lambda net, scores: scores.sigmoid()), "fc", "without sigmoid"),
    "softmax": (lambda: Net(lambda net, scores: scores.softmax(1)), "fc", "without sigmoid"),
    "log_softmax": (lambda: Net(lambda net, scores: functional.log_softmax(scores, 1)), "fc", "without sigmoid"),
    "sigmoid without head=": (lambda: Net(lambda net, scores: scores.sigmoid()), None, "as a classifier"),
    "dropout of the scores": (
        lambda: Net(lambda net, s: functional.dropout(s, 0.5, net.training)),
        "fc",
        "does not end",
    ),
    "a temperature": (lambda: Net(lambda net, scores: scores / 3), "fc", "does not end"),
    "scores in another order": (lambda: Net(lambda net, scores: scores.flip(1)), "fc", "does not end"),
    # wrong model: which of them is meant
    "a tuple": (lambda: Net(lambda net, scores: (scores, scores)), "fc", "returns a tuple of 2"),
    "a dictionary": (lambda: Net(lambda net, scores: {"out": scores}), "fc", 'returns a dict of "out"'),
    "nothing": (lambda: Trunk(forward=lambda net, maps: None), None, "returns NoneType"),
    "maps": (lambda: Trunk(forward=lambda net, maps: maps), None, "one vector is needed"),
    "a dictionary of features": (
        lambda: Trunk(forward=lambda net, maps: {"features": maps.mean((2, 3))}),
        None,
        'returns a dict of "features" for one image; one vector is needed, (1, width). Return the tensor of one entry',
    ),
    "a tuple of features": (
        lambda: Trunk(forward=lambda net, maps: (maps.mean((2, 3)),) * 2),
        None,
        "Return the tensor of one",
    ),
    "one number for all": (lambda: Trunk(forward=lambda net, maps: maps.mean()), None, "one vector is needed"),
    "an auxiliary output in training": (
        lambda: Trunk(forward=lambda net, maps: (maps.mean((2, 3)),) * 2 if net.training else maps.mean((2, 3))),
        None,
        "auxiliary outputs",
    ),
    # wrong model: what travels is not the network
    "statistics in an attribute": (lambda: Trunk(PlainStatistics()), None, "register_buffer"),
    "statistics in a buffer that is not saved": (lambda: Trunk(LostBuffer()), None, "register_buffer"),
    # no model
    "another layer": (Net, "classifier", 'has no torch.nn.Linear "classifier"'),
    "a typing error": (Net, "fcc", 'Did you mean "fc"'),
    "an inner layer": (Net, "trunk.3", "does not end"),
    "three channels": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        None,
        'settings={"model.channels": 3}',
    ),
    "images of 32": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 30 * 30, 12), nn.ReLU()),
        None,
        "It takes 32 pixels",
    ),
    "two inputs": (TwoInputs, None, "does not take images"),
    "a counter of whole numbers": (lambda: Trunk(Counter()), None, '"after.0.calls"'),
    "one that holds a generator": (lambda: Trunk(_HoldsGenerator()), None, "cannot be copied"),
    "a head by cosines": (lambda: Net(head=Cosine(12, 2)), "fc", "a forward of its own"),
    "a number": (lambda: 3, None, ""),
    "a class that fails": (lambda: lambda channels, image_size: 1 / 0, None, "ZeroDivisionError"),
}


@pytest.mark.parametrize(("make", "head", "problem"), REFUSED.values(), ids=REFUSED)
def test_networks_that_would_be_another_model_are_refused(
    make: Callable[[], Any], head: str | None, problem: str
) -> None:
    try:
        faults = find_plugin_network_faults(make_spec(make(), head), len(CLASSES))
    except BadInput as bad:
        faults = list(bad.faults)
    assert problem in str([str(fault) for fault in faults])
    assert faults


def test_the_line_that_a_refusal_gives_is_right() -> None:
    assert find_plugin_network_faults(make_spec(Net(), "fc"), 2) == []
    assert find_plugin_network_faults(make_spec(Trunk(nn.Conv2d(8, 2, 3)), "new"), 2) == []
