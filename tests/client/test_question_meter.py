"""What a site answers in one run, asked through its gate as a coordinator over the network would."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity

from client.gate.question_meter import FOLDER, KEPT
from client.site.policy import Policy
from client.site.site import Site
from common.config import Plan
from common.models.state import ModelState
from common.wire.codec import decode, encode
from common.wire.records import EvaluateReply, EvaluateRequest, Groups, TrainReply
from tests.client.gates import asked, log
from tests.client.rounds import beginning, evaluation, plan, request, site

OF = plan("surgical", {}, lr=0.01, batch_size=64)
DECLINED = "declines: policy.extra_questions:"


@pytest.fixture(autouse=True)
def _flower_knows_where_it_is() -> None:
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # read by Message() to fill its metadata


def metered(folder: Path, extra: int) -> Site:
    return site(folder, smallest_count=0, extra_questions=extra)


def another(model: ModelState, by: float) -> ModelState:
    return replace(model, trunk=model.trunk + np.float32(by))


def trains(at: Site, model: ModelState, server_round: int = 1) -> Message:
    return asked(at, "train", encode(request(OF, model, server_round)))


def judges(at: Site, model: ModelState, server_round: int = 1, *, test: bool = False) -> Message:
    wanted = evaluation(OF, model, server_round, 0, -1)
    return asked(at, "evaluate", encode(replace(wanted, test=test)))


def reason(message: Message) -> str:
    return str(message.error.reason) if message.has_error() else ""


def test_a_round_has_one_training_and_one_evaluation_and_the_next_its_own(tmp_path: Path) -> None:
    at, model = metered(tmp_path, 0), beginning(OF)
    assert [reason(trains(at, model)), reason(judges(at, model))] == ["", ""]
    assert reason(trains(at, another(model, 0.1))).startswith(DECLINED)
    assert reason(judges(at, another(model, 0.1))).startswith(DECLINED)
    assert [reason(trains(at, another(model, 0.1), 2)), reason(judges(at, another(model, 0.1), 2))] == ["", ""]
    assert [entry["rule"] for entry in log(at) if entry.get("decision") == "deny"] == ["policy.extra_questions"] * 2


def test_the_same_question_again_gets_the_same_answer_and_costs_nothing(tmp_path: Path) -> None:
    """A coordinator that was killed asks a round again."""
    at, model = metered(tmp_path, 0), beginning(OF)
    first, again = (decode(trains(at, model).content, TrainReply) for _ in range(2))
    assert first.update.trunk is not None
    assert again.update.trunk is not None
    assert first.update.trunk.tolist() == again.update.trunk.tolist()
    resumed = replace(request(OF, model), left_out="it came too late", contract="with a late joiner")
    assert not asked(at, "train", encode(resumed)).has_error()


def test_questions_beyond_are_counted_over_the_whole_run_and_over_restarts(tmp_path: Path) -> None:
    at, model = metered(tmp_path, 2), beginning(OF)
    assert [reason(judges(at, another(model, by / 10))) for by in range(3)] == [""] * 3
    restarted = metered(tmp_path, 2)
    assert reason(judges(restarted, another(model, 1), 1)).startswith(DECLINED)
    assert reason(judges(restarted, another(model, 1), 2)) == ""
    assert reason(judges(restarted, another(model, 2), 2)).startswith(DECLINED)


def test_a_model_is_tested_once_and_again_only_when_it_was_trained_further(tmp_path: Path) -> None:
    at, model = metered(tmp_path, 40), beginning(OF)
    assert reason(judges(at, model, 1, test=True)) == ""
    assert "the model of round 1 was tested" in reason(judges(at, another(model, 0.1), 1, test=True))
    trains(at, model, 2)
    assert reason(judges(at, another(model, 0.1), 2, test=True)) == ""
    assert "the model of round 2 was tested" in reason(judges(at, another(model, 0.1), 1, test=True))


def test_a_later_round_number_alone_gets_no_second_test(tmp_path: Path) -> None:
    at, model = metered(tmp_path, 40), beginning(OF)
    trains(at, model)
    assert reason(judges(at, model, 1, test=True)) == ""
    for server_round in (2, 3, 20):
        assert "none after it was trained here" in reason(judges(at, model, server_round, test=True))
    trains(at, model, 4)
    assert reason(judges(at, model, 4, test=True)) == ""


def test_a_training_that_cannot_be_done_gets_no_second_test(tmp_path: Path) -> None:
    at, model = metered(tmp_path, 0), beginning(OF)
    trains(at, model)
    assert reason(judges(at, model, 1, test=True)) == ""
    assert model.trunk is not None
    assert reason_or_error(at, replace(model, trunk=model.trunk[:-1]), 2) != ""
    assert "none after it was trained here" in reason(judges(at, another(model, 0.1), 2, test=True))
    assert "none after it was trained here" in reason(judges(metered(tmp_path, 0), another(model, 0.1), 2, test=True))


def reason_or_error(at: Site, model: ModelState, server_round: int) -> str:
    try:
        return reason(trains(at, model, server_round))
    except (ValueError, RuntimeError) as error:
        return str(error)


def test_questions_of_old_runs_are_forgotten_with_the_runs(tmp_path: Path) -> None:
    at = metered(tmp_path, 0)
    (tmp_path / FOLDER).mkdir()
    for number in range(KEPT + 5):
        (tmp_path / FOLDER / f"old-{number}.txt").write_text("", encoding="ascii")
    trains(at, beginning(OF))
    assert len(list((tmp_path / FOLDER).iterdir())) == KEPT


def test_with_no_limit_nothing_is_kept(tmp_path: Path) -> None:
    at = site(tmp_path, smallest_count=0)
    assert [reason(judges(at, another(beginning(OF), by))) for by in range(4)] == [""] * 4
    assert not (tmp_path / FOLDER).exists()


# ---------------------------------------------------------------------- figures that leave


def standard(folder: Path) -> Site:
    return replace(site(folder), policy=Policy(smallest_count=0))


def said(message: Message) -> EvaluateReply:
    return decode(message.content, EvaluateReply)


def test_the_first_model_of_a_run_has_a_loss_and_no_test_and_one_that_jumped_has_neither(tmp_path: Path) -> None:
    at, model = standard(tmp_path), beginning(OF)
    first = said(judges(at, model, test=True))
    assert (first.validation_loss is not None, first.class_names) == (True, ())
    told = []
    for number, model_of_round in ((1, model), (2, another(model, 1e-4)), (3, another(model, 2e-4))):
        trains(at, model_of_round, number)
    for number, by in ((3, 1.0), (4, 3e-4)):
        trains(at, another(model, 2e-4), number)
        told.append(said(judges(at, another(model, by), number, test=True)))
    assert [one.validation_loss is not None for one in told] == [False, True]
    assert [bool(one.class_names) for one in told] == [False, True]


@pytest.mark.parametrize(("schedule", "answered"), [("constant", 4), ("cosine", 1)])
def test_other_rounds_in_the_plan_are_another_question_where_the_learning_rate_follows_from_them(
    schedule: str, answered: int, tmp_path: Path
) -> None:
    at, updates = metered(tmp_path, 0), set()
    for rounds in (4, 6, 10, 50):
        tree = OF.model_dump(mode="json")
        tree["run"]["rounds"], tree["training"]["schedule"] = rounds, schedule
        reply = asked(at, "train", encode(request(Plan.model_validate(tree), beginning(OF), 2)))
        if not reply.has_error():
            updates.add((rounds, decode(reply.content, TrainReply).update.trunk.tobytes()))  # type: ignore[union-attr]
    assert len(updates) == answered
    assert len({update for _, update in updates}) == 1


def test_a_crafted_model_does_not_become_the_one_that_the_next_is_measured_by(tmp_path: Path) -> None:
    at = standard(tmp_path)
    for server_round in (1, 2):
        trains(at, another(beginning(OF), server_round * 1e-5), server_round)
    crafted = replace(beginning(OF), trunk=np.zeros_like(beginning(OF).trunk))
    for server_round in (3, 4):
        told = decode(trains(at, crafted, server_round).content, TrainReply)
        assert (told.validation_loss, told.validation_auroc, told.train_loss) == (None, None, None)


def test_whether_figures_leave_says_nothing_of_how_far_the_own_training_went(tmp_path: Path) -> None:
    """Own training moves models by its learning rate, from nothing to far; judged models are in between."""
    told = set()
    for rate in (1e-12, 1e-3, 1e-1):
        at, of = standard(tmp_path / str(rate)), plan("surgical", {}, lr=rate, batch_size=64, optimizer="sgd")
        for server_round, by in ((1, 0.0), (2, 1e-3)):
            asked(at, "train", encode(request(of, another(beginning(of), by), server_round)))
        judged = [evaluation(of, another(beginning(of), by), 2, 2, -1) for by in (2e-3, 9e-3, 1e-1, 1.0, 10.0)]
        replies = [said(asked(at, "evaluate", encode(replace(one, test=False)))) for one in judged]
        told.add(tuple(one.validation_loss is not None for one in replies))
    assert told == {(True, True, False, False, False)}


def test_noise_of_two_functions_of_one_model_does_not_cancel_out(tmp_path: Path) -> None:
    """A plan that shows the same network other pixels, or judges it otherwise, asks something else."""
    at, model = standard(tmp_path), beginning(OF)
    model.trunk[:], model.head.weight[:], model.head.bias[:] = 0, 0, 0  # so that pixels make no difference
    losses = [said(judges(at, model)).validation_loss]
    tree = OF.model_dump(mode="json")
    for number, changed in enumerate(({"mean": [0.3]}, {"std": [0.2]})):
        of = Plan.model_validate({**tree, "model": {**tree["model"], **changed}})
        wanted = replace(evaluation(of, model, 1, 0, -1), run=f"other-{number}", test=False)
        losses.append(said(asked(at, "evaluate", encode(wanted))).validation_loss)
    assert len(set(losses)) == 3


def test_the_loss_of_a_model_that_is_sure_of_a_class_is_no_count_and_the_same_each_time(tmp_path: Path) -> None:
    at, model = standard(tmp_path), beginning(OF)
    model.trunk[:], model.head.weight[:], model.head.bias[:] = 0, 0, 0
    model.head.bias[0] = 30.0
    told = said(judges(at, model))
    again = said(judges(at, model, 2))
    assert told.validation_loss == again.validation_loss
    assert told.validation_loss is not None
    exact = said(judges(site(tmp_path / "exact", smallest_count=0), model)).validation_loss
    assert exact is not None
    assert exact > 2  # 30 for each image without the class, over two classes
    # The noise follows from a secret of each hospital, and may be small at one of them.
    others = [said(judges(standard(tmp_path / str(secret)), model)).validation_loss for secret in range(6)]
    assert sum(abs(loss - exact) > 0.3 for loss in others if loss is not None) >= 3


def test_of_hidden_classes_no_head_row_moves_and_no_loss_depends_on_them(tmp_path: Path) -> None:
    """Class a has fewer than 20 patients who show it, b has not."""
    at = replace(site(tmp_path), policy=Policy(smallest_count=1))
    labels = at.train.labels.copy()
    labels[:, 1] = 0
    labels[:3, 1] = 1
    few = replace(at, train=replace(at.train, labels=labels), policy=Policy(smallest_count=4))
    assert few.hides("train") == {"a"}
    update = decode(trains(few, beginning(OF)).content, TrainReply).update
    assert isinstance(update, Groups)
    assert update.head is not None
    moved = np.abs(update.head.weight).sum(axis=1) + np.abs(update.head.bias)
    assert [bool(value) for value in moved] == [True, False]
    allowed = replace(few, folder=tmp_path / "allowed", policy=Policy(smallest_count=4, train_hidden_classes=True))
    update = decode(trains(allowed, beginning(OF)).content, TrainReply).update
    assert update.head is not None
    assert np.abs(update.head.bias).all()


def test_evaluate_requests_of_the_guard_are_counted_too(tmp_path: Path) -> None:
    at, model = metered(tmp_path, 1), beginning(OF)
    assert isinstance(evaluation(OF, model, 1, 0, -1), EvaluateRequest)
    assert [bool(reason(judges(at, another(model, by)))) for by in (0.0, 0.1, 0.2)] == [False, False, True]


def test_a_question_about_parts_at_the_site_is_another_once_a_training_wrote_over_them(tmp_path: Path) -> None:
    """Of one question there were a hundred answers, each with noise of its own: their mean has little."""
    of = plan("pfl", {}, lr=0.01, batch_size=64)
    at, model = metered(tmp_path, 3), beginning(of)

    def own_parts(number: float) -> None:
        head = replace(model.head, weight=model.head.weight + np.float32(number))
        assert not asked(at, "train", encode(request(of, replace(model, head=head)))).has_error()

    def judged(*, test: bool) -> str:
        return reason(asked(at, "evaluate", encode(replace(evaluation(of, model, 1, 1, -1), test=test))))

    own_parts(0.0)
    assert [judged(test=False), judged(test=True), judged(test=False), judged(test=True)] == [""] * 4
    own_parts(1.0)
    assert judged(test=False) == ""
    assert "the model of round 1 was tested" in judged(test=True)
    own_parts(2.0)  # with two more trainings and one more evaluation the three are used up
    assert judged(test=False).startswith(DECLINED)


def test_a_round_that_is_done_again_after_a_kill_is_no_other_question(tmp_path: Path) -> None:
    of = plan("pfl", {}, lr=0.01, batch_size=64)
    at, model = metered(tmp_path, 0), beginning(of)
    for _ in range(2):
        assert reason(asked(at, "train", encode(request(of, model)))) == ""
        assert reason(asked(at, "evaluate", encode(evaluation(of, model, 1, 1, -1)))) == ""
