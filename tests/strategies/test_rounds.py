"""The round loop against sites that answer by hand: who counts, who does not and why, which round was best."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, RecordDict

from polyclinic.common.config import ParticipationSection
from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import Head
from polyclinic.common.models.state import ModelState
from polyclinic.common.system.plain_text import MAX_REASON_CHARACTERS
from polyclinic.common.wire.codec import count_payload_bytes, encode_record
from polyclinic.common.wire.records import (
    EvaluateReply,
    EvaluateRequest,
    ModelGroups,
    RollCall,
    RollCallAnswer,
    TrainReply,
    TrainRequest,
)
from polyclinic.server.simulation.backends.inline import run_with_inline_grid
from polyclinic.strategies.engine.coordinator import Coordinator
from polyclinic.strategies.engine.events import RoundRecord, TooFewSites
from polyclinic.strategies.engine.exchange import ExchangeReplies
from polyclinic.strategies.engine.state import (
    deserialize_federation_state,
    make_model_array_record,
    serialize_federation_state,
)
from polyclinic.strategies.registry import build_strategy
from tests.harms import FORMS, Harm
from tests.strategies.leading import Noted, Turned, app_of, small_plan
from tests.words import raw_in

CLASSES = {"east": ("c", "a"), "north": ("a", "b"), "south": ("b",)}
STEP = {"east": -3.0, "north": 1.0, "south": 0.5}


@dataclass(frozen=True)
class Peer:
    """A site that moves every value by its own step and reports scripted losses.

    Attributes:
        losses: Validation loss of the model after round 0, 1, ...
        spoil: What it does to an honest training reply before it leaves.
        tested: Classes it claims to have tested.
        run: The run that it takes the roll call for.
        samples: Its training images.
    """

    site: str
    labels: tuple[str, ...] = ()
    losses: Sequence[float | None] = (0.5,) * 9
    spoil: Callable[[TrainReply], TrainReply | RecordDict] = lambda reply: reply
    tested: tuple[str, ...] = ()
    run: str = ""
    samples: int = 10

    def called(self, call: RollCall) -> RollCallAnswer:
        names = CLASSES[self.site]
        run, labels = self.run or call.run, self.labels or names
        return RollCallAnswer(run, self.site, labels, names, self.samples, 5, 9, "layout", "0.1.0")

    def trained(self, request: TrainRequest) -> TrainReply | RecordDict:
        model, head = request.model, request.model.head
        step = np.float32(STEP[self.site])
        rows = Head(head.class_names, np.full_like(head.weight, step), np.full_like(head.bias, -step))
        update = ModelGroups(np.full_like(model.trunk, step), np.full_like(model.norm, step), rows)
        loss = self.losses[request.round - 1]
        return self.spoil(TrainReply(request.run, request.round, self.site, self.samples, 0.5, loss, None, 1.0, update))

    def judged(self, request: EvaluateRequest) -> EvaluateReply:
        column = (0.5,) * len(self.tested)
        counts, loss = (3,) * len(self.tested), self.losses[request.round]
        facts = (request.run, request.round, self.site, loss, None, self.tested)
        return EvaluateReply(*facts, column, column, column, counts, counts, "hash")


@dataclass
class Ran:
    """A finished run."""

    coordinator: Coordinator
    rounds: list[RoundRecord]
    tested: ExchangeReplies[EvaluateReply]

    @property
    def model(self) -> ModelState:
        return self.coordinator.state.model


def initial(class_names: Sequence[str]) -> ArrayRecord:
    rows = np.arange(2 * len(class_names), dtype=np.float32).reshape(-1, 2) - 2
    head = Head(tuple(class_names), rows, rows[:, 0].copy())
    return make_model_array_record(ModelState(np.array([0.25, -4], np.float32), np.array([1], np.float32), head))


def run(
    peers: Sequence[Peer],
    *,
    rounds: int = 1,
    seed: int = 7,
    parameters: Mapping[str, Any] = {},
    wire: Callable[[Any], Any] = lambda grid: grid,
    noted: Noted | None = None,
    **participation: Any,
) -> Ran:
    """Run surgical aggregation over these sites."""
    participation = {"roll_call_deadline_s": 5.0, "clip": "off", **participation}  # every step is a constant
    section = ParticipationSection.model_validate(participation)
    noted = noted or Noted()
    coordinator = Coordinator(
        build_strategy("surgical", parameters), small_plan(seed=seed), section, "run-1", callbacks=noted
    )
    ran: list[Ran] = []

    def main(grid: Any) -> None:
        grid = wire(grid)
        contract = coordinator.sites.call_roll(grid, len(peers))
        coordinator.start(grid, initial(contract.class_names), rounds)
        ran.append(Ran(coordinator, noted.records, coordinator.test_result_model(grid)))

    run_with_inline_grid(main, app_of(peers), len(peers))
    return ran[0]


EAST, NORTH, SOUTH = Peer("east"), Peer("north"), Peer("south")
ALL = (EAST, NORTH, SOUTH)


def raising(reply: TrainReply) -> TrainReply:
    raise OSError("disk full")


def endless(reply: TrainReply) -> TrainReply:
    raise OSError("\x1b[2J" * 3_500_000)  # 14 MB


def with_update(**changes: Any) -> Callable[[TrainReply], TrainReply]:
    return lambda reply: replace(reply, update=replace(reply.update, **changes))


def renamed(reply: TrainReply) -> TrainReply:
    return replace(reply, update=replace(reply.update, head=replace(reply.update.head, class_names=("z",))))


def narrower(reply: TrainReply) -> TrainReply:
    assert reply.update.head is not None
    head = reply.update.head
    return replace(reply, update=replace(reply.update, head=replace(head, weight=head.weight[:, :1])))


def test_the_model_moves_by_the_means_worked_by_hand() -> None:
    after = run(ALL).model
    # trunk and norm: (-3 + 1 + 0.5) / 3 = -0.5
    np.testing.assert_array_equal(after.trunk, [-0.25, -4.5])
    np.testing.assert_array_equal(after.norm, [0.5])
    # rows before a (-2 -1), b (0 1), c (2 3); a: (-3 + 1) / 2 = -1; b: (1 + 0.5) / 2 = 0.75; c: -3; bias the other way
    np.testing.assert_array_equal(after.head.weight, [[-3, -2], [0.75, 1.75], [-1, 0]])
    np.testing.assert_array_equal(after.head.bias, [-1, -0.75, 5])


def test_a_row_whose_only_owner_fails_stays_as_it_was() -> None:
    after = run((replace(EAST, spoil=raising), NORTH, SOUTH), min_sites=2).model
    np.testing.assert_array_equal(after.head.weight[2], [2, 3])
    np.testing.assert_array_equal(after.head.weight[0], [-2 + 1, -1 + 1])


def test_the_order_in_which_sites_answer_changes_nothing() -> None:
    # By names the sum is (1e16 - 1e16) + 6.75; backwards 6.75 - 1e16 is rounded, for doubles are 2 apart there.
    steps = zip(ALL, (1e16, -1e16, 6.75), strict=True)
    peers = [replace(peer, spoil=with_update(trunk=np.full(2, step, np.float32))) for peer, step in steps]
    straight, turned, shuffled = run(peers), run(peers, wire=Turned), run(peers[::-1])
    np.testing.assert_allclose(straight.model.trunk, [0.25 + 6.75 / 3, -4 + 6.75 / 3])
    for other in (turned, shuffled):
        assert straight.model.trunk.tobytes() == other.model.trunk.tobytes()
        assert straight.coordinator.sites.contract.hash == other.coordinator.sites.contract.hash


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (raising, "disk full"),
        (endless, " characters cut)"),
        (with_update(trunk=np.array([np.nan, 1], np.float32)), "trunk holds values that are not finite"),
        (with_update(trunk=np.ones(3, np.float32)), "trunk has shape (3,), expected (2,)"),
        (with_update(trunk=None), "trunk was expected"),
        (with_update(norm=None), "norm was expected"),
        (with_update(head=None), "head was expected"),
        (renamed, "head rows are ['z'], expected ['b']"),
        (narrower, "head.weight has shape (1, 1), expected (1, 2)"),
        (lambda reply: replace(reply, round=9), "('run-1', 9, 'south'), expected ('run-1', 1, 'south')"),
        (lambda reply: replace(reply, site="north"), "('run-1', 1, 'north'), expected ('run-1', 1, 'south')"),
        (lambda reply: replace(reply, run="old"), "('old', 1, 'south'), expected ('run-1', 1, 'south')"),
        (lambda reply: replace(reply, train_loss=float("nan")), "TrainReply.train_loss is not a number"),
        (lambda reply: replace(reply, validation_loss=float("inf")), "TrainReply.validation_loss must be finite."),
        (lambda reply: replace(reply, train_samples=4000), "trained on 4000 images, said 10 at the roll call"),
        (lambda reply: replace(reply, epochs=2), "2 epochs, and was asked for at most 1"),
        (lambda reply: replace(reply, seconds=1e5), "100,000 s, and was asked at most 60 s ago"),
        (lambda reply: replace(reply, seconds=-1.0), "TrainReply.seconds must be from 0 to 1e+08, not -1."),
        (lambda reply: replace(reply, validation_auroc=1.5), "TrainReply.validation_auroc must be from 0 to 1"),
        (lambda reply: replace(reply, epsilon=1e300), "TrainReply.epsilon must be from 0 to 1e+09, not 1e+300."),
        (lambda reply: replace(reply, site="sou\u202eth"), r"cannot be printed: sou\u202eth."),
        (lambda reply: encode_record(RollCall("run-1", "{}")), "expected TrainReply, got 'RollCall'."),
        (lambda reply: RecordDict(), "without a wire version"),
    ],
)
def test_a_reply_that_cannot_count_costs_only_its_own_update_and_has_its_reason(spoil: Any, reason: str) -> None:
    ran = run((EAST, NORTH, replace(SOUTH, spoil=spoil)), min_sites=2)
    assert set(ran.rounds[0].absent) == {"south"}
    assert reason in ran.rounds[0].absent["south"]
    assert len(ran.rounds[0].absent["south"]) <= MAX_REASON_CHARACTERS
    assert raw_in(ran.rounds[0].absent["south"], "") == set()
    assert ran.rounds[0].sites == ("east", "north")
    np.testing.assert_array_equal(ran.model.trunk, [0.25 - 1, -4 - 1])  # (-3 + 1) / 2
    assert dict(ran.coordinator.state.counted) == {"east": 1, "north": 1}


@pytest.mark.parametrize("harm", FORMS, ids=lambda harm: harm.kind)
def test_a_harmful_reply_changes_no_more_than_an_absence(
    harm: Harm, record_property: Callable[[str, object], None]
) -> None:
    record_property("survived", harm.kind)
    record_property("same model", harm.kind)

    def spoilt(reply: TrainReply) -> RecordDict:
        content = encode_record(reply)
        harm.spoil(content)
        return content

    harmed = run((EAST, NORTH, replace(SOUTH, spoil=spoilt)), rounds=2, min_sites=2)
    alone = run((EAST, NORTH, replace(SOUTH, spoil=raising)), rounds=2, min_sites=2)
    for record in harmed.rounds:
        assert set(record.absent) == {"south"}
        assert harm.reason in record.absent["south"]
    after, expected = (ModelGroups.from_model(ran.model).to_named_arrays() for ran in (harmed, alone))
    assert after.keys() == expected.keys()
    assert all(array.tobytes() == expected[name].tobytes() for name, array in after.items())


def test_a_site_is_told_once_why_its_reply_did_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: dict[tuple[str, int], str] = {}
    trained, judged = Peer.trained, Peer.judged

    def listening(peer: Peer, request: TrainRequest) -> RecordDict:
        reasons[peer.site, request.round] = request.left_out
        return trained(peer, request)

    def judging(peer: Peer, request: EvaluateRequest) -> EvaluateReply:
        reasons[peer.site, 9] = request.left_out
        return judged(peer, request)

    monkeypatch.setattr(Peer, "trained", listening)
    monkeypatch.setattr(Peer, "judged", judging)

    def wrong_in_round_2(reply: TrainReply) -> TrainReply:
        return with_update(trunk=None)(reply) if reply.round == 2 else reply

    run((EAST, NORTH, replace(SOUTH, spoil=wrong_in_round_2)), rounds=4, min_sites=2)
    assert {key: reason for key, reason in reasons.items() if reason} == {("south", 3): "round 2: trunk was expected"}


def test_a_test_of_a_class_that_the_site_does_not_annotate_is_reported_and_its_reason_outlives_the_coordinator() -> (
    None
):
    ran = run((replace(EAST, tested=("a", "c")), NORTH, replace(SOUTH, tested=("b", "q"))), noted=(noted := Noted()))
    state, reason = ran.coordinator.state, 'tested "q", which it does not annotate'
    assert set(ran.tested.accepted) == {"east", "north"}
    assert dict(ran.tested.absent) == {"south": reason}
    assert noted.absences == [("evaluate", {"south": reason})]
    assert dict(state.left_out) == {"south": f"evaluation: {reason}"}
    read = deserialize_federation_state(serialize_federation_state(state))
    assert (read.left_out, read.lowest_losses) == (state.left_out, state.lowest_losses)
    assert set(read.lowest_losses) == set(CLASSES)


FIVE = {"east": 1.0, "lying": -100.0, "north": 2.0, "south": 3.0, "west": 4.0}


def five(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Ran:
    """Five sites, of which one's steps are far longer than the others'."""
    monkeypatch.setattr("tests.strategies.test_rounds.CLASSES", dict.fromkeys(FIVE, ("a", "b")))
    monkeypatch.setattr("tests.strategies.test_rounds.STEP", FIVE)
    return run([Peer(site) for site in FIVE], **options)


def test_an_update_over_three_medians_counts_as_one_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    free, bounded = (five(monkeypatch, clip=clip) for clip in ("off", 3.0))
    np.testing.assert_allclose(free.model.trunk, [0.25 - 18, -4 - 18])  # (1 - 100 + 2 + 3 + 4) / 5
    assert free.rounds[0].shortened == {}
    np.testing.assert_allclose(bounded.model.trunk, [0.25 + 0.2, -4 + 0.2])  # median 3: (1 - 9 + 2 + 3 + 4) / 5
    assert set(bounded.rounds[0].shortened) == {"lying"}
    assert "33.3 times the median length" in bounded.rounds[0].shortened["lying"]
    assert bounded.rounds[0].sites == tuple(sorted(FIVE))


@pytest.mark.parametrize("in_memory", [0, 2**20])
def test_a_bound_changes_no_bit_where_no_update_is_too_long(in_memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyclinic.strategies.engine.aggregator.MAX_UPDATE_BYTES_IN_MEMORY", in_memory)
    plain, bounded = (run(ALL, rounds=2, clip=clip) for clip in ("off", 4.0))
    for group in ("trunk", "norm"):
        assert getattr(plain.model, group).tobytes() == getattr(bounded.model, group).tobytes()
    assert plain.model.head.weight.tobytes() == bounded.model.head.weight.tobytes()


@pytest.mark.parametrize("in_memory", [0, 2**20])
@pytest.mark.parametrize(
    ("mean", "moved"),
    [
        ("coordinate_median", 2.0),
        ({"kind": "trimmed_mean", "fraction": 0.2}, 2.0),  # (1 + 2 + 3) / 3
        ({"kind": "krum"}, 2.0),  # scores of 1 2 3 4: 1 + 4, 1 + 1, 1 + 1, 1 + 4; the first of equals
        ({"kind": "krum", "keep": 3}, 2.0),  # 1, 2 and 3
    ],
)
def test_a_robust_mean_is_not_moved_by_one_site_that_lies(
    mean: Any, moved: float, in_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyclinic.strategies.engine.aggregator.MAX_UPDATE_BYTES_IN_MEMORY", in_memory)
    ran = five(monkeypatch, parameters={"mean": mean})
    np.testing.assert_array_equal(ran.model.trunk, [0.25 + moved, -4 + moved])
    np.testing.assert_array_equal(ran.model.head.bias, np.array([-2, 0], np.float32) - moved)
    assert ran.rounds[0].plain == ()


def test_rows_with_too_few_owners_for_a_robust_mean_get_the_plain_one_and_are_named() -> None:
    ran = run(ALL, parameters={"mean": "coordinate_median"})
    np.testing.assert_array_equal(ran.model.trunk, [0.25 + 0.5, -4 + 0.5])  # of -3, 1 and 0.5
    np.testing.assert_array_equal(ran.model.head.weight, [[-3, -2], [0.75, 1.75], [-1, 0]])
    assert ran.rounds[0].plain == ("a", "b", "c")


def test_a_group_that_was_not_asked_for_is_refused() -> None:
    spoil = with_update(norm=np.zeros(1, np.float32))
    quiet = [replace(peer, spoil=with_update(norm=None)) for peer in (EAST, NORTH)]
    ran = run((*quiet, replace(SOUTH, spoil=spoil)), parameters={"trunk": "fedbn_plus"}, min_sites=2)
    assert ran.rounds[0].absent == {"south": "norm was not expected"}


def test_too_few_replies_stop_the_run_and_name_each_missing_site_with_its_reason() -> None:
    spoilt = (replace(EAST, spoil=raising), NORTH, replace(SOUTH, spoil=with_update(trunk=None)))
    with pytest.raises(TooFewSites, match=r"round 1: 1 of 3 sites replied\. .*south: trunk was expected"):
        run(spoilt, min_sites=2)


@pytest.mark.parametrize(
    ("peers", "options", "error", "reason"),
    [
        (ALL, {"parameters": {"mean": "krum"}}, BadInput, r"method\.mean: krum needs 5 sites or more; there are 3"),
        ((EAST, NORTH, Peer("nobody")), {}, TooFewSites, r'2 of 3 sites .* \("east", "north"\)\. node 4: '),
        ((EAST, NORTH, replace(SOUTH, run="old")), {}, TooFewSites, "node 4: .* run old, expected run-1"),
        ((NORTH, NORTH), {}, BadInput, "site north: two sites use this name"),
    ],
    ids=["fewer_sites_than_its_mean_needs", "too_few_sites", "a_site_of_another_run", "two_sites_of_one_name"],
)
def test_a_run_does_not_begin_with(
    peers: Sequence[Peer], options: dict[str, Any], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        run(peers, **options)


def test_labels_that_mean_one_class_are_refused_in_the_sites_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CLASSES, "south", ("b", "b"))
    with pytest.raises(BadInput, match=r'south: data\.annotates: "Node", "Nodule" both mean "b"'):
        run((EAST, NORTH, replace(SOUTH, labels=("Node", "Nodule"))))


def test_the_best_round_is_the_first_with_the_lowest_mean_validation_loss() -> None:
    # Means over the sites, after round 0, 1, 2, 3: 0.8, 0.5, 0.5, 0.75. South's are the means.
    east = replace(EAST, losses=(0.6, 0.9, 0.2, 0.7))
    north = replace(NORTH, losses=(1.0, 0.1, 0.8, 0.8))
    ran = run((east, north, replace(SOUTH, losses=(0.8, 0.5, 0.5, 0.75))), rounds=3)
    means = [record.validation.mean_loss for record in ran.rounds]
    assert means == pytest.approx([0.8, 0.5, 0.5])
    assert ran.coordinator.last_validation.mean_loss == pytest.approx(0.75)
    assert (ran.coordinator.state.best_round, ran.coordinator.state.round) == (1, 3)
    np.testing.assert_array_equal(ran.coordinator.state.best_or_last_model.trunk, [0.25 - 0.5, -4 - 0.5])


@pytest.mark.parametrize(
    ("losses", "best"),
    [((3.0, 2.0, 1.0), 2), ((1.0, 2.0, 3.0), 0), ((None,) * 3, -1)],
    ids=["the_last", "the_first", "none_where_nobody_has_a_loss"],
)
def test_the_best_model_may_be(losses: Sequence[float | None], best: int) -> None:
    ran = run([replace(peer, losses=losses) for peer in ALL], rounds=2)
    assert ran.coordinator.state.best_round == best
    best_or_last = ran.coordinator.state.best_or_last_model
    assert np.array_equal(best_or_last.trunk, ran.model.trunk) == (best != 0)


def test_sites_are_drawn_by_seed_and_round() -> None:
    drawn = [[record.sites for record in run(ALL, rounds=6, seed=s, sites_per_round=2).rounds] for s in (7, 7, 8)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert {site for sites in drawn[0] for site in sites} == set(CLASSES)
    assert all(len(sites) == 2 for sites in drawn[0])


def test_weighting_by_samples_weighs_a_site_by_its_training_images() -> None:
    after = run((NORTH, replace(SOUTH, samples=40)), parameters={"weighting": "samples"}).model
    # (10 * 1 + 40 * 0.5) / 50 = 0.6, for the trunk and for row b; row a is north's alone
    np.testing.assert_allclose(after.trunk, [0.85, -3.4], rtol=1e-6)
    np.testing.assert_allclose(after.head.weight, [[-2 + 1, -1 + 1], [0.6, 1.6]], rtol=1e-6)


def test_a_site_that_says_it_has_a_billion_images_weighs_no_more_than_the_largest_share() -> None:
    claims = (NORTH, replace(SOUTH, samples=10**9))
    after = run(claims, parameters={"weighting": "samples"}, largest_share=0.5).model
    np.testing.assert_allclose(after.trunk, [0.25 + 0.75, -4 + 0.75], rtol=1e-6)  # (10 * 1 + 10 * 0.5) / 20
    believed = run(claims, parameters={"weighting": "samples"}).model
    np.testing.assert_allclose(believed.trunk, [0.75, -3.5], rtol=1e-6)  # 0.5: south alone


def test_bytes_noted_are_those_of_the_payloads() -> None:
    down, up = [], []

    class Scales(Turned):
        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            sent = list(messages)
            down.append(sum(count_payload_bytes(message.content) for message in sent))
            up.append(0)
            return super().push_messages(sent)

        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            replies = super().pull_messages(message_ids)
            up[-1] += sum(count_payload_bytes(message.content) for message in replies)
            return replies

    ran = run(ALL, rounds=2, wire=Scales)
    # Exchanges: roll call, rounds 1 and 2, last validation, test.
    assert [sum(record.bytes_down.values()) for record in ran.rounds] == down[1:3]
    assert [sum(record.bytes_up.values()) for record in ran.rounds] == up[1:3]


def test_a_metric_that_the_plan_does_not_ask_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = Peer.judged

    def more(peer: Peer, request: EvaluateRequest) -> EvaluateReply:
        reply = judged(peer, request)
        names = ("plugin:<b>best</b>",) if peer.site == "south" and request.test else ()
        return replace(reply, metric_names=names, metric_values=(1.0,) * len(names) * len(reply.class_names))

    monkeypatch.setattr(Peer, "judged", more)
    ran = run((EAST, NORTH, replace(SOUTH, tested=("b",))))
    assert set(ran.tested.accepted) == {"east", "north"}
    assert set(ran.tested.absent) == {"south"}
    assert '"plugin:<b>best</b>"' in ran.tested.absent["south"]
