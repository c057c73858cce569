"""Parts given as objects, as somebody at a prompt gives them: closures, one after the other, into one process."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import polyclinic as pc
from tests.polyclinic.pictures import SMALL, pictures

HEAD = {"model.train": "head"}


def networks(width: int, between: Callable[[], nn.Module]) -> Callable[[int, int], nn.Module]:
    def build(channels: int, image_size: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, width, 5, stride=4), between(), nn.AdaptiveAvgPool2d(2), nn.Flatten())

    return build


def run(out: Path, data: pc.LabelledImages | None = None, **more: Any) -> pc.FinishedRun:
    return pc.simulate(SMALL, dataset=data or pictures(), out=out, **more)


def test_networks_of_one_factory_are_different_networks_and_stay_so(tmp_path: Path) -> None:
    """The source is the same; what it captured is not."""
    first = run(tmp_path / "relu", model=networks(8, nn.ReLU))
    before = first.predict(pictures().images[:4])
    others = [run(tmp_path / name, model=networks(*made)) for name, made in (("a", (8, nn.Tanh)), ("b", (16, nn.ReLU)))]
    assert len({finished.model_sha256 for finished in (first, *others)}) == 3
    assert isinstance(first.network().backbone[1], nn.ReLU)
    assert first.predict(pictures().images[:4]).equals(before)


def test_data_sets_and_losses_of_one_factory_are_different_ones(tmp_path: Path) -> None:
    def reader(seed: int) -> Callable[[Path, Any], pc.LabelledImages]:
        return lambda folder, options: pictures(seed)

    def loss(by: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return lambda logits, labels, annotated: by * (logits.sigmoid() - labels).abs()[~labels.isnan()].mean()

    runs = [
        pc.simulate(SMALL, dataset=reader(seed), loss=loss(by), out=tmp_path / f"{seed}{by}")
        for seed, by in ((1, 1.0), (2, 1.0), (1, -1.0))
    ]
    assert len({finished.model_sha256 for finished in runs}) == 3


def test_a_network_that_somebody_holds_is_not_trained_in_place(tmp_path: Path) -> None:
    torch.manual_seed(1)
    pretrained = networks(8, nn.ReLU)(1, 16)
    before = {name: tensor.clone() for name, tensor in pretrained.state_dict().items()}
    first, second = (run(tmp_path / name, model=lambda channels, size: pretrained) for name in ("first", "second"))
    assert first.model_sha256 == second.model_sha256
    assert all(torch.equal(tensor, before[name]) for name, tensor in pretrained.state_dict().items())


def test_a_folder_that_is_used_again_takes_nothing_over(tmp_path: Path) -> None:
    """A notebook removes the folder and runs the cell again, with other images or fewer of them."""
    for seed, count in ((1, 120), (2, 120), (2, 90)):
        fresh = run(tmp_path / f"fresh{seed}{count}", pictures(seed, count), settings=HEAD)
        again = run(tmp_path / "again", pictures(seed, count), settings=HEAD)
        assert again.model_sha256 == fresh.model_sha256
        shutil.rmtree(tmp_path / "again")


def test_a_file_that_changed_is_read_anew(tmp_path: Path) -> None:
    hashes = []
    for seed in (1, 2):
        parts = {part: pictures(3 * seed + number) for number, part in enumerate(("train", "val", "test"))}
        arrays = {
            f"{part}_{kind}": getattr(data, kind) for part, data in parts.items() for kind in ("images", "labels")
        }
        np.savez(tmp_path / "data.npz", **arrays)
        settings = {"data": {"kind": "npz", "path": str(tmp_path / "data.npz"), "classes": ["lines", "bars"]}}
        done = pc.simulate(SMALL, settings={**settings, "simulation.backend": "inline"}, out=tmp_path / str(seed))
        hashes.append(done.model_sha256)
    assert hashes[0] != hashes[1]


def test_a_run_that_is_done_is_resumed_with_its_own_experiment_only(tmp_path: Path) -> None:
    own: dict[str, Any] = {"model": networks(8, nn.ReLU)}
    done = run(tmp_path / "done", **own)
    assert run(tmp_path / "done", **own, resume=True).model_sha256 == done.model_sha256
    for other, words in (
        ({"model": networks(8, nn.Tanh)}, "model=build has other code or values"),
        ({"data": pictures(7)}, "dataset=LabelledImages has other pictures, labels, names or code"),
        ({"optimizer": lambda p, **more: SGD(p, lr=1.0)}, "training.optimizer was .*, is optimizer=lambda"),
        ({"settings": {"training.lr": 0.5}}, "training"),
    ):
        with pytest.raises(pc.BadInput, match=rf"began with another experiment: .*{words}"):
            run(tmp_path / "done", **own | other, resume=True)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"relu": torch.relu, "tanh": torch.tanh}


def activate(maps: torch.Tensor) -> torch.Tensor:
    return ACTIVATIONS["now"](maps)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(nn.Conv2d(1, 8, 5, stride=4), nn.AdaptiveAvgPool2d(2), nn.Flatten())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return activate(self.layer(images))


class Inherited(Base):
    pass


def test_a_network_whose_base_class_uses_another_function_is_another_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook, between two runs of one process; the third run repeats the first."""
    hashes = []
    for number, name in enumerate(("relu", "tanh", "relu")):
        monkeypatch.setitem(ACTIVATIONS, "now", ACTIVATIONS[name])
        hashes.append(run(tmp_path / str(number), model=Inherited()).model_sha256)
    assert hashes[0] == hashes[2] != hashes[1]
    with pytest.raises(pc.BadInput, match="model=Inherited has other code or values"):
        run(tmp_path / "1", model=Inherited(), resume=True)


