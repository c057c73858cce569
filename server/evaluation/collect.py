"""Load the models that the user names, and make the question by which hospitals score them."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.evaluation.foreign import ModelFile
from polyclinic.common.evaluation.models import ModelToScore, open_models
from polyclinic.common.evaluation.question import (
    EvaluationQuestion,
    GroupColumn,
    SentFile,
    SentModel,
)
from polyclinic.common.evaluation.thresholds import SUMMARY_FILE, make_summary_of_thresholds
from polyclinic.common.models.zoo.spec import DESCRIPTION_FILE, TENSORS_FILE
from polyclinic.common.system.plain_text import format_bytes
from polyclinic.common.wire.evaluation import MAX_MODEL_BYTES


@dataclass(frozen=True)
class QuestionWithModels:
    """A question to hospitals, together with the models to score.

    Attributes:
        question: Names, files and hashes of the models.
        content: The concatenated bytes of all files, in the order of the question.
        models: The loaded models.
    """

    question: EvaluationQuestion
    content: bytes
    models: tuple[ModelToScore, ...]


def make_question(files: Sequence[ModelFile], groups: Sequence[GroupColumn], title: str = "") -> QuestionWithModels:
    """Load the models, and return a question with their files.

    Raises:
        BadInput: If a model cannot be loaded, or the files are too large.
    """
    models = open_models(files)
    contents, sent = list[bytes](), list[SentModel]()
    for file, model in zip(files, models, strict=True):
        parts = dict(_read_files(file))
        described = tuple(
            SentFile(name=name, sha256=hashlib.sha256(content).hexdigest(), size=len(content))
            for name, content in parts.items()
        )
        description = None
        if file.described is not None:
            # Hospitals must not learn paths of this machine.
            description = file.described.model_copy(update={"file": described[0].name, "sha256": described[0].sha256})
        sent.append(SentModel(name=model.name, files=described, described=description))
        contents += parts.values()
    size = sum(map(len, contents))
    if size > MAX_MODEL_BYTES:
        problem = f"have {format_bytes(size)} together; {format_bytes(MAX_MODEL_BYTES)} is the most of one question."
        raise BadInput([Fault("MODEL...", problem, "Ask for fewer models at a time.")])
    question = EvaluationQuestion(title=title, models=tuple(sent), groups=tuple(groups))
    return QuestionWithModels(question, b"".join(contents), tuple(models))


def _read_files(file: ModelFile) -> Iterator[tuple[str, bytes]]:
    """Yield (name, bytes) of each file of a model to send; a run's summary is reduced to its thresholds."""
    if not file.is_run:
        yield f"model{file.file.suffix}", file.file.read_bytes()
        return
    yield DESCRIPTION_FILE, (file.path / DESCRIPTION_FILE).read_bytes()
    yield TENSORS_FILE, (file.path / TENSORS_FILE).read_bytes()
    yield SUMMARY_FILE, make_summary_of_thresholds(file.path)
