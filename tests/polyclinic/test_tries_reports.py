"""Public problem reports of other projects, each as its reporter has it; the name of a try is the report."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import monai.data
import monai.transforms
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, random_split
from torchvision import transforms

import polyclinic as pc
from polyclinic.common.config import Experiment, TrainingSection
from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import build_network
from polyclinic.common.models.state import read_model_state, write_model_state
from polyclinic.common.models.zoo.registry import find_plugin_network_faults
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.plugins import DATASETS, LOSSES, MODELS, PLUGIN_PREFIX, register_local_plugin
from polyclinic.custom_parts import wrap_as_dataset_plugin
from polyclinic.data.base.image_set import DatasetSplits
from polyclinic.data.base.spec import PluginDatasetSpec
from polyclinic.data.sources.plugin import load_plugin_dataset
from polyclinic.strategies.local.losses import PLAIN_LOSSES, make_training_loss
from polyclinic.strategies.local.plugin_calls import SiteLabels, find_plugin_faults

COUNT = 40
GREY = np.random.default_rng(3).integers(0, 256, (COUNT, 8, 8), dtype=np.uint8)
FLOATS = torch.from_numpy(GREY).float()[:, None] / 255
NUMBER = np.arange(COUNT) % 2


class Items(Dataset[Any]):
    classes: ClassVar[Any] = ["no", "yes"]

    def __init__(self, get: Callable[[int], Any]) -> None:
        self.get = get

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return self.get(index)


def read(data: Any) -> DatasetSplits:
    name = register_local_plugin(DATASETS, wrap_as_dataset_plugin(data))
    return load_plugin_dataset(PluginDatasetSpec(kind="plugin", name=name), Path())


# ---------------------------------------------------------------------- random numbers


class Draw(monai.transforms.RandomizableTransform):
    """MONAI#1068, #1066: a transform of one's own that draws from ``self.R``."""

    def __call__(self, image: Any) -> Any:
        return image * float(self.R.uniform(0.2, 0.9))


def distribution(row: int) -> Tensor:
    return FLOATS[row] * torch.distributions.Uniform(0.2, 0.9).sample()


RANDOM: dict[str, Callable[[], Callable[[int], Any]]] = {
    "Project-MONAI/MONAI#1068": lambda: (lambda move: lambda row: move(FLOATS[row]))(Draw()),
    "Project-MONAI/MONAI#1066": lambda: (lambda move: lambda row: move(FLOATS[row]))(
        monai.transforms.Compose([Draw(), Draw()])
    ),
    "Project-MONAI/MONAI#398": lambda: (lambda move: lambda row: move({"image": FLOATS[row]})["image"])(
        monai.transforms.Compose([monai.transforms.RandZoomd("image", prob=1.0, min_zoom=0.6, max_zoom=0.9)])
    ),
    "Project-MONAI/MONAI#2099": lambda: lambda row: FLOATS[row] * float(np.random.uniform(0.2, 0.9)),
    "Lightning-AI/pytorch-lightning#20412": lambda: distribution,
    "wolny/pytorch-3dunet#32": lambda: (lambda state: lambda row: FLOATS[row] * state.uniform(0.2, 0.9))(
        np.random.RandomState(47)
    ),
}


@pytest.mark.parametrize("make", RANDOM.values(), ids=RANDOM)
def test_each_item_of_each_epoch_has_draws_of_its_own_that_follow_from_the_seed(
    make: Callable[[], Callable[[int], Any]],
) -> None:
    move = make()
    splits = read(Items(lambda row: (move(row), NUMBER[row])))
    stored: Any = splits.train.stored
    rows = splits.train.places
    first, other, again = (stored.read_pictures(np.asarray(rows), seed) for seed in (1, 2, 1))
    np.testing.assert_array_equal(first, again)
    share = first.mean((1, 2)) / GREY[rows].mean((1, 2))
    assert len(np.unique(np.round(share, 3))) > len(rows) / 2  # not one draw for all
    assert (first != other).any()


# ---------------------------------------------------------------------- pixels and labels