def test_factories_on_one_line_make_different_networks_and_optimisers(tmp_path: Path) -> None:
    relu, tanh = lambda *size: networks(8, nn.ReLU)(*size), lambda *size: networks(8, nn.Tanh)(*size)
    slow, fast = lambda p, **more: SGD(p, lr=0.01), lambda p, **more: SGD(p, lr=1.0)
    given: list[dict[str, Any]] = [{"model": relu}, {"model": tanh}, {"optimizer": slow}, {"optimizer": fast}]
    runs = [run(tmp_path / str(number), **parts) for number, parts in enumerate(given)]
    assert len({done.model_sha256 for done in runs}) == 4
    for number, other in ((0, {"model": tanh}), (2, {"optimizer": fast})):
        with pytest.raises(pc.BadInput, match="began with another experiment"):
            run(tmp_path / str(number), resume=True, **other)


LABELS = pictures().labels


def accuracy(scores: Any, labels: Any) -> float:
    return float(((scores > 0.5) == labels).mean())


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda folder: run(folder, pictures(patients=[None] * 120)), "patients must be a name for each image"),
        (lambda folder: run(folder, pc.LabelledImages(pictures().images, LABELS, "ab")), "not 'ab'"),
        (lambda folder: run(folder, pc.LabelledImages([1, 2], LABELS, ("lines", "bars"))), "list[0]: is no image: int"),
        (lambda folder: run(folder, settings={"training.lr": object()}), "which no experiment file can hold"),
        (lambda folder: run(folder, metrics={"mine": accuracy}), "metrics: is dict, not a list of functions"),  # type: ignore
        (lambda folder: run(folder, metrics=accuracy), "metrics: is function, not a list of functions"),
        (lambda folder: run(folder, metrics=["accuracy"]), "metrics: is list, not a list of functions"),
        (lambda folder: run(folder, loss="focal"), "loss: is str, not a function"),
        (lambda folder: pc.compare("digits_surgical", out=folder), "must be a list"),
        (lambda folder: pc.compare([], out=folder), "must be a list with at least one"),
        (lambda folder: pc.compare(["digits_surgical"], seeds=0, out=folder), "must be at least 1"),
    ],
)
def test_what_does_not_fit_is_said_in_words(call: Callable[[Path], object], reason: str, tmp_path: Path) -> None:
    with pytest.raises(pc.BadInput) as refused:
        call(tmp_path / "out")
    assert reason in str(refused.value)


