"""Ask hospitals to score models: one question, answered once by each."""

from collections.abc import Mapping
from dataclasses import dataclass

from polyclinic.common.evaluation.evaluation import Evaluation
from polyclinic.common.wire.evaluation import ScoringReply, make_scoring_request
from polyclinic.common.wire.fleet_protocol import SCORING_TYPE
from polyclinic.server.evaluation.collect import QuestionWithModels
from polyclinic.server.evaluation.pool import pool_answers
from polyclinic.server.questions.exchange import QuestionExchange, make_question_run

RUN = "evaluate"
"""Beginning of the run's name of a question."""


@dataclass(frozen=True)
class NetworkEvaluation:
    """The figures of the hospitals that answered.

    Attributes:
        silent: Site -> why it has no answer.
    """

    evaluation: Evaluation
    silent: Mapping[str, str]


def ask_for_figures(exchange: QuestionExchange, asked: QuestionWithModels) -> NetworkEvaluation:
    """Send the models to the connected hospitals, and pool their answers."""
    text = asked.question.model_dump_json()
    request = make_scoring_request(make_question_run(RUN), text, asked.content)
    answers = exchange.ask_connected_sites(request, SCORING_TYPE, ScoringReply)
    return NetworkEvaluation(pool_answers(asked, answers.answers, answers.silent), answers.silent)
