"""The models, of about the sizes of ours."""

from torch import nn
from torchvision.models import resnet18, vit_b_16, vit_l_16


def model_named(name: str) -> nn.Module:
    """``tiny``: 0.2 MB; ``resnet18``: 45 MB; ``vit_b``: 343 MB; ``vit_l``: 1,213 MB."""
    if name == "resnet18":
        return resnet18(num_classes=10)
    if name == "vit_b":
        return vit_b_16(image_size=32, num_classes=10)
    if name == "vit_l":
        return vit_l_16(image_size=32, num_classes=10)
    return nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Linear(64, 512))
