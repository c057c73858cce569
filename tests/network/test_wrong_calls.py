"""Every command and every usual mistake: refused at once, with what to do, and nothing is left.

``pytest tests/network/test_wrong_calls.py -m "" -n 0`` writes what each of them costs to ``build/wrong-calls.md``.
"""

import contextlib
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.network.ended import Command, Ended, Table
from tests.network.real import ROOT, flwr_client, flwr_server

CPU_S, CPU_S_BESIDE_OTHERS = 0.5, 0.8
"""Of a refusal, on a machine that has nothing else to do, and on one whose cores others use, which makes each second
do less: 0.33 s became 0.6 at a load of 8 on two cores. Torch alone takes 1.9 s. Each may be tried three times, for the
first compiles what it imports."""
TRIES = 3
YARDSTICK = "import asyncio, ssl, email.message, http.client, xml.dom.minidom, unittest, decimal"
YARDSTICKS = 6
"""A refusal takes up to 5 (0.57 s, where one takes 0.117 s), and 20 or more if it waits for torch."""
"""So many times what Python takes to start with these modules of its own: 0.2 s each, where a refusal takes 0.33 s. On
a slower machine beside two other tests a refusal took up to 2.9 of them, 1.5 s; torch alone takes ten there."""
EXPERIMENT = "experiments/digits_surgical.toml"


@dataclass(frozen=True)
class Place:
    """What the calls name: files with a mistake, a folder that is taken, folders that are right."""

    folder: Path
    coordinator: Path
    site: Path
    trained: Path
    taken: Path
    port: int

    def __getitem__(self, name: str) -> Path:
        return self.folder / name


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("wrong")
    right = (ROOT / EXPERIMENT).read_text(encoding="utf-8")
    (folder / "key.toml").write_text(right.replace("[run]", "[run]\nroundz = 3", 1), encoding="utf-8")
    (folder / "study").mkdir()
    (folder / "study" / "study.toml").write_text('titel = "x"', encoding="utf-8")
    for wrong in ("site", "coordinator"):
        (folder / f"wrong-{wrong}").mkdir()
        (folder / f"wrong-{wrong}" / f"{wrong}.toml").write_text('naem = "x"\n', encoding="utf-8")
    (folder / "model").mkdir()
    (folder / "model" / "model.json").write_text('{"class_names": ["mass"]}', encoding="utf-8")
    (folder / "model" / "model.safetensors").touch()
    (folder / "page.html").write_text("<html></html>", encoding="utf-8")
    (folder / "labels.csv").write_text("image,edema\na.png,1\n", encoding="utf-8")
    (folder / "empty").mkdir()
    (folder / "noise.npz").write_bytes(bytes(range(256)))
    np.savez(folder / "labels.npz", labels=np.zeros(3))
    (folder / "run").mkdir()
    (folder / "run" / "events.jsonl").touch()
    (folder / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    (folder / "cut.safetensors").write_bytes(bytes(range(7, 107)))
    (folder / "utf16.csv").write_text("image,edema\na.png,1\n", encoding="utf-16")
    (folder / "empty.csv").touch()
    (folder / "run" / "receipt.json").write_text('{"audit": {}}', encoding="utf-8")
    (folder / "other.csv").write_text("x,y\nq,1\n", encoding="utf-8")
    (folder / "method.toml").write_text(right.replace('"surgical"', '"surgicl"', 1), encoding="utf-8")
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "taken").mkdir()
    (folder / "taken" / "something").touch()
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        ports = ("--port", port, "--listen", "127.0.0.1")
        made = flwr_server("init", folder / "trial", "--name", "trial", "--host", "127.0.0.1", *ports)
        assert made.code == 0, made.err
        site = _admitted_site(folder, port)
        yield Place(folder, folder / "trial", site, folder / "trained", folder / "taken", port)


def _admitted_site(folder: Path, port: int) -> Path:
    site = folder / "north"
    assert flwr_client("init", site, "--name", "north").code == 0
    (site / "site.toml").write_text('name = "north"\n[data]\nkind = "digits"\n', encoding="utf-8")
    assert flwr_server("admit", folder / "trial", site / "north.request", "--yes").code == 0
    shutil.copy(folder / "trial" / "kits" / "north.kit", site)
    return site


