"""Batch normalisation that outlives a batch of one image, and group normalisation in its place."""

import math

from torch import Tensor, nn
from torch.nn import functional

from common.errors import BadInput, Fault


class SteadyBatchNorm2d(nn.BatchNorm2d):
    """:class:`torch.nn.BatchNorm2d` that uses its running statistics where one value per channel is all there is.

    The last layers of a network see 1x1 maps at its smallest image size. PyTorch stops with an error there when the
    last batch of an epoch holds a single image, hours into a run; one value has no variance, so that batch is
    normalised as in evaluation and leaves the running statistics alone. In every other case the two are equal.
    """

    def forward(self, maps: Tensor) -> Tensor:
        """Normalise ``(batch, channels, height, width)``."""
        if self.training and maps.numel() == maps.shape[1]:
            return functional.batch_norm(
                maps, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        return super().forward(maps)


def make_steady(module: nn.Module) -> None:
    """Replace every :class:`torch.nn.BatchNorm2d` inside ``module``, in place; all values stay."""
    for name, child in module.named_children():
        if type(child) is nn.BatchNorm2d:
            steady = SteadyBatchNorm2d(child.num_features, eps=child.eps, momentum=child.momentum)
            steady.load_state_dict(child.state_dict())
            setattr(module, name, steady)
        make_steady(child)


MOST_GROUPS = 32
_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, SteadyBatchNorm2d)


def make_grouped(module: nn.Module) -> None:
    """Replace every batch normalisation inside ``module`` by group normalisation, in place; scale and shift stay.

    As many groups as divide the channels, at most 32 (Wu and He, "Group Normalization", ECCV 2018).
    """
    for name, child in module.named_children():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            if type(child) not in _PLAIN:  # timm's BatchNormAct2d applies an activation, too
                problem = f"group normalisation cannot take the place of {type(child).__name__}, which does more."
                raise BadInput([Fault("model.norm", problem, 'Use "batch".')])
            grouped = nn.GroupNorm(math.gcd(MOST_GROUPS, child.num_features), child.num_features, eps=child.eps)
            grouped.load_state_dict({key: child.state_dict()[key] for key in ("weight", "bias")})
            setattr(module, name, grouped)
        make_grouped(child)
