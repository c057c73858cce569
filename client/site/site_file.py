"""``site.toml``, read and checked without torch: a wrong one is refused at once."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from client.site.policy import Policy
from common.data.base.spec import DataSpec
from common.errors import BadInput, Fault
from common.security.identity import checked_name, split_address
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
        policy: What leaves beside updates.
        health: Where ``flwr-client status`` and the container's health check ask; empty for nowhere. Port 0 takes any.
    """

    name: str
    kit: str = ""
    key: str = ""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    health: str = "127.0.0.1:9095"
    policy: Policy = Policy()
    data: DataSpec = Field(discriminator="kind")

    _name = field_validator("name")(checked_name)

    @field_validator("health")
    @classmethod
    def _an_address(cls, address: str) -> str:
        if address:
            split_address(re.sub(":0$", ":1", address))
        return address


def read_site_file(folder: Path) -> tuple[SiteFile, tuple[str, ...], Mapping[str, str], list[Fault]]:
    """Read ``site.toml`` of a folder; the data that it names is not looked at.

    Returns:
        The file, the classes that it annotates and its synonyms, and what is wrong with these two.

    Raises:
        BadInput: With every fault, if the folder holds none or it has a fault elsewhere.
    """
    tree = _read_site_toml(folder)
    data = tree.get("data")
    labels, synonyms = (data.pop("annotates", ()), data.pop("synonyms", {})) if isinstance(data, dict) else ((), {})
    wrong = [*_list_faults(labels), *_map_faults(synonyms)]
    try:
        file = validated(SiteFile, tree, FILE)
    except BadInput as error:
        raise BadInput([*error.faults, *wrong]) from None
    return file, tuple(labels), synonyms, wrong


def _read_site_toml(folder: Path) -> dict[str, Any]:
    if not is_file(folder / FILE):
        problem = f"is no site's folder: it holds no {FILE}."
        raise BadInput([Fault(str(folder), problem, "Make one with flwr-client init.")])
    return read_toml(folder / FILE)


def _list_faults(labels: Any) -> list[Fault]:
    if isinstance(labels, list | tuple) and all(isinstance(name, str) for name in labels):
        return []
    return [Fault(f"{FILE}: data.annotates", "must be a list of class names.")]


def _map_faults(synonyms: Any) -> list[Fault]:
    if isinstance(synonyms, dict) and all(isinstance(name, str) for name in synonyms.values()):
        return []
    return [Fault(f"{FILE}: data.synonyms", 'must be a table of lines "own name" = "canonical name".')]
