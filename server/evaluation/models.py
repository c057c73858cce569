"""Check the arguments of ``flwr-server evaluate`` before torch is imported."""

from collections.abc import Sequence
from pathlib import Path

from polyclinic.common.errors import BadInput, Fault, raise_faults, suggest_nearest_name
from polyclinic.common.evaluation.foreign import TORCH_EXPORT_RISK, ModelFile, ModelFormat, find_model_file
from polyclinic.common.evaluation.question import GROUP_COLUMNS, MAX_MODELS, GroupColumn
from polyclinic.common.system.toml import read_toml


def parse_group_columns(texts: Sequence[str]) -> tuple[GroupColumn, ...]:
    """Check the values of ``--by``; return them without repetitions, in the order of :data:`GROUP_COLUMNS`.

    Raises:
        BadInput: If a value is not in :data:`GROUP_COLUMNS`.
    """
    for text in texts:
        if text not in GROUP_COLUMNS:
            problem = f"is none of {', '.join(GROUP_COLUMNS)}: hospitals have no other column in common."
            raise BadInput([Fault(f"--by {text}", problem, suggest_nearest_name(text, GROUP_COLUMNS))])
    return tuple(column for column in GROUP_COLUMNS if column in texts)


def find_models_to_send(paths: Sequence[Path]) -> list[ModelFile]:
    """Check the paths of models on the command line without reading tensors; return the files to send.

    Raises:
        BadInput: If there are too many models, or a file is missing, is a pickle or is no model.
    """
    if len(paths) > MAX_MODELS:
        raise BadInput([Fault("MODEL...", f"are {len(paths)}; {MAX_MODELS} is the most of one question.")])
    pickled = [path for path in paths if _is_torch_export(path)]
    raise_faults([_make_pickle_fault(path) for path in pickled])
    return [find_model_file(path, frozenset()) for path in paths]


def _is_torch_export(path: Path) -> bool:
    if path.suffix != ".toml" or not path.is_file():
        return path.suffix == ModelFormat.torch_export
    return str(read_toml(path).get("file", "")).endswith(ModelFormat.torch_export)


def _make_pickle_fault(path: Path) -> Fault:
    problem = f"is not sent to hospitals: {TORCH_EXPORT_RISK}."
    remedy = "Send the model as .onnx or .safetensors, which hold no program. Or each hospital that trusts its author "
    remedy += "evaluates it at home: flwr-client evaluate DIR MODEL.toml --trust FILE"
    return Fault(str(path), problem, remedy)
