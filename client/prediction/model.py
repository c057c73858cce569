"""A model for use at the hospital: from a received package, or from any folder with ``model.json``."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from polyclinic.client.prediction.received import find_delivery
from polyclinic.client.site.site_file import SiteSettings
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.models.saved import SavedModelDescription, read_model_description
from polyclinic.common.models.zoo.spec import DESCRIPTION_FILE
from polyclinic.common.prediction.files import select_learned_classes


@dataclass(frozen=True)
class UsableModel:
    """A saved model with its description and title.

    Attributes:
        folder: Folder with ``model.json`` and ``model.safetensors``.
        title: The study's title, or the folder's name.
        run: The run's identifier; empty for a model that came without a package.
    """

    folder: Path
    description: SavedModelDescription
    title: str
    run: str = ""

    @property
    def unlearned(self) -> Mapping[str, str]:
        """Class -> reason why the model has not learned it."""
        return self.description.unlearned or {}

    @property
    def learned_classes(self) -> list[str]:
        """The classes that the model has learned; probabilities of other classes have no meaning."""
        return select_learned_classes(self.description.class_names, self.unlearned)


def find_model(settings: SiteSettings, name: str) -> UsableModel:
    """Return the model of a received run or of a folder.

    Args:
        name: The run's identifier, its first digits, or the path of a folder with ``model.json``.

    Raises:
        BadInput: If there is no such model, or the package was changed.
    """
    folder = Path(name)
    if (folder / DESCRIPTION_FILE).is_file():
        return UsableModel(folder, read_model_description(folder), folder.resolve().name)
    stored = find_delivery(settings, name)
    if stored is None or stored.manifest is None:
        problem = f"is neither a run of flwr-client delivered nor a folder with {DESCRIPTION_FILE}."
        raise BadInput([Fault(name, problem, "flwr-client delivered lists the runs that this hospital has received.")])
    return UsableModel(stored.folder, read_model_description(stored.folder), stored.manifest.title, stored.manifest.run)
