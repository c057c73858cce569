"""The wire versions that this release speaks, and all that differs between them.

Coordinator and hospitals need not change release on one day: a release speaks its own wire version and the one before.
The two sides agree on the newer one that both speak, in the call ``Hello`` before anything else is sent
(:class:`polyclinic.common.wire.fleet_protocol.HelloAnswer`). A site states its version in a header of each call
(:func:`make_release_header`). A site that is two versions apart is refused at the connection, with the release to
install.

The records of our programs are always those of :data:`WIRE_VERSION`. They are rewritten at two places only:
:func:`write_in_version` just before a request or a reply is signed and sent, :func:`read_in_present_version` when a
record is decoded. What a version lacks altogether, a run may not ask of a site that speaks it
(:func:`find_lacking_feature`): that site is refused for the run, with the reason.

To raise the wire version to n + 1:

1. Raise :data:`WIRE_VERSION`, and ``polyclinic.common.__version__``: a person who has to update is given its name.
2. In :data:`FORMATS`, add an entry for n + 1 without differences, write into the entry of n what n + 1 changed, and
   delete the entry of n - 1 with the code that only this entry used.
3. Add the golden bytes of n + 1, and delete those of n - 1 (``tests/golden/README.md``).
4. Set commit and name of release n in ``tests/network/previous_release.py``, and run ``make test-previous-release``.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from polyclinic.common import __version__
from polyclinic.common.errors import WireVersionError
from polyclinic.common.system.plain_text import make_printable_line
from polyclinic.common.wire.release_name import parse_release_name

if TYPE_CHECKING:
    from flwr.app import RecordDict

    from polyclinic.common.config import HospitalPlan

WIRE_VERSION = 17
"""Version of what coordinator and hospitals send one another. It is raised whenever a record gains, loses or changes a
field, or anything that is sent is hashed, signed, encrypted or derived otherwise."""
VERSION_FIELD, RECORD_FIELD = "wire.version", "wire.record"
"""Fields of each record that name its wire version and its class."""
PLAN_FIELD = "plan"
"""Field of a request with the run's plan as JSON."""
RELEASE_HEADER = "polyclinic-release"
"""Header of a site's calls with its wire version and its release. Releases up to wire version 16 do not send it."""
LARGEST_VERSION = 999_999
"""Largest wire version that a header can state."""

FieldValue = bool | int | float | str | bytes | list[Any]


@dataclass(frozen=True)
class LackingFeature:
    """Something that a run may need and that a wire version does not have.

    Attributes:
        name: Name of the feature, for people.
        reason: Clause that says what would go wrong.
        is_used_by: Returns True for the plan of a run that needs the feature.
    """

    name: str
    reason: str
    is_used_by: "Callable[[HospitalPlan], bool]"


@dataclass(frozen=True)
class WireFormat:
    """How a wire version differs from :data:`WIRE_VERSION`; without arguments, not at all.

    Attributes:
        signs_calls_for_coordinator: A site signs its calls for one coordinator. If False, it signs the time alone.
        added_fields: Record class -> field that a later version added -> the value that has the meaning of the record
            without that field. A record with another value cannot be sent in this version.
        statements: Record class -> fields that a later version added, and that only say something about the sender.
            They are left out in this version, and are empty in a record of this version.
        added_records: Record classes that a later version added. None of them can be sent in this version.
        plan_tables: Tables of a plan that a later version added, and that a site of this version does without; a key
            of a table is ``table.key``.
        lacks: Features that a later version added or changed.
    """

    signs_calls_for_coordinator: bool = True
    added_fields: Mapping[str, Mapping[str, FieldValue]] = field(default_factory=lambda: MappingProxyType({}))
    statements: Mapping[str, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))
    added_records: frozenset[str] = frozenset()
    plan_tables: frozenset[str] = frozenset()
    lacks: tuple[LackingFeature, ...] = ()


