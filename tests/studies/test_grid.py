"""Grids of runs, their pace and their places; and the studies of papers that are made of them."""

import fcntl
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from polyclinic.common.errors import BadInput
from polyclinic.strategies.registry import build_site_method
from polyclinic.studies import runner
from polyclinic.studies.progress import ActiveRun, TrialsTable, TrialsTimeEstimate
from polyclinic.studies.runner import RunsFailed, assign_gpus, count_possible_parallel_runs, run_trials
from polyclinic.studies.study import list_study_trials
from polyclinic.studies.study_file import read_study
from polyclinic.studies.trial import Trial, check_trials
from tests.federations import DIGITS
from tests.network.real import flwr_sim
from tests.server.commands import ROOT

SILENT = Console(quiet=True)
PAPERS = ROOT / "experiments" / "papers"


def trial(folder: Path, name: str, *overrides: str) -> Trial:
    path = folder / f"{name}.toml"
    path.write_text(DIGITS, encoding="utf-8")
    return Trial(path, folder / "runs" / name, overrides, name)


def pace(
    totals: dict[str, int], *active: ActiveRun, jobs: int = 1, done: dict[str, int] | None = None
) -> TrialsTimeEstimate:
    return TrialsTimeEstimate(totals, done or dict.fromkeys(totals, 0), jobs, lambda: list(active))


@pytest.mark.parametrize(
    ("totals", "jobs", "finished", "active", "left"),
    [
        # Two runs of b are left; none of b has finished, so the median of all is taken: 14 s each.
        ({"a": 3, "b": 2}, 1, (10, 30, 14), (), 28),
        ({"a": 3, "b": 2}, 2, (10, 30, 14), (), 14),
        ({"a": 1}, 1, (10,), (), 0),
        ({"a": 2}, 1, (), (ActiveRun("a", 30, 0, 10),), None),  # before anything has finished nobody knows
        # 30 s for 3 of 6 rounds: 60 s in all, 30 s to go; the other two take 60 s each: 150 s, one at a time.
        ({"a": 1, "b": 2}, 1, (), (ActiveRun("a", 30, 3, 6),), 150),
        # 4 of 20 rounds took 8 s: 16 rounds at 2 s are left, although the run before took 100 s.
        ({"a": 2}, 1, (100,), (ActiveRun("a", 8, 4, 20),), 32),
        ({"a": 2}, 1, (100,), (ActiveRun("a", 30, 0, 20),), 70),  # without a round yet it counts by the run before
        ({"a": 2}, 1, (100,), (ActiveRun("a", 130, 0, 20),), 0),
    ],
)
def test_the_time_left_is_that_of_runs_at_work_by_their_rounds_and_of_others_by_the_median(
    totals: dict[str, int], jobs: int, finished: tuple[float, ...], active: tuple[ActiveRun, ...], left: float | None
) -> None:
    grid = pace(totals, *active, jobs=jobs)
    for seconds in finished:
        grid.record_finished_run("a", seconds)
    assert grid.estimate_remaining_s() == left


def test_the_table_counts_runs_that_were_there_before_and_leaves_finished_experiments_out() -> None:
    before, after = (pace({"a": 3, "b": 1}, ActiveRun("a", 5, 1, 9), done={"a": n, "b": 1}) for n in (2, 1))
    after.record_finished_run("a", 12.0)
    for grid, duration in ((before, ""), (after, "12.0 s")):  # a run that was there before has no length
        columns = TrialsTable(SILENT, grid).make_unfinished_runs_table().columns[1:]
        assert [list(column.cells) for column in columns] == [["2 of 3"], ["round 1 of 9"], [duration]]


def write_summary(run: Trial, table: str, **settings: object) -> None:
    """Leave a finished run of the same experiment, but for these settings of one table; None leaves a key out."""
    experiment = run.experiment_file.experiment.model_dump(mode="json")
    experiment[table].update(settings)
    experiment[table] = {key: value for key, value in experiment[table].items() if value is not None}
    run.folder.mkdir(parents=True)
    (run.folder / "summary.json").write_text(json.dumps({"experiment": experiment}), encoding="utf-8")


OF_FILES = ("model.train=head", "model.weights=trunk.safetensors")


