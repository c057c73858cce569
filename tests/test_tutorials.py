"""The tutorials' commands run as they stand, and the page on new methods makes one."""

import contextlib
import importlib.util
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import polyclinic as pc
import polyclinic.client.cli
import polyclinic.server.cli
import polyclinic.studies.cli
from polyclinic.strategies import registry
from tests.bad_input.catalogue import changed
from tests.doc_pages import blocks, lines, saved
from tests.federations import federation
from tests.network.real import Machine, Program, eventually, free_ports, lines_of, machine, typed

PROGRAMS = {
    "flwr-sim": polyclinic.studies.cli,
    "flwr-server": polyclinic.server.cli,
    "flwr-client": polyclinic.client.cli,
}
ROOT = Path(__file__).parents[1]


def no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have runs of this process write no report, which takes longer to draw than a small run."""
    monkeypatch.setattr("polyclinic.server.federation.set_up.write_run_pages", lambda *arguments, **options: None)


def test_the_page_on_python_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    no_pages(monkeypatch)
    space: dict[str, Any] = {}
    for block in blocks("python", "python"):
        exec(compile(block, "docs/python.md", "exec"), space)  # as a person pastes them, one after the other
    assert (tmp_path / "runs" / "classes.png").stat().st_size > 5_000
    table, names = space["compared"].table, ("surgical", "partial_loss")
    assert list(table.index) == [(name, seed) for name in names for seed in (0, 1)]
    assert table["all"].between(0, 1).all()
    assert (tmp_path / "runs" / "compared" / "report.html").is_file()
    assert {"first", "own"} <= {path.name for path in (tmp_path / "runs").iterdir()}


def test_the_loss_of_monai_on_the_page_on_python_trains_what_our_focal_loss_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_pages(monkeypatch)
    space: dict[str, Any] = {}
    (block,) = (block for block in blocks("python", "python") if "FocalLoss" in block)
    exec(compile(block, "docs/python.md", "exec"), space)
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, (60, 2)).astype(np.float32)
    labels[::7, 0] = np.nan  # of an annotated class
    scans = pc.LabelledImages(random.integers(0, 256, (60, 16, 16), np.uint8), labels, ("lines", "bars"))
    experiment = {
        "run": {"method": "partial_loss", "rounds": 2},
        "model": {"architecture": "tiny_cnn", "channels": 1, "image_size": 16},
        "partition": {"kind": "class_lists", "lists": {"east": ["lines", "bars"], "north": ["bars"]}},
    }
    monai = pc.simulate(experiment, dataset=scans, loss=space["known_focal"], out=tmp_path / "monai")
    ours = pc.simulate(experiment, settings={"training.loss": "focal"}, dataset=scans, out=tmp_path / "ours")
    for first, second in zip(monai.network().parameters(), ours.network().parameters(), strict=True):
        assert torch.allclose(first, second, atol=1e-4)


class Scans(Dataset[tuple[Tensor, Tensor]]):
    """Colour pictures that say nothing of their labels."""

    classes = ("Mass", "Nodule", "Effusion")

    def __len__(self) -> int:
        return 15

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(index)
        return torch.rand(3, 64, 64, generator=random), torch.randint(0, 2, (3,), generator=random).float()


def test_the_readmes_classifier_and_data_set_train_the_model_of_a_toml_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    [block] = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    space: dict[str, Any] = {"my_dataset": Scans()}
    short = (('"run.rounds": 20', '"run.rounds": 1'), ('out="runs/mine"', 'out="runs/mine", seeds=1'))
    short += (("print(pc.compare", "compared = (pc.compare"),)
    exec(compile(changed(block, *short), "README.md", "exec"), space)
    assert len([line for line in block.splitlines() if line]) <= 10
    tables = {
        "run": {"method": "surgical", "rounds": 1},
        "model": {"architecture": "torchvision:resnet18", "image_size": 64},
        "partition": {"kind": "class_lists", "lists": space["lists"]},
    }
    no_pages(monkeypatch)
    alone = pc.simulate(tables, dataset=Scans(), out="by-toml")
    assert space["compared"].runs["surgical", 0].model_sha256 == alone.model_sha256


@pytest.mark.torture
def test_the_researchers_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved("tutorial-researcher", tmp_path)
    for program, *arguments in lines("tutorial-researcher"):
        with contextlib.suppress(SystemExit):  # only a fault ends a program so
            PROGRAMS[program].main(arguments)
    for report in ("first", "short", "both"):
        assert (tmp_path / "runs" / report / "report.html").is_file()
    assert len(lines_of(tmp_path / "runs" / "first" / "rounds.jsonl")) == 2
    assert len(lines_of(tmp_path / "runs" / "short" / "rounds.jsonl")) == 1


class Rehearsal:
    """Both pages' commands in the order in which two people would type them, in one folder."""

    def __init__(self, folder: Path, on: Machine) -> None:
        self.folder, self._machine = folder, on
        self.left = {page: lines(page) for page in ("tutorial-coordinator", "tutorial-hospital")}

    def types(self, page: str, *beginning: str) -> None:
        """The page's next commands that begin so; each has to end with 0."""
        for words in self._taken(page, *beginning):
            if words[0] == "cp":
                shutil.copy(words[1], words[2])
                continue
            ended = typed(PROGRAMS[words[0]].main, *words[1:])
            assert ended.code == 0, f"{words}\n{ended.out}{ended.err}"

    def starts(self, page: str, *beginning: str) -> list[Program]:
        """The same for programs that stay."""
        commands = self._taken(page, *beginning)
        return [
            self._machine.start(Path(words[-1]).name, "-m", PROGRAMS[words[0]].__name__, *words[1:])
            for words in commands
        ]

    def _taken(self, page: str, *beginning: str) -> list[list[str]]:
        commands = [words for words in self.left[page] if tuple(words[: len(beginning)]) == beginning]
        assert commands
        self.left[page] = [words for words in self.left[page] if words not in commands]
        return commands