def test_purp1eHaze_FedIPR_2_a_wrapper_without_class_names_counts_them() -> None:
    class DatasetSplit(Dataset[Any]):
        def __init__(self, dataset: Dataset[Any], rows: list[int]) -> None:
            self.dataset, self.rows = dataset, rows

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> Any:
            return self.dataset[self.rows[index]]

    splits = read(DatasetSplit(Items(lambda row: (GREY[row], row % 2)), list(range(COUNT))))
    assert splits.train.class_names == ("0", "1")


def test_bentrevett_pytorch_image_classification_12_a_subset_has_the_names_of_its_data_set() -> None:
    train, test = random_split(Items(lambda row: (GREY[row], row % 2)), [30, 10], torch.Generator().manual_seed(0))
    splits = read({"train": train, "test": test})
    assert splits.train.class_names == ("no", "yes")
    np.testing.assert_array_equal(splits.test.labels.argmax(1), [row % 2 for row in test.indices])


SHAPES: dict[str, Callable[[int], Any]] = {
    "pytorch/pytorch#3670": lambda row: torch.tensor([row % 2]),
    "deepchem/deepchem#2328": lambda row: np.array([[row % 2]]),
    "securefederatedai/openfl#652": lambda row: np.array([row % 2], np.uint8),
}


@pytest.mark.parametrize("label", SHAPES.values(), ids=SHAPES)
def test_a_class_number_of_any_shape_is_the_class(label: Callable[[int], Any]) -> None:
    splits = read(Items(lambda row: (GREY[row], label(row))))
    np.testing.assert_array_equal(splits.train.labels.argmax(1), NUMBER[splits.train.places])


NORMALIZED: dict[str, Callable[[int], Any]] = {
    "real-stanford/diffusion_policy#112": lambda row: transforms.Normalize([0.485], [0.229])(2 * FLOATS[row] - 1),
    "choyingw/SynergyNet#19": lambda row: transforms.Normalize([127.5], [128.0])(FLOATS[row]),
    "timesler/facenet-pytorch#89": lambda row: (FLOATS[row] - 127.5) / 128,
    "clovaai/deep-text-recognition-benchmark#133": lambda row: (FLOATS[row] - 0.5) / 0.5,
    "Nerogar/mgds#55": lambda row: torch.from_numpy(GREY[row].astype(np.float32))[None] * 257 / 255,
    "pytorch/vision#105": lambda row: GREY[row].astype(np.int16) * 128,
    "Project-MONAI/MONAI, NormalizeIntensity": lambda row: monai.transforms.NormalizeIntensity()(FLOATS[row]),
}


@pytest.mark.parametrize("image", NORMALIZED.values(), ids=NORMALIZED)
def test_pixels_of_another_range_are_refused(image: Callable[[int], Any]) -> None:
    with pytest.raises(BadInput, match=r"value_range=|Leave Normalize out|shows nothing"):
        read(Items(lambda row: (image(row), NUMBER[row])))


def test_pillow_3011_a_picture_of_16_bits_has_its_values_by_its_range() -> None:
    deep = GREY.astype(np.uint16) * 257
    data = pc.LabelledImages(Items(lambda row: (Image.fromarray(deep[row]), NUMBER[row])), value_range=(0, 65535))
    splits = read(data)
    np.testing.assert_array_equal(splits.train.images, GREY[splits.train.places])


UNKNOWN: dict[str, tuple[Any, Any]] = {
    "open-mmlab/mmpretrain#631": ([0, 1, float("nan")], [0, 1, np.nan]),
    "chemprop/chemprop#960": (np.array([np.nan, 1, 0]), [np.nan, 1, 0]),
    "open-mmlab/mmpretrain#1439": ([1, None, 0], [1, np.nan, 0]),
}


@pytest.mark.parametrize(("label", "expected"), UNKNOWN.values(), ids=UNKNOWN)
def test_an_unknown_label_stays_unknown_and_has_no_gradient(label: Any, expected: Any) -> None:
    splits = read(pc.LabelledImages(Items(lambda row: (GREY[row], label)), class_names=("a", "b", "c")))
    np.testing.assert_array_equal(splits.train.labels[0], np.array(expected, np.float32))
    logits = torch.zeros(1, 3, requires_grad=True)
    loss = PLAIN_LOSSES["multi_label", "masked"](logits, torch.tensor(splits.train.labels[:1]), torch.ones(3).bool())
    loss.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert (logits.grad[0].numpy() != 0).tolist() == (~np.isnan(np.array(expected, float))).tolist()


