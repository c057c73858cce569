"""Who may take part: one file a site, its public key as it was admitted, and whether it was revoked since."""

import datetime as dt
from pathlib import Path

from pydantic import field_validator

from common.errors import BadInput, Fault, did_you_mean, quoted
from common.identity import SiteKit, SiteRequest, checked_key, checked_name, same_key, write_toml
from common.toml_files import Section, read_toml, validated
from server.authority import authority_certificate
from server.coordinator import Coordinator


class AdmittedSite(Section):
    """``sites/NAME.toml``; times are ISO 8601, an empty ``revoked`` means that the site may take part.

    Attributes:
        old_keys: Those that the name had before, each revoked; none of them is ever admitted again.
    """

    site: str
    public_key: str
    admitted: str
    revoked: str = ""
    old_keys: tuple[str, ...] = ()

    _name = field_validator("site")(checked_name)
    _key = field_validator("public_key")(checked_key)

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
    for site in sites.values():
        same = same_key(site.public_key, request.public_key)
        revoked = (same and site.revoked) or any(same_key(key, request.public_key) for key in site.old_keys)
        if revoked or (same and site.site != request.site):
            problem = f'its key was {"revoked" if revoked else "admitted"} under the name "{site.site}".'
            faults.append(Fault(where, problem, "The site makes a new key: another folder, flwr-client init."))
    return faults


def admit(coordinator: Coordinator, request: SiteRequest) -> Path:
    """Admit a site; return the path of its kit.

    Raises:
        BadInput: If the name or the key cannot be used.
    """
    if faults := admission_faults(coordinator, request):
        raise BadInput(faults)
    authority_certificate(coordinator)  # without one there is no kit to send
    old = admitted_sites(coordinator).get(request.site)
    keys = (*old.old_keys, old.public_key) if old and old.revoked else old.old_keys if old else ()
    site = AdmittedSite(site=request.site, public_key=request.public_key, admitted=_now(), old_keys=keys)
    write_toml(_path(coordinator, request.site), site, "Admitted by flwr-server admit.")
    return write_kit(coordinator, site)


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


def revoke(coordinator: Coordinator, name: str) -> AdmittedSite:
    """Take a site's admission back.

    Raises:
        BadInput: If there is no such site, or it was revoked before.
    """
    sites = members(coordinator)
    if name not in sites:
        remedy = did_you_mean(name, sites) or f"Admitted sites: {quoted(sites) or 'none'}."
        raise BadInput([Fault(name, "is not an admitted site.", remedy)])
    site = sites[name].model_copy(update={"revoked": _now()})
    write_toml(_path(coordinator, name), site, "Admitted by flwr-server admit, revoked since.")
    return site


def _path(coordinator: Coordinator, name: str) -> Path:
    return coordinator.sites / f"{name}.toml"


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