@pytest.mark.parametrize(
    ("table", "settings", "overrides", "done"),
    [
        ("training", {"threads": None}, (), True),
        ("training", {"threads": 2}, (), False),
        ("training", {"threads": None, "thread": 1}, (), False),
        ("model", {"frozen_sha256": "0" * 64}, OF_FILES, True),
        ("model", {"weights_sha256": "0" * 64}, OF_FILES, True),
        ("model", {"frozen_sha256": "0" * 64}, (*OF_FILES, f"model.frozen_sha256={'a' * 64}"), False),
        ("model", {"weights_sha256": "0" * 64}, (*OF_FILES, f"model.weights_sha256={'a' * 64}"), False),
    ],
    ids=["a release without some key", "another value", "an unknown key", *("a hash",) * 2, *("another hash",) * 2],
)
def test_a_run_of_the_same_meaning_is_done(
    table: str, settings: dict[str, object], overrides: tuple[str, ...], done: bool, tmp_path: Path
) -> None:
    write_summary(trial(tmp_path, "a", *overrides[:2]), table, **settings)
    assert trial(tmp_path, "a", *overrides).is_trial_finished() is done


def test_one_failed_run_is_named_and_the_others_are_finished_though_one_broke_off_before(tmp_path: Path) -> None:
    good = trial(tmp_path, "good", "run.rounds=1")
    good.unfinished_folder.mkdir(parents=True)
    (good.unfinished_folder / "rounds.jsonl").write_text("{}\n", encoding="utf-8")
    bad = trial(tmp_path, "bad", "run.rounds=1", "model.weights=none.pth")
    with pytest.raises(RunsFailed, match=r"^bad: .*weights") as failed:
        run_trials([bad, good], tmp_path / "runs", 1, SILENT)
    assert "good" not in str(failed.value)
    assert good.is_trial_finished()
    assert not good.unfinished_folder.exists()
    assert not bad.folder.exists()


def test_two_at_work_in_one_folder_would_throw_each_others_runs_away(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with (tmp_path / "runs" / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BadInput, match="another flwr-sim is at work"):
            run_trials([trial(tmp_path, "a")], tmp_path / "runs", 1, SILENT)


def test_faults_of_all_cells_come_at_once(tmp_path: Path) -> None:
    trials = [trial(tmp_path, "a", "run.method=surgicl"), trial(tmp_path, "b", "partition.shared=11")]
    with pytest.raises(BadInput) as error:
        check_trials(trials)
    assert {fault.where for fault in error.value.faults} == {"a.toml: run.method", "b.toml: partition.shared"}


def test_a_name_does_not_make_another_run(tmp_path: Path) -> None:
    plain, named = trial(tmp_path, "a"), trial(tmp_path, "b", "run.name=other")
    assert plain.settings_text == named.settings_text
    assert plain.settings_text != trial(tmp_path, "c", "run.rounds=3").settings_text


@pytest.mark.parametrize(
    ("gpus", "overrides", "jobs"),
    [
        (0, [""], 6),
        (0, ["", "training.threads=4"], 1),
        (0, ["", "simulation.backend=ray"], 1),
        (1, [""], 4),
        (1, ["simulation.gpus_per_site=0.5"], 2),
        (4, ["", "simulation.gpus_per_site=2"], 2),
        (4, ["simulation.gpus_per_site=1"], 4),
        (4, ["simulation.gpus_per_site=0"], 6),
    ],
)
def test_runs_on_ray_go_one_at_a_time_and_others_by_cores_threads_and_gpus(
    gpus: int, overrides: list[str], jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(6)))
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    trials = [trial(tmp_path, f"{number}", *filter(None, [text])) for number, text in enumerate(overrides)]
    assert count_possible_parallel_runs(trials) == jobs


def test_runs_at_a_time_are_dealt_out_over_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    single, double = trial(tmp_path, "a"), trial(tmp_path, "b", "simulation.gpus_per_site=2")
    with assign_gpus(single) as first, assign_gpus(single) as second, assign_gpus(double) as third:
        assert (first, second, third) == ("0", "1", "2,0")
        with assign_gpus(single) as fourth:
            assert fourth == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-8a, 7")
    with assign_gpus(double) as first, assign_gpus(single) as second:
        assert (first, second) == ("5,GPU-8a", "7")
    for override in ("simulation.backend=ray", "simulation.gpus_per_site=0"):
        with assign_gpus(trial(tmp_path, "c", override)) as gpus:
            assert gpus is None