@pytest.fixture(scope="session")
def table() -> Iterator[Table]:
    found = Table()
    yield found
    if found.rows:
        found.write(ROOT / "build" / "wrong-calls.md")


Typed = Callable[[Place, Path], tuple[object, ...]]
NO_FILE, NO_FOLDER = "there is no such file.", "is no coordinator's folder"
NO_SITE, NO_MODEL = "there is no such folder.", "model.json: cannot be read: No such file or directory."
NOWHERE = "is a link to a place that is not there."
WRONG_KEY, IN_USE = "is not a known key.", "cannot be opened: address already in use."
CALLS: dict[tuple[str, str], tuple[Typed, str]] = {
    ("flwr-sim run", "wrong path"): (lambda p, out: ("run", p["none.toml"], "--out", out), NO_FILE),
    ("flwr-sim run", "wrong key"): (lambda p, out: ("run", p["key.toml"], "--out", out), WRONG_KEY),
    ("flwr-sim run", "wrong --set"): (
        lambda p, out: ("run", EXPERIMENT, "--out", out, "--set", "run.roundz=3"),
        WRONG_KEY,
    ),
    ("flwr-sim run", "unknown method"): (
        lambda p, out: ("run", EXPERIMENT, "--out", out, "--set", "run.method=surgicl"),
        'Did you mean "surgical"?',
    ),
    ("flwr-sim run", "folder taken"): (lambda p, out: ("run", EXPERIMENT, "--out", p.taken), "is not empty"),
    ("flwr-sim run", "occupied port"): (
        lambda p, out: ("run", EXPERIMENT, "--out", out, "--web", "--port", p.port),
        IN_USE,
    ),
    ("flwr-sim run", "wrong file"): (
        lambda p, out: ("run", p["labels.csv"], "--out", out),
        "is a table; an experiment file is wanted.",
    ),
    ("flwr-sim run", "dangling link"): (lambda p, out: ("run", EXPERIMENT, "--out", p["dangling"]), NOWHERE),
    ("flwr-sim run", "below a dangling link"): (
        lambda p, out: ("run", EXPERIMENT, "--out", p["dangling"] / "run"),
        NOWHERE,
    ),
    ("flwr-sim run", "nothing to resume"): (
        lambda p, out: ("run", EXPERIMENT, "--out", p.taken, "--resume"),
        "holds something, but no run. Name the folder of a run, or a new one.",
    ),
    ("flwr-sim benchmark", "wrong path"): (
        lambda p, out: ("benchmark", p["none"], "--out", out),
        "A checkout has one in experiments/benchmark",
    ),
    ("flwr-sim compare", "wrong path"): (lambda p, out: ("compare", p["none.toml"], "--out", out), NO_FILE),
    ("flwr-sim compare", "wrong key"): (lambda p, out: ("compare", p["key.toml"], "--out", out), WRONG_KEY),
    ("flwr-sim compare", "the same twice"): (
        lambda p, out: ("compare", EXPERIMENT, EXPERIMENT, "--out", out),
        'two files have one name: "digits_surgical". Rename one of them.',
    ),
    ("flwr-sim compare", "wrong --set"): (
        lambda p, out: ("compare", EXPERIMENT, "--out", out, "--set", "run.seed=3"),
        "is settled by --seeds. Leave it out.",
    ),
    ("flwr-sim compare", "dangling link"): (lambda p, out: ("compare", EXPERIMENT, "--out", p["dangling"]), NOWHERE),
    ("flwr-sim study", "wrong path"): (lambda p, out: ("study", p["none"], "--out", out), NO_FILE),
    ("flwr-sim study", "wrong key"): (lambda p, out: ("study", p["study"], "--out", out), WRONG_KEY),
    ("flwr-sim study", "wrong --set"): (
        lambda p, out: ("study", "experiments/papers/fedmlp", "--out", out, "--set", "run.roundz=3"),
        WRONG_KEY,
    ),
    ("flwr-sim sites", "wrong path"): (lambda p, out: ("sites", p["none.toml"], "--out", out), NO_FILE),
    ("flwr-sim sites", "wrong key"): (lambda p, out: ("sites", p["key.toml"], "--out", out), WRONG_KEY),
    ("flwr-sim init", "wrong path"): (lambda p, out: ("init", p["none.csv"], "--out", out), NO_FILE),
    **{
        ("flwr-sim init", f"wrong file: {name}"): (
            lambda p, out, name=name: ("init", p[name], "--images", p.taken, "--out", out),
            words,
        )
        for name, words in {
            "utf16.csv": "is not UTF-8 text but UTF-16. Save it as UTF-8 text.",
            "empty.csv": "is empty. Its first line names the columns.",
            "noise.npz": "is not UTF-8 text",
            "other.csv": "no column of the table names pictures",
            "labels.csv": "none of the 1 pictures of column",
        }.items()
    },
    ("flwr-sim init", "wrong key"): (
        lambda p, out: ("init", p["labels.csv"], "--image-column", "scan", "--out", out),
        '"scan" is not a column',
    ),
    ("flwr-sim init", "file taken"): (
        lambda p, out: ("init", p["labels.csv"], "--out", p["key.toml"]),
        "is there already. Name another file, or remove it.",
    ),
    ("flwr-sim export", "wrong path"): (lambda p, out: ("export", p["none"], "--out", out), NO_MODEL),
    ("flwr-sim export", "wrong key"): (lambda p, out: ("export", p["model"], "--to", "onix"), "expected onnx"),
    ("flwr-sim predict", "wrong path"): (
        lambda p, out: ("predict", p["none"], p["none.npz"], "--out", out),
        NO_FILE,
    ),
    ("flwr-sim predict", "folder taken"): (
        lambda p, out: ("predict", p["model"], p["key.toml"], "--out", p["key.toml"]),
        "exists, and nothing is written over.",
    ),
    **{
        ("flwr-sim predict", f"wrong file: {name}"): (
            lambda p, out, name=name: ("predict", p["model"], p[name], "--out", out),
            words,
        )
        for name, words in {
            "page.html": "holds no image that can be read (page.html: neither PNG, JPEG, DICOM nor NIfTI)",
            "empty": "is no npz file, no picture and no folder of pictures",
            "noise.npz": "no npz file",
            "labels.npz": 'has no images. Keys: "labels"',
        }.items()
    },
    ("flwr-sim export", "wrong file"): (
        lambda p, out: ("export", p["model"], "--check", p["page.html"], "--out", out),
        "holds no image that can be read",
    ),
    ("flwr-sim export", "folder taken"): (
        lambda p, out: ("export", p["model"], "--out", p["key.toml"]),
        "exists, and nothing is written over.",
    ),
    ("flwr-sim evaluate", "wrong file: npz"): (
        lambda p, out: ("evaluate", p["model"], p["labels.npz"]),
        'has no array "test_images"',
    ),
    ("flwr-sim evaluate", "wrong file: toml"): (lambda p, out: ("evaluate", p["model"], p["key.toml"]), WRONG_KEY),
    ("flwr-sim evaluate", "wrong key"): (
        lambda p, out: ("evaluate", p["model"], p["labels.csv"], "--image-column", "scan"),
        '"scan" is not a column',
    ),
    ("flwr-sim evaluate", "wrong file: csv"): (
        lambda p, out: ("evaluate", p["model"], p["labels.csv"]),
        'expected at least one of "mass".',
    ),
    ("flwr-sim evaluate", "wrong file: png"): (
        lambda p, out: ("evaluate", p["model"], ROOT / "docs" / "report.png"),
        "report.png is not text but a picture. Name a csv file.",
    ),
    ("flwr-sim study", "wrong file"): (
        lambda p, out: ("study", p["labels.csv"], "--out", out),
        "labels.csv/study.toml: there is no such file. Name a folder with a study.toml",
    ),
    ("flwr-sim evaluate", "wrong option"): (
        lambda p, out: ("evaluate", p["model"], p["labels.csv"], "--classes", "mass"),
        "names the label columns of an npz file, and labels.csv is none. Leave it out.",
    ),
    ("flwr-sim evaluate", "wrong path"): (lambda p, out: ("evaluate", p["none"], p["none.csv"]), NO_FILE),
    ("flwr-sim weights", "wrong key"): (
        lambda p, out: ("weights", out, "--architecture", "resnet"),
        "there is no source of weights",
    ),
    ("flwr-sim weights", "wrong path"): (
        lambda p, out: ("weights", out, "--architecture", "resnet18", "--checkpoint", p["none.pth"]),
        NO_FILE,
    ),
    **{
        ("flwr-sim weights", f"wrong file: {name}"): (
            lambda p, out, name=name: ("weights", out, "--architecture", "densenet121", "--checkpoint", p[name]),
            words,
        )
        for name, words in {
            "a.png": "is no file of tensors. Name a .pth or .pt file of torch.save, or a .safetensors file.",
            "labels.csv": "is no file of tensors.",
            "empty.csv": "is no file of tensors.",
            "cut.safetensors": "is no file of tensors.",
            "taken": "is a folder, not a file.",
        }.items()
    },
    ("flwr-sim weights", "file taken"): (
        lambda p, out: ("weights", p["key.toml"], "--architecture", "resnet18"),
        "exists, and nothing is written over.",
    ),
    ("flwr-sim demo", "folder taken"): (lambda p, out: ("demo", "--out", p.taken), "holds something that no demo"),
    ("flwr-sim demo", "root"): (lambda p, out: ("demo", "--out", "/"), "holds something that no demo"),
    ("flwr-sim demo", "dangling link"): (lambda p, out: ("demo", "--out", p["dangling"]), NOWHERE),
    ("flwr-sim demo", "wrong key"): (lambda p, out: ("demo", "--out", out, "--backend", "rai"), "simulation.backend"),
    ("flwr-sim examples", "wrong path"): (lambda p, out: ("examples", p["key.toml"] / "x"), "cannot be written"),
    ("flwr-server init", "wrong path"): (
        lambda p, out: ("init", p["key.toml"] / "x", "--name", "x", "--host", "h.example"),
        "cannot be written",
    ),
    ("flwr-server init", "folder taken"): (
        lambda p, out: ("init", p.coordinator, "--name", "x", "--host", "h.example"),
        "is a coordinator's folder already",
    ),
    ("flwr-server admit", "wrong path"): (lambda p, out: ("admit", p.coordinator, p["none.request"]), NO_FILE),
    ("flwr-server start", "wrong path"): (lambda p, out: ("start", p["none"]), NO_FOLDER),
    ("flwr-server start", "wrong key"): (lambda p, out: ("start", p["wrong-coordinator"]), WRONG_KEY),
    ("flwr-server start", "occupied port"): (lambda p, out: ("start", p.coordinator), IN_USE),
    ("flwr-server run", "wrong path"): (lambda p, out: ("run", p["none"], EXPERIMENT, "--out", out), NO_FOLDER),
    ("flwr-server run", "wrong key"): (
        lambda p, out: ("run", p.coordinator, p["key.toml"], "--out", out),
        WRONG_KEY,
    ),
    ("flwr-server run", "folder taken"): (
        lambda p, out: ("run", p.coordinator, EXPERIMENT, "--out", p.taken),
        "is not empty",
    ),
    ("flwr-server run", "dangling link"): (
        lambda p, out: ("run", p.coordinator, EXPERIMENT, "--out", p["dangling"]),
        NOWHERE,
    ),
    ("flwr-server run", "nothing to resume"): (
        lambda p, out: ("run", p.coordinator, EXPERIMENT, "--out", p.taken, "--resume"),
        "holds something, but no run.",
    ),
    ("flwr-server run", "not started"): (
        lambda p, out: ("run", p.coordinator, EXPERIMENT, "--out", out),
        "flwr-server start does not run on this folder.",
    ),
    ("flwr-server status", "occupied port"): (
        lambda p, out: ("status", p.coordinator, "--web", "--port", p.port),
        "cannot be opened: address already in use",
    ),
    ("flwr-server revoke", "wrong key"): (
        lambda p, out: ("revoke", p.coordinator, "nort"),
        'is not an admitted site. Did you mean "north"?',
    ),
    ("flwr-server admit", "wrong file"): (
        lambda p, out: ("admit", p.coordinator, p.coordinator / "authority" / "ca.crt"),
        "is a certificate; a request is wanted here.",
    ),
    ("flwr-server verify", "wrong path"): (lambda p, out: ("verify", p["none"]), NO_FILE),
    ("flwr-server verify", "folder without a run"): (lambda p, out: ("verify", p.taken), "holds no run that is done."),
    **{
        ("flwr-server verify", f"wrong file: {name}"): (
            lambda p, out, name=name: ("verify", p[name]),
            "is no receipt of a run. Name the receipt.json of a run, or the run's folder.",
        )
        for name in ("a.png", "key.toml", "other.csv", "empty.csv", "model/model.json")
    },
    ("flwr-server verify", "wrong request"): (
        lambda p, out: ("verify", p["run"], "--request", p["none.request"]),
        NO_FILE,
    ),
    ("flwr-server status", "wrong path"): (lambda p, out: ("status", p["none"]), NO_FOLDER),
    ("flwr-server status", "wrong key"): (lambda p, out: ("status", p["wrong-coordinator"]), WRONG_KEY),
    ("flwr-server runs", "wrong path"): (lambda p, out: ("runs", p["none"]), NO_FOLDER),
    ("flwr-server runs", "wrong key"): (lambda p, out: ("runs", p["wrong-coordinator"]), WRONG_KEY),
    ("flwr-server health", "wrong path"): (lambda p, out: ("health", p["none"]), NO_FOLDER),
    ("flwr-server revoke", "wrong path"): (lambda p, out: ("revoke", p["none"], "north"), NO_FOLDER),
    ("flwr-server deadlines", "wrong path"): (lambda p, out: ("deadlines", p["none"]), NO_FOLDER),
    ("flwr-server deadlines", "wrong method"): (
        lambda p, out: ("deadlines", p.coordinator, p["method.toml"]),
        'Did you mean "surgical"?',
    ),
    ("flwr-server deadlines", "wrong key"): (lambda p, out: ("deadlines", p.coordinator, p["key.toml"]), WRONG_KEY),
    ("flwr-sim compare", "out is a run"): (
        lambda p, out: ("compare", EXPERIMENT, "--out", p["run"]),
        "is the folder of a run, and nothing else is written into it.",
    ),
    ("flwr-sim study", "out is a run"): (
        lambda p, out: ("study", "experiments/papers/fedmlp", "--quick", "--out", p["run"]),
        "is the folder of a run, and nothing else is written into it.",
    ),
    ("flwr-sim benchmark", "out is a run"): (
        lambda p, out: ("benchmark", "--out", p["run"]),
        "is the folder of a run, and nothing else is written into it.",
    ),
    ("flwr-sim sites", "out is a hospital's"): (
        lambda p, out: ("sites", EXPERIMENT, "--out", p.site),
        "is the folder of a hospital, and nothing else is written into it.",
    ),
    ("flwr-sim sites", "out is a coordinator's"): (
        lambda p, out: ("sites", EXPERIMENT, "--out", p.coordinator),
        "is the folder of a coordinator, and nothing else is written into it.",
    ),
    ("flwr-client init", "wrong path"): (
        lambda p, out: ("init", p["key.toml"] / "x", "--name", "x"),
        "cannot be written",
    ),
    ("flwr-client start", "wrong path"): (lambda p, out: ("start", p["none"]), NO_SITE),
    ("flwr-client start", "wrong key"): (lambda p, out: ("start", p["wrong-site"]), WRONG_KEY),
    ("flwr-client check", "wrong path"): (lambda p, out: ("check", p["none"]), NO_SITE),
    ("flwr-client check", "wrong key"): (lambda p, out: ("check", p["wrong-site"]), WRONG_KEY),
    ("flwr-client preview", "wrong path"): (lambda p, out: ("preview", p["none"]), NO_SITE),
    ("flwr-client preview", "wrong key"): (lambda p, out: ("preview", p["wrong-site"]), WRONG_KEY),
    ("flwr-client preview", "folder taken"): (lambda p, out: ("preview", p.site, "--out", p.taken), "is not empty"),
    ("flwr-client preview", "out is a key"): (
        lambda p, out: ("preview", p.site, "--attack", "--out", p.site / "north.key"),
        "exists, and nothing is written over.",
    ),
    ("flwr-client preview-data", "out is a link to nowhere"): (
        lambda p, out: ("preview-data", p.site, "--out", p["dangling"]),
        "exists, and nothing is written over.",
    ),
    ("flwr-sim init", "out is a link to nowhere"): (
        lambda p, out: ("init", p["labels.csv"], "--out", p["dangling"]),
        "is there already. Name another file, or remove it.",
    ),
    ("flwr-sim predict", "out is a link to nowhere"): (
        lambda p, out: ("predict", p["model"], ROOT / "docs" / "report.png", "--out", p["dangling"]),
        "exists, and nothing is written over.",
    ),
    ("flwr-client preview-data", "out is a key"): (
        lambda p, out: ("preview-data", p.site, "--out", p.site / "north.key"),
        "exists, and nothing is written over.",
    ),
    ("flwr-client preview-data", "wrong path"): (lambda p, out: ("preview-data", p["none"]), NO_SITE),
    ("flwr-client preview-data", "wrong key"): (lambda p, out: ("preview-data", p["wrong-site"]), WRONG_KEY),
    **{
        (f"flwr-client {command}", f"wrong experiment: {name}"): (
            lambda p, out, command=command, name=name: (command, p.site, "--experiment", p[name]),
            words,
        )
        for command in ("preview", "preview-data", "check")
        for name, words in {
            "none.toml": NO_FILE,
            "key.toml": WRONG_KEY,
            "method.toml": 'Did you mean "surgical"?',
            "labels.csv": "is a table; an experiment file is wanted.",
            "a.png": "is not",
        }.items()
    },
    ("flwr-client preview", "wrong experiment for an attack"): (
        lambda p, out: ("preview", p.site, "--attack", "--experiment", p["key.toml"]),
        WRONG_KEY,
    ),
    ("flwr-client audit verify", "wrong receipt"): (
        lambda p, out: ("audit", "verify", p.site, "--receipt", p["none.json"]),
        "there is no such file",
    ),
    ("flwr-client status", "wrong path"): (lambda p, out: ("status", p["none"]), NO_SITE),
    ("flwr-client health", "wrong path"): (lambda p, out: ("health", p["none"]), NO_SITE),
    ("flwr-client status", "not started"): (lambda p, out: ("status", p.site), "no flwr-client runs"),
    ("flwr-client status", "wrong folder"): (lambda p, out: ("status", p.taken), "is no site's folder"),
    ("flwr-client init", "wrong file"): (
        lambda p, out: ("init", p["labels.csv"], "--name", "x"),
        "is a file; a site's folder is made here.",
    ),
    ("flwr-client audit show", "wrong path"): (lambda p, out: ("audit", "show", p["none"]), NO_SITE),
    ("flwr-client audit verify", "wrong path"): (lambda p, out: ("audit", "verify", p["none"]), NO_SITE),
}


