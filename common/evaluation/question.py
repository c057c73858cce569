"""The question of ``flwr-server evaluate``: which models hospitals score, each file by its hash; read without torch."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from polyclinic.common.evaluation.foreign import WHY_TRUST, ForeignModel, ModelFormat
from polyclinic.common.evaluation.groups import Grouping
from polyclinic.common.evaluation.thresholds import SUMMARY
from polyclinic.common.models.zoo.spec import DESCRIPTION, TENSORS, Sha256
from polyclinic.common.system.plain_names import PlainName
from polyclinic.common.system.plain_text import is_plain_text
from polyclinic.common.system.toml import TomlSection, parse_json_section
from polyclinic.common.wire.evaluation import MOST_MODEL_BYTES

MOST_MODELS = 20
LONGEST_NAME = 200
RUN_FILES = (DESCRIPTION, TENSORS, SUMMARY)
"""Files of a run's model; the summary has the thresholds that the run chose, and nothing else."""

GroupColumn = Literal["sex", "age"]
GROUPINGS: Mapping[GroupColumn, Grouping] = {"sex": Grouping("sex"), "age": Grouping("age", (40, 65))}
"""Subgroups that a question can ask for. Cut points are the product's, so that no question can single out a patient."""
GROUP_COLUMNS: tuple[GroupColumn, ...] = get_args(GroupColumn)


class SentFile(TomlSection):
    """A file of a model.

    Attributes:
        sha256: Its hash, by which the hospital refuses any other file.
        size: Its bytes.
    """

    name: Annotated[str, Field(max_length=LONGEST_NAME)]
    sha256: Sha256
    size: Annotated[int, Field(ge=0, le=MOST_MODEL_BYTES)]

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        return str(PlainName(name))


class SentModel(TomlSection):
    """A model that hospitals score.

    Attributes:
        name: Its name in tables.
        files: :data:`RUN_FILES` of a run, or the one file of another model.
        described: What the user states of a model of somebody else; None for a model that describes itself.
    """

    name: Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
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
                raise ValueError(f"a .pt2 file is not scored over the network: {WHY_TRUST}")
            if names != [self.described.file] or self.described.sha256 != self.files[0].sha256:
                raise ValueError("expected the one file that the description names, with its hash")
        elif not self.is_run and not (len(names) == 1 and names[0].endswith(ModelFormat.onnx)):
            raise ValueError(f"expected {', '.join(RUN_FILES)}, or one {ModelFormat.onnx.value} file")
        return self

    @property
    def is_run(self) -> bool:
        """True for the model of a run's folder, False for a model file that somebody describes."""
        return self.described is None and [file.name for file in self.files] == list(RUN_FILES)

    @property
    def sha256(self) -> str:
        """Hash of the file with the model's numbers, by which a hospital's policy lists the model."""
        return self.files[RUN_FILES.index(TENSORS)].sha256 if self.is_run else self.files[0].sha256


class EvaluationQuestion(TomlSection):
    """What the hospitals receive beside the files; people approve this text.

    Attributes:
        title: For people.
        groups: Columns by which there are subgroups.
    """

    title: Annotated[str, Field(max_length=200)] = ""
    models: Annotated[tuple[SentModel, ...], Field(min_length=1, max_length=MOST_MODELS)]
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
        place = 0
        for file in self.files:
            yield file, view[place : place + file.size]
            place += file.size

    def find_content_fault(self, content: bytes) -> str:
        """Return why the files are not those that the question names, by size and SHA-256; empty if they are."""
        if len(content) != sum(file.size for file in self.files):
            return f"its files have {len(content):,} bytes, and the question names others"
        for file, part in self.split_content(content):
            if (actual := hashlib.sha256(part).hexdigest()) != file.sha256:
                return f"{file.name} has SHA-256 {actual}, and the question names {file.sha256}: it was changed"
        return ""

    def list_architectures(self, content: bytes) -> list[str]:
        """Return the name of each network that is built here; an ONNX file holds its own.

        Args:
            content: The bytes of all files, which are those that the question names.

        Raises:
            ValueError: If a run's description names none.
        """
        parts = list(self.split_content(content))
        names = list[str]()
        for model in self.models:
            own = parts[: len(model.files)]
            parts = parts[len(model.files) :]
            if model.described is not None and model.described.architecture:
                names.append(model.described.architecture)
            if model.is_run:
                try:
                    names.append(str(json.loads(bytes(own[0][1]))["model"]["architecture"]))
                except (ValueError, KeyError, TypeError, RecursionError):
                    raise ValueError(f"{DESCRIPTION} of {model.name} names no network") from None
        return names


def parse_evaluation_question(text: str) -> EvaluationQuestion:
    """Parse a question that came from a coordinator.

    Raises:
        ValueError: If it is no question, with a short reason.
    """
    return parse_json_section(EvaluationQuestion, text, "the question")
