"""Polyclinic from Python: the run that the command line makes, its tables, and parts of one's own as objects."""

import json
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

import polyclinic as pc
from polyclinic.common import plugins
from polyclinic.common.errors import BadInput
from polyclinic.common.metrics.auroc import compute_metrics_per_class
from polyclinic.custom_parts import convert_settings_to_overrides
from polyclinic.server.federation.checkpoints import CheckpointFolder
from tests.federations import ALL_DIGITS, experiment, finished
from tests.polyclinic.pictures import SMALL, pictures, share_above, squared, tiny
from tests.server.killing import Killed, kill_at

ONE_ROUND = {"run.rounds": 1, "simulation.backend": "inline"}


def simulated(out: Path, **choices: Any) -> pc.FinishedRun:
    tables = {**SMALL, "run": {"method": "surgical", "rounds": 2}, "evaluation": {}}
    return pc.simulate(tables, dataset=pictures(), out=out, **choices)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> pc.FinishedRun:
    return simulated(tmp_path_factory.mktemp("pictures") / "run")


def test_it_is_the_run_of_the_command_line(tmp_path: Path) -> None:
    file = experiment(tmp_path)
    done = pc.simulate(file.path, out=tmp_path / "run")
    assert done.model_sha256 == finished(ALL_DIGITS)[1]["model_sha256"]
    assert pc.load(tmp_path / "run").summary == json.loads((tmp_path / "run" / "summary.json").read_text())


def test_the_tables_have_what_the_summary_has(run: pc.FinishedRun) -> None:
    test = run.summary["test"]
    assert list(run.classes.index) == ["bars", "lines"]
    assert list(run.classes["owners"]) == [2, 1]
    assert list(run.classes["auroc"]) == [test["per_class"][name]["auroc"] for name in run.classes.index]
    assert (run.classes["low"] <= run.classes["auroc"]).all()
    assert (run.classes["auroc"] <= run.classes["high"]).all()
    assert list(run.rounds.index) == [1, 2]
    assert (run.rounds["sites"] == 2).all()
    assert run.rounds["bytes_up"].sum() <= run.sites["bytes_up"].sum()
    assert list(run.sites.index) == ["east", "north"]
    assert [test["per_class"][name]["positives"] < 30 for name in run.classes.index] == [True, True]
    assert run.mean_auroc is None
    assert repr(run).startswith("<surgical: 2 rounds, 2 sites, no mean AUROC can be given: at most ")


def test_figures_are_axes_and_can_be_drawn_into_given_ones(run: pc.FinishedRun) -> None:
    both = Figure().subplots(1, 2)
    assert run.plot_rounds(both[0]) is both[0]
    assert run.plot_classes(both[1]) is both[1]
    assert list(both[0].lines[0].get_ydata()) == list(run.rounds["validation_auroc"])
    assert list(both[1].lines[0].get_xdata()) == list(run.classes["auroc"])
    assert isinstance(run.plot_classes(), Axes)


def test_images_of_an_array_and_of_files_are_predicted_alike(run: pc.FinishedRun, tmp_path: Path) -> None:
    images, folder = pictures(count=3).images, tmp_path / "pictures"
    folder.mkdir()
    for n, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{n}.png")
    of_array = run.predict(images)
    with pytest.warns(pc.FileReadingWarning, match="trained on a data set of your own: files are read by Polyclinic's"):
        of_files = pc.predict(run.folder, folder)
    assert list(of_array.columns) == ["bars", "lines"]
    np.testing.assert_allclose(of_array.to_numpy(), of_files.to_numpy(), atol=1e-6)
    with torch.no_grad():
        direct = run.network()(torch.from_numpy(images[:, None]).float())
    np.testing.assert_allclose(of_array.to_numpy(), direct.sigmoid().numpy(), atol=1e-6)
    with pytest.raises(BadInput, match="must be uint8"):
        run.predict(images.astype(np.float32))


