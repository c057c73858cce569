"""Why a record is not accepted."""

from common.system.plain_text import shown

TRACE = "=== Source Location Trace"


def grpc_words(details: str | None) -> str:
    """Return the details of a gRPC error as one short plain line, without the trace of gRPC's own source files."""
    return shown((details or "").split(TRACE)[0].strip())


class WireError(ValueError):
    """A record that this side does not accept, with the reason."""


class WireVersionError(WireError):
    """The other side speaks another version of these records."""