FORMATS: Mapping[int, WireFormat] = MappingProxyType(
    {
        WIRE_VERSION: WireFormat(),
        16: WireFormat(
            signs_calls_for_coordinator=False,
            statements=MappingProxyType({"RollCallAnswer": frozenset({"pixels", "level", "shown", "fingerprint"})}),
            added_records=frozenset(
                {"Question", "CountRequest", "CountReply", "DeliveryRequest", "ScoringRequest", "ScoringReply"}
            ),
            plan_tables=frozenset({"planning", "pixels", "vocabulary", "run.purpose"}),
            lacks=(
                LackingFeature(
                    "secure aggregation",
                    "it shares its secrets in another form, so that no sum could be unmasked",
                    lambda plan: plan.privacy.secure_aggregation,
                ),
                LackingFeature(
                    "method.compress_model",
                    "a site knows no such key and reads no plan with it",
                    lambda plan: "compress_model" in plan.method,
                ),
            ),
        ),
    }
)
"""The wire versions that this release speaks, with their differences."""
OLDEST_VERSION = min(FORMATS)


# ---------------------------------------------------------------------- records
# These functions import Flower when they are called: programs that read no record start without it.


def read_version(content: "RecordDict") -> Any:
    """Return the wire version that a record names, of any type; None if it names none."""
    from polyclinic.common.wire.canonical_bytes import read_small_fields

    return read_small_fields(content).get(VERSION_FIELD)


def is_record_in_version(record: str, version: int) -> bool:
    """Return True if a wire version has the record class of this name."""
    return version in FORMATS and record not in FORMATS[version].added_records


def is_spoken(version: object) -> bool:
    """Return True if this release speaks a wire version."""
    return type(version) is int and version in FORMATS


def write_in_version(content: "RecordDict", version: int) -> "RecordDict":
    """Return a record of any spoken version in another version; its arrays are not copied.

    Raises:
        WireVersionError: If the record says something that the version cannot say, or either version is not spoken.
    """
    from flwr.app import ConfigRecord, RecordDict

    from polyclinic.common.wire.canonical_bytes import FIELDS, read_small_fields

    fields = read_small_fields(content)
    if fields.get(VERSION_FIELD) == version and is_spoken(version):
        return content
    written = RecordDict(dict(content))
    written[FIELDS] = ConfigRecord(downgrade_fields(read_in_present_version(fields), version))
    return written


