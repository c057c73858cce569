"""An external test set: images of another place, which no site has and by which nothing is chosen."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from common.data.base.image_set import ImageSet, joined
from common.data.base.spec import DataSpec, NpzSpec
from common.data.images.reading import IN_MEMORY
from common.data.load import faults, load
from common.data.sources.npz import load_npz_test
from common.errors import BadInput, Fault, did_you_mean, quoted

SECTION = "external_test"


def external_faults(spec: DataSpec | None, base: Path) -> list[Fault]:
    """Find what is wrong with an external test set without reading its pictures."""
    return [] if spec is None or isinstance(spec, NpzSpec) else _named(faults(spec, base))


def external_images(spec: DataSpec | None, base: Path) -> ImageSet | None:
    """Read an external test set: the test arrays of an npz file, all images of anything else; None without one.

    Args:
        base: The folder that paths in ``spec`` are relative to.

    Raises:
        BadInput: With all faults of the data.
    """
    if spec is None:
        return None
    try:
        if isinstance(spec, NpzSpec):
            return load_npz_test(spec, base, IN_MEMORY)
        splits = load(spec, base)
        return joined([splits.train, splits.validation, splits.test])
    except BadInput as error:
        raise BadInput(_named(error.faults)) from None


def refuse_other_classes(
    images: ImageSet, class_names: Sequence[str], where: str = SECTION, whose: str = "the sites label"
) -> None:
    """Refuse test images that label no class of the model.

    Args:
        where, whose: What the fault says of the images' place, and of ``class_names``.

    Raises:
        BadInput: Naming the classes of both.
    """
    if not set(images.class_names) & set(class_names):
        near = [hint for name in images.class_names if (hint := did_you_mean(name, class_names))]
        problem = f"labels {quoted(images.class_names)}, {whose} {quoted(class_names)}: no class in common."
        raise BadInput([Fault(where, problem, " ".join(near))])


def _named(found: Iterable[Fault]) -> list[Fault]:
    """Faults that name keys of ``[data]``, with this section's name instead."""
    return [replace(fault, where=f"{SECTION}.{fault.where.removeprefix('data.')}") for fault in found]
