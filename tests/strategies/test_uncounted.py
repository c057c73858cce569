"""Nothing that a site states enters the model or a choice unless its replies count."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from polyclinic.common.contract import LabelContract
from polyclinic.common.wire.records import NO_ARRAYS, RollCallAnswer
from polyclinic.server.federation.recorder import RunRecorder
from polyclinic.server.reporting.run_claims import list_prominent_limitations
from polyclinic.server.runs.reader import read_run
from polyclinic.server.runs.verify import verify_run
from polyclinic.strategies.engine.admission_limits import (
    find_contradictory_count_faults,
    lower_answer_claims,
    lower_image_claims,
)
from polyclinic.strategies.engine.run_member import RunMember
from polyclinic.strategies.methods.base import RoundContext
from polyclinic.strategies.methods.fednoro import FedNoRo, find_noisy_sites, find_noisy_sites_despite_liar
from polyclinic.strategies.methods.fedsld import compute_federation_prior
from tests.false_statements import (
    CLAIMS,
    HONEST,
    LIAR,
    NEVER_THERE,
    REFUSED,
    Lie,
    lying,
    plan,
    times,
    with_claim,
    with_error,
    with_every_statistic,
    with_nan_trunk,
    with_other_image_count,
    with_perfect_figures,
)
from tests.federations import Traffic, federation, json_lines, temporary_folder
from tests.server.killing import Killed, kill_at
from tests.strategies.states import make_reply

METHODS = ("fedsld", "fedmlp", "fedirm", "fednoro", "rscfed", "cbafed")
ROUNDS = 3
WORST = "a billion images, all positive"


@cache
def finished(method: str, lie: Lie, *overrides: str, rounds: int = ROUNDS) -> tuple[Path, dict[str, Any]]:
    """The run folder and the summary of a run in which one site lies."""
    folder = temporary_folder("polyclinic-uncounted-")
    with lying(lie):
        summary = federation(folder, *plan(method, rounds), *overrides)
    return folder / "run", summary


def events(run: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in json_lines(run / "events.jsonl") if event["event"] == name]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_site_whose_replies_never_count_leaves_the_model_as_if_it_were_not_there(method: str) -> None:
    _, expected = finished(method, NEVER_THERE)
    run, summary = finished(method, Lie(CLAIMS[WORST]))
    assert summary["model_sha256"] == expected["model_sha256"]
    assert summary["statistics"]["counted"] == list(HONEST)
    assert "trained on" in summary["statistics"]["uncounted"][LIAR]
    sentences = " ".join(list_prominent_limitations(read_run(run)))
    assert f"What {LIAR} states has no part in statistics" in sentences
    assert "The statements of 3 of 4 sites count: site-1, site-2, site-3" in sentences


@pytest.mark.slow
@pytest.mark.parametrize("claim", [name for name in CLAIMS if name != WORST])
@pytest.mark.parametrize("method", ["fedsld", pytest.param("fedavg_scaled", marks=pytest.mark.torture)])
def test_no_claim_of_such_a_site_stays_in_what_fedsld_sends(method: str, claim: str) -> None:
    _, expected = finished(method, NEVER_THERE)
    _, summary = finished(method, Lie(CLAIMS[claim]))
    assert summary["model_sha256"] == expected["model_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSED)
def test_it_does_not_matter_why_its_replies_do_not_count(kind: str) -> None:
    _, expected = finished("fedsld", NEVER_THERE)
    run, summary = finished("fedsld", Lie(times(1, 1.0), REFUSED[kind]))
    assert summary["model_sha256"] == expected["model_sha256"]
    assert [event["sites"] for event in events(run, "repeated_round")] == [[LIAR]]


@pytest.mark.slow
def test_the_weights_that_a_largest_share_gives_do_not_depend_on_it() -> None:
    """Otherwise a claim of a billion raises what the largest of the others may weigh."""
    choices = ("method.weighting=samples", "participation.largest_share=0.4", "partition.size_skew=1")
    _, expected = finished("fedmlp", NEVER_THERE, *choices)
    run, summary = finished("fedmlp", Lie(CLAIMS[WORST]), *choices, "run.keep_updates=true")
    assert summary["model_sha256"] == expected["model_sha256"]
    assert not verify_run(run).faults


@pytest.mark.slow
def test_killed_before_or_after_a_round_is_repeated_it_ends_in_the_same_model(tmp_path: Path) -> None:
    lie = Lie(CLAIMS[WORST])
    _, expected = finished("fedsld", NEVER_THERE)
    for after in (False, True):
        out = f"killed-{after}"
        with lying(lie):
            with pytest.MonkeyPatch.context() as patched:
                kill_at(patched, RunRecorder, "on_state_reset", 1, after=after)
                with pytest.raises(Killed):
                    federation(tmp_path, *plan("fedsld", ROUNDS), out=out)
            resumed = federation(tmp_path, *plan("fedsld", ROUNDS), out=out, resume=True)
        assert resumed["model_sha256"] == expected["model_sha256"]
        assert list(resumed["statistics"]["uncounted"]) == [LIAR]


@pytest.mark.slow
def test_a_site_that_is_refused_once_counts_again_when_a_reply_is_accepted() -> None:
    lie = Lie(CLAIMS["the truth"], with_other_image_count, counted=frozenset({1, 3}))
    run, summary = finished("fedsld", lie)
    assert [(event["round"], event["site"]) for event in events(run, "uncounted")] == [(2, LIAR)]
    assert [(event["round"], event["site"]) for event in events(run, "counted_again")] == [(3, LIAR)]
    assert events(run, "repeated_round") == []
    assert summary["statistics"]["counted"] == [*HONEST, LIAR]
    assert summary["statistics"]["uncounted"] == {}


@pytest.mark.slow
def test_losses_of_a_site_that_ceased_to_count_divide_nobody_any_more() -> None:
    """It states losses of 0 in a reply that counts, and no reply after that one counts."""

    def zero_then_refused(reply: Any) -> Any:
        lied = with_every_statistic(0.0)(reply)
        return lied if reply.round == 1 else with_nan_trunk(lied)

    run, summary = finished("fednoro", Lie(CLAIMS["the truth"], zero_then_refused), "run.keep_updates=true")
    assert LIAR in summary["learned"]["noisy"]
    assert 0 < len(set(summary["learned"]["noisy"]) & set(HONEST)) < 3
    assert not verify_run(run).faults


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedseq", "pfl"])
def test_figures_of_such_a_site_choose_no_round_and_enter_no_mean_of_the_test(method: str) -> None:
    """Sites judge each model of fedseq by itself, and in pfl each tests its own model."""
    alone, expected = finished(method, NEVER_THERE)
    run, summary = finished(method, Lie(CLAIMS["the truth"], with_nan_trunk, with_perfect_figures))
    assert summary["best_round"] == expected["best_round"]
    assert summary["test"]["mean_auroc"] == expected["test"]["mean_auroc"]
    assert summary["test"]["operating_points"] == expected["test"]["operating_points"]
    means = [[line["validation_auroc"] for line in json_lines(each / "rounds.jsonl")] for each in (run, alone)]
    assert means[0] == means[1]
    assert summary["per_site"][LIAR]["mean_auroc"] == 1.0  # it has a line of its own


# ---------------------------------------------------------------------- claims


def test_a_claim_of_more_than_a_hundred_medians_of_the_others_is_lowered_to_them() -> None:
    # Of the others: median of 10, 20, 60 is 20; of 10, 20 and a billion too.
    sizes = {"a": 10, "b": 20, "c": 60, "d": 10**9}
    assert lower_image_claims(sizes, sizes) == {"d": 2000}
    assert lower_image_claims(sizes, sizes, admitted={"d"}) == {}
    assert lower_image_claims({**sizes, "d": 2000}, sizes) == {}
    # d does not count: of the others of c the median is 15, of those of d 20.
    assert lower_image_claims({**sizes, "c": 1501}, {"a", "b", "c"}) == {"c": 1500, "d": 2000}


@pytest.mark.parametrize("sizes", [{"a": 7}, {"a": 1, "b": 10**9}], ids=["one site", "two sites"])
def test_of_two_sites_nothing_shows_who_claims_too_much(sizes: dict[str, int]) -> None:
    assert lower_image_claims(sizes, sizes) == {}


def test_hospitals_whose_sizes_differ_by_a_hundred_times_are_left_as_they_are() -> None:
    sizes = {"university": 200_000, "town": 2_000, "village": 2_000, "clinic": 20_000}
    assert lower_image_claims(sizes, sizes) == {}


def test_a_lowered_claim_keeps_its_shares_of_labels_and_what_it_does_not_tell() -> None:
    answer = RollCallAnswer(
        "run", "a", ("x", "y"), ("x", "y"), 1000, 5, 900, "layout", "1", positives=(250, -1), negatives=(750, -1)
    )
    lowered = lower_answer_claims(answer, 100)
    assert (lowered.train_samples, lowered.patients) == (100, 100)
    assert (lowered.positives, lowered.negatives) == ((25, -1), (75, -1))


@pytest.mark.slow
def test_people_read_of_a_lowered_claim_and_its_weight_can_be_recomputed() -> None:
    """The liar stays with its claim, so that its replies count."""
    lie = Lie(times(1000, 0.5), lambda reply: replace(reply, train_samples=1000 * reply.train_samples))
    run, summary = finished("fedsld", lie, "run.keep_updates=true", rounds=1)
    (event,) = events(run, "lowered_claim")
    claim = summary["statistics"]["lowered"][LIAR]
    assert (event["claimed"], event["counted"]) == (claim["claimed"], claim["counted"])
    others = [site["train_samples"] for name, site in summary["sites"].items() if name != LIAR]
    assert claim["counted"] == 100 * np.median(others) < claim["claimed"]
    assert any(f"{claim['counted']:,} count" in limit for limit in list_prominent_limitations(read_run(run)))
    assert not verify_run(run).faults


@pytest.mark.parametrize(("counts", "faults"), [((6, 4), 0), ((6, 5), 1), ((10, 10), 1), ((-1, 10), 0)])
def test_where_an_image_shows_one_class_a_site_cannot_count_more_than_it_has(
    counts: tuple[int, int], faults: int
) -> None:
    answer = RollCallAnswer("run", "a", ("x", "y"), ("x", "y"), 10, 5, 9, "layout", "1", counts, (0, 0))
    answer = replace(answer, negatives=tuple(10 - max(count, 0) if count >= 0 else -1 for count in counts))
    members = [RunMember(1, answer, 0, 0)]
    assert len(find_contradictory_count_faults("multi_class", members)) == faults
    assert find_contradictory_count_faults("multi_label", members) == []


# ---------------------------------------------------------------------- FedSLD's prior

CONTRACT = LabelContract(("x", "y"), MappingProxyType({"a": ("x", "y"), "b": ("x", "y")}))


def prior_of(**answers: tuple[tuple[int, int], tuple[int, int]]) -> list[float]:
    stated = {
        site: RollCallAnswer("run", site, ("x", "y"), ("x", "y"), 10, 5, 9, "layout", "1", *counts)
        for site, counts in answers.items()
    }
    return compute_federation_prior(RoundContext("multi_label", CONTRACT, stated, NO_ARRAYS, 1)).tolist()


def test_a_class_that_nobody_tells_any_more_gets_the_mean_share_of_the_others() -> None:
    assert prior_of(a=((2, 3), (8, 7)), b=((4, 5), (6, 5))) == [0.3, 0.4]
    assert prior_of(a=((2, -1), (8, -1))) == [0.2, 0.2]
    assert prior_of() == [0.5, 0.5]


@pytest.mark.slow
def test_a_site_that_was_missing_until_now_trains_with_a_prior_of_which_it_is_a_part(traffic: Traffic) -> None:
    """It alone annotates a class, which would have the weight 0 in its own training."""
    honest, alone = list("0123456"), list("0123456789")
    lists = f'"site-1" = {honest}, "site-2" = {honest}, "site-4" = {alone}'.replace("'", '"')
    lists = f'partition={{kind = "class_lists", lists = {{{lists}}}}}'
    late = Lie(CLAIMS["the truth"], with_error, counted=frozenset({2}))
    with lying(late):
        federation(temporary_folder("polyclinic-late-"), *plan("fedsld", 2), lists)
    requests = [request for request in traffic.requests if request.round == 2]
    late_request = max(requests, key=lambda request: np.count_nonzero(request.statistics["prior"]))
    assert (late_request.statistics["prior"] > 0).all()


@pytest.mark.slow
def test_a_largest_share_bounds_a_site_in_the_prior_too(traffic: Traffic) -> None:
    """A site whose replies count says that each of its images shows every class."""
    with lying(Lie(times(90, 1.0), with_claim)):
        choices = (*plan("fedsld", 2), "participation.largest_share=0.4")
        federation(temporary_folder("polyclinic-share-"), *choices)
    priors = np.concatenate([request.statistics["prior"] for request in traffic.requests])
    # The liar has 40 % of all images and each other site 20 %. Two others or three annotate a class, which a tenth of
    # their images show: at most (0.4 + 0.4 * 0.2) / 0.8.
    assert 0.4 < priors.max() < 0.6


# ---------------------------------------------------------------------- FedNoRo's losses

LABELLED = LabelContract(("a", "b"), MappingProxyType(dict.fromkeys(("e", "n", "s", "w", "z"), ("a", "b"))))
LOSSES = {"e": 5.0, "n": 5.1, "s": 6.0, "w": 6.1}
"""Two clean and two noisy sites, nearer to one another than to 0."""


def noisy_beside(stated: float) -> set[str]:
    """The noisy ones of four honest sites beside a fifth, which states this loss everywhere."""
    values = {**LOSSES, "z": stated}
    replies = {site: make_reply(site, indicators=np.full((2, 2), value, np.float32)) for site, value in values.items()}
    context = RoundContext("multi_label", LABELLED, {}, NO_ARRAYS, 1)
    verdicts = FedNoRo({"stage_one_rounds": 1}).aggregate_statistics(context, replies)
    return {site for site, flag in verdicts.items() if flag[0] and site != "z"}


@pytest.mark.parametrize("stated", [0.0, -0.0, 1e-30, 0.001, 1.0])
def test_a_site_that_states_hardly_any_loss_makes_no_clean_site_noisy(stated: float) -> None:
    assert noisy_beside(stated) == {"s", "w"}


def test_only_one_site_alone_in_being_clean_is_set_aside() -> None:
    losses = np.array([[0.0], [1.0], [1.1], [2.0], [2.1]])
    assert find_noisy_sites(losses).tolist() == [False, False, False, True, True]
    assert find_noisy_sites_despite_liar(losses).tolist() == find_noisy_sites(losses).tolist()
    alone = np.array([[0.0], [5.0], [5.1], [6.0], [6.1]])
    assert find_noisy_sites(alone).tolist() == [False, True, True, True, True]
    assert find_noisy_sites_despite_liar(alone).tolist() == [False, False, False, True, True]
    three = alone[:3]
    assert find_noisy_sites_despite_liar(three).tolist() == find_noisy_sites(three).tolist()


@pytest.mark.slow
def test_a_reply_with_a_loss_below_0_does_not_count() -> None:
    run, _ = finished("fednoro", Lie(CLAIMS["the truth"], with_every_statistic(-1.0)), rounds=1)
    assert "cannot be below 0" in events(run, "absent")[0]["reason"]


def test_losses_of_positives_that_a_site_does_not_annotate_are_none_of_its_losses() -> None:
    contract = LabelContract(("a", "b"), MappingProxyType({"e": ("a",), "n": ("a", "b")}))
    replies = {site: make_reply(site, indicators=np.full((2, 2), 0.5, np.float32)) for site in contract.sites}
    context = RoundContext("multi_label", contract, {}, NO_ARRAYS, 1)
    stored = FedNoRo({"stage_one_rounds": 1}).aggregate_statistics(context, replies)
    np.testing.assert_array_equal(stored["e"][1:], np.array([0.5, 0.5, 0.5, np.nan], np.float32))
    np.testing.assert_array_equal(stored["n"][1:], np.full(4, 0.5, np.float32))
