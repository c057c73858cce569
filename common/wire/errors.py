"""Why a record is not accepted."""


class WireError(ValueError):
    """A record that this side does not accept, with the reason."""


class WireVersionError(WireError):
    """The other side speaks another version of these records."""
