"""The pixel form of a data set: all settings that decide how its images become the numbers that a network receives.

Each hospital computes its pixel form from its data settings. The coordinator compares the forms before round 1
(:mod:`polyclinic.common.pixel_contract`). The form of a run is saved with its model, so that later images are read in
the same way as the training images.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from polyclinic.data.base.spec import (
    DEFAULT_RENDERING,
    ONLY_FOR_PICTURES,
    ONLY_FOR_VOLUMES,
    BaseDatasetSpec,
    PictureRenderingOptions,
    PictureTableSpec,
    Resize,
    Side,
    VolumeSize,
    describe_sides,
)

DECODING_RULES = 1
"""Version of the rules that no key changes: orientation, aspect ratio, default window. A release that reads other
pixels from the same file with the same keys has a higher version."""
RESOURCE_LIMIT_KEYS = ("largest_mb",)
"""Rendering options that limit resources and change no pixel."""
FILE_FORMAT_KEYS = ("frame", "bit_depth")
"""Rendering options that some files require. A hospital that leaves one out has no such files, so that any value of
another hospital is compatible with its data."""
RENDERING_KEYS = tuple(
    option.name for option in dataclasses.fields(PictureRenderingOptions) if option.name not in RESOURCE_LIMIT_KEYS
)
"""Rendering options that change pixels: all options but :data:`RESOURCE_LIMIT_KEYS`."""
DatasetSpecT = TypeVar("DatasetSpecT", bound=BaseDatasetSpec)
PIXEL_KEYS = ("color", "image_size", "resize", *RENDERING_KEYS)
"""The keys of ``[data]`` that decide how images become pixels."""
SITE_SPECIFIC_KEY = "own"
"""The key of the table ``[pixels]`` that lists the rendering options in which hospitals may differ."""


class PixelForm(BaseModel):
    """How the images of one data set become pixels.

    Attributes:
        color: True for pixels of three channels, red, green and blue; False for grey.
        height, width: Size of the stored images in pixels. The network resizes them if its own size is another one.
        depth: Number of slices of stored volumes; None for pictures.
        resize: How images of other sizes or shapes are brought to that size; None if no image was resized.
        rendering: The rendering options (:class:`PictureRenderingOptions`) that are not at their defaults.
        only_grey: True if ``color`` is False and no image had any colour. Read in colour, such images have three equal
            channels, as if a network with three input channels had repeated the grey channel.
        decoded: True if the images are rendered from files with the keys of ``[data]``.
        white_of_dark: The value that is probably white (1, 3, 7, 15, 31 or 63) if the images are nearly black and no
            ``value_range`` says which value is white; else 0.
        rules: :data:`DECODING_RULES` of the release that read the images.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    color: bool
    height: Side
    width: Side
    depth: Side | None = None
    resize: Resize | None = None
    rendering: Mapping[
        Annotated[str, Field(max_length=40, pattern="^[a-z_]+$")], bool | int | float | str | tuple[int | float, ...]
    ] = Field(default_factory=dict)
    only_grey: bool = False
    decoded: bool = False
    white_of_dark: Annotated[int, Field(ge=0, le=63)] = 0
    rules: int = DECODING_RULES

    @model_serializer(mode="wrap")
    def _leave_out_depth_of_pictures(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the depth of pictures, because releases without volumes refuse the key."""
        values: dict[str, Any] = serialize(self)
        if values["depth"] is None:
            del values["depth"]
        return values

    def to_json(self) -> str:
        """Return the form as JSON; equal forms have equal text."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)

    @property
    def image_size(self) -> int | list[int]:
        """The side of square images, else height and width; depth, height and width of volumes."""
        if self.depth is not None:
            return [self.depth, self.height, self.width]
        return self.height if self.height == self.width else [self.height, self.width]

    @property
    def volume_size(self) -> VolumeSize | None:
        """Depth, height and width of volumes; None for pictures."""
        return None if self.depth is None else (self.depth, self.height, self.width)

    def read_setting(self, key: str) -> Any:
        """Return the value of one of :data:`PIXEL_KEYS` as a JSON type; an unset rendering option has its default."""
        if key in ("color", "image_size", "resize"):
            return getattr(self, key)
        value = self.rendering.get(key, getattr(DEFAULT_RENDERING, key, None))
        return list(value) if isinstance(value, tuple) else value

    def has_setting(self, key: str) -> bool:
        """Return True if a key of :data:`PIXEL_KEYS` applies to these images; ``window`` does not apply to arrays."""
        if key == "resize":
            return self.resize is not None
        if key in (ONLY_FOR_VOLUMES if self.depth is None else ONLY_FOR_PICTURES):
            return False
        if key in ("color", "image_size"):
            return True
        not_needed = key in FILE_FORMAT_KEYS and self.read_setting(key) is None
        return key in self.rendering or (self.decoded and not not_needed)

    @property
    def rendering_options(self) -> PictureRenderingOptions:
        """The rendering options as an object, without options that only a newer release has."""
        options: dict[str, Any] = {key: self.rendering[key] for key in RENDERING_KEYS if key in self.rendering}
        return PictureRenderingOptions(**options)

    def describe_size(self) -> str:
        """Return the size of an image in words: ``64 × 64 pixels``, or ``48 × 64 × 64 voxels``."""
        return describe_sides(self.volume_size or (self.height, self.width))

    def describe(self) -> str:
        """Describe the form for people: ``colour, 64 × 64 pixels, resize = "pad", window = [40, 400]``."""
        parts = ["colour" if self.color else "grey", self.describe_size()]
        if self.resize is not None:
            parts.append(format_setting("resize", self.resize))
        parts += [format_setting(key, self.read_setting(key)) for key in sorted(self.rendering)]
        return ", ".join(parts)


def format_setting(key: str, value: Any) -> str:
    """Return a key of ``[data]`` with its value as a line of TOML; for the value None, ``no`` and the key."""
    if value is None:
        return f"no {key}"
    numbers = [int(n) if float(n).is_integer() else n for n in value] if isinstance(value, list | tuple) else value
    return f"{key} = {json.dumps(numbers)}"


def make_pixel_form(
    spec: BaseDatasetSpec | None, shape: tuple[int, ...], *, drops_color: bool = False, white_of_dark: int = 0
) -> PixelForm:
    """Return the form of a data set's images.

    Args:
        spec: The settings of the data set; None for one without settings.
        shape: Shape of one stored image, ``(height, width[, 3])``; of a volume ``(depth, height, width, channels)``.
        drops_color: True if images that have colour are stored in grey.
        white_of_dark: The value that is probably white if the pictures are nearly black, else 0; ignored for volumes.
    """
    depth, (height, width, *channels) = (shape[0], shape[1:]) if len(shape) == 4 else (None, shape)
    color = bool(channels) and channels[0] == 3
    rendering = {}
    for key in RENDERING_KEYS:
        default = getattr(DEFAULT_RENDERING, key)
        if (value := getattr(spec, key, default)) != default:
            rendering[key] = value
    is_resized = getattr(spec, "image_size", None) is not None and "spacing" not in rendering
    return PixelForm(
        color=color,
        height=height,
        width=width,
        depth=depth,
        resize=getattr(spec, "resize", None) if is_resized else None,
        rendering=rendering,
        only_grey=not color and not drops_color,
        decoded=isinstance(spec, PictureTableSpec),
        white_of_dark=white_of_dark if depth is None else 0,
    )


def check_pixel_table(table: Mapping[str, Any]) -> dict[str, Any]:
    """Check the table ``[pixels]`` of an experiment: keys of ``[data]`` that decide how images become pixels.

    Returns:
        The table with its values in canonical form, as JSON types.

    Raises:
        ValueError: With all faults.
    """
    given = {key: value for key, value in table.items() if key != SITE_SPECIFIC_KEY}
    faults = list[str]()
    free_keys = table.get(SITE_SPECIFIC_KEY, [])
    if not isinstance(free_keys, list | tuple) or any(key not in RENDERING_KEYS for key in free_keys):
        faults.append(
            f"{SITE_SPECIFIC_KEY} must be a list of keys in which hospitals may differ: {', '.join(RENDERING_KEYS)}"
        )
    if unknown := sorted(given.keys() - set(PIXEL_KEYS)):
        faults.append(f"has no key {', '.join(unknown)}; its keys are {', '.join((*PIXEL_KEYS, SITE_SPECIFIC_KEY))}")
    checked = dict[str, Any]()
    try:
        # A spacing belongs to volumes, whose size the table need not name.
        assumed = {"image_size": [1, 1, 1]} if "spacing" in given else {}
        stated = {key: given[key] for key in given.keys() & set(PIXEL_KEYS)}
        spec = PictureTableSpec.model_validate({"labels": "", **assumed, **stated})
        values = spec.model_dump(mode="json")
        checked = {key: values[key] for key in PIXEL_KEYS if key in given}
    except ValidationError as error:
        faults += [f"{'.'.join(map(str, fault['loc'][:1]))}: {fault['msg']}" for fault in error.errors()]
    if not faults and (both := sorted(set(free_keys) & checked.keys())):
        faults.append(f"{', '.join(both)}: either all hospitals have one value, or each has its {SITE_SPECIFIC_KEY}")
    if faults:
        raise ValueError("; ".join(faults))
    return {**checked, **({SITE_SPECIFIC_KEY: sorted(free_keys)} if free_keys else {})}


def read_as_trained(spec: DatasetSpecT, form: PixelForm | None) -> DatasetSpecT:
    """Return the settings of a data set, changed so that its images are read as those of the training.

    A key of :data:`FILE_FORMAT_KEYS`, such as ``bit_depth``, keeps its value in ``spec`` if it has one there.

    Args:
        form: The pixel form of the training images; None if the model file has none.
    """
    if form is None:
        return spec
    size = form.height if form.volume_size is None else form.volume_size
    keys: dict[str, Any] = {"image_size": size, "resize": form.resize, "color": form.color}
    if form.resize is None:
        del keys["resize"]
    if form.volume_size is None and form.height != form.width:
        del keys["image_size"]
    if form.decoded:
        for key in RENDERING_KEYS:
            value = getattr(spec, key, None)
            if key not in FILE_FORMAT_KEYS or value is None:
                value = getattr(form.rendering_options, key)
            keys[key] = value
    return spec.model_copy(update={key: value for key, value in keys.items() if key in type(spec).model_fields})
