"""Comparisons from Python: experiments as files, names or tables, with parts of one's own, and what comes back."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

import polyclinic as pc
from polyclinic.common.errors import BadInput
from polyclinic.common.plugins import TABLE_COLUMNS
from polyclinic.studies.runner import RunsFailed
from tests.polyclinic.pictures import SMALL, pictures, share_above, squared, tiny

METHODS = ("surgical", "partial_loss")


def experiments(*methods: str, rounds: int = 1) -> dict[str, Mapping[str, Any]]:
    return {method: {**SMALL, "run": {"method": method, "rounds": rounds}} for method in methods}


def inline(**more: Any) -> dict[str, Any]:
    return {"run.rounds": 1, "simulation.backend": "inline", **more}


class CountedStripes(Dataset[tuple[NDArray[np.uint8], NDArray[np.float32]]]):
    """A data set that counts how often it is read."""

    classes = ("bars", "lines")

    def __init__(self) -> None:
        made = pictures()
        self.images, self.labels = np.asarray(made.images), np.asarray(made.labels)
        self.reads = 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        self.reads += 1
        return self.images[index], self.labels[index]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> pc.ComparedRuns:
    parts: dict[str, Any] = {"model": tiny, "loss": squared, "metrics": [share_above]}
    out = tmp_path_factory.mktemp("compared") / "own"
    return pc.compare(experiments(*METHODS), dataset=pictures(count=480), seeds=3, out=out, **parts)


def test_own_parts_train_the_models_of_single_runs(compared: pc.ComparedRuns, tmp_path: Path) -> None:
    settings = {"run.seed": 1}
    alone = pc.simulate(
        experiments(*METHODS)["partial_loss"],
        settings=settings,
        dataset=pictures(count=480),
        model=tiny,
        loss=squared,
        metrics=[share_above],
        out=tmp_path / "run",
    )
    assert compared.runs["partial_loss", 1].model_sha256 == alone.model_sha256
    assert compared.table.loc[("partial_loss", 1), "model_sha256"] == alone.model_sha256


def test_tables_have_the_figures_of_the_report(compared: pc.ComparedRuns) -> None:
    stored = json.loads((compared.folder / "comparison.json").read_text(encoding="utf-8"))
    assert list(compared.methods.index) == list(METHODS)
    assert list(compared.methods["all"]) == [method["auroc"]["all"]["mean"] for method in stored["methods"]]
    by_seed = compared.table["all"].groupby("experiment", sort=False).mean()
    assert list(by_seed) == pytest.approx(list(compared.methods["all"]))
    assert list(compared.tests["difference"]) == [each["result"]["mean_difference"] for each in stored["contrasts"]]
    assert compared.report.is_file()


def test_own_metrics_are_in_tables_print_and_page(compared: pc.ComparedRuns) -> None:
    shares = [run.own_metrics["share_above"] for run in compared.runs.values()]
    assert list(compared.table["share_above"]) == shares
    means = compared.table["share_above"].groupby("experiment", sort=False).mean()
    assert list(compared.methods["share_above"]) == pytest.approx(list(means))
    for text in (str(compared), compared._repr_html_(), compared.report.read_text(encoding="utf-8")):
        assert "Metrics of your own" in text
        assert "share_above" in text
        assert "own-share_above" not in text


def sd(scores: NDArray[np.float64], labels: NDArray[np.float64]) -> float:
    return 0.25


def difference(scores: NDArray[np.float64], labels: NDArray[np.float64]) -> float:
    return 0.5


def test_metrics_that_are_called_like_columns_are_in_columns_of_their_full_names(tmp_path: Path) -> None:
    done = pc.compare(experiments(*METHODS), dataset=pictures(), metrics=[sd, difference], seeds=1, out=tmp_path)
    full_names = {name for name in done.methods.columns if name.startswith("plugin:own-")}
    assert {name.split("-")[1] for name in full_names} == {"sd", "difference"}
    assert sorted(done.methods[sorted(full_names)].iloc[0]) == [0.25, 0.5]
    assert done.methods["sd"].isna().all()  # of one seed
    run = done.runs["surgical", 0]
    tables = (done.methods, done.table, run.classes)
    assert [full_names - {*table.columns} for table in tables] == [set()] * 3
    columns = {name for table in tables for name in table.reset_index().columns}
    assert columns - full_names == TABLE_COLUMNS


def test_one_instance_for_all_seeds_is_named_as_their_common_start(tmp_path: Path) -> None:
    def notes(out: str, seeds: int, model: Any) -> list[str]:
        done = pc.compare(experiments("surgical"), dataset=pictures(), model=model, seeds=seeds, out=tmp_path / out)
        assert set(done.notes) <= {note for note in done.notes if note in done.report.read_text(encoding="utf-8")}
        return [note for note in done.notes if note in str(done) and "All seeds begin with the weights" in note]

    assert len(notes("instance", 2, tiny(1, 16))) == 1
    assert notes("function", 2, tiny) == []
    assert notes("class", 2, Flat) == []
    assert notes("one", 1, tiny(1, 16)) == []


class Flat(nn.Module):
    """A network that is made without arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(16, 12), nn.ReLU())

    def forward(self, images: Tensor) -> Any:
        return self.layers(images)


