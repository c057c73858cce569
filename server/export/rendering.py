"""``--frame``, ``--axis`` and ``--window`` of ``flwr-sim predict``, read without torch."""

from pydantic import BaseModel, ConfigDict, ValidationError

from common.data.base.spec import Axis, Frame, Rendering, Window
from common.errors import BadInput, Fault


class _Named(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False)

    frame: Frame | None = None
    axis: Axis = "axial"
    window: Window | None = None


_EXPECTED = {
    "frame": 'a number from 1, or "middle"',
    "axis": "axial, coronal or sagittal",
    "window": "CENTRE,WIDTH: two numbers, the second at least 1, such as 40,400",
}


def named_rendering(frame: str | None, axis: str | None, window: str | None) -> Rendering | None:
    """Return what the options name; None where none is given.

    Raises:
        BadInput: With every option that cannot be understood.
    """
    parts = None if window is None else window.split(",")
    given = {"frame": frame, "axis": axis, "window": parts}
    if not any(given.values()):
        return None
    try:
        named = _Named.model_validate({key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        wrong = {str(one["loc"][0]) for one in error.errors()}
        said = {"frame": frame, "axis": axis, "window": window}
        faults = [Fault(f"--{key} {said[key]}", f"expected {_EXPECTED[key]}.") for key in _EXPECTED if key in wrong]
        raise BadInput(faults) from None
    return Rendering(named.frame, named.axis, named.window)
