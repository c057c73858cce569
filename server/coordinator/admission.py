"""Admission and revocation of sites; each admitted site has a file ``sites/NAME.toml``."""

import datetime as dt
import unicodedata
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from polyclinic.common.errors import BadInput, Fault, quote_names, raise_faults, suggest_nearest_name
from polyclinic.common.security.identity import (
    SiteAdmissionRequest,
    SiteConnectionKit,
    check_public_key,
    check_site_name,
    compute_public_key_fingerprint,
    is_same_public_key,
    write_commented_toml_file,
)
from polyclinic.common.security.phrase import compute_certificate_phrase, compute_public_key_phrase
from polyclinic.common.system.plain_names import PlainName, join_plain_name
from polyclinic.common.system.plain_text import quote_for_shell
from polyclinic.common.system.toml import TomlSection, read_toml, validate_tables
from polyclinic.server.coordinator.authority import read_authority_certificate
from polyclinic.server.coordinator.folder import CoordinatorFolder
from polyclinic.strategies.engine.admission_limits import ClaimsBySite, SiteAdmissionLimits

MAX_CLAIMABLE_CLASSES = 10_000
MAX_NAME_LENGTH = 100
"""Greatest number of characters of a class name."""


class AdmittedSite(TomlSection):
    """The content of ``sites/NAME.toml``. Times are ISO 8601; ``revoked`` is empty until the site is revoked.

    Attributes:
        admitted: Time at which the present key was admitted.
        first_admitted: Time at which a site of this name was admitted first; empty in a file of an earlier release,
            for which ``admitted`` is used. If two sites contradict each other in a run, the site that was admitted
            first prevails. A new key does not change this order.
        classes: Canonical names of the classes that the site may claim to annotate; empty for any.
        max_images: Most training images that the site may claim; 0 for any number.
        old_keys: Earlier, revoked keys of the site; none of them can be admitted again.
    """

    site: str
    public_key: str
    admitted: str
    first_admitted: str = ""
    revoked: str = ""
    classes: tuple[str, ...] = ()
    max_images: int = Field(0, ge=0)
    old_keys: tuple[str, ...] = ()

    _name = field_validator("site")(check_site_name)
    _key = field_validator("public_key")(check_public_key)

    @field_validator("admitted", "first_admitted")
    @classmethod
    def _check_time(cls, text: str, info: ValidationInfo) -> str:
        if text or info.field_name == "admitted":
            _parse_utc_time(text)
        return text

    @property
    def admission_order(self) -> tuple[dt.datetime, str]:
        """Return the sort key (time of the first admission, site name).

        Earlier releases stored times in whole seconds, so two sites may have the same time. Then the name decides.
        """
        return _parse_utc_time(self.first_admitted or self.admitted), self.site

    @field_validator("classes")
    @classmethod
    def _check_claimable_classes(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not name.strip() or name != name.strip() or not name.isprintable() or len(name) > MAX_NAME_LENGTH:
                shown = repr(name[:MAX_NAME_LENGTH])
                raise ValueError(f"{shown} cannot be a class: 1 to {MAX_NAME_LENGTH} characters that show")
        if len(set(names)) < len(names) or len(names) > MAX_CLAIMABLE_CLASSES:
            raise ValueError(f"each class stands there once, and no more than {MAX_CLAIMABLE_CLASSES:,} of them")
        return names

    @field_validator("old_keys")
    @classmethod
    def _check_revoked_keys(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(check_public_key(key) for key in keys)


def read_all_admitted_sites(coordinator: CoordinatorFolder) -> dict[str, AdmittedSite]:
    """Return all sites ever admitted, revoked ones too, by name.

    Raises:
        BadInput: If a site's file was edited and is no longer valid.
    """
    paths = sorted(coordinator.sites_path.glob("*.toml"))
    sites = [validate_tables(AdmittedSite, read_toml(path), f"sites/{path.name}") for path in paths]
    return {site.site: site for site in sorted(sites, key=lambda site: site.site)}


def read_unrevoked_sites(coordinator: CoordinatorFolder, members: Collection[str] = ()) -> dict[str, AdmittedSite]:
    """Return the admitted sites that are not revoked, by name.

    Args:
        members: The sites that a run names as its members; empty for all.
    """
    return {
        name: site
        for name, site in read_all_admitted_sites(coordinator).items()
        if not site.revoked and (not members or name in members)
    }


def find_admission_faults(coordinator: CoordinatorFolder, request: SiteAdmissionRequest) -> list[Fault]:
    """Return a fault for each reason why a site's admission request must be rejected."""
    sites = read_all_admitted_sites(coordinator)
    where = f"{request.site}.request"
    faults = []
    admitted = sites.get(request.site)
    if admitted and not admitted.revoked and not is_same_public_key(admitted.public_key, request.public_key):
        words = f"{quote_for_shell(coordinator.folder)} {quote_for_shell(request.site)}"
        remedy = f"If this is the same hospital with a new key: flwr-server revoke {words}"
        faults.append(Fault(where, f'the name "{request.site}" is taken by another key.', remedy))
    alphabets = {unicodedata.name(letter, "UNKNOWN").split()[0] for letter in request.site if letter.isalpha()}
    if len(alphabets) > 1:
        problem = f"its name mixes letters of {' and '.join(sorted(alphabets))}, of which some look alike."
        faults.append(Fault(where, problem, "The site takes a name in one alphabet: flwr-client init."))
    if request.site != request.site.strip() and admitted is None:
        problem = "its name ends with a space, which nobody sees or hears on the telephone."
        faults.append(Fault(where, problem, "The site takes its name without the space: flwr-client init."))
    for site in sites.values():
        if site.site != request.site and _make_name_key(site.site) == _make_name_key(request.site):
            problem = (
                f'its name differs from the admitted site "{site.site}" in capitals, spaces or forms of letters only.'
            )
            faults.append(Fault(where, problem, "The site takes another name: flwr-client init."))
        is_present_key = is_same_public_key(site.public_key, request.public_key)
        is_old_key = any(is_same_public_key(key, request.public_key) for key in site.old_keys)
        is_revoked = is_old_key or (is_present_key and site.revoked)
        if is_revoked or (is_present_key and site.site != request.site):
            problem = f'its key was {"revoked" if is_revoked else "admitted"} under the name "{site.site}".'
            remedy = "flwr-client init DIR --renew-key" if is_revoked else "another folder, flwr-client init"
            faults.append(Fault(where, problem, f"The site makes a new key: {remedy}."))
    return faults


def _make_name_key(name: str) -> str:
    """Return a normalized site name, which is equal for names that differ only in case, spaces or Unicode form."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    with_dots = folded.replace("\u0131", "i").replace("i\u0307", "i")  # the two letters i of Turkish
    return " ".join(with_dots.split())


def make_site_claim_limits_reader(coordinator: CoordinatorFolder, members: Collection[str] = ()) -> ClaimsBySite:
    """Return a function that reads from the sites' files which classes and how many images each site may claim.

    The limits also hold the order in which the sites were admitted first. While a file is damaged, the function returns
    the limits of its last successful read.

    Args:
        members: The sites of the run; empty for all. Limits of other sites are not returned.
    """
    last = dict[str, SiteAdmissionLimits]()

    def read_claim_limits() -> Mapping[str, SiteAdmissionLimits]:
        try:
            sites = read_unrevoked_sites(coordinator, members)
        except BadInput:
            return last
        last.clear()
        for order, site in enumerate(sorted(sites.values(), key=lambda site: site.admission_order)):
            last[site.site] = SiteAdmissionLimits(frozenset(site.classes), site.max_images, order)
        return last

    return read_claim_limits


def describe_telephone_call(coordinator: CoordinatorFolder, request: SiteAdmissionRequest) -> list[str]:
    """Return the lines by which a coordinator and a hospital compare their keys in one telephone call.

    Raises:
        BadInput: If the certificate of the coordinator's authority cannot be read.
    """
    site, key = request.site, request.public_key
    return [
        f"site         {site}",
        f"its phrase   {compute_public_key_phrase(key)}",
        f"fingerprint  {compute_public_key_fingerprint(key)}",
        f"your phrase  {compute_certificate_phrase(read_authority_certificate(coordinator))}",
        f"Call {site} by telephone, at a number that does not come from the mail with this file. Have it read out its",
        "phrase (or its fingerprint), and read out yours: by yours it knows that the kit it receives is from you.",
    ]


def admit_site(
    coordinator: CoordinatorFolder,
    request: SiteAdmissionRequest,
    *,
    classes: str | None = None,
    max_images: int | None = None,
) -> Path:
    """Admit a site and write its connection kit, the file by which the hospital connects; return the kit's path.

    Args:
        classes: Canonical names of the classes that the site may claim to annotate, separated by commas. Empty text
            allows any class; None keeps the limit of a site that is admitted again.
        max_images: Most training images that the site may claim; 0 for any number, None to keep the limit.

    Raises:
        BadInput: If the name, the key or a class cannot be used.
    """
    raise_faults(find_admission_faults(coordinator, request))
    read_authority_certificate(coordinator)  # before a file is written: without it no kit can be made
    now = _format_utc_now()

    site: dict[str, Any] = {"site": request.site, "public_key": request.public_key, "admitted": now}
    site["first_admitted"] = now
    if old := read_all_admitted_sites(coordinator).get(request.site):
        old_keys = (*old.old_keys, old.public_key) if old.revoked else old.old_keys
        site |= {"old_keys": old_keys, "classes": old.classes, "max_images": old.max_images}
        site["first_admitted"] = old.first_admitted or old.admitted
    if classes is not None:
        site["classes"] = tuple(name.strip() for name in classes.split(",") if name.strip())
    if max_images is not None:
        site["max_images"] = max_images
    admitted = validate_tables(AdmittedSite, site, "flwr-server admit")
    write_commented_toml_file(
        _get_site_toml_path(coordinator, request.site), admitted, "Admitted by flwr-server admit."
    )
    return write_connection_kit(coordinator, admitted)


def write_connection_kit(coordinator: CoordinatorFolder, site: AdmittedSite) -> Path:
    """Write a site's connection kit, the file by which the hospital connects to this coordinator; return its path."""
    kit = SiteConnectionKit(
        coordinator=coordinator.file.name,
        address=coordinator.public_address,
        site=site.site,
        public_key=site.public_key,
        ca_certificate=read_authority_certificate(coordinator),
    )
    path = join_plain_name(coordinator.folder / "kits", PlainName(site.site), ".kit")
    write_commented_toml_file(path, kit, _make_kit_heading(site.site, compute_certificate_phrase(kit.ca_certificate)))
    return path


def _make_kit_heading(site: str, phrase: str) -> str:
    # A person may read the file, and a stranger may have written it: the phrase in it proves nothing.
    return (
        f"For {site}. Holds no secret. The coordinator's phrase when this kit was written:\n"
        f"    {phrase}\n"
        "Anyone who makes such a file can write any phrase here. Compare the one that flwr-client check shows,\n"
        "by telephone, with the one that the coordinator reads out to you."
    )


def read_admitted_site(coordinator: CoordinatorFolder, name: str) -> AdmittedSite:
    """Return the site with this name that was admitted, even if it is revoked.

    Raises:
        BadInput: If no such site was admitted.
    """
    return _select_site(read_all_admitted_sites(coordinator), name)


def read_unrevoked_site(coordinator: CoordinatorFolder, name: str) -> AdmittedSite:
    """Return an admitted site that is not revoked.

    Raises:
        BadInput: If no such site was admitted, or the site is revoked.
    """
    return _select_site(read_unrevoked_sites(coordinator), name)


def _select_site(sites: Mapping[str, AdmittedSite], name: str) -> AdmittedSite:
    if name not in sites:
        remedy = suggest_nearest_name(name, sites) or f"Admitted sites: {quote_names(sites) or 'none'}."
        raise BadInput([Fault(name, "is not an admitted site.", remedy)])
    return sites[name]


def revoke_site(coordinator: CoordinatorFolder, name: str) -> AdmittedSite:
    """Revoke a site's admission; return the site with the time of the revocation.

    Raises:
        BadInput: If no such site was admitted, or the site is revoked already.
    """
    site = read_unrevoked_site(coordinator, name).model_copy(update={"revoked": _format_utc_now()})
    write_commented_toml_file(
        _get_site_toml_path(coordinator, name), site, "Admitted by flwr-server admit, revoked since."
    )
    return site


def _get_site_toml_path(coordinator: CoordinatorFolder, name: str) -> Path:
    return join_plain_name(coordinator.sites_path, PlainName(name), ".toml")


def _format_utc_now() -> str:
    """Return the time to the microsecond, so that sites admitted one after another by a script have an order."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="microseconds")


def _parse_utc_time(text: str) -> dt.datetime:
    """Return a time in ISO 8601; without a zone it is UTC.

    Raises:
        ValueError: If the text is no such time.
    """
    try:
        time = dt.datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text[:40]!r} is no time such as 2026-11-24T02:38:31+00:00") from None
    return time if time.tzinfo else time.replace(tzinfo=dt.UTC)
