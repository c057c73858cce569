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
from collections.abc import Iterator
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
    """A folder with files that hold a mistake, a folder that is taken and folders that are right; and a used port."""

    folder: Path
    port: int


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
        site = folder / "north"
        assert flwr_client("init", site, "--name", "north").code == 0
        (site / "site.toml").write_text('name = "north"\n[data]\nkind = "digits"\n', encoding="utf-8")
        assert flwr_server("admit", folder / "trial", site / "north.request", "--yes").code == 0
        shutil.copy(folder / "trial" / "kits" / "north.kit", site)
        yield Place(folder, port)


@pytest.fixture(scope="session")
def table() -> Iterator[Table]:
    found = Table()
    yield found
    if found.rows:
        found.write(ROOT / "build" / "wrong-calls.md")


NO_FILE, NO_FOLDER = "there is no such file.", "is no coordinator's folder"
NO_SITE, NO_MODEL = "there is no such folder.", "model.json: cannot be read: No such file or directory."
NOWHERE = "is a link to a place that is not there."
WRONG_KEY, IN_USE = "is not a known key.", "cannot be opened: address already in use."
# fmt: off
CALLS = [
    ("wrong path", "flwr-sim run @none.toml --out @out", NO_FILE),
    ("wrong key", "flwr-sim run @key.toml --out @out", WRONG_KEY),
    ("wrong --set", "flwr-sim run EXPERIMENT --out @out --set run.roundz=3", WRONG_KEY),
    ("unknown method", "flwr-sim run EXPERIMENT --out @out --set run.method=surgicl", 'Did you mean "surgical"?'),
    ("folder taken", "flwr-sim run EXPERIMENT --out @taken", "is not empty"),
    ("occupied port", "flwr-sim run EXPERIMENT --out @out --web --port PORT", IN_USE),
    ("wrong file", "flwr-sim run @labels.csv --out @out", "is a table; an experiment file is wanted."),
    ("dangling link", "flwr-sim run EXPERIMENT --out @dangling", NOWHERE),
    ("below a dangling link", "flwr-sim run EXPERIMENT --out @dangling/run", NOWHERE),
    ("nothing to resume", "flwr-sim run EXPERIMENT --out @taken --resume",
     "holds something, but no run. Name the folder of a run, or a new one."),
    ("wrong path", "flwr-sim benchmark @none --out @out", "A checkout has one in experiments/benchmark"),
    ("wrong path", "flwr-sim compare @none.toml --out @out", NO_FILE),
    ("wrong key", "flwr-sim compare @key.toml --out @out", WRONG_KEY),
    ("the same twice", "flwr-sim compare EXPERIMENT EXPERIMENT --out @out",
     'two files have one name: "digits_surgical". Rename one of them.'),
    ("wrong --set", "flwr-sim compare EXPERIMENT --out @out --set run.seed=3", "is settled by --seeds. Leave it out."),
    ("dangling link", "flwr-sim compare EXPERIMENT --out @dangling", NOWHERE),
    ("wrong path", "flwr-sim study @none --out @out", NO_FILE),
    ("wrong key", "flwr-sim study @study --out @out", WRONG_KEY),
    ("wrong --set", "flwr-sim study experiments/papers/fedmlp --out @out --set run.roundz=3", WRONG_KEY),
    ("wrong path", "flwr-sim sites @none.toml --out @out", NO_FILE),
    ("wrong key", "flwr-sim sites @key.toml --out @out", WRONG_KEY),
    ("wrong path", "flwr-sim init @none.csv --out @out", NO_FILE),
    ("wrong file: utf16.csv", "flwr-sim init @utf16.csv --images @taken --out @out",
     "is not UTF-8 text but UTF-16. Save it as UTF-8 text."),
    ("wrong file: empty.csv", "flwr-sim init @empty.csv --images @taken --out @out",
     "is empty. Its first line names the columns."),
    ("wrong file: noise.npz", "flwr-sim init @noise.npz --images @taken --out @out", "is not UTF-8 text"),
    ("wrong file: other.csv", "flwr-sim init @other.csv --images @taken --out @out",
     "no column of the table names pictures"),
    ("wrong file: labels.csv", "flwr-sim init @labels.csv --images @taken --out @out",
     "none of the 1 pictures of column"),
    ("wrong key", "flwr-sim init @labels.csv --image-column scan --out @out", '"scan" is not a column'),
    ("file taken", "flwr-sim init @labels.csv --out @key.toml", "is there already. Name another file, or remove it."),
    ("wrong path", "flwr-sim export @none --out @out", NO_MODEL),
    ("wrong key", "flwr-sim export @model --to onix", "expected onnx"),
    ("wrong path", "flwr-sim predict @none @none.npz --out @out", NO_FILE),
    ("folder taken", "flwr-sim predict @model @key.toml --out @key.toml", "exists, and nothing is written over."),
    ("wrong file: page.html", "flwr-sim predict @model @page.html --out @out",
     "holds no image that can be read (page.html: neither PNG, JPEG, DICOM nor NIfTI)"),
    ("wrong file: empty", "flwr-sim predict @model @empty --out @out",
     "is no npz file, no picture and no folder of pictures"),
    ("wrong file: noise.npz", "flwr-sim predict @model @noise.npz --out @out", "no npz file"),
    ("wrong file: labels.npz", "flwr-sim predict @model @labels.npz --out @out", 'has no images. Keys: "labels"'),
    ("wrong file", "flwr-sim export @model --check @page.html --out @out", "holds no image that can be read"),
    ("folder taken", "flwr-sim export @model --out @key.toml", "exists, and nothing is written over."),
    ("wrong file: npz", "flwr-sim evaluate @model @labels.npz", 'has no array "test_images"'),
    ("wrong file: toml", "flwr-sim evaluate @model @key.toml", WRONG_KEY),
    ("wrong key", "flwr-sim evaluate @model @labels.csv --image-column scan", '"scan" is not a column'),
    ("wrong file: csv", "flwr-sim evaluate @model @labels.csv", 'expected at least one of "mass".'),
    ("wrong file: png", "flwr-sim evaluate @model docs/report.png",
     "report.png is not text but a picture. Name a csv file."),
    ("wrong file", "flwr-sim study @labels.csv --out @out",
     "labels.csv/study.toml: there is no such file. Name a folder with a study.toml"),
    ("wrong option", "flwr-sim evaluate @model @labels.csv --classes mass",
     "names the label columns of an npz file, and labels.csv is none. Leave it out."),
    ("wrong path", "flwr-sim evaluate @none @none.csv", NO_FILE),
    ("wrong key", "flwr-sim weights @out --architecture resnet", "there is no source of weights"),
    ("wrong path", "flwr-sim weights @out --architecture resnet18 --checkpoint @none.pth", NO_FILE),
    ("wrong file: a.png", "flwr-sim weights @out --architecture densenet121 --checkpoint @a.png",
     "is no file of tensors. Name a .pth or .pt file of torch.save, or a .safetensors file."),
    ("wrong file: labels.csv", "flwr-sim weights @out --architecture densenet121 --checkpoint @labels.csv",
     "is no file of tensors."),
    ("wrong file: empty.csv", "flwr-sim weights @out --architecture densenet121 --checkpoint @empty.csv",
     "is no file of tensors."),
    ("wrong file: cut.safetensors", "flwr-sim weights @out --architecture densenet121 --checkpoint @cut.safetensors",
     "is no file of tensors."),
    ("wrong file: taken", "flwr-sim weights @out --architecture densenet121 --checkpoint @taken",
     "is a folder, not a file."),
    ("file taken", "flwr-sim weights @key.toml --architecture resnet18", "exists, and nothing is written over."),
    ("folder taken", "flwr-sim demo --out @taken", "holds something that no demo"),
    ("root", "flwr-sim demo --out /", "holds something that no demo"),
    ("dangling link", "flwr-sim demo --out @dangling", NOWHERE),
    ("wrong key", "flwr-sim demo --out @out --backend rai", "simulation.backend"),
    ("wrong path", "flwr-sim examples @key.toml/x", "cannot be written"),
    ("wrong path", "flwr-server init @key.toml/x --name x --host h.example", "cannot be written"),
    ("folder taken", "flwr-server init @trial --name x --host h.example", "is a coordinator's folder already"),
    ("wrong path", "flwr-server admit @trial @none.request", NO_FILE),
    ("wrong path", "flwr-server start @none", NO_FOLDER),
    ("wrong key", "flwr-server start @wrong-coordinator", WRONG_KEY),
    ("occupied port", "flwr-server start @trial", IN_USE),
    ("wrong path", "flwr-server run @none EXPERIMENT --out @out", NO_FOLDER),
    ("wrong key", "flwr-server run @trial @key.toml --out @out", WRONG_KEY),
    ("folder taken", "flwr-server run @trial EXPERIMENT --out @taken", "is not empty"),
    ("dangling link", "flwr-server run @trial EXPERIMENT --out @dangling", NOWHERE),
    ("nothing to resume", "flwr-server run @trial EXPERIMENT --out @taken --resume", "holds something, but no run."),
    ("not started", "flwr-server run @trial EXPERIMENT --out @out", "flwr-server start does not run on this folder."),
    ("occupied port", "flwr-server status @trial --web --port PORT", "cannot be opened: address already in use"),
    ("wrong key", "flwr-server revoke @trial nort", 'is not an admitted site. Did you mean "north"?'),
    ("wrong file", "flwr-server admit @trial @trial/authority/ca.crt", "is a certificate; a request is wanted here."),
    ("wrong path", "flwr-server verify @none", NO_FILE),
    ("folder without a run", "flwr-server verify @taken", "holds no run that is done."),
    ("wrong file: a.png", "flwr-server verify @a.png",
     "is no receipt of a run. Name the receipt.json of a run, or the run's folder."),
    ("wrong file: key.toml", "flwr-server verify @key.toml",
     "is no receipt of a run. Name the receipt.json of a run, or the run's folder."),
    ("wrong file: other.csv", "flwr-server verify @other.csv",
     "is no receipt of a run. Name the receipt.json of a run, or the run's folder."),
    ("wrong file: empty.csv", "flwr-server verify @empty.csv",
     "is no receipt of a run. Name the receipt.json of a run, or the run's folder."),
    ("wrong file: model/model.json", "flwr-server verify @model/model.json",
     "is no receipt of a run. Name the receipt.json of a run, or the run's folder."),
    ("wrong request", "flwr-server verify @run --request @none.request", NO_FILE),
    ("wrong path", "flwr-server status @none", NO_FOLDER),
    ("wrong key", "flwr-server status @wrong-coordinator", WRONG_KEY),
    ("wrong path", "flwr-server runs @none", NO_FOLDER),
    ("wrong key", "flwr-server runs @wrong-coordinator", WRONG_KEY),
    ("wrong path", "flwr-server health @none", NO_FOLDER),
    ("wrong path", "flwr-server revoke @none north", NO_FOLDER),
    ("wrong path", "flwr-server deadlines @none", NO_FOLDER),
    ("wrong method", "flwr-server deadlines @trial @method.toml", 'Did you mean "surgical"?'),
    ("wrong key", "flwr-server deadlines @trial @key.toml", WRONG_KEY),
    ("out is a run", "flwr-sim compare EXPERIMENT --out @run",
     "is the folder of a run, and nothing else is written into it."),
    ("out is a run", "flwr-sim study experiments/papers/fedmlp --quick --out @run",
     "is the folder of a run, and nothing else is written into it."),
    ("out is a run", "flwr-sim benchmark --out @run", "is the folder of a run, and nothing else is written into it."),
    ("out is a hospital's", "flwr-sim sites EXPERIMENT --out @north",
     "is the folder of a hospital, and nothing else is written into it."),
    ("out is a coordinator's", "flwr-sim sites EXPERIMENT --out @trial",
     "is the folder of a coordinator, and nothing else is written into it."),
    ("wrong path", "flwr-client init @key.toml/x --name x", "cannot be written"),
    ("wrong path", "flwr-client start @none", NO_SITE),
    ("wrong key", "flwr-client start @wrong-site", WRONG_KEY),
    ("wrong path", "flwr-client check @none", NO_SITE),
    ("wrong key", "flwr-client check @wrong-site", WRONG_KEY),
    ("wrong path", "flwr-client preview @none", NO_SITE),
    ("wrong key", "flwr-client preview @wrong-site", WRONG_KEY),
    ("folder taken", "flwr-client preview @north --out @taken", "is not empty"),
    ("out is a key", "flwr-client preview @north --attack --out @north/north.key",
     "exists, and nothing is written over."),
    ("out is a link to nowhere", "flwr-client preview-data @north --out @dangling",
     "exists, and nothing is written over."),
    ("out is a link to nowhere", "flwr-sim init @labels.csv --out @dangling",
     "is there already. Name another file, or remove it."),
    ("out is a link to nowhere", "flwr-sim predict @model docs/report.png --out @dangling",
     "exists, and nothing is written over."),
    ("out is a key", "flwr-client preview-data @north --out @north/north.key", "exists, and nothing is written over."),
    ("wrong path", "flwr-client preview-data @none", NO_SITE),
    ("wrong key", "flwr-client preview-data @wrong-site", WRONG_KEY),
    ("wrong experiment: none.toml", "flwr-client preview @north --experiment @none.toml", NO_FILE),
    ("wrong experiment: key.toml", "flwr-client preview @north --experiment @key.toml", WRONG_KEY),
    ("wrong experiment: method.toml", "flwr-client preview @north --experiment @method.toml",
     'Did you mean "surgical"?'),
    ("wrong experiment: labels.csv", "flwr-client preview @north --experiment @labels.csv",
     "is a table; an experiment file is wanted."),
    ("wrong experiment: a.png", "flwr-client preview @north --experiment @a.png", "is not"),
    ("wrong experiment: none.toml", "flwr-client preview-data @north --experiment @none.toml", NO_FILE),
    ("wrong experiment: key.toml", "flwr-client preview-data @north --experiment @key.toml", WRONG_KEY),
    ("wrong experiment: method.toml", "flwr-client preview-data @north --experiment @method.toml",
     'Did you mean "surgical"?'),
    ("wrong experiment: labels.csv", "flwr-client preview-data @north --experiment @labels.csv",
     "is a table; an experiment file is wanted."),
    ("wrong experiment: a.png", "flwr-client preview-data @north --experiment @a.png", "is not"),
    ("wrong experiment: none.toml", "flwr-client check @north --experiment @none.toml", NO_FILE),
    ("wrong experiment: key.toml", "flwr-client check @north --experiment @key.toml", WRONG_KEY),
    ("wrong experiment: method.toml", "flwr-client check @north --experiment @method.toml", 'Did you mean "surgical"?'),
    ("wrong experiment: labels.csv", "flwr-client check @north --experiment @labels.csv",
     "is a table; an experiment file is wanted."),
    ("wrong experiment: a.png", "flwr-client check @north --experiment @a.png", "is not"),
    ("wrong experiment for an attack", "flwr-client preview @north --attack --experiment @key.toml", WRONG_KEY),
    ("wrong receipt", "flwr-client audit verify @north --receipt @none.json", "there is no such file"),
    ("wrong path", "flwr-client status @none", NO_SITE),
    ("wrong path", "flwr-client health @none", NO_SITE),
    ("not started", "flwr-client status @north", "no flwr-client runs"),
    ("wrong folder", "flwr-client status @taken", "is no site's folder"),
    ("wrong file", "flwr-client init @labels.csv --name x", "is a file; a site's folder is made here."),
    ("wrong path", "flwr-client audit show @none", NO_SITE),
    ("wrong path", "flwr-client audit verify @none", NO_SITE),
]
# fmt: on
"""Mistake, command line, and words of the answer. ``@NAME`` is a file or folder of :func:`place` or of the test."""


