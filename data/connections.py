"""List the hosts to which a data set connects, and the data that are sent to them, without opening a connection."""

from dataclasses import dataclass
from pathlib import Path

from polyclinic.common.errors import BadInput
from polyclinic.common.hosts import HostUse, find_host_secret, is_sent_unencrypted
from polyclinic.common.system.plain_text import make_printable_line
from polyclinic.data.base.spec import DataSpec, DicomwebDatasetSpec, make_search_use
from polyclinic.data.tables.csv import read_csv_table

_MAX_ACCESSION_CHARACTERS = 16
"""Maximum length of an AccessionNumber in the DICOM standard (VR SH)."""
_MAX_SAMPLES = 3
_MAX_SAMPLE_CHARACTERS = 24


@dataclass(frozen=True)
class OutboundConnection:
    """A host to which a program will connect, described for the user who must agree.

    Attributes:
        use: The host and the data that are sent to it, in the form for permissions (:mod:`polyclinic.common.hosts`).
        address: The address to show to the user.
        where: The configuration key or command-line option that names the host.
        sent: Phrases that describe the data that are sent to the host.
        asks: True if the user must agree; False if the user named the host on the command line.
    """

    use: HostUse
    address: str
    where: str
    sent: tuple[str, ...]
    asks: bool = True

    @property
    def host(self) -> str:
        """Return the host in the form in which a Python caller lists it."""
        return self.use.host

    def describe(self) -> list[str]:
        """Return lines of text: the address of the host, and below it the data that are sent to it.

        Paths and addresses come from a file of another author. Line feeds in them are replaced, so that they cannot
        add a line.
        """
        lines = (f"{self.address} ({self.where})", *(f"    is sent {phrase}" for phrase in self.sent))
        return [make_printable_line(line) for line in lines]


def list_dataset_connections(
    spec: DataSpec | None, base: Path, secrets_path: Path, *, section: str = "data", samples: bool = False
) -> list[OutboundConnection]:
    """Return the hosts to which a data set connects when it is loaded; empty for files on this machine.

    Connections of a data set plug-in are not listed, because a plug-in is a program that the user has installed.

    Args:
        base: The folder to which paths in ``spec`` are relative.
        secrets_path: The user's file of secrets.
        section: The section of the configuration file that holds ``spec``.
        samples: Show some of the values that are sent; only for a terminal, because a log would store them.

    Raises:
        BadInput: If the file of secrets has a fault.
    """
    if not isinstance(spec, DicomwebDatasetSpec):
        return []
    use = make_search_use(spec, base)
    host = use.host
    secret = find_host_secret(host, secrets_path)
    sent = [_describe_searches(spec, base, samples=samples)]
    if secret is not None:
        sent.append(f"your secret for {host} ({secret.authentication}, from {secrets_path})")
    if is_sent_unencrypted(host):
        sent.append("all of it without TLS: anyone on the way can read it")
    return [OutboundConnection(use, spec.url, f"{section}.url", tuple(sent))]


def _describe_searches(spec: DicomwebDatasetSpec, base: Path, *, samples: bool) -> str:
    """Return a phrase about the column whose values are searched for in the PACS."""
    phrase = f'each value of column "{spec.search_column}" of {spec.labels}'
    try:
        cells = read_csv_table(base / spec.labels, "data.labels", spec.largest_mb).get_column(spec.search_column).cells
    except (BadInput, KeyError):  # the check of the data reports it, before anything is sent
        return phrase
    values = [cell for cell in dict.fromkeys(cells) if cell]
    phrase += f", {len(values):,} in all"
    if samples and values:
        phrase += ": " + ", ".join(
            make_printable_line(value, _MAX_SAMPLE_CHARACTERS) for value in values[:_MAX_SAMPLES]
        )
        phrase += ", ..." if len(values) > _MAX_SAMPLES else ""
    odd = [value for value in values if len(value) > _MAX_ACCESSION_CHARACTERS or set(value) & set(" ,^")]
    if odd and spec.study_column is None and spec.accession_column is not None:
        phrase += f" ({len(odd):,} of them are longer than an AccessionNumber, or have spaces or commas as names do)"
    return phrase
