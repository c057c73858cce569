"""Who may take part: one file a site, its public key as it was admitted, and whether it was revoked since."""

import datetime as dt
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from common.errors import BadInput, Fault, did_you_mean, quoted
from common.security.identity import SiteKit, SiteRequest, checked_key, checked_name, same_key, write_toml
from common.system.toml import Section, read_toml, validated
from server.coordinator.authority import authority_certificate
from server.coordinator.folder import Coordinator
from strategies.engine.claims import Claims, ClaimsBySite

MOST_CLASSES, LONGEST_NAME = 10_000, 100


@dataclass(frozen=True)
class Lists:
    """What ``flwr-server admit`` was told that a site may claim; None leaves what stands.

    Attributes:
        classes: Canonical names, separated by commas; empty text for any.
        images: Most training images; 0 for any number.
    """

    classes: str | None = None
    images: int | None = None


UNTOLD = Lists()


def checked_classes(names: Sequence[str]) -> tuple[str, ...]:
    """Class names as a site may have them.

    Raises:
        ValueError: If one cannot be a class's name, or stands there twice.
    """
    for name in names:
        if not name.strip() or name != name.strip() or not name.isprintable() or len(name) > LONGEST_NAME:
            raise ValueError(f"{name[:LONGEST_NAME]!r} cannot be a class: 1 to {LONGEST_NAME} characters that show")
    if len(set(names)) < len(names) or len(names) > MOST_CLASSES:
        raise ValueError(f"each class stands there once, and no more than {MOST_CLASSES:,} of them")
    return tuple(names)


