"""Ask hospitals to score models on their test images."""

from collections.abc import Mapping
from dataclasses import dataclass

from polyclinic.common.evaluation.evaluation import Evaluation
from polyclinic.common.wire.evaluation import ScoringReply, make_scoring_request
from polyclinic.common.wire.fleet_protocol import SCORING_TYPE
from polyclinic.server.evaluation.collect import QuestionWithModels
from polyclinic.server.evaluation.pool import pool_answers
from polyclinic.server.questions.exchange import QuestionExchange, make_question_run

RUN_NAME_PREFIX = "evaluate"
"""Prefix of the run name under which a question is asked."""


@dataclass(frozen=True)
class NetworkEvaluation:
    """The evaluation of models at connected hospitals.

    Attributes:
        evaluation: Figures of the hospitals that answered, and pooled figures.
        silent: Site -> reason for its missing answer.
    """

    evaluation: Evaluation
    silent: Mapping[str, str]


def ask_for_figures(exchange: QuestionExchange, question: QuestionWithModels) -> NetworkEvaluation:
    """Send models to the connected hospitals, and pool the figures in their answers."""
    text = question.question.model_dump_json()
    request = make_scoring_request(make_question_run(RUN_NAME_PREFIX), text, question.content)
    answers = exchange.ask_connected_sites(request, SCORING_TYPE, ScoringReply)
    return NetworkEvaluation(pool_answers(question, answers.answers, answers.silent), answers.silent)
