"""The table "What goes with what" of docs/methods.md, made from the methods themselves by ``make reference``."""

from collections.abc import Mapping
from typing import Any

from polyclinic.common.config import Experiment
from polyclinic.common.errors import BadInput
from polyclinic.strategies.registry import STRATEGIES, build_experiment_strategy

MODEL = {"architecture": "tiny_cnn", "channels": 1, "image_size": 32, "norm": "group"}
VOLUMES = {"architecture": "tiny_cnn_3d", "channels": 1, "image_size": [16, 16, 16], "norm": "group"}
MASKS = {"architecture": "tiny_unet", "channels": 1, "image_size": 32, "norm": "group", "task": "segmentation"}
COLUMNS: Mapping[str, Mapping[str, Any]] = {
    "one class an image": {"model": {**MODEL, "task": "multi_class"}},
    "volumes": {"model": VOLUMES},
    "segmentation": {"model": MASKS},
    "secure aggregation": {"privacy": {"secure_aggregation": True}},
    "noise by image or patient": {"privacy": {"level": "patient", "noise_multiplier": 1.0}},
    "noise on updates": {"privacy": {"level": "update", "noise_multiplier": 1.0}},
}
"""Column of the table -> the settings that are tried with each method."""
NEEDED: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "scaffold": {"training": {"optimizer": "sgd", "momentum": 0.0}},
    "fedbn_plus": {"model": {"weights": "trunk.safetensors"}},
}
"""Settings without which a method is refused."""


def works(method: str, settings: Mapping[str, Any]) -> bool:
    """Return True if an experiment with this method and these settings passes the checks of a run."""
    needed = NEEDED.get(method, {})
    privacy = settings.get("privacy", {})
    tree: dict[str, Any] = {
        "run": {"method": method, "rounds": 60},
        "method": {"weighting": "uniform"} if "secure_aggregation" in privacy else {},
        "model": {**settings.get("model", MODEL), **needed.get("model", {})},
        "training": needed.get("training", {}),
        "evaluation": {"checkpoint": "last"},  # with noise nothing can say which round was best
        "privacy": privacy,
    }
    try:
        build_experiment_strategy(Experiment.model_validate(tree))
    except BadInput:
        return False
    return True


def make_method_table() -> str:
    """Return the table: a row for each method, a dot where the settings of a column go with it."""
    lines = [f"| method | {' | '.join(COLUMNS)} |", f"| --- |{' :---: |' * len(COLUMNS)}"]
    for name in sorted(STRATEGIES):
        dots = ["●" if works(name, settings) else "" for settings in COLUMNS.values()]
        lines.append(f"| `{name}` | {' | '.join(dots)} |")
    return "\n".join(lines) + "\n"