def test_the_name_of_a_method_stands_for_its_setting(tmp_path: Path) -> None:
    settings = {key: value for key, value in SMALL.items() if key != "run"} | {"run.rounds": 1}
    done = pc.compare(["surgical", "vanilla"], settings=settings, dataset=pictures(), seeds=1, out=tmp_path / "out")
    assert [key for key, _ in done.runs] == ["surgical", "vanilla"]
    alone = pc.compare({"one": "vanilla"}, settings=settings, dataset=pictures(), seeds=1, out=tmp_path / "one")
    assert alone.runs["one", 0].model_sha256 == done.runs["vanilla", 0].model_sha256


def test_a_p_value_that_the_page_does_not_give_is_none_with_the_reason(compared: pc.ComparedRuns) -> None:
    test = compared.tests.set_index(["classes", "pairing"]).loc[("all", "classes")]
    assert np.isnan(test["p"])
    assert test["verdict"] == "not tested"
    assert test["note"] == "2 pairs are too few; a test needs at least 3"


def test_it_is_printed_with_the_sentences_of_its_report(compared: pc.ComparedRuns) -> None:
    text, html, page = str(compared), compared._repr_html_(), compared.report.read_text(encoding="utf-8")
    assert compared.notes
    for sentence in (compared.result, *compared.notes):
        assert sentence in text
        assert sentence in html
        assert sentence in page
    assert str(compared.report) in text
    assert repr(compared).startswith("<6 runs compared: By mean AUROC")


def test_a_data_set_is_checked_and_read_once_for_all_runs(tmp_path: Path) -> None:
    table, together = experiments("surgical"), CountedStripes()
    pc.compare(table, dataset=together, seeds=2, out=tmp_path / "both")
    alone = [CountedStripes(), CountedStripes()]
    for seed, stripes in enumerate(alone):
        settings = {"run.seed": seed}
        pc.simulate(table["surgical"], settings=settings, dataset=stripes, out=tmp_path / f"{seed}")
    # Each run reads the pictures that it trains and tests on; the items as a whole are read before the first only.
    assert together.reads <= sum(stripes.reads for stripes in alone) - len(together)


def test_finished_runs_are_kept(tmp_path: Path) -> None:
    first = pc.compare(experiments("surgical"), dataset=pictures(), seeds=1, out=tmp_path / "out")
    written = (tmp_path / "out" / "surgical-seed0" / "summary.json").stat().st_mtime_ns
    again = pc.compare(experiments(*METHODS), dataset=pictures(), seeds=1, out=tmp_path / "out")
    assert (tmp_path / "out" / "surgical-seed0" / "summary.json").stat().st_mtime_ns == written
    assert again.runs["surgical", 0].model_sha256 == first.runs["surgical", 0].model_sha256


