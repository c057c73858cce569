"""Every command and every usual mistake: refused at once, with what to do, and nothing is left."""

import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.network.ended import HALF, MODULES, disk, fill
from tests.network.real import ROOT, flwr_client, flwr_server
from tests.network.warm import MODULES_TO, Warm
from tests.processes import MARK, command_line, environment, kill, marked

SLOW_MODULES = {"torch", "torchvision", "flwr", "ray"}
"""What no refusal waits for: torch alone takes 1.9 s, a refusal without it 0.33 s."""
EXPERIMENT = "experiments/digits_surgical.toml"
THIS = uuid.uuid4().hex
"""The mark of all that the calls start."""


@dataclass(frozen=True)
class Place:
    """A folder with files that hold a mistake, a folder that is taken and folders that are right; and a used port.

    Attributes:
        light: Has imported the greater part of what a refusal needs: such a call costs 0.05 s, by itself 0.4 s.
    """

    folder: Path
    port: int
    light: Warm


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("wrong")
    right = (ROOT / EXPERIMENT).read_text(encoding="utf-8")
    files: dict[str, str | bytes] = {
        "key.toml": right.replace("[run]", "[run]\nroundz = 3", 1),
        "method.toml": right.replace('"surgical"', '"surgicl"', 1),
        "study/study.toml": 'titel = "x"',
        "wrong-site/site.toml": 'naem = "x"\n',
        "wrong-coordinator/coordinator.toml": 'naem = "x"\n',
        "model/model.json": '{"class_names": ["mass"]}',
        "model/model.safetensors": "",
        "page.html": "<html></html>",
        "labels.csv": "image,edema\na.png,1\n",
        "empty.csv": "",
        "other.csv": "x,y\nq,1\n",
        "noise.npz": bytes(range(256)),
        "run/events.jsonl": "",
        "run/receipt.json": '{"audit": {}}',
        "a.png": b"\x89PNG\r\n\x1a\n" + bytes(100),
        "cut.safetensors": bytes(range(7, 107)),
        "taken/something": "",
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "empty").mkdir()
    np.savez(folder / "labels.npz", labels=np.zeros(3))
    (folder / "dangling").symlink_to(folder / "nowhere")
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
        light = Warm(
            "polyclinic.server.coordinator.folder", "polyclinic.client.site.site_file", "typer.rich_utils", "psutil"
        )
        yield Place(folder, port, light)
        light.end()
        left = marked(THIS)
        kill(left)
        assert [command_line(process) for process in left] == []


