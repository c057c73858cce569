"""Facts about grids of runs: their pace, what is kept, what is thrown away, who may run."""

import fcntl
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from common.errors import BadInput
from studies import runner
from studies.progress import ActiveRun, GridPace, GridTable
from studies.runner import FailedRuns, assign_gpus, count_fitting_jobs, run_trials
from studies.trial import Trial, check_trials
from tests.federations import DIGITS

SILENT = Console(quiet=True)


def trial(folder: Path, name: str, *overrides: str, text: str = DIGITS) -> Trial:
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return Trial(path, folder / "runs" / name, overrides, name)


# ---------------------------------------------------------------------- pace


def pace(totals: dict[str, int], done: dict[str, int], *active: ActiveRun, jobs: int = 1) -> GridPace:
    return GridPace(totals, done, jobs, lambda: list(active))


def test_before_anything_has_finished_nobody_knows_how_long_the_rest_takes() -> None:
    assert pace({"a": 2}, {"a": 0}, ActiveRun("a", 30, 0, 10)).left() is None


def test_the_rest_is_what_such_runs_took_at_so_many_at_a_time() -> None:
    one, two = (pace({"a": 3, "b": 2}, {"a": 0, "b": 0}, jobs=jobs) for jobs in (1, 2))
    for each in (one, two):
        for seconds in (10, 30, 14):
            each.finished("a", seconds)
    # Two runs of b are left; none of b has finished, so the median of all is taken: 14 s each, two at a time.
    assert (one.typical("a"), two.left(), one.left()) == (14, 14, 28)


def test_a_run_at_work_counts_by_its_own_rounds() -> None:
    after_one = pace({"a": 2}, {"a": 0}, ActiveRun("a", 8, 4, 20), jobs=3)
    after_one.finished("a", 100.0)
    # 4 of 20 rounds took 8 s: 16 rounds at 2 s are left, whatever the run before took.
    assert after_one.left() == 32


def test_those_that_wait_take_as_long_as_those_at_work_seem_to_where_none_has_finished() -> None:
    # 30 s for 3 of 6 rounds: 60 s in all, 30 s to go; the other two take 60 s each: 150 s, one at a time.
    assert pace({"a": 1, "b": 2}, {"a": 0, "b": 0}, ActiveRun("a", 30, 3, 6)).left() == 150


@pytest.mark.parametrize(("seconds", "left"), [(30, 70), (130, 0)])
def test_a_run_without_a_round_yet_counts_by_what_such_runs_took(seconds: float, left: float) -> None:
    after_one = pace({"a": 2}, {"a": 0}, ActiveRun("a", seconds, 0, 20))
    after_one.finished("a", 100.0)
    assert after_one.left() == left


def test_nothing_is_left_when_all_is_done() -> None:
    assert pace({"a": 1}, {"a": 1}).left() == 0


def test_the_table_counts_runs_that_were_there_before_and_leaves_finished_experiments_out() -> None:
    before = pace({"a": 3, "b": 1}, {"a": 2, "b": 1}, ActiveRun("a", 5, 1, 9))
    after = pace({"a": 3, "b": 1}, {"a": 1, "b": 1}, ActiveRun("a", 5, 1, 9))
    after.finished("a", 12.0)
    for each, took in ((before, ""), (after, "12.0 s")):  # a run that was there before has no length
        columns = GridTable(SILENT, each).table().columns[1:]
        assert [list(column.cells) for column in columns] == [["2 of 3"], ["round 1 of 9"], [took]]


# ---------------------------------------------------------------------- runs


def test_a_run_that_broke_off_is_thrown_away_and_done_anew(tmp_path: Path) -> None:
    one = trial(tmp_path, "a", "run.rounds=1")
    one.unfinished.mkdir(parents=True)
    (one.unfinished / "rounds.jsonl").write_text("{}\n", encoding="utf-8")
    run_trials([one], tmp_path / "runs", 1, SILENT)
    assert one.is_done()
    assert not one.unfinished.exists()


@pytest.mark.parametrize(("old", "kept"), [({}, True), ({"threads": 2}, False), ({"thread": 1}, False)])
def test_a_run_of_a_release_without_some_key_is_kept_where_its_default_is_meant(
    old: dict[str, int], kept: bool, tmp_path: Path
) -> None:
    one = trial(tmp_path, "a")
    experiment = one.file.experiment.model_dump(mode="json")
    del experiment["training"]["threads"]
    experiment["training"].update(old)
    one.folder.mkdir(parents=True)
    (one.folder / "summary.json").write_text(json.dumps({"experiment": experiment}), encoding="utf-8")
    assert one.is_done() is kept


