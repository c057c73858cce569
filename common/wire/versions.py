"""The wire versions that this release speaks, and all differences between them.

Coordinator and hospitals need not update on the same day, because a release speaks its wire version and the one before.
The two sides agree on the newest version that both speak, in the call ``Hello`` before anything else is sent
(:class:`polyclinic.common.wire.fleet_protocol.HelloAnswer`). A site states its version in a header of each call
(:func:`make_release_header`). A site that is two versions apart is refused at the connection, with the name of the
release to install.

Inside our programs, records always have the form of :data:`WIRE_VERSION`. They are converted at two places only.
:func:`write_in_version` does so just before a request or a reply is signed and sent, :func:`read_in_present_version`
when a record is decoded. A run that needs a feature which a site's version lacks refuses this site, with the reason
(:func:`find_lacking_feature`).

To raise the wire version to n + 1:

1. Raise :data:`WIRE_VERSION`, and ``polyclinic.common.__version__``, because people who must update see this name.
2. In :data:`WIRE_FORMATS`, add an entry for n + 1 without differences. Write the changes of n + 1 into the entry of n.
   Delete the entry of n - 1 with the code that only this entry used.
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
"""Version of the format of everything that coordinator and hospitals send to one another.

It is raised whenever a record gains, loses or changes a field, or anything that is sent is hashed, signed, encrypted or
derived in another way.
"""
VERSION_FIELD = "wire.version"
"""Field of each record with its wire version."""
RECORD_FIELD = "wire.record"
"""Field of each record with the name of its class."""
PLAN_FIELD = "plan"
"""Field of a request with the run's plan as JSON."""
RELEASE_HEADER = "polyclinic-release"
"""Header of a site's calls with its wire version and its release. Releases up to wire version 16 do not send it."""
MAX_WIRE_VERSION = 999_999
"""Largest wire version that a header can state."""

FieldValue = bool | int | float | str | bytes | list[Any]


@dataclass(frozen=True)
class LackingFeature:
    """A feature that a run may need, and that a wire version lacks.

    Attributes:
        name: Name of the feature, for people.
        reason: Clause about the consequence for a run.
        is_used_by: Returns True for the plan of a run that needs the feature.
    """

    name: str
    reason: str
    is_used_by: "Callable[[HospitalPlan], bool]"


@dataclass(frozen=True)
class WireFormat:
    """The differences of a wire version from :data:`WIRE_VERSION`; without arguments there are none.

    Attributes:
        signs_calls_for_coordinator: True if a site signs its calls for one coordinator; False if it signs only the
            time.
        added_fields: Record class -> field that a later version added -> the value with the same meaning as the missing
            field. A record with another value cannot be sent in this version.
        statements: Record class -> fields with facts about the sender that a later version added. They are left out in
            this version, and are empty in a received record of this version.
        added_records: Record classes that a later version added. They cannot be sent in this version.
        plan_tables: Tables of a plan that a later version added, and that a site of this version does not need; a key
            of a
            table is ``table.key``.
        lacks: Features that a later version added or changed.
    """

    signs_calls_for_coordinator: bool = True
    added_fields: Mapping[str, Mapping[str, FieldValue]] = field(default_factory=lambda: MappingProxyType({}))
    statements: Mapping[str, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))
    added_records: frozenset[str] = frozenset()
    plan_tables: frozenset[str] = frozenset()
    lacks: tuple[LackingFeature, ...] = ()


