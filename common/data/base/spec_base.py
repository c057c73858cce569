"""What the sections of a config file about data have in common."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from common.data.base.decoded_size import LARGEST_MB

Resize = Literal["pad", "stretch"]
Frame = Annotated[int, Field(ge=1)] | Literal["middle"]
Axis = Literal["axial", "coronal", "sagittal"]
Window = tuple[float, Annotated[float, Field(ge=1)]]
"""Centre and width, in the units of the rescaled values: of a CT, Hounsfield units."""
LabelPolicy = Literal["unknown", "negative", "positive"]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(gt=0)]
Side = Annotated[int, Field(gt=0, le=4096)]
"""Of an image, in pixels."""
LargestMb = Annotated[int, Field(ge=1, le=2**20)]
"""What one picture may take, and a file in any case: see :mod:`common.data.base.decoded_size`."""
LegacySeed = Annotated[int, Field(ge=0, lt=2**32)]
"""As numpy's legacy generator takes it."""
ClassNames = Annotated[tuple[str, ...], Field(min_length=1)]

SPLIT_SEED = 1337


class Spec(BaseModel):
    """Unknown keys are refused, values cannot change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Rendering:
    """Which picture of a file is shown, and how its grey values are.

    Attributes:
        frame: Number of a DICOM file's frame or a NIfTI file's slice, from 1, or ``"middle"``; None for the only one.
        axis: Across which a NIfTI volume is sliced.
        window: In the place of the file's own; None for that, or for the range of the values where it has none.
        largest_mb: MiB that one decoded picture may take.
    """

    frame: Frame | None = None
    axis: Axis = "axial"
    window: Window | None = None
    largest_mb: int = LARGEST_MB


AS_IN_FILE = Rendering()