@pytest.mark.parametrize("key", ["frozen_sha256", "weights_sha256"])
def test_a_run_that_named_a_file_by_its_hash_is_done(key: str, tmp_path: Path) -> None:
    one = trial(tmp_path, "a", "model.train=head", "model.weights=trunk.safetensors")
    experiment = one.file.experiment.model_dump(mode="json")
    experiment["model"][key] = "0" * 64
    one.folder.mkdir(parents=True)
    (one.folder / "summary.json").write_text(json.dumps({"experiment": experiment}), encoding="utf-8")
    assert one.is_done()
    of_another = trial(tmp_path, "a", "model.train=head", "model.weights=trunk.safetensors", f"model.{key}={'a' * 64}")
    assert not of_another.is_done()


def test_one_failed_run_is_named_and_the_others_are_finished(tmp_path: Path) -> None:
    good, bad = (
        trial(tmp_path, "good", "run.rounds=1"),
        trial(tmp_path, "bad", "run.rounds=1", "model.weights=none.pth"),
    )
    with pytest.raises(FailedRuns, match=r"^bad: .*weights") as failed:
        run_trials([bad, good], tmp_path / "runs", 1, SILENT)
    assert "good" not in str(failed.value)
    assert good.is_done()
    assert not bad.folder.exists()


def test_two_at_work_in_one_folder_would_throw_each_others_runs_away(tmp_path: Path) -> None:
    one = trial(tmp_path, "a")
    (tmp_path / "runs").mkdir()
    with (tmp_path / "runs" / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BadInput, match=r"another flwr-sim is at work in this folder\."):
            run_trials([one], tmp_path / "runs", 1, SILENT)


def test_a_folder_of_another_experiment_is_left_as_it_is(tmp_path: Path) -> None:
    one = trial(tmp_path, "a")
    one.folder.mkdir(parents=True)
    (one.folder / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(BadInput, match="holds another experiment, and nothing is written over"):
        check_trials([one])


def test_faults_of_all_cells_come_at_once(tmp_path: Path) -> None:
    trials = [trial(tmp_path, "a", "run.method=surgicl"), trial(tmp_path, "b", "partition.shared=11")]
    with pytest.raises(BadInput) as refused:
        check_trials(trials)
    assert {fault.where for fault in refused.value.faults} == {"a.toml: run.method", "b.toml: partition.shared"}


def test_a_name_does_not_make_another_run(tmp_path: Path) -> None:
    plain, named = trial(tmp_path, "a"), trial(tmp_path, "b", "run.name=other")
    assert plain.identity == named.identity
    assert plain.identity != trial(tmp_path, "c", "run.rounds=3").identity


def test_runs_on_ray_go_one_at_a_time_and_others_by_cores_and_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(6)))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert count_fitting_jobs([trial(tmp_path, "a")]) == 6
    assert count_fitting_jobs([trial(tmp_path, "a"), trial(tmp_path, "b", "training.threads=4")]) == 1
    assert count_fitting_jobs([trial(tmp_path, "a"), trial(tmp_path, "b", "simulation.backend=ray")]) == 1
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert count_fitting_jobs([trial(tmp_path, "a")]) == 4
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert count_fitting_jobs([trial(tmp_path, "a"), trial(tmp_path, "b", "simulation.gpus_per_site=2")]) == 2
    assert count_fitting_jobs([trial(tmp_path, "a", "simulation.gpus_per_site=1")]) == 4
    assert count_fitting_jobs([trial(tmp_path, "a", "simulation.gpus_per_site=0")]) == 6
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert count_fitting_jobs([trial(tmp_path, "a", "simulation.gpus_per_site=0.5")]) == 2


def test_runs_at_a_time_are_dealt_out_over_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    one, two = trial(tmp_path, "a"), trial(tmp_path, "b", "simulation.gpus_per_site=2")
    with assign_gpus(one) as first, assign_gpus(one) as second, assign_gpus(two) as third, assign_gpus(one) as fourth:
        assert (first, second, third, fourth) == ("0", "1", "2,0", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-8a, 7")
    with assign_gpus(two) as first, assign_gpus(one) as second:
        assert (first, second) == ("5,GPU-8a", "7")
    with assign_gpus(trial(tmp_path, "c", "simulation.backend=ray")) as any_of_them:
        assert any_of_them is None
    with assign_gpus(trial(tmp_path, "d", "simulation.gpus_per_site=0")) as none:
        assert none is None


def test_a_run_sees_the_gpus_that_were_dealt_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, told = list[str](), list[tuple[str, float]]()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setattr(runner, "end_with_parent", lambda: None)
    monkeypatch.setattr("os.dup2", lambda old, new: new)
    monkeypatch.setattr(runner, "simulate", lambda *given, **named: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]))
    for gpus in ("1,2", None):
        runner._run_quietly(trial(tmp_path, "a"), SimpleNamespace(send=told.append), gpus)  # type: ignore[arg-type]
    assert seen == ["1,2", "1,2"]  # None leaves what is there
    assert [failure for failure, _ in told] == ["", ""]
