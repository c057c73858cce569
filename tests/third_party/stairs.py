"""Somebody's own network as a plug-in of Polyclinic."""

from torch import nn


def network(channels: int, image_size: int) -> nn.Module:
    """Images ``(batch, channels, image_size, image_size)`` in, features ``(batch, 64)`` out."""
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.GELU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.LayerNorm([32, image_size // 4, image_size // 4]), nn.GELU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 64), nn.Tanh()),
    )