def yardstick_s() -> float:
    """CPU seconds of a program that never changes, on this machine as busy as it is now."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", YARDSTICK], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def label(call: tuple[object, str, str]) -> str:
    """Command and mistake, by which a test is named."""
    mistake, line, _ = call
    return f"{' '.join(line.split()[:2])}, {mistake}, {line.split()[2]}"


def called(line: str, place: Place, tmp_path: Path) -> Ended:
    """Make a call to its end."""

    def filled(word: str) -> str:
        own = {"@out": tmp_path / "out", "@full": tmp_path / "full", "EXPERIMENT": EXPERIMENT, "PORT": place.port}
        first, slash, rest = word.partition("/")
        if word.startswith("@") or word in own:
            return f"{own.get(first, place.folder / first[1:])}{slash}{rest}"
        return word

    return Command([filled(word) for word in line.split()], tmp_path / "said.log").ended(tmp_path)


@pytest.mark.parametrize("call", CALLS, ids=label)
def test_a_wrong_call_is_refused_at_once_and_leaves_nothing(
    call: tuple[str, str, str], place: Place, tmp_path: Path, table: Table
) -> None:
    mistake, line, words = call
    tries: list[Ended] = []
    while not tries or (tries[-1].cpu_s >= CPU_S and len(tries) < TRIES):
        tries.append(called(line, place, tmp_path))
    ended = min(tries, key=lambda each: each.cpu_s)
    table.add(line, mistake, ended)
    output = " ".join(ended.said.split())
    assert (ended.code, ended.left) == (2, ()), output
    assert words in output
    assert "Traceback" not in output
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

    folder = place.folder / "trained"
    folder.mkdir()
    network = build(ModelSpec(architecture="tiny_cnn", channels=1, image_size=16), ("a", "b"), 0)
    save_model(folder, network, label_contract_sha256="0" * 64)
    return folder


NO_ROOM, NEEDED = "there is no room left on the disk", "17 MB are needed to start"
# fmt: off
ON_A_FULL_DISK = [
    (0, "flwr-sim run EXPERIMENT --out @full/run --backend inline", NEEDED),
    (0, "flwr-sim compare EXPERIMENT --out @full/all", NEEDED),
    (0, "flwr-sim study experiments/papers/fedmlp --quick --out @full/all", NEEDED),
    (0, "flwr-sim benchmark --out @full/all", NEEDED),
    (0, "flwr-sim demo --out @full/demo", NEEDED),
    (0, "flwr-sim examples @full/experiments", NO_ROOM),
    (4, "flwr-sim examples @full/experiments", NO_ROOM),
    (0, "flwr-sim sites EXPERIMENT --out @full/sites", NO_ROOM),
    (600, "flwr-sim sites EXPERIMENT --out @full/sites", NO_ROOM),
    (8, "flwr-sim export @trained --out @full/model.onnx", NO_ROOM),
    (12, "flwr-sim export @trained --to torchscript --out @full/model.pt", NO_ROOM),
    (0, "flwr-server init @full/new --name x --host h.example", NO_ROOM),
    (4, "flwr-server init @full/new --name x --host h.example", NO_ROOM),
    (8, "flwr-server init @full/new --name x --host h.example", NO_ROOM),
    (12, "flwr-server init @full/new --name x --host h.example", NO_ROOM),
    (16, "flwr-server init @full/new --name x --host h.example", NO_ROOM),
    (0, "flwr-server run @trial EXPERIMENT --out @full/run", NEEDED),
    (0, "flwr-client init @full/new --name x", NO_ROOM),
    (8, "flwr-client preview @north --out @full/seen", NO_ROOM),
]
# fmt: on
"""Free space in kB, command line, and words of the answer."""


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
@pytest.mark.parametrize("call", ON_A_FULL_DISK, ids=label)
def test_a_full_disk_is_reported_with_its_folder_and_leaves_nothing(
    call: tuple[int, str, str], place: Place, tmp_path: Path, table: Table
) -> None:
    room, line, words = call
    with full_disk(tmp_path / "full", room) as full:
        ended = called(line, place, tmp_path)
        table.add(line, f"full disk, {room} kB free", ended)
        output = " ".join(ended.said.split())
        assert ended.code in (1, 2)
        assert words in output
        assert str(full) in output
        assert "Traceback" not in output
        assert ended.left == ()
        assert [path.name for path in full.iterdir()] == ["filler"]
