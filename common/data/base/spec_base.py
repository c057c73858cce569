"""What the sections of a config file about data have in common."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Resize = Literal["pad", "stretch"]
Frame = Annotated[int, Field(ge=1)] | Literal["middle"]
LabelPolicy = Literal["unknown", "negative", "positive"]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(gt=0)]
Side = Annotated[int, Field(gt=0, le=4096)]
"""Of an image, in pixels."""
LegacySeed = Annotated[int, Field(ge=0, lt=2**32)]
"""As numpy's legacy generator takes it."""
ClassNames = Annotated[tuple[str, ...], Field(min_length=1)]

SPLIT_SEED = 1337


class Spec(BaseModel):
    """Unknown keys are refused, values cannot change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
