"""A meter of what a coordinator asks about a site's images: each answer says something of them, and asking is free.

A round needs one training and one evaluation; a run one test, and one comparison with training alone, of each model
that it ends with. What goes beyond is counted over the whole run, kept over restarts: the guard has sites judge several
models in a round, and a round that is taken back is done again from another model. The same question again gets the
same answer and is not counted, so a coordinator that was killed goes on as before. It is another question where the
answer rests on what the site remembers of an earlier round, and a training has written over that.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import RecordDict

from client.gate.policy_rules import Verdict
from client.gate.requested_work import RequestedWork
from client.site.memory import MemoryFolder
from client.site.policy import Policy
from common.system.files import write_atomically
from common.wire.canonical_bytes import record_sha256

FOLDER = "questions"
KEPT = 200
"""Runs, as many as :data:`client.gate.known_runs.KEPT`; a run that is forgotten begins anew in both."""
SAYS_NOTHING = ("plan", "contract", "left_out", "frozen")
"""Parts of a request on which no answer depends, or that are settled elsewhere: a resumed run may change them."""

KINDS = {"TrainRequest": "train", "EvaluateRequest": "evaluate", "BenefitRequest": "benefit"}
ONCE = {"test": "tested", "benefit": "compared"}
"""Kinds of which there is one for each model that a run ends with, and what was done then."""
TRAINED = "trained"
"""Kind of a line about a training that was answered; one of kind ``train`` may have failed."""


class Question(NamedTuple):
    """What one request asks.

    Attributes:
        kind: ``train``, ``evaluate``, ``test`` or ``benefit``.
        digest: SHA-256 of all that its answer depends on: of the request, of the site's memory, and the plan's rounds
            where it depends on these.
    """

    kind: str
    round: int
    digest: str


def question_of(
    fields: Mapping[str, Any], content: RecordDict, asked: RequestedWork, memory: MemoryFolder
) -> Question | None:
    """The question of a request; None for one that is not about images, or cannot be read: its handler says why.

    Args:
        memory: Of the run.
    """
    server_round = fields.get("round", 0)
    kind = KINDS.get(str(fields.get("wire.record")))
    if kind is None or type(server_round) is not int:
        return None
    kind = "test" if kind == "evaluate" and fields.get("test") else kind
    digest = record_sha256(content, SAYS_NOTHING)
    if kind == "train" and asked.plan.training.schedule != "constant":
        digest = f"{digest}-{asked.plan.run.rounds}"  # the learning rate follows from them
    counted = fields.get("counted")
    if type(counted) is int and (kind == "train" or asked.method.keeps_local_parts):
        digest = f"{digest}-{memory.digest(counted).hex()}"
    return Question(kind, server_round, digest)


class QuestionMeter:
    """The questions of one run that a site answers, in its state folder."""

    def __init__(self, folder: Path, run: str, *, durable: bool = True) -> None:
        self._path, self._durable = folder / FOLDER / f"{run}.txt", durable

    def verdict(self, policy: Policy, question: Question) -> Verdict:
        """Whether the site answers; if so, the question is on the disk before the work begins."""
        most = policy.extra_questions
        if most is None:
            return Verdict("policy")
        answered = self._answered()
        if question in answered:
            return Verdict("policy")
        if reason := _fault(answered, question, most):
            return Verdict("policy.extra_questions", reason)
        self._write([*answered, question])
        return Verdict("policy")

    def note_answered(self, question: Question) -> None:
        """Note that a training was done: only then a test of another model follows."""
        done = question._replace(kind=TRAINED)
        if question.kind == "train" and done not in (answered := self._answered()):
            self._write([*answered, done])

    def _answered(self) -> list[Question]:
        try:
            lines = self._path.read_text(encoding="ascii").splitlines()
        except FileNotFoundError:
            return []
        split = (line.split() for line in lines)
        return [Question(kind, int(server_round), digest) for kind, server_round, digest in split]

    def _write(self, questions: list[Question]) -> None:
        text = "".join(f"{one.kind} {one.round} {one.digest}\n" for one in questions)
        write_atomically(self._path, text.encode(), durable=self._durable)
        runs = sorted(self._path.parent.glob("*.txt"), key=lambda path: path.stat().st_mtime)
        for path in runs[:-KEPT]:
            path.unlink()


def _fault(answered: list[Question], question: Question, most: int) -> str:
    """Why a question that was not asked before is not answered; empty where it is."""
    if done := ONCE.get(question.kind):
        last = max((one.round for one in answered if one.kind == question.kind), default=-1)
        trained = any(last < one.round <= question.round for one in answered if one.kind == TRAINED)
        if last < 0 or (question.round > last and trained):
            return ""
        return f"the model of round {last} was {done}, and none after it was trained here"
    others = [(one.kind, one.round) for one in answered if one.kind not in (*ONCE, TRAINED)]
    extra = len(others) - len(set(others))
    if (question.kind, question.round) not in others or extra < most:
        return ""
    return f"it is {most}, and this run has asked so much beyond one training and one evaluation a round"