def test_a_run_sees_the_gpus_that_were_dealt_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    visible, ends = list[str](), list[tuple[str, float]]()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setattr(runner, "end_process_with_parent", lambda: None)
    monkeypatch.setattr("os.dup2", lambda old, new: new)
    monkeypatch.setattr(runner, "simulate", lambda *_, **__: visible.append(os.environ["CUDA_VISIBLE_DEVICES"]))
    for gpus in ("1,2", None):
        runner._run_quietly(trial(tmp_path, "a"), SimpleNamespace(send=ends.append), gpus, ())  # type: ignore[arg-type]
    assert visible == ["1,2", "1,2"]  # None leaves what is there
    assert [failure for failure, _ in ends] == ["", ""]


STUDY = """
title = "Digits"
paper = "Nobody, 2026"
seeds = 2
differs = ["digits instead of radiographs"]

[quick]
set = ["run.rounds=1"]
differs = ["one round"]

[[tables]]
title = "Shared classes"
experiment = "{method}.toml"
measures = ["auroc", "auroc_shared", { title = "odd ones", classes = ["1", "3"] }]
reference = "ours"
figures = ["sweep"]
paper_unit = "percent"
quick = ["2 shared"]
settings = [
    { title = "2 shared", x = 2, set = ["partition.shared=2"] },
    { title = "9 shared", x = 9, set = ["partition.shared=9"] },
]
methods = [{ title = "ours", part = "surgical" }, { title = "theirs", part = "vanilla" }]
[tables.paper]
"ours" = [[81.5, 70.25], [90]]

[[tables]]
title = "Once more"
experiment = "surgical.toml"
measures = ["rounds", "megabytes"]
methods = [{ title = "the same run" }]
"""


def study(folder: Path, text: str = STUDY) -> Path:
    small = "\n[small.training]\nlr = 0.01\n"
    (folder / "surgical.toml").write_text(DIGITS + small, encoding="utf-8")
    vanilla = 'extends = "surgical.toml"\n[run]\nmethod = "vanilla"\n'
    (folder / "vanilla.toml").write_text(vanilla, encoding="utf-8")
    (folder / "study.toml").write_text(text, encoding="utf-8")
    return folder


def trials(folder: Path, *, quick: bool, seeds: int = 1) -> list[Trial]:
    study = read_study(folder, quick=quick)
    grid = list_study_trials(study, folder, folder / "runs", ("scale=small",) if quick else (), range(seeds))
    return [trial for table in grid for row in table for column in row for trial in column]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"auroc_shared"', '"aurocshared"', 'Did you mean "auroc_shared"?'),
        ('reference = "ours"', 'reference = "our"', '"our" is no method of "Shared classes"'),
        ('"ours" = [[81.5, 70.25], [90]]', '"mine" = [[1], [2]]', '"mine" is no method of "Shared classes"'),
        ("[[81.5, 70.25], [90]]", "[[81.5, 70.25]]", 'row "ours" of "Shared classes" has not 2 settings of at most 3'),
        ("[[81.5, 70.25], [90]]", "[[1, 2, 3, 4], [9]]", 'row "ours" of "Shared classes" has not 2 settings'),
        ("x = 9, ", "", 'every setting of "Shared classes" needs an x for its sweep'),
        ('title = "theirs"', 'title = "ours"', 'two methods of "Shared classes" have one title'),
        ('title = "9 shared"', 'title = "2_shared"', 'two settings of "Shared classes" have one title'),
    ],
)
def test_what_a_study_cannot_mean_is_refused_with_its_reason(old: str, new: str, reason: str, tmp_path: Path) -> None:
    assert old in STUDY
    with pytest.raises(BadInput) as error:
        read_study(study(tmp_path, STUDY.replace(old, new)), quick=False)
    (fault,) = error.value.faults
    assert reason in str(fault)


def test_the_papers_numbers_are_fractions_whatever_unit_it_prints_and_may_be_missing(tmp_path: Path) -> None:
    table = read_study(study(tmp_path), quick=False).tables[0]
    values = [table.get_paper_value("ours", *place) for place in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1))]
    assert values == [0.815, 0.7025, None, 0.9, None]
    assert table.get_paper_value("theirs", 0, 0) is None