def test_a_number_of_numpys_is_a_number_and_half_precision_layers_are_made_single(tmp_path: Path) -> None:
    half = run(
        tmp_path / "half",
        model=lambda channels, size: networks(8, nn.ReLU)(channels, size).half(),
        settings={"training.lr": np.float64(0.01), "run.rounds": np.int64(1)},
    )
    assert all(value.dtype == torch.float32 for value in half.network().parameters())
    for images in (None, [1, 2], np.zeros((0, 16, 16), np.uint8)):
        with pytest.raises(pc.BadInput, match="image"):
            half.predict(images)


def test_pictures_of_two_parts_are_dropped_where_asked_and_listed_in_the_run_folder(tmp_path: Path) -> None:
    data = pictures()
    images, labels = np.asarray(data.images), np.asarray(data.labels)
    parts = {
        name: pc.LabelledImages(images[rows], labels[rows], data.class_names)
        for name, rows in (("train", slice(0, 90)), ("test", slice(80, 120)))
    }
    with pytest.raises(pc.BadInput, match="has 10 of 40 pictures of its test part in its train part too"):
        pc.simulate(SMALL, dataset=parts, out=tmp_path / "refused")
    done = pc.simulate(
        SMALL, dataset=parts, settings={"data.duplicates": "drop_from_training"}, out=tmp_path / "dropped"
    )
    lines = (done.folder / "duplicates.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "part,picture,copy_in_part,copy"
    assert sorted(line.split(",")[1] for line in lines[1:]) == [f"test[{row}]" for row in range(10)]
    assert any("test pictures are in the train part too" in note for note in done.summary["notes"])


class Drawn(list[Any]):
    """Items whose brightness is drawn at each reading, and which count how often they are read."""

    reads = 0

    def __getitem__(self, row: Any) -> Any:
        self.reads += 1
        image, labels = super().__getitem__(row)
        bright = image * (0.5 + 0.5 * np.random.random())
        return {"image": bright.astype(np.uint8), "label": labels, "ward": row}


def drawn_pictures() -> Drawn:
    given = pictures()
    return Drawn(zip(given.images, given.labels, strict=True))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "wrap", [lambda images: images, lambda images: {"train": images, "test": images}], ids=["whole", "parts"]
)
def test_a_class_that_the_data_lacks_is_named_before_an_item_is_read(
    wrap: Callable[[Any], Any], tmp_path: Path
) -> None:
    images = drawn_pictures()
    named = pc.LabelledImages(images, class_names=("lines", "rings"))
    with pytest.raises(pc.BadInput, match='"bars" is not a class of the data, whose classes are "lines", "rings"'):
        run(tmp_path / "out", wrap(named))
    assert images.reads == 0


def test_class_names_that_are_no_list_are_reported_with_the_data(tmp_path: Path) -> None:
    with pytest.raises(pc.BadInput, match="class_names must be a list of texts, not 'lines'"):
        run(tmp_path / "out", pc.LabelledImages(pictures().images, pictures().labels, "lines"))


def test_notes_on_augmented_tests_and_unread_entries_are_printed_and_kept(tmp_path: Path) -> None:
    finished = run(tmp_path / "out", pc.LabelledImages(drawn_pictures(), class_names=("lines", "bars")))
    starts = ("Validation and test pictures are augmented", '"ward" of the items is not read')
    for start in starts:
        assert [start in note for note in finished.notes].count(True) == 1
        assert [start in note for note in finished.summary["notes"]].count(True) == 1
        assert str(finished).count(start) == 1
