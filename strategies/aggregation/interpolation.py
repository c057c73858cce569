"""The mean of the hospitals' model and the server's.

Hassani and Rekik, "UniFed", 2024 (specs 2.4, step 6). By the text alpha, 0.7, is the share of the HOSPITALS' model in
every tensor, running means and variances of batch normalisation included. The authors' code mixes parameters only,
gives the hospitals 0.3 and keeps the server's running statistics; the published tables are likely to be the code's.
"""

import numpy as np

from common.models.head import Head
from common.models.state import ModelState
from strategies.aggregation.mean import Float32


def mixed(clients: Float32, server: Float32, alpha: float) -> Float32:
    """Mix two models' tensors, or flat groups of them, of one shape.

    Args:
        clients: What the last hospital of the round returned.
        server: What the server trained by itself.
        alpha: Share of ``clients``, 0 to 1.
    """
    mixture = np.float64(alpha) * clients.astype(np.float64) + np.float64(1 - alpha) * server.astype(np.float64)
    return mixture.astype(np.float32)


def mixture(hospitals: ModelState, server: ModelState, alpha: float) -> ModelState:
    """Mix all of two models, running means and variances too; a head row is mixed with that of its name."""
    other = server.head.rows(hospitals.head.class_names)
    weight, bias = mixed(hospitals.head.weight, other.weight, alpha), mixed(hospitals.head.bias, other.bias, alpha)
    return ModelState(
        mixed(hospitals.trunk, server.trunk, alpha),
        mixed(hospitals.norm, server.norm, alpha),
        Head(hospitals.head.class_names, np.asarray(weight), np.asarray(bias)),
    )
