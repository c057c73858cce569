"""Polyclinic from Python: the run that the command line makes, its tables, and parts of one's own as objects."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

import polyclinic as pc
from polyclinic.common import plugins
from polyclinic.common.errors import BadInput
from polyclinic.own_parts import convert_settings_to_overrides
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
    of_array, of_files = run.predict(images), pc.predict(run.folder, folder)
    assert list(of_array.columns) == ["bars", "lines"]
    np.testing.assert_allclose(of_array.to_numpy(), of_files.to_numpy(), atol=1e-6)
    with torch.no_grad():
        direct = run.network()(torch.from_numpy(images[:, None]).float())
    np.testing.assert_allclose(of_array.to_numpy(), direct.sigmoid().numpy(), atol=1e-6)
    with pytest.raises(BadInput, match="must be uint8"):
        run.predict(images.astype(np.float32))


def test_network_loss_and_metric_of_ones_own_are_used_and_unknown_to_another_process(tmp_path: Path) -> None:
    own = simulated(tmp_path / "run", model=tiny, loss=squared, metrics=[share_above])
    assert own.summary["experiment"]["model"]["architecture"].startswith("plugin:own-tiny-")
    (metric,) = own.summary["test"]["mean_more"]
    assert metric.startswith("plugin:own-share_above-")
    assert own.network().backbone[2].out_features == 12
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plugins, "_offered", {})
        with pytest.raises(BadInput, match=r"was given to polyclinic.simulate in another process"):
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
