"""A trained model that was damaged, or images that it cannot read, through ``flwr-sim predict`` and ``export``."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from polyclinic.common.models.zoo.spec import DESCRIPTION_FILE, TENSORS_FILE
from tests.bad_input.catalogue import Case, Ended, simulation
from tests.bad_input.checkpoints import copied_to, file


def predicting(change: Callable[[Path], object]) -> Callable[[Path], Ended]:
    def done(folder: Path) -> Ended:
        run = copied_to(folder)
        change(run)
        np.savez(folder / "scans.npz", images=np.zeros((2, 16, 16), np.uint8))
        ended = simulation("predict", run, folder / "scans.npz", "--out", folder / "p.csv")
        assert not (folder / "p.csv").exists()
        return ended

    return done


def on(images: Callable[[Path], object], name: str = "scans.npz") -> Callable[[Path], Ended]:
    """Of a good model."""

    def done(folder: Path) -> Ended:
        run = copied_to(folder)
        images(folder / name)
        return simulation("predict", run, folder / name, "--out", folder / "p.csv")

    return done


def described(**other: Any) -> Callable[[Path], Any]:
    return file(DESCRIPTION_FILE, lambda content: json.dumps(json.loads(content) | other).encode())


def model(**other: Any) -> Callable[[Path], Any]:
    def change(content: bytes) -> bytes:
        description = json.loads(content)
        description["model"] |= other
        return json.dumps(description).encode()

    return file(DESCRIPTION_FILE, change)


def exporting(*arguments: str) -> Callable[[Path], Ended]:
    return lambda folder: simulation(
        "export", copied_to(folder), *(word.replace("FOLDER", str(folder)) for word in arguments)
    )


def evaluating(*arguments: str) -> Callable[[Path], Ended]:
    def done(folder: Path) -> Ended:
        run = copied_to(folder)
        (folder / "labels.csv").write_text("picture,heart\n1.png,1\n", encoding="utf-8")
        (folder / "latin.csv").write_bytes("image,Kör\n1.png,1\n".encode("latin-1"))
        return simulation("evaluate", run, *(word.replace("FOLDER", str(folder)) for word in arguments))

    return done


OTHERS = safetensors.numpy.save({"head.weight": np.zeros((2, 3), np.float32)})

CASES = (
    Case("no model in the folder", lambda folder: simulation("predict", folder, folder, "--out", folder / "p.csv")),
    Case("tensors that are cut off", predicting(file(TENSORS_FILE, lambda content: content[:-4]))),
    Case("tensors that are lost", predicting(lambda run: (run / TENSORS_FILE).unlink())),
    Case("tensors of another model", predicting(file(TENSORS_FILE, lambda content: OTHERS))),
    Case("a description that is cut off", predicting(file(DESCRIPTION_FILE, lambda content: content[:60]))),
    Case("a description that is empty", predicting(file(DESCRIPTION_FILE, lambda content: b""))),
    Case("a description with several faults", predicting(described(class_names=[], format_version=2, more=1))),
    Case("a description of another architecture", predicting(model(architecture="femnist_cnn"))),
    Case("a description with a class twice", predicting(described(class_names=["0"] * 10))),
    Case("a description of a neck without end", predicting(model(neck=10**12))),
    Case("a description that reads another file", predicting(model(weights="/etc/passwd"))),
    Case("images that are not there", on(lambda path: None)),
    Case("a folder without a picture", on(lambda path: path.mkdir(), "scans")),
    Case("an npz that is cut off", on(lambda path: path.write_bytes(b"PK\x03\x04 cut off"))),
    Case("an npz of one array", on(lambda path: path.write_bytes(b"\x93NUMPY one array, no archive"))),
    Case("an npz without images", on(lambda path: np.savez(path, scans=np.zeros(2)))),
    Case("an npz of four channels", on(lambda path: np.savez(path, images=np.zeros((2, 8, 8, 4), np.uint8)))),
    Case("a form that is none", exporting("--to", "onix")),
    Case("an export to a folder that is not there", exporting("--to", "torchscript", "--out", "FOLDER/none/m.pt")),
    Case("a table without images to evaluate on", evaluating("FOLDER/labels.csv")),
    Case("a table in Latin-1 to evaluate on", evaluating("FOLDER/latin.csv")),
    Case("a table that is not there", evaluating("FOLDER/labls.csv")),
)
