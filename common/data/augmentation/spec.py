"""What an experiment says of augmentation; without torch, so that reading a file does not wait for its import."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from common.plugins import PluginName


class AugmentationSpec(BaseModel):
    """The ``[augmentation]`` part of an experiment; all off by default.

    Attributes:
        rotation: Largest angle either way, as a fraction of a full turn: 0.2 is +-72 degrees.
        horizontal_flip: Mirror every other image on average.
        zoom: Height and width are scaled independently; 0.5 shows 0.5 to 1.5 times the original's extent.
        contrast: 0.75 multiplies the distance from the image's mean by 0.25 to 1.75. Not clipped to 0..255.
        translate: Largest shift either way, as a fraction of height and of width.
        transform: ``plugin:NAME``, which changes the images after all that.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    rotation: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    horizontal_flip: bool = False
    zoom: Annotated[float, Field(ge=0, lt=1)] = 0.0
    contrast: Annotated[float, Field(ge=0, le=1)] = 0.0
    translate: Annotated[float, Field(ge=0, le=1)] = 0.0
    transform: PluginName | None = None
