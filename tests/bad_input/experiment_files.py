"""Experiment files, and what is typed beside them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.bad_input.catalogue import Case, Ended, changed, simulation
from tests.federations import DIGITS

DATA = 'kind = "digits"\nimage_size = 16'
PARTITION = 'kind = "class_subsets"\nsites = 3\nshared = 2'
Change = tuple[str, str]


def run(folder: Path, content: str | bytes, *overrides: str) -> Ended:
    """``flwr-sim run``; nothing may have been written."""
    data = content.encode() if isinstance(content, str) else content
    (folder / "bad.toml").write_bytes(data)
    setting = [word for override in overrides for word in ("--set", override)]
    ended = simulation("run", folder / "bad.toml", "--out", folder / "run", *setting)
    assert not (folder / "run").exists()
    return ended


def edited(*changes: Change) -> Callable[[Path], Ended]:
    return lambda folder: run(folder, changed(DIGITS, *changes))


def set_to(*overrides: str) -> Callable[[Path], Ended]:
    return lambda folder: run(folder, DIGITS, *overrides)


def holding(content: str | bytes) -> Callable[[Path], Ended]:
    return lambda folder: run(folder, content)


def misnamed(folder: Path) -> Ended:
    (folder / "chest.toml").write_text(DIGITS, encoding="utf-8")
    return simulation("run", folder / "chset.toml", "--out", folder / "run")


def over_a_folder(folder: Path) -> Ended:
    (folder / "run").mkdir()
    (folder / "run" / "notes.txt").write_text("mine", encoding="utf-8")
    (folder / "good.toml").write_text(DIGITS, encoding="utf-8")
    ended = simulation("run", folder / "good.toml", "--out", folder / "run")
    assert [path.name for path in (folder / "run").iterdir()] == ["notes.txt"]
    return ended


def over_a_file(folder: Path) -> Ended:
    (folder / "run").write_text("mine", encoding="utf-8")
    (folder / "good.toml").write_text(DIGITS, encoding="utf-8")
    ended = simulation("run", folder / "good.toml", "--out", folder / "run")
    assert (folder / "run").read_text(encoding="utf-8") == "mine"
    return ended


def in_a_circle(folder: Path) -> Ended:
    (folder / "other.toml").write_text('extends = "bad.toml"', encoding="utf-8")
    return run(folder, 'extends = "other.toml"')


def with_weights(folder: Path) -> Ended:
    (folder / "weights.safetensors").write_bytes(b"not what was announced")
    named = f'channels = 1\nweights = "weights.safetensors"\nweights_sha256 = "{"0" * 64}"'
    return run(folder, changed(DIGITS, ("channels = 1", named)))


def of_npz(partition: str, classes: str) -> Callable[[Path], Ended]:
    """Of two classes, dealt out like this."""

    def done(folder: Path) -> Ended:
        images, labels = np.full((40, 16, 16), 90, np.uint8), (np.arange(40) % 2)[:, None].astype(np.uint8)
        parts = ("train", "val", "test")
        arrays = {f"{part}_images": images for part in parts} | {f"{part}_labels": labels for part in parts}
        np.savez(folder / "data.npz", **arrays)  # type: ignore[arg-type]
        data = f'kind = "npz"\npath = "data.npz"\nclasses = {classes}'
        return run(folder, changed(DIGITS, (DATA, data), (PARTITION, f'kind = "class_lists"\n{partition}')))

    return done


SEVERAL = (
    ('"surgical"', '"surgicl"'),
    ("rounds = 2", "rounds = 0"),
    ("batch_size = 64", 'batch_size = "many"'),
    ("sites = 3", "site = 3"),
)
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")

CASES = (
    Case("a bracket is missing", edited(("[run]", "[run"))),
    Case("a word without quotes", edited(('"surgical"', "surgical"))),
    Case("a path with Windows' backslashes", edited((DATA, 'kind = "npz"\npath = "C:\\data\\new.npz"'))),
    Case("a key twice", edited(("rounds = 2", "rounds = 2\nrounds = 3"))),
    Case("saved as UTF-16", holding(DIGITS.encode("utf-16"))),
    Case("a letter in Latin-1", holding(changed(DIGITS, ("seed = 3", 'name = "Zürich"')).encode("latin-1"))),
    Case("not a text file", holding(b"\x89PNG\r\n\x1a\n\0\0")),
    Case("empty", holding("")),
    Case("nested too deeply", holding("a = " + "[" * 5000)),
    Case("a number of 5000 digits", edited(("seed = 3", f"seed = {'9' * 5000}"))),
    Case("an unknown key", edited(("rounds = 2", "round = 2"))),
    Case("an unknown table", edited(("[training]", "[trainig]"))),
    Case("an unknown key that is like none", set_to("simulation.colour=3")),
    Case("a word where a number belongs", edited(("batch_size = 64", 'batch_size = "many"'))),
    Case("a number where a word belongs", edited(("seed = 3", "name = 3"))),
    Case(
        "a number where a table belongs",
        edited(("\n[run]", "training = 3\n[run]"), ("[training]\nbatch_size = 64\nlr = 0.003", "")),
    ),
    Case("a number where true or false belongs", set_to("training.reset_optimizer=2")),
    Case("half a round", edited(("rounds = 2", "rounds = 2.5"))),
    Case("no round", edited(("rounds = 2", "rounds = 0"))),
    Case("a seed that is too large", set_to("run.seed=99999999999999999999")),
    Case("a seed below 0", set_to("data.split_seed=-1")),
    Case("a learning rate that is no number", set_to("training.lr=nan")),
    Case("a learning rate without end", set_to("training.lr=inf")),
    Case("a choice that is none", edited(("lr = 0.003", 'optimizer = "adm"'))),
    Case("an unknown architecture", edited(('"tiny_cnn"', '"resnet"'))),
    Case("images too small for the architecture", edited(('"tiny_cnn"', '"resnet18"'))),
    Case("a neck of a billion", set_to("model.neck=1000000000")),
    Case("images of a billion pixels", set_to("data.image_size=32768")),
    Case("no model", edited(('[model]\narchitecture = "tiny_cnn"\nchannels = 1\nimage_size = 16\n', ""))),
    Case("no data and no partition", holding(DIGITS.split("[data]")[0])),
    Case("a data set of an unknown kind", edited(('"digits"', '"digit"'))),
    Case("a data set without a kind", edited(('kind = "digits"\n', ""))),
    Case("an unknown method", edited(('"surgical"', '"surgicl"'))),
    Case("an unknown method that is like none", edited(('"surgical"', '"x"'))),
    Case("a parameter that the method does not have", set_to("method.warmup_epochs=1")),
    Case("a parameter of a wrong value", set_to("method.warm_up_epochs=-1")),
    Case("a parameter that makes no sense in the method", set_to("run.method=centralised", "method.clip_update=1.0")),
    Case("a method that needs every class at every site", set_to("run.method=fedavg")),
    Case("a method of another task", set_to("run.method=fednoro", "model.task=multi_class")),
    Case("a method that needs images of the coordinator's", set_to("run.method=server_only")),
    Case(
        "numbers of sites that contradict one another",
        set_to("participation.min_sites=3", "participation.sites_per_round=2"),
    ),
    Case("more sites than the partition makes", set_to("participation.min_sites=5", "participation.sites_per_round=6")),
    Case("right classes of a task that has several", set_to("evaluation.test_each_round=true")),
    Case("a hash of no file", set_to(f'model.weights_sha256="{"0" * 64}"')),
    Case("a hash that is none", set_to('model.weights="w.safetensors"', 'model.weights_sha256="abc"')),
    Case("weights of another hash", with_weights),
    Case("weights that are not there", set_to('model.weights="no.safetensors"')),
    Case("several faults at once", edited(*SEVERAL)),
    Case("several faults that need more than reading", set_to("run.method=surgicl", "data={kind='npz',path='no.npz'}")),
    Case("an override that is no assignment", set_to("run.rounds")),
    Case("an override of a key as if it were a table", set_to("run.rounds.more=3")),
    Case("a scale that is none", set_to("scale=tiny")),
    Case("a scale that the file does not have", set_to("scale=small")),
    Case("a name that is near another file's", misnamed),
    Case("files that extend one another", in_a_circle),
    Case("a file that extends one elsewhere", holding('extends = "../base.toml"')),
    Case("a file that extends one that is not there", holding('extends = "base.toml"')),
    Case("a run folder with something in it", over_a_folder),
    Case("a run folder that is a file", over_a_file),
    Case("a class that no site owns", of_npz('[partition.lists]\nnorth = ["a"]\nsouth = ["a"]', '["a", "b"]')),
    Case(
        "a class that the data do not have",
        of_npz('[partition.lists]\nnorth = ["Nodule"]\nsouth = ["Massa"]', '["Nodule", "Mass"]'),
    ),
    Case("a site's name that leads elsewhere", of_npz('[partition.lists]\n"../away" = ["a", "b"]', '["a", "b"]')),
    Case("a share of a GPU that is not there", set_to("simulation.gpus_per_site=0.5"), marks=(NO_GPU,)),
    Case("more GPUs a site than there are", set_to("simulation.gpus_per_site=2"), marks=(NO_GPU,)),
    Case("one and a half GPUs a site", set_to("simulation.gpus_per_site=1.5")),
    Case("a backend that is none", set_to("simulation.backend=rai")),
)
