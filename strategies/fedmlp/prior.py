"""How often a site sees a class, and what that adds to the class's logit in training.

Sun et al., "FedMLP", MICCAI 2024, eq. 3 (specs 3.3, steps 1 and 2; 3.5, step 5). The paper's adjusted probability
``p pi / (p pi + (1 - p)(1 - pi))`` is ``sigmoid(logit + log(pi / (1 - pi)))``; we add to the logit, which needs no
guard against 0/0. At test time nothing is added.
"""

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Float64 = NDArray[np.float64]


def positive_prior(positives: ArrayLike, images: int) -> Float64:
    """Share of a site's images in which each class is present.

    Departs from the paper in keeping half an image away from 0 and 1, where its logarithm is infinite.

    Args:
        positives: Images labelled or tagged as positive, ``(classes,)``.
        images: All training images of the site, those of unknown label included.
    """
    margin = 1 / (2 * images)
    return np.clip(np.asarray(positives, np.float64) / images, margin, 1 - margin)


def adjustment(prior: Float64) -> Float64:
    """The logarithm of the odds of ``prior``, to be added to training logits."""
    return np.log(prior) - np.log1p(-prior)


def adjustment_of(targets: Tensor) -> Tensor:
    """:func:`adjustment` by a whole site's targets ``(n, classes)``, as float32 ``(classes,)`` on their device."""
    positives = (targets == 1).sum(dim=0).cpu().numpy()
    values = adjustment(positive_prior(positives, len(targets)))
    return torch.from_numpy(values.astype(np.float32)).to(targets.device)