def test_vectorinstitute_cyclops_168_minus_one_is_refused() -> None:
    with pytest.raises(BadInput, match="NaN"):
        read(pc.LabelledImages(Items(lambda row: (GREY[row], [1, -1])), class_names=("a", "b")))


# ---------------------------------------------------------------------- losses of a batch without what they need


def two_way(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    """tk1980/TwoWayMultiLabelLoss#2: a mean over the positives, of which a batch may have none."""
    present, absent = labels == 1, labels == 0
    return functional.softplus(-logits[present]).mean() + functional.softplus(logits[absent]).mean()


def empty(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    """xuxw98/ESAM#17: the cross-entropy of no entry is NaN."""
    known = ~labels.isnan()
    return functional.binary_cross_entropy_with_logits(logits[known], labels[known])


def loss_of(loss: Any, labels: Tensor) -> Tensor:
    spec = TrainingSection.model_validate({"loss": PLUGIN_PREFIX + register_local_plugin(LOSSES, loss)})
    plain = PLAIN_LOSSES["multi_label", "masked"]
    function = make_training_loss(spec, plain, "multi_label", "masked", labels)
    return function(torch.zeros(labels.shape, requires_grad=True), labels, torch.ones(labels.shape[1]).bool())


def test_two_way_loss_2_a_loss_without_a_value_where_no_class_is_present_is_refused_at_the_start() -> None:
    run, model = {"method": "partial_loss", "rounds": 1}, {"architecture": "tiny_cnn", "channels": 1, "image_size": 16}
    training = {"loss": PLUGIN_PREFIX + register_local_plugin(LOSSES, two_way)}
    experiment = Experiment.model_validate({"run": run, "model": model, "training": training})
    (fault,) = find_plugin_faults(experiment, 3, "masked", SiteLabels(fewest_classes=3))
    assert fault.problem == "returns nan for a batch of images that show no class."


def test_esam_17_a_batch_without_known_labels_teaches_nothing() -> None:
    assert float(loss_of(empty, torch.full((2, 3), torch.nan)).detach()) == 0.0


# ---------------------------------------------------------------------- networks


class InplaceABN(nn.Module):
    """mapillary/inplace_abn#130: running statistics without a counter."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, maps: Tensor) -> Tensor:
        normal = functional.batch_norm(
            maps, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1
        )
        return functional.leaky_relu(normal)


class Timm(nn.Module):
    """huggingface/pytorch-image-models#1816: the head replaced by a sequence with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, 6, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.trunk(images))
        return scores


def trunk(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 6, 3, stride=2), norm, nn.AdaptiveAvgPool2d(2), nn.Flatten())


NETWORKS: dict[str, tuple[Callable[[], nn.Module], str | None]] = {
    "pytorch/pytorch#31498": (lambda: trunk(nn.BatchNorm2d(6, momentum=None)), None),
    "pytorch/pytorch#15298": (lambda: trunk(nn.BatchNorm2d(6, momentum=0.0)), None),
    "mapillary/inplace_abn#130": (lambda: trunk(InplaceABN(6)), None),
    "huggingface/pytorch-image-models#1816": (Timm, "head.3"),
}


@pytest.mark.parametrize(("make", "head"), NETWORKS.values(), ids=NETWORKS)
def test_what_a_site_sends_is_the_whole_network(make: Callable[[], nn.Module], head: str | None) -> None:
    table = {"channels": 1, "image_size": 8, "head": head, "mean": [0.0], "std": [1.0]}
    spec = ModelSpec.model_validate({"architecture": PLUGIN_PREFIX + register_local_plugin(MODELS, make()), **table})
    assert find_plugin_network_faults(spec, 2) == []
    network, other = (build_network(spec, ("no", "yes"), seed) for seed in (1, 2))
    images = torch.from_numpy(GREY[:8])[:, None].float()
    for _ in range(3):
        network.train()(images)
    state = read_model_state(network)
    write_model_state(other, trunk=state.trunk, norm=state.norm, head=state.head)
    with torch.no_grad():
        torch.testing.assert_close(other.eval()(images), network.eval()(images))
