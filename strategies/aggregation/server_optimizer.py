"""Server optimisers, which use a round's mean update as a gradient; any averaging method can have one.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: "Adaptive Federated Optimization", ICLR 2021, algorithm
2 (FedAdam, FedYogi); Hsu, Qi, Brown, arXiv 1909.06335 (momentum). As in these papers, there is no bias correction.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

Float64 = NDArray[np.float64]
Moments = Mapping[str, NDArray[Any]]
"""First and second moments by group: ``trunk.first``, ``trunk.second``, ``head CLASS.first``, ..."""

Kind = Literal["momentum", "adam", "yogi"]
DEFAULT_LR: Mapping[Kind, float] = {"momentum": 1.0, "adam": 0.01, "yogi": 0.01}


class ServerOptimizer(BaseModel):
    """The ``[method.server_optimizer]`` table.

    Attributes:
        kind: Server momentum, FedAdam or FedYogi.
        lr: Learning rate; by default 1 for momentum and 0.01 for Adam and Yogi.
        beta1: Decay of the first moment, the running mean of updates.
        beta2: Decay of the second moment, the running mean of squared updates.
        tau: Added to the root of the second moment in the divisor; the second moment starts at ``tau ** 2``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: Kind
    lr: Annotated[float, Field(gt=0)] | None = None
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    tau: Annotated[float, Field(gt=0)] = 1e-3


def compute_server_step(
    spec: ServerOptimizer, update: Float64, moments: Moments, group: str
) -> tuple[Float64, Moments]:
    """Return a server optimiser's step for a mean update, and the optimiser's new moments.

    Args:
        update: Mean of the sites' updates, of any shape.
        moments: First and second moments of all model groups before the step.
        group: Name under which the moments of this update are stored.
    """
    lr = spec.lr or DEFAULT_LR[spec.kind]
    before = moments.get(f"{group}.first", np.zeros_like(update))
    if spec.kind == "momentum":
        first = spec.beta1 * before + update
        return lr * first, {**moments, f"{group}.first": first}
    first = spec.beta1 * before + (1 - spec.beta1) * update
    second = moments.get(f"{group}.second", np.full_like(update, spec.tau**2))
    square = update**2
    if spec.kind == "adam":
        second = spec.beta2 * second + (1 - spec.beta2) * square
    else:
        second = second - (1 - spec.beta2) * square * np.sign(second - square)
    step = lr * first / (np.sqrt(second) + spec.tau)
    return step, {**moments, f"{group}.first": first, f"{group}.second": second}