ANSWERS = {
    "there is no such file.": """
        flwr-sim run @none.toml --out @out
        flwr-sim compare @none.toml --out @out
        flwr-sim study @none --out @out
        flwr-sim sites @none.toml --out @out
        flwr-sim init @none.csv --out @out
        flwr-sim predict @none @none.npz --out @out
        flwr-sim evaluate @none @none.csv
        flwr-sim weights @out --architecture resnet18 --checkpoint @none.pth
        flwr-server admit @trial @none.request
        flwr-server verify @none
        flwr-server verify @run --request @none.request
        flwr-client audit verify @north --receipt @none.json
    """,
    "is not a known key.": """
        flwr-sim run @key.toml --out @out
        flwr-sim run EXPERIMENT --out @out --set run.roundz=3
        flwr-sim compare @key.toml --out @out
        flwr-sim study @study --out @out
        flwr-sim study experiments/papers/fedmlp --out @out --set run.roundz=3
        flwr-sim sites @key.toml --out @out
        flwr-sim evaluate @model @key.toml
        flwr-server start @wrong-coordinator
        flwr-server run @trial @key.toml --out @out
        flwr-server status @wrong-coordinator
        flwr-server runs @wrong-coordinator
        flwr-server deadlines @trial @key.toml
        flwr-client start @wrong-site
        flwr-client check @wrong-site
        flwr-client preview @wrong-site
        flwr-client preview-data @wrong-site
        flwr-client preview @north --attack --experiment @key.toml
    """,
    'Did you mean "surgical"?': """
        flwr-sim run EXPERIMENT --out @out --set run.method=surgicl
        flwr-server deadlines @trial @method.toml
    """,
    "is not empty": """
        flwr-sim run EXPERIMENT --out @taken
        flwr-server run @trial EXPERIMENT --out @taken
        flwr-client preview @north --out @taken
    """,
    "cannot be opened: address already in use.": """
        flwr-sim run EXPERIMENT --out @out --web --port PORT
        flwr-server start @trial
        flwr-server status @trial --web --port PORT
    """,
    "is a table; an experiment file is wanted.": "flwr-sim run @labels.csv --out @out",
    "is a link to a place that is not there.": """
        flwr-sim run EXPERIMENT --out @dangling
        flwr-sim run EXPERIMENT --out @dangling/run
        flwr-sim compare EXPERIMENT --out @dangling
        flwr-sim demo --out @dangling
        flwr-server run @trial EXPERIMENT --out @dangling
    """,
    "holds something, but no run.": """
        flwr-sim run EXPERIMENT --out @taken --resume
        flwr-server run @trial EXPERIMENT --out @taken --resume
    """,
    "A checkout has one in experiments/benchmark": "flwr-sim benchmark @none --out @out",
    "changes the runs of --method": "flwr-sim benchmark --set method.pull=0.1 --out @out",
    'two files have one name: "digits_surgical".': "flwr-sim compare EXPERIMENT EXPERIMENT --out @out",
    "is settled by --seeds.": "flwr-sim compare EXPERIMENT --out @out --set run.seed=3",
    "is empty.": "flwr-sim init @empty.csv --images @taken --out @out",
    "holds arrays and is no table": "flwr-sim init @noise.npz --images @taken --out @out",
    "Which column names the pictures?": "flwr-sim init @other.csv --images @taken --out @out",
    "none of the 1 pictures of column": "flwr-sim init @labels.csv --images @taken --out @out",
    '"scan" is not a column': """
        flwr-sim init @labels.csv --image-column scan --out @out
        flwr-sim evaluate @model @labels.csv --image-column scan
    """,
    "is there already.": """
        flwr-sim init @labels.csv --out @key.toml
        flwr-sim init @labels.csv --out @dangling
    """,
    "model.json: cannot be read": "flwr-sim export @none --out @out",
    "expected onnx": "flwr-sim export @model --to onix",
    "exists, and nothing is written over.": """
        flwr-sim predict @model @key.toml --out @key.toml
        flwr-sim export @model --out @key.toml
        flwr-sim weights @key.toml --architecture resnet18
        flwr-client preview @north --attack --out @north/north.key
        flwr-client preview-data @north --out @dangling
        flwr-sim predict @model docs/report.png --out @dangling
        flwr-client preview-data @north --out @north/north.key
    """,
    "holds no image that can be read": """
        flwr-sim predict @model @page.html --out @out
        flwr-sim export @model --check @page.html --out @out
    """,
    "is no npz file, no picture and no folder of pictures": "flwr-sim predict @model @empty --out @out",
    "no npz file": "flwr-sim predict @model @noise.npz --out @out",
    'has no images. Keys: "labels"': "flwr-sim predict @model @labels.npz --out @out",
    'is not divided into "test"': "flwr-sim evaluate @model @labels.npz",
    'expected at least one of "mass".': "flwr-sim evaluate @model @labels.csv",
    "report.png is not text but a picture.": "flwr-sim evaluate @model docs/report.png",
    "labels.csv/study.toml: there is no such file.": "flwr-sim study @labels.csv --out @out",
    "names the label columns of an npz file": "flwr-sim evaluate @model @labels.csv --classes mass",
    "there is no source of weights": "flwr-sim weights @out --architecture resnet",
    "is no file of tensors.": """
        flwr-sim weights @out --architecture densenet121 --checkpoint @a.png
        flwr-sim weights @out --architecture densenet121 --checkpoint @labels.csv
        flwr-sim weights @out --architecture densenet121 --checkpoint @empty.csv
        flwr-sim weights @out --architecture densenet121 --checkpoint @cut.safetensors
    """,
    "is a folder, not a file.": "flwr-sim weights @out --architecture densenet121 --checkpoint @taken",
    "holds something that no demo": """
        flwr-sim demo --out @taken
        flwr-sim demo --out /
    """,
    "simulation.backend": "flwr-sim demo --out @out --backend rai",
    "cannot be written": """
        flwr-sim examples @key.toml/x
        flwr-server init @key.toml/x --name x --host h.example
        flwr-client init @key.toml/x --name x
    """,
    "is a coordinator's folder already": "flwr-server init @trial --name x --host h.example",
    "is no coordinator's folder": """
        flwr-server start @none
        flwr-server run @none EXPERIMENT --out @out
        flwr-server status @none
        flwr-server runs @none
        flwr-server health @none
        flwr-server revoke @none north
        flwr-server deadlines @none
    """,
    "flwr-server start does not run on this folder.": "flwr-server run @trial EXPERIMENT --out @out",
    'is not an admitted site. Did you mean "north"?': "flwr-server revoke @trial nort",
    "is a certificate; a request is wanted here.": "flwr-server admit @trial @trial/authority/ca.crt",
    "holds no run that is done.": "flwr-server verify @taken",
    "is no receipt of a run.": """
        flwr-server verify @a.png
        flwr-server verify @key.toml
        flwr-server verify @other.csv
        flwr-server verify @empty.csv
        flwr-server verify @model/model.json
    """,
    "is the folder of a run": """
        flwr-sim compare EXPERIMENT --out @run
        flwr-sim study experiments/papers/fedmlp --quick --out @run
        flwr-sim benchmark --out @run
    """,
    "is the folder of a hospital": "flwr-sim sites EXPERIMENT --out @north",
    "is the folder of a coordinator": "flwr-sim sites EXPERIMENT --out @trial",
    "there is no such folder.": """
        flwr-client start @none
        flwr-client check @none
        flwr-client preview @none
        flwr-client preview-data @none
        flwr-client status @none
        flwr-client health @none
        flwr-client audit show @none
        flwr-client audit verify @none
    """,
    "no flwr-client runs": "flwr-client status @north",
    "is no site's folder": "flwr-client status @taken",
    "is a file; a site's folder is made here.": "flwr-client init @labels.csv --name x",
}
"""Words of the answer -> command lines. ``@NAME`` is a file or folder of :func:`place` or of the test."""
EXPERIMENTS = {
    "none.toml": "there is no such file.",
    "key.toml": "is not a known key.",
    "method.toml": 'Did you mean "surgical"?',
    "labels.csv": "is a table; an experiment file is wanted.",
    "a.png": "is not",
}
CALLS = [(line.strip(), words) for words, lines in ANSWERS.items() for line in lines.strip().splitlines()]
CALLS += [
    (f"flwr-client {command} @north --experiment @{file}", words)
    for command in ("preview", "preview-data", "check")
    for file, words in EXPERIMENTS.items()
]


