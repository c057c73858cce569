"""site.toml: what the hospital says about itself. Read once, checked whole, before anything connects."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from client.site.disclosure import hidden_classes
from client.site.site import Site
from client.site.site_file import FILE, SiteFile, read_site_file
from common.contract import Declaration, merge
from common.data.base.image_set import ImageSet, Splits
from common.data.load import faults as data_faults
from common.data.load import load
from common.errors import BadInput, Fault, did_you_mean, quoted, stop_on
from common.security.identity import SiteKit, public_line, read_key, read_kit, same_key


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

    @property
    def device(self) -> str:
        if self.file.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        return self.file.device


def read_settings(folder: Path) -> Settings:
    """Read ``site.toml`` of a folder, and check what it says of the data, but for the pictures.

    Raises:
        BadInput: With every fault.
    """
    settings, found = _read(folder)
    found += data_faults_of(settings)
    if settings.file.device == "cuda" and not torch.cuda.is_available():
        found.append(Fault(f"{FILE}: device", "is cuda, but this machine shows no GPU.", 'Set "auto" or "cpu".'))
    stop_on(found)
    return settings


def read_file_only(folder: Path) -> Settings:
    """Read ``site.toml`` of a folder; the data it names is not looked at.

    Raises:
        BadInput: With every fault.
    """
    settings, found = _read(folder)
    stop_on(found)
    return settings


def data_faults_of(settings: Settings) -> list[Fault]:
    """What is wrong with the data of a site, without reading its pictures."""
    return [
        replace(fault, where=f"{FILE}: {fault.where}") for fault in data_faults(settings.file.data, settings.folder)
    ]


def _read(folder: Path) -> tuple[Settings, list[Fault]]:
    """Settings, and what is wrong with their class names; of a file with other faults there are no settings."""
    file, labels, synonyms, wrong = read_site_file(folder)
    return Settings(folder, file, labels, synonyms), wrong


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


def open_site(settings: Settings) -> Site:
    """Read the site's images and labels.

    Raises:
        BadInput: With every fault, or with the files where too many cannot be read.
    """
    try:
        splits = load(settings.file.data, settings.folder)
    except BadInput as error:
        raise BadInput(replace(fault, where=f"{FILE}: {fault.where}") for fault in error.faults) from None
    declaration = declaration_of(settings, splits.class_names)
    if not len(splits.train):
        raise BadInput([Fault(f"{FILE}: data", "has no training image.")])
    return Site(
        declaration=declaration,
        train=_canonical(splits.train, declaration),
        validation=_canonical(splits.validation, declaration),
        test=_canonical(splits.test, declaration),
        folder=settings.state,
        device=settings.device,
        hidden=_hidden(splits, declaration, settings.file.policy.smallest_count),
        policy=settings.file.policy,
        weights_folder=settings.folder / "weights",
    )


def _hidden(splits: Splits, declaration: Declaration, smallest: int) -> Mapping[str, frozenset[str]]:
    """Find the classes whose counts stay hidden, by part, from all columns of the data."""
    canonical = dict(zip(declaration.names, declaration.canonical, strict=True))
    found = {part: hidden_classes(getattr(splits, part), smallest) for part in ("train", "validation", "test")}
    return {part: frozenset(canonical[name] for name in names if name in canonical) for part, names in found.items()}


def declaration_of(settings: Settings, known: tuple[str, ...]) -> Declaration:
    """What the site says about its labels.

    Args:
        known: Classes of its data.

    Raises:
        BadInput: With every fault.
    """
    names = settings.labels or known
    stop_on(_label_faults(names, known))
    declaration = Declaration(settings.file.name, names, settings.synonyms)
    merge([declaration])  # for the faults of the one
    return declaration


def _label_faults(names: tuple[str, ...], known: tuple[str, ...]) -> list[Fault]:
    return [
        Fault(
            f"{FILE}: data.annotates",
            f'"{name}" is not a class of the data. Classes: {quoted(known)}.',
            did_you_mean(name, known),
            cause="column",
        )
        for name in names
        if name not in known
    ]


def _canonical(images: ImageSet, declaration: Declaration) -> ImageSet:
    return replace(images.only_classes(declaration.names), class_names=declaration.canonical)
