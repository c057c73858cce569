"""Facts about studies: what study.toml may say, which runs it makes, and the tables that come of them."""

import json
from pathlib import Path

import pytest

from common.errors import BadInput
from strategies.registry import build_site_method
from studies.study import trials_of
from studies.study_file import read_study
from studies.trial import Trial
from tests.federations import DIGITS
from tests.server.commands import ROOT, flwr_sim

PAPERS = sorted(path.parent for path in (ROOT / "experiments" / "papers").glob("*/study.toml"))

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


def refused(folder: Path, old: str, new: str) -> str:
    assert old in STUDY
    with pytest.raises(BadInput) as found:
        read_study(study(folder, STUDY.replace(old, new)), quick=False)
    (fault,) = found.value.faults
    return str(fault)


def trials(folder: Path, *, quick: bool, seeds: int = 1) -> list[Trial]:
    study = read_study(folder, quick=quick)
    grid = trials_of(study, folder, folder / "runs", ("scale=small",) if quick else (), range(seeds))
    return [trial for table in grid for row in table for column in row for trial in column]


# ---------------------------------------------------------------------- the file


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"auroc_shared"', '"aurocshared"', '"aurocshared" is no measure. Did you mean "auroc_shared"?'),
        (
            'reference = "ours"',
            'reference = "our"',
            '"our" is no method of "Shared classes". Methods: "ours", "theirs"',
        ),
        ('"ours" = [[81.5, 70.25], [90]]', '"mine" = [[1], [2]]', '"mine" is no method of "Shared classes"'),
        ("[[81.5, 70.25], [90]]", "[[81.5, 70.25]]", 'row "ours" of "Shared classes" has not 2 settings of at most 3'),
        ("[[81.5, 70.25], [90]]", "[[1, 2, 3, 4], [9]]", 'row "ours" of "Shared classes" has not 2 settings'),
        ("x = 9, ", "", 'every setting of "Shared classes" needs an x for its sweep'),
        ('title = "theirs"', 'title = "ours"', 'two methods of "Shared classes" have one title'),
        ('title = "9 shared"', 'title = "2_shared"', 'two settings of "Shared classes" have one title'),
    ],
)
def test_what_a_study_cannot_mean_is_refused_with_its_reason(old: str, new: str, said: str, tmp_path: Path) -> None:
    assert said in refused(tmp_path, old, new)


def test_the_papers_numbers_are_fractions_whatever_unit_it_prints_and_may_be_missing(tmp_path: Path) -> None:
    table = read_study(study(tmp_path), quick=False).tables[0]
    found = [table.paper_value("ours", *place) for place in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1))]
    assert found == [0.815, 0.7025, None, 0.9, None]
    assert table.paper_value("theirs", 0, 0) is None


def test_the_quick_scale_keeps_what_is_named_with_the_papers_numbers_for_it(tmp_path: Path) -> None:
    cut = read_study(study(tmp_path, STUDY.replace('quick = ["2 shared"]', 'quick = ["9 shared", "ours"]')), quick=True)
    (nine,), (ours,) = cut.tables[0].settings, cut.tables[0].methods
    assert (nine.title, ours.title, cut.seeds) == ("9 shared", "ours", 1)
    assert cut.tables[0].paper == {"ours": ((90.0,),)}
    assert cut.differs == ("digits instead of radiographs", "one round")
    assert [method.title for method in cut.tables[1].methods] == ["the same run"]


def test_a_study_without_a_quick_scale_says_so(tmp_path: Path) -> None:
    text = STUDY.replace('[quick]\nset = ["run.rounds=1"]\ndiffers = ["one round"]\n', "")
    with pytest.raises(BadInput, match=r"study.toml: --quick: there is no \[quick\] table\."):
        read_study(study(tmp_path, text), quick=True)


# ---------------------------------------------------------------------- its runs


def test_a_run_that_two_tables_want_is_one_run(tmp_path: Path) -> None:
    found = trials(study(tmp_path), quick=False, seeds=2)
    assert len(found) == 2 * 2 * 2 + 2
    assert len({trial.folder for trial in found}) == 8  # the second table's runs are the first's with 2 shared classes
    assert found[-1].folder.name == "1-ours-2_shared-seed1"
    assert {trial.label for trial in found} == {"ours 2 shared", "ours 9 shared", "theirs 2 shared", "theirs 9 shared"}


@pytest.mark.parametrize("folder", PAPERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("quick", [False, True])
def test_every_papers_study_names_experiments_and_methods_that_there_are(folder: Path, quick: bool) -> None:
    for trial in trials(folder, quick=quick):
        build_site_method(trial.file.experiment)


def test_every_paper_has_its_study() -> None:
    assert [folder.name for folder in PAPERS] == ["fedmlp", "fedsld", "surgical", "unifed"]


# ---------------------------------------------------------------------- the whole


def test_a_study_runs_goes_on_where_it_broke_off_and_sets_the_papers_numbers_beside_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = study(tmp_path), tmp_path / "out"
    command = ("study", folder, "--out", out, "--quick", "--seeds", 2, "--jobs", 2)
    first = flwr_sim(capsys, *command)
    assert first.code == 0, first.err
    result = json.loads((out / "study.json").read_text(encoding="utf-8"))
    ours, theirs = result["tables"][0]["entries"]
    assert ours[0][0]["paper"] == 0.815
    assert 0.5 < theirs[0][0]["ours"]["mean"] < 1
    assert result["tables"][1]["entries"][0][0][0]["ours"] == {"mean": 1.0, "sd": 0.0}
    runs = sorted(path.name for path in (out / "runs").iterdir() if path.is_dir())
    assert runs == [f"1-{method}-2_shared-seed{seed}" for method in ("ours", "theirs") for seed in (0, 1)]
    aurocs = [json.loads((out / "runs" / name / "summary.json").read_text())["test"]["mean_auroc"] for name in runs[:2]]
    assert ours[0][0]["ours"]["mean"] == pytest.approx(sum(aurocs) / 2)
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "digits instead of radiographs" in page
    assert "<script" not in page
    markdown = (out / "study.md").read_text(encoding="utf-8")
    assert "(0.815)" in markdown
    assert "theirs: not tested: 1 pair is too few" in markdown
    assert "validation was best before round 1" not in markdown + page
    assert page.count(">paper<") == 2  # of the five columns of both tables, the paper gives numbers for two

    best = next((out / "runs").glob("*/summary.json"))
    best.write_text(json.dumps(json.loads(best.read_text()) | {"best_round": 0}), encoding="utf-8")
    again = flwr_sim(capsys, *command)
    for text in ((out / "study.md").read_text(encoding="utf-8"), (out / "report.html").read_text(encoding="utf-8")):
        assert "In 1 run validation was best before round 1, and the initial model is tested" in text

    (out / "runs" / runs[0]).rename(out / "runs" / f"{runs[0]}.unfinished")
    again = flwr_sim(capsys, *command)
    assert "3 of 4 runs are there already." in again.out
    assert "4 of 4 runs" in again.err
    assert json.loads((out / "study.json").read_text(encoding="utf-8"))["tables"][0]["entries"] == [ours, theirs]


def test_a_study_that_does_not_exist_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = flwr_sim(capsys, "study", tmp_path / "none", "--out", tmp_path / "out")
    assert ended.code == 2
    assert "study.toml: there is no such file." in ended.err
