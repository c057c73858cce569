"""The results file of the benchmark: one JSON line a finished run, so that a kill loses only what was at work."""

import ast
import hashlib
import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from common.errors import BadInput, Fault
from server.analysis.benchmark.spec import Planned
from server.runs.reader import Run

Interval = tuple[float, float]
_ROOT = Path(__file__).parents[3]
DECIDE = ("common/data", "common/metrics", "common/models", "strategies", "client/training")
"""Where the code is that decides what a run ends with."""


class ClassResult(BaseModel):
    """One class of one run, on the test part."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    positives: int
    negatives: int
    auroc: float | None
    average_precision: float | None
    balanced_accuracy: float | None
    interval: Interval | None = None


class ResultLine(BaseModel):
    """One finished run.

    Attributes:
        key: Of the run's settings.
        code: Of the code that decides what a run ends with.
        validation_auroc: The best round's mean over the sites; a learning rate is chosen by it.
        interval: Of the mean AUROC over all classes, over the test part's patients; None where sites have own models.
        cpu_seconds: Of the run's process.
        megabytes: Sent and received by all sites.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    key: str
    code: str
    data: str
    pattern: str
    method: str
    lr: float
    seed: int
    tuning: bool
    validation_auroc: float | None
    classes: dict[str, ClassResult]
    interval: Interval | None
    best_round: int | None
    rounds: int
    cpu_seconds: float
    megabytes: float


def line_of(planned: Planned, run: Run, cpu_seconds: float) -> ResultLine:
    """What a finished run leaves."""
    test = run.summary.test
    intervals = test.intervals.per_class if test.intervals else {}
    validated = [each.validation_auroc for each in run.rounds if each.validation_auroc is not None]
    return ResultLine(
        key=planned.key,
        code=code_version(),
        data=planned.data,
        pattern=planned.pattern,
        method=planned.method,
        lr=planned.lr,
        seed=planned.seed,
        tuning=planned.tuning,
        validation_auroc=_rounded(max(validated, default=None)),
        classes={
            name: ClassResult(
                positives=each.positives or 0,
                negatives=each.negatives or 0,
                auroc=_rounded(each.auroc),
                average_precision=_rounded(each.average_precision),
                balanced_accuracy=_rounded(each.balanced_accuracy),
                interval=_ends(intervals.get(name)),
            )
            for name, each in test.per_class.items()
        },
        interval=_ends(test.intervals.mean_auroc if test.intervals else None),
        best_round=run.summary.best_round,
        rounds=run.summary.rounds,
        cpu_seconds=round(cpu_seconds, 2),
        megabytes=round(sum((s.bytes_up or 0) + (s.bytes_down or 0) for s in run.summary.sites.values()) / 1e6, 3),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def _ends(interval: Interval | None) -> Interval | None:
    return None if interval is None else (round(interval[0], 5), round(interval[1], 5))


def read_lines(path: Path) -> dict[str, ResultLine]:
    """The finished runs by key; of two with one key the later. What a kill left half written at the end is left out.

    Raises:
        BadInput: If another line than the last is no result.
    """
    if not path.exists():
        return {}
    texts = path.read_text(encoding="utf-8").split("\n")
    found: dict[str, ResultLine] = {}
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            line = ResultLine.model_validate_json(text)
        except ValidationError:
            if number == len(texts):
                break
            problem = f"line {number} is no result of a run."
            raise BadInput([Fault(str(path), problem, "Remove that line; its run is made again.")]) from None
        found[line.key] = line
    return found


def append_line(path: Path, line: ResultLine) -> None:
    """Write a line to the disk; half a line that a kill left at the end is cut off first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(0)
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
        file.write(json.dumps(line.model_dump(mode="json"), sort_keys=True).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


@cache
def code_version() -> str:
    """SHA-256, in part, of the code that decides what a run ends with; comments and docstrings do not count."""
    digest = hashlib.sha256()
    for path in _files():
        digest.update(f"{path.relative_to(_ROOT)}\n{_without_docstrings(path)}\n".encode())
    return digest.hexdigest()[:12]


def _files() -> Iterable[Path]:
    for place in DECIDE:
        yield from sorted((_ROOT / place).rglob("*.py"))


def _without_docstrings(path: Path) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [one for one in node.body if not _is_text(one)]
    return ast.dump(tree)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