def yardstick_s() -> float:
    """CPU seconds of a program that never changes, on this machine as busy as it is now."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", YARDSTICK], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def called(command: str, typed: Typed, place: Place, tmp_path: Path) -> Ended:
    words = (command.split()[0], *typed(place, tmp_path / "out"))
    return Command(words, tmp_path / "said.log").ended(tmp_path)


@pytest.mark.parametrize(("command", "mistake"), CALLS, ids=lambda each: str(each))
def test_a_wrong_call_is_refused_at_once_and_leaves_nothing(
    command: str, mistake: str, place: Place, tmp_path: Path, table: Table
) -> None:
    typed, words = CALLS[command, mistake]
    tried: list[Ended] = []
    while not tried or (tried[-1].cpu_s >= CPU_S and len(tried) < TRIES):
        tried.append(called(command, typed, place, tmp_path))
    ended = min(tried, key=lambda one: one.cpu_s)
    table.add(command, mistake, ended)
    said = " ".join(ended.said.split())
    assert (ended.code, ended.left) == (2, ()), said
    assert words in said
    assert "Traceback" not in said
    busy = os.getloadavg()[0] > (os.cpu_count() or 1) + 1
    most = CPU_S_BESIDE_OTHERS if busy else CPU_S
    assert ended.cpu_s < most or ended.cpu_s < YARDSTICKS * min(yardstick_s() for _ in range(TRIES))
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def trained(place: Place) -> Path:
    """A folder with a model, which no training has made."""
    from common.models.network import build
    from common.models.saved import save_model
    from common.models.zoo.spec import ModelSpec

    place.trained.mkdir()
    network = build(ModelSpec(architecture="tiny_cnn", channels=1, image_size=16), ("a", "b"), 0)
    save_model(place.trained, network, label_contract_sha256="0" * 64)
    return place.trained


NO_ROOM, NEEDED = "there is no room left on the disk", "17 MB are needed to start"
ON_A_FULL_DISK: dict[tuple[str, int], tuple[Typed, str]] = {
    ("flwr-sim run", 0): (lambda p, full: ("run", EXPERIMENT, "--out", full / "run", "--backend", "inline"), NEEDED),
    ("flwr-sim compare", 0): (lambda p, full: ("compare", EXPERIMENT, "--out", full / "all"), NEEDED),
    ("flwr-sim study", 0): (
        lambda p, full: ("study", "experiments/papers/fedmlp", "--quick", "--out", full / "all"),
        NEEDED,
    ),
    ("flwr-sim benchmark", 0): (lambda p, full: ("benchmark", "--out", full / "all"), NEEDED),
    ("flwr-sim demo", 0): (lambda p, full: ("demo", "--out", full / "demo"), NEEDED),
    ("flwr-sim examples", 0): (lambda p, full: ("examples", full / "experiments"), NO_ROOM),
    ("flwr-sim examples", 4): (lambda p, full: ("examples", full / "experiments"), NO_ROOM),
    ("flwr-sim sites", 0): (lambda p, full: ("sites", EXPERIMENT, "--out", full / "sites"), NO_ROOM),
    ("flwr-sim sites", 600): (lambda p, full: ("sites", EXPERIMENT, "--out", full / "sites"), NO_ROOM),
    ("flwr-sim export", 8): (lambda p, full: ("export", p.trained, "--out", full / "model.onnx"), NO_ROOM),
    ("flwr-sim export", 12): (
        lambda p, full: ("export", p.trained, "--to", "torchscript", "--out", full / "model.pt"),
        NO_ROOM,
    ),
    ("flwr-server init", 0): (
        lambda p, full: ("init", full / "new", "--name", "x", "--host", "h.example"),
        NO_ROOM,
    ),
    **{
        ("flwr-server init", room): (
            lambda p, full: ("init", full / "new", "--name", "x", "--host", "h.example"),
            NO_ROOM,
        )
        for room in (4, 8, 12, 16)
    },
    ("flwr-server run", 0): (lambda p, full: ("run", p.coordinator, EXPERIMENT, "--out", full / "run"), NEEDED),
    ("flwr-client init", 0): (lambda p, full: ("init", full / "new", "--name", "x"), NO_ROOM),
    ("flwr-client preview", 8): (lambda p, full: ("preview", p.site, "--out", full / "seen"), NO_ROOM),
}
"""Command, and how many kB are free -> what is typed, and what is said."""


@contextlib.contextmanager
def full_disk(folder: Path, room_kb: int) -> Iterator[Path]:
    """A disk of its own on which this much is free."""
    folder.mkdir()
    size = f"size={64 + room_kb}k"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a disk of its own cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        os.truncate(folder / "filler", 64 * 1024)
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.torture
@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize("call", ON_A_FULL_DISK, ids=lambda call: f"{call[0]}, {call[1]} kB")
def test_a_full_disk_is_told_with_its_folder_and_leaves_nothing(
    call: tuple[str, int], place: Place, tmp_path: Path, table: Table
) -> None:
    command, room = call
    typed, words = ON_A_FULL_DISK[call]
    with full_disk(tmp_path / "full", room) as full:
        ended = Command((command.split()[0], *typed(place, full)), tmp_path / "said.log").ended(tmp_path)
        table.add(command, f"full disk, {room} kB free", ended)
        said = " ".join(ended.said.split())
        assert ended.code in (1, 2)
        assert words in said
        assert str(full) in said
        assert "Traceback" not in said
        assert ended.left == ()
        assert [path.name for path in full.iterdir()] == ["filler"]
