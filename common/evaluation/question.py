"""The question of ``flwr-server evaluate``: the models that hospitals score, each file with its hash; read without
torch.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from polyclinic.common.evaluation.foreign import TORCH_EXPORT_RISK, ForeignModel, ModelFormat
from polyclinic.common.evaluation.groups import Grouping
from polyclinic.common.evaluation.thresholds import SUMMARY_FILE
from polyclinic.common.models.zoo.spec import DESCRIPTION_FILE, TENSORS_FILE, Sha256
from polyclinic.common.system.plain_names import PlainName
from polyclinic.common.system.plain_text import is_plain_text
from polyclinic.common.system.toml import TomlSection, parse_json_section
from polyclinic.common.wire.evaluation import MAX_MODEL_BYTES

MAX_MODELS = 20
MAX_MODEL_NAME_CHARACTERS = 200
RUN_FILES = (DESCRIPTION_FILE, TENSORS_FILE, SUMMARY_FILE)
"""Files of a run's model. The summary is reduced to the thresholds that the run chose."""

GroupColumn = Literal["sex", "age"]
GROUPINGS: Mapping[GroupColumn, Grouping] = {"sex": Grouping("sex"), "age": Grouping("age", (40, 65))}
"""Subgroups that a question can request. The program fixes the cut points, so no question can single out a patient."""
GROUP_COLUMNS: tuple[GroupColumn, ...] = get_args(GroupColumn)


class SentFile(TomlSection):
    """A file of a model that the coordinator sends.

    Attributes:
        name: Name of the file.
        sha256: Hash of the file; the hospital refuses a file with another hash.
        size: Size in bytes.
    """

    name: Annotated[str, Field(max_length=MAX_MODEL_NAME_CHARACTERS)]
    sha256: Sha256
    size: Annotated[int, Field(ge=0, le=MAX_MODEL_BYTES)]

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        return str(PlainName(name))


class SentModel(TomlSection):
    """A model that the coordinator sends for scoring.

    Attributes:
        name: Name in tables.
        files: The :data:`RUN_FILES` of a run, or the single file of another model.
        described: The user's description of a model that another program trained; None for a model that describes
            itself.
    """

    name: Annotated[str, Field(min_length=1, max_length=MAX_MODEL_NAME_CHARACTERS)]
    files: Annotated[tuple[SentFile, ...], Field(min_length=1, max_length=len(RUN_FILES))]
    described: ForeignModel | None = None

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not is_plain_text(name):
            raise ValueError("has characters that cannot be printed")
        return name

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        names = [file.name for file in self.files]
        if self.described is not None:
            if self.described.format is ModelFormat.torch_export:
                raise ValueError(f"a .pt2 file is not scored over the network: {TORCH_EXPORT_RISK}")
            if names != [self.described.file] or self.described.sha256 != self.files[0].sha256:
                raise ValueError("expected the one file that the description names, with its hash")
        elif not self.is_run and not (len(names) == 1 and names[0].endswith(ModelFormat.onnx)):
            raise ValueError(f"expected {', '.join(RUN_FILES)}, or one {ModelFormat.onnx.value} file")
        return self

    @property
    def is_run(self) -> bool:
        """True for the model of a run's folder, False for a model file."""
        return self.described is None and [file.name for file in self.files] == list(RUN_FILES)

    @property
    def sha256(self) -> str:
        """Hash of the file with the model's numbers; a hospital's policy lists models by this hash."""
        return self.files[RUN_FILES.index(TENSORS_FILE)].sha256 if self.is_run else self.files[0].sha256


class EvaluationQuestion(TomlSection):
    """The text that hospitals receive together with the models' files, and that people there approve.

    Attributes:
        title: The question in words, for people.
        models: The models to score.
        groups: Columns that define subgroups.
    """

    title: Annotated[str, Field(max_length=200)] = ""
    models: Annotated[tuple[SentModel, ...], Field(min_length=1, max_length=MAX_MODELS)]
    groups: tuple[GroupColumn, ...] = ()

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        names = [model.name for model in self.models]
        if len(set(names)) < len(names):
            raise ValueError("each model must have a name of its own")
        if not is_plain_text(self.title):
            raise ValueError("title: has characters that cannot be printed")
        return self

    @property
    def files(self) -> list[SentFile]:
        """The files of all models, in the order in which their bytes are sent."""
        return [file for model in self.models for file in model.files]

    def split_content(self, content: bytes) -> Iterator[tuple[SentFile, memoryview]]:
        """Yield each file with its bytes.

        Args:
            content: The bytes of all files, one after another.
        """
        view = memoryview(content)
        start = 0
        for file in self.files:
            yield file, view[start : start + file.size]
            start += file.size

    def find_content_fault(self, content: bytes) -> str:
        """Return the reason if the files do not have the sizes and hashes of the question; empty if they have.

        Args:
            content: The bytes of all files, one after another.
        """
        if len(content) != sum(file.size for file in self.files):
            return f"its files have {len(content):,} bytes, and the question names others"
        for file, part in self.split_content(content):
            if (actual := hashlib.sha256(part).hexdigest()) != file.sha256:
                return f"{file.name} has SHA-256 {actual}, and the question names {file.sha256}: it was changed"
        return ""

    def list_architectures(self, content: bytes) -> list[str]:
        """Return the name of each network that the hospital has to build; an ONNX file contains its network.

        Args:
            content: The bytes of all files; sizes and hashes must have been checked.

        Raises:
            ValueError: If a run's description names no network.
        """
        parts = list(self.split_content(content))
        names = list[str]()
        for model in self.models:
            model_parts = parts[: len(model.files)]
            parts = parts[len(model.files) :]
            if model.described is not None and model.described.architecture:
                names.append(model.described.architecture)
            if model.is_run:
                try:
                    names.append(str(json.loads(bytes(model_parts[0][1]))["model"]["architecture"]))
                except (ValueError, KeyError, TypeError, RecursionError):
                    raise ValueError(f"{DESCRIPTION_FILE} of {model.name} names no network") from None
        return names


def parse_evaluation_question(text: str) -> EvaluationQuestion:
    """Parse a question from the JSON text of a coordinator.

    Raises:
        ValueError: With a short reason, if the text is not a valid question.
    """
    return parse_json_section(EvaluationQuestion, text, "the question")