@pytest.fixture
def rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rehearsal]:
    monkeypatch.chdir(tmp_path)
    with machine(tmp_path / "machine", works_in=tmp_path) as here:
        yield Rehearsal(tmp_path, here)


@pytest.mark.torture
def test_the_tutorials_of_coordinator_and_hospital_run_together(rehearsal: Rehearsal) -> None:
    coordinator, hospital = "tutorial-coordinator", "tutorial-hospital"
    saved(coordinator, rehearsal.folder)
    rehearsal.types(coordinator, "flwr-sim", "sites")
    rehearsal.types(coordinator, "flwr-server", "init")
    file = rehearsal.folder / "trial" / "coordinator.toml"  # the pages' port may be in use where tests run
    file.write_text(changed(file.read_text(), ("port = 9092", f"port = {free_ports(1)[0]}")))
    rehearsal.types(hospital, "flwr-client", "init")
    rehearsal.types(coordinator, "flwr-server", "admit")
    rehearsal.types(hospital, "cp")
    rehearsal.types(hospital, "flwr-client", "confirm")
    for command in ("check", "preview"):
        rehearsal.types(hospital, "flwr-client", command)
    (server_up,) = rehearsal.starts(coordinator, "flwr-server", "start")
    server_up.says("hospitals connect to")
    hospitals = rehearsal.starts(hospital, "flwr-client", "start")
    for program in hospitals:
        program.says("connected to trial")
    rehearsal.types(coordinator, "flwr-server", "status")
    rehearsal.types(coordinator, "flwr-server", "deadlines")
    check_block, *_ = blocks("troubleshooting")
    check_lines = [shlex.split(line, comments=True) for line in check_block.splitlines()]
    for _, command, _ in filter(None, check_lines):
        assert typed(polyclinic.client.cli.main, command, "hospitals/north").code == 0
    (run,) = rehearsal.starts(coordinator, "flwr-server", "run")
    run.succeeds()
    for command in ("status", "health", "record", "audit"):
        rehearsal.types(hospital, "flwr-client", command)
    for command in ("verify", "runs", "deliver", "revoke"):
        rehearsal.types(coordinator, "flwr-server", command)
    assert rehearsal.left == {coordinator: [], hospital: []}
    out = rehearsal.folder / "runs" / "first"
    assert (out / "report.html").is_file()
    assert [line["sites"] for line in lines_of(out / "rounds.jsonl")] == [["east", "north", "south"]] * 2
    eventually(lambda: not hospitals[1].runs, "the hospital whose admission was taken back ends")
    assert hospitals[1].process.wait() == 14


def add_method(name: str, cls: str, texts: Sequence[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a method and its test from the page's texts, and register the method; return the test's module."""
    modules = []
    for module, text in zip((f"polyclinic.strategies.methods.{name}", f"test_{name}"), texts, strict=True):
        path = folder / f"{module.rpartition('.')[2]}.py"
        path.write_text(text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(module, path)
        modules.append(importlib.util.module_from_spec(spec))
        monkeypatch.setitem(sys.modules, module, modules[-1])
        spec.loader.exec_module(modules[-1])
        monkeypatch.setitem(registry.STRATEGIES, name, getattr(modules[0], cls))
    return modules[1]


def test_the_page_on_new_methods_makes_one_that_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = add_method("fedpull", "FedPull", blocks("new-method", "python")[:2], tmp_path, monkeypatch)
    test.test_the_pull_is_the_sum_of_absolute_differences()
    summary = federation(tmp_path, "run.method=fedpull", "run.rounds=1", "method.pull=0.001")
    assert (summary["method"], summary["rounds"]) == ("fedpull", 1)


def test_the_page_on_new_methods_makes_a_rule_with_a_statistic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = add_method("fedfair", "FedFair", blocks("new-method", "python")[-2:], tmp_path, monkeypatch)
    test.test_a_site_weighs_its_loss_to_the_power_of_fairness()
    assert "`fedfair`" in registry.list_statistic_meanings()["hardness"]
    ran = [
        federation(tmp_path, "run.method=fedfair", "run.rounds=2", f"method.fairness={power}", out=f"at-{power}")
        for power in (0, 4)
    ]
    plain = federation(tmp_path, "run.method=partial_loss", "run.rounds=2", out="plain")
    assert ran[0]["model_sha256"] == plain["model_sha256"] != ran[1]["model_sha256"]