class Stretched(Dataset[dict[str, Any]]):
    """Items as MONAI makes them: a tensor (channels, width, height), stretched to 0 to 1; and a random transform."""

    classes = ("bars", "lines")

    def __init__(self, seed: int) -> None:
        self.made = pictures(seed, 90)

    def __len__(self) -> int:
        return len(self.made.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = torch.from_numpy(np.asarray(self.made.images)[index].T[None] / np.float32(255))
        noisy = image + 0.3 * torch.rand(image.shape)
        return {
            "image": (noisy - noisy.min()) / (noisy.max() - noisy.min()),
            "label": np.asarray(self.made.labels)[index, ::-1].copy(),
        }


def compute_aurocs(probabilities: pd.DataFrame, test: Stretched) -> list[float]:
    labels = np.asarray(test.made.labels)[:, ::-1]
    results = compute_metrics_per_class(probabilities[list(test.classes)].to_numpy(), labels, test.classes)
    return [result.auroc or 0.0 for result in results.values()]


def test_a_data_set_is_predicted_as_the_run_tested_it(tmp_path: Path) -> None:
    test = Stretched(1)
    done = pc.simulate(SMALL, dataset={"train": Stretched(0), "test": test}, out=tmp_path / "run")
    expected = pytest.approx(list(done.classes.loc[list(test.classes), "auroc"]), abs=1e-6)
    assert compute_aurocs(done.predict(test), test) == expected
    with_images = pc.LabelledImages(test, item=lambda item: item["image"])  # labels are not needed
    assert compute_aurocs(pc.predict(done.folder, with_images), test) == expected
    raw = torch.from_numpy(np.asarray(test.made.images))[:, None]
    assert compute_aurocs(done.predict(raw), test) != expected


def test_images_that_cannot_be_read_as_in_training_are_refused(run: pc.FinishedRun) -> None:
    images = np.asarray(pictures(count=4).images)
    scaled = pc.LabelledImages(images / np.float32(255))
    np.testing.assert_allclose(run.predict(scaled), run.predict(images), atol=1e-4)
    with pytest.raises(BadInput, match=r"values outside 0 .black. to 1 .white."):
        run.predict(pc.LabelledImages(images.astype(np.float32)))
    with pytest.raises(BadInput, match=r'is a dictionary of parts. Give one of them: run.predict\(parts\["test"\]\)'):
        run.predict({"test": scaled})  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="not an empty list"):
        run.predict([])
    with pytest.raises(BadInput, match="not a int"):
        run.predict(3)  # type: ignore[arg-type]


def test_files_of_a_run_that_read_files_are_predicted_without_a_warning(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((16, 16), np.uint8)).save(tmp_path / "black.png")
    done = pc.simulate("digits_surgical", settings=ONE_ROUND, out=tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(done.predict(tmp_path / "black.png").index) == ["black.png"]


ANOTHER_PROCESS = """
import sys
import polyclinic as pc
from tests.polyclinic.pictures import pictures, tiny

folder, images = sys.argv[1], pictures(count=4).images
try:
    pc.load(folder).predict(images)
except pc.BadInput as error:
    remedy = error.faults[0].remedy
load, predict = (part.split(")")[0] + ")" for part in remedy.split("pc.")[1:3])
for call, end in ((load, ".predict(images)"), (predict, "")):
    table = eval(f"pc.{call}{end}".replace("FOLDER", "folder").replace("model=...", "model=tiny"))
    print(table.to_numpy().tolist())
"""


def test_another_process_gives_the_network_again_as_the_message_says(tmp_path: Path) -> None:
    own = simulated(tmp_path / "run", model=tiny)
    command = [sys.executable, "-W", "error", "-c", ANOTHER_PROCESS, str(own.folder)]
    printed = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True).stdout
    expected = own.predict(pictures(count=4).images).to_numpy()
    tables = [json.loads(line) for line in printed.splitlines()]
    assert len(tables) == 2
    for table in tables:
        np.testing.assert_allclose(table, expected, atol=1e-6)


def test_a_network_that_is_given_again_and_differs_is_named_or_refused(tmp_path: Path, run: pc.FinishedRun) -> None:
    own = simulated(tmp_path / "run", model=tiny(1, 16), head="new")
    images = pictures(count=4).images
    with pytest.warns(
        pc.OtherNetworkWarning, match="trained with model=Sequential, from which the given network differs"
    ):
        again = pc.load(own.folder, model=tiny(1, 16), head="new")  # other initial weights
    with pytest.warns(pc.OtherNetworkWarning):
        assert again.predict(images).equals(own.predict(images))
    with pytest.raises(BadInput, match=r"5 tensors differ.* Give model= with the arguments that it was trained with"):
        pc.load(own.folder, model=nn.Sequential(nn.Flatten(), nn.Linear(256, 3)))
    with pytest.raises(BadInput, match=r"head: is 'fc'; .* was trained with 'new'"):
        pc.load(own.folder, model=tiny(1, 16), head="fc")
    with pytest.raises(BadInput, match=r"model: is not needed: the network of .* is tiny_cnn"):
        pc.load(run.folder, model=tiny)