class AdmittedSite(Section):
    """``sites/NAME.toml``; times are ISO 8601, an empty ``revoked`` means that the site may take part.

    Attributes:
        classes: Canonical names of the classes that it may claim to annotate; empty for any.
        max_images: Most training images that it may claim; 0 for any number.
        old_keys: Those that the name had before, each revoked; none of them is ever admitted again.
    """

    site: str
    public_key: str
    admitted: str
    revoked: str = ""
    classes: tuple[str, ...] = ()
    max_images: int = Field(0, ge=0)
    old_keys: tuple[str, ...] = ()

    _name = field_validator("site")(checked_name)
    _key = field_validator("public_key")(checked_key)

    @field_validator("classes")
    @classmethod
    def _classes(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return checked_classes(names)

    @field_validator("old_keys")
    @classmethod
    def _old(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(checked_key(key) for key in keys)


def admitted_sites(coordinator: Coordinator) -> dict[str, AdmittedSite]:
    """All sites ever admitted, by name, sorted.

    Raises:
        BadInput: With the faults of a file that was edited.
    """
    paths = sorted(coordinator.sites.glob("*.toml"))
    sites = [validated(AdmittedSite, read_toml(path), f"sites/{path.name}") for path in paths]
    return {site.site: site for site in sorted(sites, key=lambda site: site.site)}


def members(coordinator: Coordinator) -> dict[str, AdmittedSite]:
    """The sites that may take part now."""
    return {name: site for name, site in admitted_sites(coordinator).items() if not site.revoked}


def admission_faults(coordinator: Coordinator, request: SiteRequest) -> list[Fault]:
    """Say why a request cannot be granted."""
    sites = admitted_sites(coordinator)
    where = f"{request.site}.request"
    faults = []
    found = sites.get(request.site)
    if found and not found.revoked and not same_key(found.public_key, request.public_key):
        remedy = f"If this is the same hospital with a new key: flwr-server revoke {coordinator.folder} {request.site}"
        faults.append(Fault(where, f'the name "{request.site}" is taken by another key.', remedy))
    if len(alphabets := alphabets_of(request.site)) > 1:
        problem = f"its name mixes letters of {' and '.join(sorted(alphabets))}, of which some look alike."
        faults.append(Fault(where, problem, "The site takes a name in one alphabet: flwr-client init."))
    for site in sites.values():
        if site.site != request.site and site.site.casefold() == request.site.casefold():
            problem = f'its name differs from the admitted site "{site.site}" in capitals only.'
            faults.append(Fault(where, problem, "The site takes another name: flwr-client init."))
        same = same_key(site.public_key, request.public_key)
        revoked = (same and site.revoked) or any(same_key(key, request.public_key) for key in site.old_keys)
        if revoked or (same and site.site != request.site):
            problem = f'its key was {"revoked" if revoked else "admitted"} under the name "{site.site}".'
            faults.append(Fault(where, problem, "The site makes a new key: another folder, flwr-client init."))
    return faults


def alphabets_of(name: str) -> set[str]:
    """The alphabets of a name's letters, as Unicode calls them: LATIN, CYRILLIC, GREEK, ..."""
    return {unicodedata.name(letter, "UNKNOWN").split()[0] for letter in name if letter.isalpha()}


def claims_of(coordinator: Coordinator) -> ClaimsBySite:
    """Looks up what each site was admitted for, as its file says now; while a file is damaged, as it said before."""
    last = dict[str, Claims]()

    def look() -> Mapping[str, Claims]:
        try:
            sites = members(coordinator)
        except BadInput:
            return last
        last.update({name: Claims(frozenset(site.classes), site.max_images) for name, site in sites.items()})
        return last

    return look


def admit(coordinator: Coordinator, request: SiteRequest, lists: Lists = UNTOLD) -> Path:
    """Admit a site; return the path of its kit.

    Args:
        lists: What the site may claim; of a site that is admitted again, what is not told stays as it stands.

    Raises:
        BadInput: If the name, the key or a class cannot be used.
    """
    if faults := admission_faults(coordinator, request):
        raise BadInput(faults)
    authority_certificate(coordinator)  # without one there is no kit to send
    old = admitted_sites(coordinator).get(request.site)
    keys = (*old.old_keys, old.public_key) if old and old.revoked else old.old_keys if old else ()
    tree = {"site": request.site, "public_key": request.public_key, "admitted": _now(), "old_keys": keys}
    site = validated(AdmittedSite, tree | _listed(lists, old), "flwr-server admit")
    write_toml(_path(coordinator, request.site), site, "Admitted by flwr-server admit.")
    return write_kit(coordinator, site)


def _listed(lists: Lists, old: AdmittedSite | None) -> dict[str, Any]:
    """What the site may claim from now on."""
    named = None if lists.classes is None else tuple(name.strip() for name in lists.classes.split(",") if name.strip())
    return {
        "classes": named if named is not None else old.classes if old else (),
        "max_images": lists.images if lists.images is not None else old.max_images if old else 0,
    }


def write_kit(coordinator: Coordinator, site: AdmittedSite) -> Path:
    """Write what the hospital gets."""
    kit = SiteKit(
        coordinator=coordinator.file.name,
        address=coordinator.public_address,
        site=site.site,
        public_key=site.public_key,
        ca_certificate=authority_certificate(coordinator),
    )
    path = coordinator.folder / "kits" / f"{site.site}.kit"
    write_toml(path, kit, f"For {site.site}. Holds no secret.")
    return path


def member(coordinator: Coordinator, name: str) -> AdmittedSite:
    """A site that may take part now.

    Raises:
        BadInput: If there is no such site, or it was revoked before.
    """
    sites = members(coordinator)
    if name not in sites:
        remedy = did_you_mean(name, sites) or f"Admitted sites: {quoted(sites) or 'none'}."
        raise BadInput([Fault(name, "is not an admitted site.", remedy)])
    return sites[name]


def revoke(coordinator: Coordinator, name: str) -> AdmittedSite:
    """Take a site's admission back.

    Raises:
        BadInput: If there is no such site, or it was revoked before.
    """
    site = member(coordinator, name).model_copy(update={"revoked": _now()})
    write_toml(_path(coordinator, name), site, "Admitted by flwr-server admit, revoked since.")
    return site


def _path(coordinator: Coordinator, name: str) -> Path:
    return coordinator.sites / f"{name}.toml"


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