WIRE_FORMATS: Mapping[int, WireFormat] = MappingProxyType(
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
"""Wire version that this release speaks -> its differences."""
OLDEST_WIRE_VERSION = min(WIRE_FORMATS)


# ---------------------------------------------------------------------- records
# These functions import Flower when they are called, so that programs that read no record start without it.


def read_version(content: "RecordDict") -> Any:
    """Return the wire version in a record, of any type; None if there is none."""
    from polyclinic.common.wire.canonical_bytes import read_small_fields

    return read_small_fields(content).get(VERSION_FIELD)


def is_record_in_version(record: str, version: int) -> bool:
    """Return True if a wire version has the record class of this name."""
    return version in WIRE_FORMATS and record not in WIRE_FORMATS[version].added_records


def is_spoken(version: object) -> bool:
    """Return True if this release speaks a wire version."""
    return type(version) is int and version in WIRE_FORMATS


def write_in_version(content: "RecordDict", version: int) -> "RecordDict":
    """Return a record of any spoken version in another version; its arrays are not copied.

    Raises:
        WireVersionError: If the version cannot express a value of the record, or either version is not spoken.
    """
    from flwr.app import ConfigRecord, RecordDict

    from polyclinic.common.wire.canonical_bytes import FIELDS_RECORD, read_small_fields

    fields = read_small_fields(content)
    if fields.get(VERSION_FIELD) == version and is_spoken(version):
        return content
    written = RecordDict(dict(content))
    written[FIELDS_RECORD] = ConfigRecord(downgrade_fields(read_in_present_version(fields), version))
    return written


def read_in_present_version(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record's fields, of any spoken version, in the form of :data:`WIRE_VERSION`.

    Raises:
        WireVersionError: If the version is not spoken.
    """
    version = fields.get(VERSION_FIELD)
    if not is_spoken(version):
        raise WireVersionError(
            f"the other side speaks wire version {make_printable_line(repr(version), 40)}, this one "
            f"{describe_spoken_versions()}. Install the same release on both."
        )
    return upgrade_fields(fields, WIRE_FORMATS[fields[VERSION_FIELD]])


def upgrade_fields(fields: Mapping[str, Any], earlier: WireFormat) -> dict[str, Any]:
    """Return the fields of a record of an earlier version in the form of :data:`WIRE_VERSION`."""
    record = str(fields.get(RECORD_FIELD))
    added = earlier.added_fields.get(record, {})
    empty = dict.fromkeys(earlier.statements.get(record, ()), "")
    return {**added, **empty, **fields, VERSION_FIELD: WIRE_VERSION}


def downgrade_fields(
    fields: Mapping[str, Any], version: int, formats: Mapping[int, WireFormat] = WIRE_FORMATS
) -> dict[str, Any]:
    """Return the fields of a record of :data:`WIRE_VERSION` in the form of an earlier version.

    Raises:
        WireVersionError: If the version lacks the record, or a field whose value it cannot express.
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
    """Return a plan's JSON without these tables and keys; the unchanged text if it has none of them."""
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
    return " and ".join(map(str, sorted(WIRE_FORMATS, reverse=True)))


# ---------------------------------------------------------------------- the version of the other side


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
        """The newest version that both sides speak; if there is none, the newest of this release.

        A site also speaks the version before its newest. So a site that is newer by one version agrees on our newest.
        """
        return min(self.wire, WIRE_VERSION) if self.is_within_reach else WIRE_VERSION

    @property
    def is_within_reach(self) -> bool:
        """True if both sides speak a common version, because they are at most one version apart."""
        return OLDEST_WIRE_VERSION <= self.wire <= WIRE_VERSION + 1


def describe_needed_update(stated: StatedRelease) -> str:
    """Return a clause about a connected site of another wire version: the side that must update, and until when."""
    release = f"release {stated.release}" if stated.release else "release"
    here = f"this coordinator's release {__version__} speaks {describe_spoken_versions()}"
    both = f"its {release} speaks wire version {stated.wire}, {here}"
    if stated.wire > WIRE_VERSION:
        return f"is ahead: {both}; update the coordinator"
    return f"has to update: {both}, and the next one will refuse it"


PRESENT_RELEASE = StatedRelease(WIRE_VERSION, __version__)


def make_release_header(wire: int) -> tuple[str, str]:
    """Return the header in which a site states its wire version and its release."""
    return RELEASE_HEADER, f"{wire} {__version__}"


def parse_release_header(header: str, *, signed_for_coordinator: bool) -> StatedRelease:
    """Parse the header of :func:`make_release_header`.

    Args:
        header: The header's text; empty if the call has none.
        signed_for_coordinator: True if the call is signed for this coordinator. The header is not signed, so any other
            call counts as one of an earlier version, even if the header says otherwise.
    """
    unsigned = [version for version, spoken in WIRE_FORMATS.items() if not spoken.signs_calls_for_coordinator]
    newest = MAX_WIRE_VERSION if signed_for_coordinator else max(unsigned, default=0)
    stated = re.fullmatch(r"(\d{1,6}) (.+)", header, re.ASCII | re.DOTALL)
    if stated is None:
        return StatedRelease(min(WIRE_VERSION, newest))
    return StatedRelease(min(int(stated[1]), newest), parse_release_name(stated[2]))


def find_lacking_feature(version: int, plan: "HospitalPlan") -> str:
    """Return the reason why a site that speaks this wire version cannot take part in a plan's run; empty if it can."""
    for feature in WIRE_FORMATS[version].lacks:
        if feature.is_used_by(plan):
            return f"{feature.name} needs wire version {WIRE_VERSION}; in wire version {version}, {feature.reason}."
    return ""