def test_another_experiment_in_the_folder_is_named_by_the_argument_that_changed(tmp_path: Path) -> None:
    given: dict[str, Any] = {"dataset": pictures(), "seeds": 1, "out": tmp_path / "out"}
    pc.compare(experiments("surgical"), model=tiny, **given)
    edited = type(tiny)(tiny.__code__.replace(co_consts=(*tiny.__code__.co_consts, "edited")), tiny.__globals__, "tiny")
    for changed, words in (
        ({"model": edited}, "model=tiny has other code or values than the run began with"),
        ({"model": tiny, "loss": squared}, 'training.loss was "default", is loss=squared|training.loss was .*squared'),
        ({"model": tiny, "settings": {"training.lr": 0.5}}, "training.lr was 0.01, is 0.5"),
        ({"model": tiny, "settings": {"run.rounds": 2}}, "run.rounds was 1, is 2"),
    ):
        with pytest.raises(BadInput, match=rf"holds another experiment: ({words})") as refused:
            pc.compare(experiments("surgical"), **given, **changed)
        assert "name another out=." in str(refused.value)
        assert "--" not in str(refused.value)


def test_tables_without_own_parts_run_in_processes_of_their_own(tmp_path: Path) -> None:
    digits = {"kind": "class_lists", "lists": {"a": list("01234"), "b": list("456789")}}
    table = {"data": {"kind": "digits"}, "partition": digits, "model": {"architecture": "tiny_cnn", "image_size": 16}}
    chosen = {name: {**table, "run": {"method": name}} for name in METHODS}
    done = pc.compare(chosen, seeds=1, jobs=2, settings=inline(), out=tmp_path / "out")
    alone = pc.simulate(chosen["partial_loss"], settings=inline(), out=tmp_path / "alone")
    assert done.runs["partial_loss", 0].model_sha256 == alone.model_sha256


def test_a_name_stands_for_settings_of_an_example(tmp_path: Path) -> None:
    done = pc.compare({"my name": "digits_surgical"}, seeds=1, settings=inline(), out=tmp_path / "out")
    assert list(done.methods.index) == ["my name"]
    assert done.runs["my name", 0].folder.name == "my-name-seed0"
    settings = {"weak": {**SMALL, "training.lr": 1e-4}, "strong": {**SMALL, "training.lr": 0.05}}
    rates = pc.compare(settings, dataset=pictures(), seeds=1, out=tmp_path / "rates")
    chosen = {name: run.summary["experiment"]["training"]["lr"] for (name, _), run in rates.runs.items()}
    assert chosen == {"weak": 1e-4, "strong": 0.05}


def test_several_jobs_with_own_objects_are_made_one_after_another_with_a_word(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="jobs=2: other processes do not know the objects of this one"):
        pc.compare(experiments("surgical"), dataset=pictures(), seeds=1, jobs=2, out=tmp_path / "out")


def test_a_run_that_fails_is_named_and_the_others_are_finished(tmp_path: Path) -> None:
    def unlucky(channels: int, image_size: int) -> nn.Module:
        network = tiny(channels, image_size)
        network.register_forward_hook(fail_in_training)
        return network

    failures = ["out of luck"]

    def fail_in_training(module: nn.Module, given: Any, made: Any) -> None:
        if (tmp_path / "out" / "surgical-seed0.unfinished").exists() and failures:
            raise ValueError(failures.pop())

    with pytest.raises(RunsFailed, match=r"surgical-seed0: (.|\n)*out of luck"):
        pc.compare(experiments(*METHODS), dataset=pictures(), model=unlucky, seeds=1, out=tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").glob("*seed0")] == ["partial_loss-seed0"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (SMALL, "is one experiment, with nothing to compare"),
        ([{**SMALL, "run": {"method": "surgical"}}] * 2, '"surgical" is the name of "surgical"(,| and) "surgical-2"'),
        ({"a": {**SMALL, "run": {"round": 1}}, "b": {**SMALL, "modell": {}}}, "a: run.round(.|\n)*b: modell"),
        ({"a": {**SMALL, "run.seed": 3}}, "run.seed"),
    ],
    ids=["one experiment", "one name twice", "faults of all", "a seed"],
)
def test_a_wrong_call_is_refused_before_anything_runs(given: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=words):
        pc.compare(given, dataset=pictures(), seeds=1, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