def called(line: str, place: Place, tmp_path: Path) -> tuple[int, str, frozenset[str]]:
    """Make a call; how it ends, what it prints, and which modules it had. It leaves no file that is not whole."""

    def filled(word: str) -> str:
        own = {"@out": tmp_path / "out", "@full": tmp_path / "full", "EXPERIMENT": EXPERIMENT, "PORT": place.port}
        first, slash, rest = word.partition("/")
        if word.startswith("@") or word in own:
            return f"{own.get(first, place.folder / first[1:])}{slash}{rest}"
        return word

    program, *words = map(filled, line.split())
    log, modules = tmp_path / "output.log", tmp_path / "modules"
    surroundings = environment() | {MARK: THIS, MODULES_TO: str(modules)}
    code = place.light.fork(MODULES[program], words, surroundings, ROOT, log).wait(60)
    output = " ".join(log.read_text(encoding="utf-8").split())
    assert "Traceback" not in output
    assert [path for name in HALF for path in tmp_path.rglob(name)] == []
    return code, output, frozenset(modules.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize(("line", "words"), CALLS, ids=[line for line, _ in CALLS])
def test_a_wrong_call_is_refused_at_once_and_leaves_nothing(
    line: str, words: str, place: Place, tmp_path: Path
) -> None:
    code, output, modules = called(line, place, tmp_path)
    assert code == 2, output
    assert words in output
    assert "polyclinic.common.errors" in modules
    assert not modules & SLOW_MODULES
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def trained(place: Place) -> Path:
    """A folder with a model, which no training has made."""
    from polyclinic.common.models.network import build_network
    from polyclinic.common.models.saved import save_model
    from polyclinic.common.models.zoo.spec import ModelSpec

    folder = place.folder / "trained"
    folder.mkdir()
    network = build_network(ModelSpec(architecture="tiny_cnn", channels=1, image_size=16), ("a", "b"), 0)
    save_model(folder, network, label_contract_sha256="0" * 64)
    return folder


NO_ROOM, NEEDED = "there is no room left on the disk", "17 MB are needed to start"
INIT, SITES = "flwr-server init @full/new --name x --host h.example", "flwr-sim sites EXPERIMENT --out @full/sites"
ON_A_FULL_DISK = [
    (0, "flwr-sim run EXPERIMENT --out @full/run --backend inline", NEEDED),
    (0, "flwr-sim compare EXPERIMENT --out @full/all", NEEDED),
    (0, "flwr-sim study experiments/papers/fedmlp --quick --out @full/all", NEEDED),
    (0, "flwr-sim benchmark --out @full/all", NEEDED),
    (0, "flwr-sim demo --out @full/demo", NEEDED),
    (0, "flwr-server run @trial EXPERIMENT --out @full/run", NEEDED),
    *((room_kb, "flwr-sim examples @full/experiments", NO_ROOM) for room_kb in (0, 4)),
    *((room_kb, SITES, NO_ROOM) for room_kb in (0, 600)),
    *((room_kb, INIT, NO_ROOM) for room_kb in (0, 4, 8, 12, 16)),
    (8, "flwr-sim export @trained --out @full/model.onnx", NO_ROOM),
    (12, "flwr-sim export @trained --to torchscript --out @full/model.pt", NO_ROOM),
    (0, "flwr-client init @full/new --name x", NO_ROOM),
    (8, "flwr-client preview @north --out @full/seen", NO_ROOM),
]
"""Free space in kB, command line, and words of the answer."""


@pytest.mark.torture
@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize(("room_kb", "line", "words"), ON_A_FULL_DISK)
def test_a_full_disk_is_reported_with_its_folder_and_leaves_nothing(
    room_kb: int, line: str, words: str, place: Place, tmp_path: Path
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    with disk(full, 64 + room_kb):
        os.truncate(fill(full), 64 * 1024)
        code, output, _ = called(line, place, tmp_path)
        assert code in (1, 2)
        assert words in output
        assert str(full) in output
        assert [path.name for path in full.iterdir()] == ["filler"]