def test_network_loss_and_metric_of_ones_own_are_used_and_unknown_to_another_process(tmp_path: Path) -> None:
    own = simulated(tmp_path / "run", model=tiny, loss=squared, metrics=[share_above])
    assert own.summary["experiment"]["model"]["architecture"].startswith("plugin:own-tiny-")
    (metric,) = own.summary["test"]["mean_more"]
    assert metric.startswith("plugin:own-share_above-")
    assert own.network().backbone[2].out_features == 12
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plugins, "_registered_parts", {})
        with pytest.raises(
            BadInput, match=r"was given to polyclinic.simulate in another process.*pc.load\(FOLDER, model="
        ):
            own.network()


def test_a_network_that_was_changed_is_another_one(tmp_path: Path) -> None:
    def network(width: int) -> Any:
        source = f"def tiny(channels, image_size):\n    return make(channels, image_size, {width})\n"
        scope: dict[str, Any] = {"make": lambda c, s, w: nn.Sequential(nn.Flatten(), nn.Linear(c * s * s, w))}
        exec(source, scope)  # as a notebook's cell that is edited and run again
        return scope["tiny"]

    narrow, wide = (simulated(tmp_path / str(width), model=network(width), head="new").network() for width in (4, 7))
    assert (narrow.head.in_features, wide.head.in_features) == (4, 7)


def test_a_run_that_broke_off_goes_on(tmp_path: Path) -> None:
    through = simulated(tmp_path / "through", model=tiny)
    with pytest.MonkeyPatch.context() as patched:
        kill_at(patched, CheckpointFolder, "save_checkpoint", 2)
        with pytest.raises(Killed):
            simulated(tmp_path / "run", model=tiny)
    resumed = simulated(tmp_path / "run", model=tiny, resume=True)
    assert resumed.model_sha256 == through.model_sha256


def test_what_is_wrong_is_said_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r'run.round: .* Did you mean "rounds"'):
        simulated(tmp_path / "run", settings={"run.round": 3})
    with pytest.raises(BadInput, match=r'Examples are "digits_surgical", "digits_vanilla"'):
        pc.simulate("digits", out=tmp_path / "run")
    with pytest.raises(BadInput, match="ray: its workers are other processes"):
        simulated(tmp_path / "run", settings={"simulation.backend": "ray"})
    assert not (tmp_path / "run").exists()


def test_refusals_name_arguments_and_no_options(run: pc.FinishedRun) -> None:
    calls: list[tuple[dict[str, Any], str]] = [
        ({}, rf"^out={run.folder}: is not empty. .* To go on with the run in it: resume=True\.$"),
        (
            {"resume": True, "loss": squared},
            rf"^resume=True, out={run.folder}: .* the same experiment and settings=, or",
        ),
        ({"resume": True, "settings": {"run.rounds": 1}}, rf"^resume=True, out={run.folder}: "),
    ]
    for choices, words in calls:
        with pytest.raises(BadInput, match=words) as refused:
            simulated(run.folder, **choices)
        assert "--" not in str(refused.value)


def test_a_folder_is_chosen_where_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [pc.simulate("digits_surgical", settings=ONE_ROUND).folder for _ in range(2)]
    assert folders == [Path("runs/surgical"), Path("runs/surgical-2")]


def test_importing_it_loads_neither_torch_nor_flower() -> None:
    code = "import sys, polyclinic; sys.exit(any(name in sys.modules for name in ('torch', 'flwr', 'pandas', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (0.5, "0.5"),
        (True, "true"),
        ("a", '"a"'),
        (["a", 'b"'], '["a", "b\\""]'),
        ({"kind": "adam", "lr": 1}, '{"kind" = "adam", "lr" = 1}'),
    ],
)
def test_settings_are_written_as_toml(value: object, text: str) -> None:
    (line,) = convert_settings_to_overrides({"a.b": value})
    assert line == f"a.b={text}"
    assert tomllib.loads(f"x = {text}")["x"] == value


def test_a_script_without_a_guard_runs_once_where_it_compares(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    program = """
print("begun")
import polyclinic as pc
settings = {"run.rounds": 1, "simulation.backend": "inline"}
pc.compare(["digits_surgical"], seeds=1, jobs=2, out="both", settings=settings)
print("done")
"""
    script.write_text(program, encoding="utf-8")
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert (ended.returncode, ended.stdout.split()) == (0, ["begun", "done"]), ended.stderr
