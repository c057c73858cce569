"""Read a run folder into typed records, for reports and comparisons."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, ValidationError

from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.system.toml import describe_validation_error
from polyclinic.server.runs.schema import RoundFileLine, RunFileModel, RunSummary

SAMPLES = "samples.json"


class SampleImage(RunFileModel):
    """One test image with its prediction, for the report.

    Attributes:
        kind: Kind of prediction: ``found``, ``missed`` or ``false alarm``.
        probability: Predicted probability of the class.
        truth: True classes of the image.
        png: The downsized image as PNG in base64.
    """

    kind: str
    probability: float
    truth: tuple[str, ...]
    png: Annotated[str, Field(pattern=r"^[A-Za-z0-9+/=]+$")]


class ClassSampleImages(RunFileModel):
    """The sample images of one class, for the report."""

    name: str
    samples: tuple[SampleImage, ...]


class SampleOutline(RunFileModel):
    """A test image with the outlined and the predicted area of a class, for the report.

    Attributes:
        dice: Dice of this image alone.
        png: The picture, or a slice of the volume, with both borders, as PNG in base64.
    """

    dice: float
    png: Annotated[str, Field(pattern=r"^[A-Za-z0-9+/=]+$")]


class ClassOutlines(RunFileModel):
    """The outlines of one class, for the report, the best first."""

    name: str
    samples: tuple[SampleOutline, ...]


class ReportSampleImages(RunFileModel):
    """The content of ``samples.json``, which only simulated runs have; without it, the report shows no images.

    Attributes:
        classes_left_out: Number of classes without sample images.
        examined: Number of test images from which the samples were chosen.
        outlines: Of a segmentation, the outlines of each class; ``classes`` is empty then.
    """

    classes: tuple[ClassSampleImages, ...] = ()
    outlines: tuple[ClassOutlines, ...] = ()
    classes_left_out: int = 0
    examined: int = 0


@dataclass(frozen=True)
class RunFolderContent:
    """The files of a run folder as typed records."""

    folder: Path
    summary: RunSummary
    rounds: tuple[RoundFileLine, ...]
    samples: ReportSampleImages | None = None

    @cached_property
    def round_count_by_site(self) -> dict[str, int]:
        """Return site -> number of rounds in which the site took part."""
        counts = Counter[str]()
        for line in self.rounds:
            counts.update(line.sites)
        return {name: counts[name] for name in self.summary.sites}


def read_rounds(folder: Path) -> tuple[RoundFileLine, ...]:
    """Read ``rounds.jsonl`` of a run that is about to end; the result is empty if no round has ended.

    Raises:
        BadInput: If a line is invalid.
    """
    path = folder / "rounds.jsonl"
    return parse_round_lines(path, path.read_text(encoding="utf-8")) if path.exists() else ()


def parse_round_lines(path: Path, text: str) -> tuple[RoundFileLine, ...]:
    """Parse the lines of ``rounds.jsonl``.

    Raises:
        BadInput: If a line is invalid.
    """
    lines = {f"{path} line {n}": line for n, line in enumerate(text.splitlines(), start=1) if line.strip()}
    return tuple(_parse_json_records(RoundFileLine, lines))


def read_run(folder: Path) -> RunFolderContent:
    """Read ``summary.json``, ``rounds.jsonl`` and, if it exists, ``samples.json``.

    Raises:
        BadInput: If a file is missing or invalid, with every fault.
    """
    faults: list[Fault] = []

    def read_run_file_text(path: Path) -> str:
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            problem = f"cannot be read ({error.strerror})." if isinstance(error, OSError) else "is not UTF-8 text."
            faults.append(Fault(str(path), problem, "Name the folder of a finished run."))
            return ""

    paths = folder / "summary.json", folder / "rounds.jsonl"
    summary_text, rounds_text = map(read_run_file_text, paths)
    raise_faults(faults)
    (summary,) = _parse_json_records(RunSummary, {str(paths[0]): summary_text})
    rounds = parse_round_lines(paths[1], rounds_text)
    path = folder / SAMPLES
    texts = {str(path): read_run_file_text(path)} if path.exists() else {}
    raise_faults(faults)
    samples = _parse_json_records(ReportSampleImages, texts)
    return RunFolderContent(folder, summary, rounds, *samples)


_R = TypeVar("_R", bound=RunFileModel)


def _parse_json_records(record: type[_R], texts: Mapping[str, str]) -> list[_R]:
    """Parse JSON texts into records; the keys of ``texts`` name the places in error messages."""
    records = []
    for where, text in texts.items():
        try:
            records.append(record.model_validate_json(text))
        except ValidationError as error:
            remedy = "Was it written by this program and left as it was?"
            raise BadInput(
                Fault(
                    f"{where}: {'.'.join(map(str, fault['loc'])) or 'the whole file'}",
                    describe_validation_error(dict(fault)),
                    remedy,
                )
                for fault in error.errors(include_url=False)
            ) from None
    return records