def read_in_present_version(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record's fields, of any spoken version, as those of :data:`WIRE_VERSION`.

    Raises:
        WireVersionError: If the version is not spoken.
    """
    version = fields.get(VERSION_FIELD)
    if not is_spoken(version):
        raise WireVersionError(
            f"the other side speaks wire version {make_printable_line(repr(version), 40)}, this one "
            f"{describe_spoken_versions()}. Install the same release on both."
        )
    return upgrade_fields(fields, FORMATS[fields[VERSION_FIELD]])


def upgrade_fields(fields: Mapping[str, Any], earlier: WireFormat) -> dict[str, Any]:
    """Return the fields of a record of an earlier version as those of :data:`WIRE_VERSION`."""
    record = str(fields.get(RECORD_FIELD))
    added = earlier.added_fields.get(record, {})
    empty = dict.fromkeys(earlier.statements.get(record, ()), "")
    return {**added, **empty, **fields, VERSION_FIELD: WIRE_VERSION}


def downgrade_fields(
    fields: Mapping[str, Any], version: int, formats: Mapping[int, WireFormat] = FORMATS
) -> dict[str, Any]:
    """Return the fields of a record of :data:`WIRE_VERSION` as those of an earlier version.

    Raises:
        WireVersionError: If a field that the version lacks has a value that it cannot say.
    """
    if version not in formats:
        raise WireVersionError(f"no record is written in wire version {version}, only in {describe_spoken_versions()}.")
    record = str(fields.get(RECORD_FIELD))
    lower = formats[version]
    if record in lower.added_records:
        raise WireVersionError(f"wire version {version} has no {record}.")
    added = lower.added_fields.get(record, {})
    for name, absent in added.items():
        if fields.get(name, absent) != absent:
            raise WireVersionError(f"wire version {version} cannot say {name} of {fields[RECORD_FIELD]}.")
    omitted = added.keys() | lower.statements.get(record, frozenset())
    lowered = {name: value for name, value in fields.items() if name not in omitted} | {VERSION_FIELD: version}
    if lower.plan_tables and isinstance(plan := lowered.get(PLAN_FIELD), str):
        lowered[PLAN_FIELD] = _leave_out_plan_tables(plan, lower.plan_tables)
    return lowered


def _leave_out_plan_tables(plan: str, tables: frozenset[str]) -> str:
    """Return a plan's JSON without these tables and keys; the same text if it has none of them."""
    parsed = json.loads(plan)
    if not isinstance(parsed, dict):
        return plan
    rest = {name: table for name, table in parsed.items() if name not in tables}
    for name, table in rest.items():
        if isinstance(table, dict):
            rest[name] = {key: value for key, value in table.items() if f"{name}.{key}" not in tables}
    return plan if rest == parsed else json.dumps(rest, separators=(",", ":"))


def describe_spoken_versions() -> str:
    """Return the spoken wire versions for people, such as ``17 and 16``."""
    return " and ".join(map(str, sorted(FORMATS, reverse=True)))


# ---------------------------------------------------------------------- what the other side speaks


@dataclass(frozen=True)
class StatedRelease:
    """The wire version and the release that a site states in each call.

    Attributes:
        wire: The newest wire version that the site speaks.
        release: Name of its release (:data:`polyclinic.common.wire.release_name.ReleaseName`); empty if it states none.
    """

    wire: int
    release: str = ""

    @property
    def agreed_version(self) -> int:
        """Return the version to speak with the site: the newest that both speak, else the newest of this release.

        A site speaks the version before its own, too. So one that is newer by one version agrees on ours.
        """
        return min(self.wire, WIRE_VERSION) if self.is_within_reach else WIRE_VERSION

    @property
    def is_within_reach(self) -> bool:
        """Return True if both sides speak a common version, because they are at most one version apart."""
        return OLDEST_VERSION <= self.wire <= WIRE_VERSION + 1


def describe_needed_update(stated: StatedRelease) -> str:
    """Return a clause about a connected site of another wire version: which side has to update, and until when."""
    release = f"release {stated.release}" if stated.release else "release"
    here = f"this coordinator's release {__version__} speaks {describe_spoken_versions()}"
    both = f"its {release} speaks wire version {stated.wire}, {here}"
    if stated.wire > WIRE_VERSION:
        return f"is ahead: {both}; update the coordinator"
    return f"has to update: {both}, and the next one will refuse it"


PRESENT_RELEASE = StatedRelease(WIRE_VERSION, __version__)


def make_release_header(wire: int) -> tuple[str, str]:
    """Return the header by which a site states its wire version and its release."""
    return RELEASE_HEADER, f"{wire} {__version__}"


def parse_release_header(header: str, *, signed_for_coordinator: bool) -> StatedRelease:
    """Parse the header of :func:`make_release_header`.

    Args:
        header: The header's text; empty if the call has none.
        signed_for_coordinator: True if the call is signed for this coordinator. The header is not signed, so a call
            that is not counts as one of an earlier version, even if the header says otherwise.
    """
    unsigned = [version for version, spoken in FORMATS.items() if not spoken.signs_calls_for_coordinator]
    newest = LARGEST_VERSION if signed_for_coordinator else max(unsigned, default=0)
    stated = re.fullmatch(r"(\d{1,6}) (.+)", header, re.ASCII | re.DOTALL)
    if stated is None:
        return StatedRelease(min(WIRE_VERSION, newest))
    return StatedRelease(min(int(stated[1]), newest), parse_release_name(stated[2]))


def find_lacking_feature(version: int, plan: "HospitalPlan") -> str:
    """Return why a site that speaks this wire version cannot take part in a plan's run; empty if it can."""
    for feature in FORMATS[version].lacks:
        if feature.is_used_by(plan):
            return f"{feature.name} needs wire version {WIRE_VERSION}; in wire version {version}, {feature.reason}."
    return ""
