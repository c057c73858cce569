"""Of many sites a sample tests the model: the run ends in the same one, also after a kill, and says who was asked."""

from pathlib import Path

import pytest

from polyclinic.common.errors import BadInput
from polyclinic.common.wire.codec import decode_record
from polyclinic.common.wire.records import EvaluateRequest
from polyclinic.server.runs.reader import read_run
from polyclinic.server.runs.verify import verify_run
from polyclinic.server.simulation.backends import inline as backends
from tests.federations import Traffic, experiment, federation, of_type
from tests.server.killing import Killed, kill_at

COHORTS = (
    "partition.sites=6", "participation.sites_per_round=3", "run.rounds=4", "training.lr=0.02",
    "participation.clip=off",
)  # fmt: skip
TWO = "evaluation.sites=2"


def evaluations(traffic: Traffic) -> list[tuple[int, bool]]:
    """Round and kind of every evaluation that a site was asked for."""
    requests = [decode_record(content, EvaluateRequest) for content in of_type(traffic.down, "evaluate")]
    return [(request.round, request.test) for request in requests]


@pytest.mark.parametrize("criterion", ["auroc", pytest.param("loss", marks=pytest.mark.long)])
def test_a_sample_chooses_the_model_that_all_would(criterion: str, tmp_path: Path, traffic: Traffic) -> None:
    by = f"evaluation.criterion={criterion}"
    every = federation(tmp_path, *COHORTS, by, "evaluation.sites=0", out="every")
    traffic.down.clear()
    sample = federation(tmp_path, *COHORTS, by, TWO, out="sample")
    assert sample["model_sha256"] == every["model_sha256"]
    assert (sample["best_round"], sample["criterion"]) == (every["best_round"], every["criterion"])
    # One exchange to judge the last model, by the three sites at most that judged the best one, and one test at two.
    assert sorted(set(evaluations(traffic))) == [(4, False), (4, True)]
    assert evaluations(traffic).count((4, True)) == 2
    assert 1 <= evaluations(traffic).count((4, False)) <= 3
    assert every["drawn_to_test"] is None
    assert len(every["per_site"]) == 6
    assert sorted(sample["per_site"]) == sorted(sample["drawn_to_test"])
    assert len(sample["per_site"]) == 2
    sampled = sample["test"]["sampled"]
    assert (sampled["drawn"], sampled["of"], sampled["mean_auroc"]) == (2, 6, None)  # the coordinator has test images


def test_the_last_round_is_judged_by_the_sites_of_the_next(tmp_path: Path, traffic: Traffic) -> None:
    federation(tmp_path, *COHORTS, TWO, "evaluation.checkpoint=last", out="short")
    assert [test for _, test in evaluations(traffic)] == [False] * 3 + [True] * 2
    longer = federation(tmp_path, *COHORTS, TWO, "evaluation.checkpoint=last", "run.rounds=5", out="longer")
    assert longer["rounds"] == 5
    short, long = ([line.validation_loss for line in read_run(tmp_path / out).rounds] for out in ("short", "longer"))
    assert short == long[:4]


def test_a_run_that_is_killed_in_its_test_asks_the_same_sites_when_it_goes_on(tmp_path: Path, traffic: Traffic) -> None:
    through = federation(tmp_path, *COHORTS, TWO, out="through")
    with pytest.MonkeyPatch.context() as patched:
        kill_at(patched, backends.InlineGrid, "answer_message", len(traffic.down))  # the second of two sites that test
        with pytest.raises(Killed):
            federation(tmp_path, *COHORTS, TWO, out="killed")
    resumed = federation(tmp_path, *COHORTS, TWO, out="killed", resume=True)
    for key in ("model_sha256", "drawn_to_test", "per_site", "test", "best_round"):
        assert resumed[key] == through[key], key
    assert verify_run(tmp_path / "killed").faults == verify_run(tmp_path / "through").faults == []


def test_a_pass_is_judged_by_the_same_sites_in_every_round(tmp_path: Path, traffic: Traffic) -> None:
    federation(tmp_path, "run.method=fedseq", *COHORTS, "partition.shared=10", TWO)
    assert [reply.round for reply in traffic.evaluations] == [1, 1, 2, 2, 3, 3, 4, 4, 4, 4]  # the last two test
    judges = [reply.site for reply in traffic.evaluations[:-2]]
    assert set(judges[::2]) == {judges[0]}
    assert set(judges[1::2]) == {judges[1]} != {judges[0]}


@pytest.mark.parametrize("method", ["individual", "pfl"])
def test_a_sample_is_refused_where_each_site_ends_with_a_model_of_its_own(method: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"evaluation\.sites: is 2, .* a model of its own"):
        federation(tmp_path, f"run.method={method}", TWO)


def test_more_sites_than_there_are_cannot_test(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"evaluation\.sites: is 9, but the partition makes 3 sites"):
        federation(tmp_path, "evaluation.sites=9")
    assert experiment(tmp_path, "evaluation.sites=0").experiment.evaluation.sites == 0
