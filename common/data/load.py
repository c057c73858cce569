"""From what a config file says to images: every cheap fault first, all at once, then the work."""

from pathlib import Path

from common.data.base.image_set import Splits
from common.data.base.spec import (
    ChexpertSpec,
    CompositesSpec,
    DataSpec,
    DigitsSpec,
    MimicSpec,
    MixtureSpec,
    NihSpec,
    NpzSpec,
    PhantomSpec,
    PluginSpec,
)
from common.data.base.spec_tables import DicomwebSpec, FolderSpec
from common.data.images.reading import IN_MEMORY, ImageStore
from common.data.sources.composites import composite_faults, load_composites
from common.data.sources.digits import load_digits
from common.data.sources.folder import open_folder
from common.data.sources.mixture import load_mixture, mixture_faults
from common.data.sources.npz import load_npz, open_npz
from common.data.sources.phantom import load_phantom
from common.data.sources.plugin import load_plugin, plugin_faults
from common.data.tables.labels import LabelTable, load_pictures
from common.data.tables.presets import open_chexpert, open_mimic, open_nih
from common.errors import BadInput, Fault


def faults(spec: DataSpec, base: Path) -> list[Fault]:
    """Find what is wrong with a data set without reading its pictures.

    Args:
        base: The folder that paths in ``spec`` are relative to.

    Returns:
        Faults with ``where`` like ``"data.path"``; the caller puts the file's name in front.
    """
    try:
        match spec:
            case NpzSpec():
                open_npz(spec, base)
            case CompositesSpec():
                return composite_faults(spec, base)
            case MixtureSpec():
                return mixture_faults(spec, base)
            case PluginSpec():
                return plugin_faults(spec)
            case DigitsSpec() | PhantomSpec():
                pass
            case _:
                open_table(spec, base)
    except BadInput as bad:
        return list(bad.faults)
    return []


def load(spec: DataSpec, base: Path, store: ImageStore = IN_MEMORY) -> Splits:
    """Read a data set.

    Args:
        base: The folder that paths in ``spec`` are relative to.
        store: Whether large sets go to a file, and the number of decoding threads.

    Raises:
        BadInput: With all faults, or with the names of unreadable images where they are too many.
    """
    match spec:
        case NpzSpec():
            return load_npz(spec, base, store)
        case CompositesSpec():
            return load_composites(spec, base, store)
        case MixtureSpec():
            return load_mixture(spec, base, store)
        case DigitsSpec():
            return load_digits(spec)
        case PhantomSpec():
            return load_phantom(spec)
        case PluginSpec():
            return load_plugin(spec, base)
        case _:
            return load_pictures(open_table(spec, base), spec, store)


def open_table(spec: FolderSpec | DicomwebSpec | NihSpec | ChexpertSpec | MimicSpec, base: Path) -> LabelTable:
    """Read and check the table of a folder of pictures, or of a PACS.

    Raises:
        BadInput: With all faults.
    """
    match spec:
        case FolderSpec():
            return open_folder(spec, base)
        case DicomwebSpec():
            from common.data.sources.dicomweb import open_dicomweb  # takes a second

            return open_dicomweb(spec, base).table
        case NihSpec():
            return open_nih(spec, base)
        case ChexpertSpec():
            return open_chexpert(spec, base)
        case MimicSpec():
            return open_mimic(spec, base)
