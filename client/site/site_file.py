"""``site.toml``, read and checked without torch: a wrong one is refused at once."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from client.site.policy import Policy
from common.data.base.spec import DataSpec
from common.errors import BadInput, Fault, quoted, stop_on
from common.security.identity import SiteKit, checked_name, public_line, read_key, read_kit, same_key
from common.system.files import is_file
from common.system.toml import Section, read_toml, validated

FILE = "site.toml"


class SiteFile(Section):
    """The keys of ``site.toml``; in ``[data]``, ``labels`` and ``synonyms`` stand beside those of the data set.

    Attributes:
        name: As registered with the coordinator.
        kit: What the coordinator sent back; ``NAME.kit`` where left out.
        key: The private key; ``NAME.key`` where left out.
        device: ``auto`` takes a GPU where there is one.
        gpus: How many GPUs each batch is split across.
        policy: What leaves beside updates.
    """

    name: str
    kit: str = ""
    key: str = ""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpus: int = Field(1, ge=1)
    policy: Policy = Policy()
    data: DataSpec = Field(discriminator="kind")

    _name = field_validator("name")(checked_name)


@dataclass(frozen=True)
class Settings:
    """One hospital's folder, read and checked.

    Attributes:
        labels: The classes that the site annotates, by its own names and in its own order; empty for all of the data.
        synonyms: The site's name -> canonical name.
    """

    folder: Path
    file: SiteFile
    labels: tuple[str, ...]
    synonyms: Mapping[str, str]

    @property
    def kit_path(self) -> Path:
        return self.folder / (self.file.kit or f"{self.file.name}.kit")

    @property
    def key_path(self) -> Path:
        return self.folder / (self.file.key or f"{self.file.name}.key")

    @property
    def state(self) -> Path:
        """What the program itself writes."""
        return self.folder / "state"


def read_file_only(folder: Path) -> Settings:
    """Read ``site.toml`` of a folder; the data it names is not looked at.

    Raises:
        BadInput: With every fault.
    """
    settings, found = read_with_faults(folder)
    stop_on(found)
    return settings


def read_with_faults(folder: Path) -> tuple[Settings, list[Fault]]:
    """Settings, and what is wrong with their class names; of a file with other faults there are no settings.

    Raises:
        BadInput: With every fault, if the folder holds no file or it has a fault elsewhere.
    """
    tree = _read_site_toml(folder)
    data = tree.get("data")
    labels, synonyms = (data.pop("annotates", ()), data.pop("synonyms", {})) if isinstance(data, dict) else ((), {})
    wrong = [*_list_faults(labels), *_map_faults(synonyms)]
    try:
        file = validated(SiteFile, tree, FILE)
    except BadInput as error:
        raise BadInput([*error.faults, *wrong]) from None
    return Settings(folder, file, tuple(labels), synonyms), wrong


def read_credentials(settings: Settings) -> SiteKit:
    """Read the kit, and check that it belongs to this site and to its key.

    Raises:
        BadInput: With every fault.
    """
    faults = list[Fault]()
    try:
        key = read_key(settings.key_path)
    except BadInput as error:
        faults += error.faults
    try:
        kit = _read_kit(settings)
    except BadInput as error:
        faults += error.faults
    stop_on(faults)
    if kit.site != settings.file.name:
        problem = f'is "{settings.file.name}", but the kit is for "{kit.site}".'
        faults.append(Fault(f"{FILE}: name", problem, "A site uses the name it is registered by."))
    if not same_key(kit.public_key, public_line(key, "")):
        problem = f"is not the key that {settings.kit_path.name} was written for."
        faults.append(Fault(settings.key_path.name, problem, "Ask for a kit for this key, or put the old key back."))
    stop_on(faults)
    return kit


def _read_kit(settings: Settings) -> SiteKit:
    if not settings.kit_path.is_file():
        others = sorted(path.name for path in settings.folder.glob("*.kit"))
        problem = f"there is no {settings.kit_path.name} in {settings.folder}."
        if others:
            problem += f" {quoted(others)} is there: the kit of another site, or under another name."
        remedy = f"Send {settings.file.name}.request to the coordinator, who admits it and sends the kit back."
        raise BadInput([Fault(f"{FILE}: kit", problem, remedy)])
    return read_kit(settings.kit_path)


def checked_folder(folder: Path) -> Path:
    """Return the folder, if it is a site's.

    Raises:
        BadInput: If it is not.
    """
    if is_file(folder / FILE):
        return folder
    problem, remedy = f"is no site's folder: it holds no {FILE}.", "Make one with flwr-client init."
    if not folder.exists():
        problem = "there is no such folder."
    elif not folder.is_dir():
        problem, remedy = "is a file; a site's folder is wanted.", f"Name the folder that holds {FILE}."
    raise BadInput([Fault(str(folder), problem, remedy)])


def _read_site_toml(folder: Path) -> dict[str, Any]:
    return read_toml(checked_folder(folder) / FILE)


def _list_faults(labels: Any) -> list[Fault]:
    if isinstance(labels, list | tuple) and all(isinstance(name, str) for name in labels):
        return []
    return [Fault(f"{FILE}: data.annotates", "must be a list of class names.")]


def _map_faults(synonyms: Any) -> list[Fault]:
    if isinstance(synonyms, dict) and all(isinstance(name, str) for name in synonyms.values()):
        return []
    return [Fault(f"{FILE}: data.synonyms", 'must be a table of lines "own name" = "canonical name".')]