def test_the_quick_scale_keeps_what_is_named_with_the_papers_numbers_for_it(tmp_path: Path) -> None:
    cut = read_study(study(tmp_path, STUDY.replace('quick = ["2 shared"]', 'quick = ["9 shared", "ours"]')), quick=True)
    (nine,), (ours,) = cut.tables[0].settings, cut.tables[0].methods
    assert (nine.title, ours.title, cut.seeds) == ("9 shared", "ours", 1)
    assert cut.tables[0].paper == {"ours": ((90.0,),)}
    assert cut.differs == ("digits instead of radiographs", "one round")
    assert [method.title for method in cut.tables[1].methods] == ["the same run"]


def test_a_study_without_a_quick_scale_says_so(tmp_path: Path) -> None:
    text = STUDY.replace('[quick]\nset = ["run.rounds=1"]\ndiffers = ["one round"]\n', "")
    with pytest.raises(BadInput, match=r"study.toml: --quick"):
        read_study(study(tmp_path, text), quick=True)


def test_a_run_that_two_tables_want_is_one_run(tmp_path: Path) -> None:
    both = trials(study(tmp_path), quick=False, seeds=2)
    assert len(both) == 2 * 2 * 2 + 2
    assert len({trial.folder for trial in both}) == 8  # the second table's runs are the first's with 2 shared classes
    assert both[-1].folder.name == "1-ours-2_shared-seed1"
    assert {trial.label for trial in both} == {"ours 2 shared", "ours 9 shared", "theirs 2 shared", "theirs 9 shared"}


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("file", sorted(PAPERS.glob("*/study.toml")), ids=lambda file: file.parent.name)
def test_every_papers_study_names_experiments_and_methods_that_there_are(file: Path, quick: bool) -> None:
    for trial in trials(file.parent, quick=quick):
        build_site_method(trial.experiment_file.experiment)


def change_summary(run: Path, **values: object) -> dict[str, Any]:
    """Change values in the summary of a finished run; return it."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8")) | values
    (run / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return dict(summary)


def test_a_study_runs_goes_on_with_more_seeds_and_sets_the_papers_numbers_beside_ours(tmp_path: Path) -> None:
    folder, out = study(tmp_path), tmp_path / "out"
    command = ("study", folder, "--out", out, "--quick", "--jobs", 2, "--seeds")
    first = flwr_sim(*command, 1)
    assert (first.code, "2 of 2 runs" in first.err) == (0, True), first.err
    result = json.loads((out / "study.json").read_text(encoding="utf-8"))
    ours, theirs = result["tables"][0]["entries"]
    assert ours[0][0]["paper"] == 0.815
    assert 0.5 < theirs[0][0]["ours"]["mean"] < 1
    page, markdown = ((out / name).read_text(encoding="utf-8") for name in ("report.html", "study.md"))
    assert "digits instead of radiographs" in page
    assert "<script" not in page
    assert "(0.815)" in markdown
    assert "theirs: not tested: 1 pair is too few" in markdown
    assert "better on validation than before round 1" not in markdown + page
    assert page.count(">paper<") == 2  # of the five columns of both tables, the paper gives numbers for two

    for method in ("ours", "theirs"):  # a second seed, which is there already, of an initial model that is better
        run = out / "runs" / f"1-{method}-2_shared-seed1"
        shutil.copytree(out / "runs" / f"1-{method}-2_shared-seed0", run)
        settings, test = (change_summary(run)[key] for key in ("experiment", "test"))
        auroc = test["mean_auroc"]
        settings["run"]["seed"], test["mean_auroc"] = 1, auroc + 0.01
        change_summary(run, experiment=settings, test=test, seed=1, best_round=0 if method == "ours" else 1)
    again = flwr_sim(*command, 2)
    assert "4 of 4 runs are there already." in again.out, again.err
    result = json.loads((out / "study.json").read_text(encoding="utf-8"))
    ((mean, *_), *_), _ = result["tables"][0]["entries"]
    assert mean["ours"]["mean"] == pytest.approx(ours[0][0]["ours"]["mean"] + 0.005)
    assert result["tables"][1]["entries"][0][0][0]["ours"] == {"mean": 1.0, "sd": 0.0}
    for name in ("report.html", "study.md"):
        text = (out / name).read_text(encoding="utf-8")
        assert "In 1 run no round was better on validation than before round 1, and the initial model is tested" in text


def test_a_study_that_does_not_exist_is_named(tmp_path: Path) -> None:
    ended = flwr_sim("study", tmp_path / "none", "--out", tmp_path / "out")
    assert ended.code == 2
    assert "study.toml: there is no such file." in ended.err
