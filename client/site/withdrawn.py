"""The file ``state/withdrawn.json``, which marks that the site has left its federation and must not train."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.system.plain_text import quote_for_shell

WITHDRAWN_FILE = "withdrawn.json"


class WithdrawnMark(BaseModel):
    """The content of ``state/withdrawn.json``: UTC time and reason of the site's withdrawal."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    time: str
    reason: str = ""


def read_withdrawn_mark(state: Path) -> WithdrawnMark | None:
    """Return the mark of a site that has left; None if the file does not exist. A damaged file counts as a mark."""
    try:
        return WithdrawnMark.model_validate_json((state / WITHDRAWN_FILE).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError):
        return WithdrawnMark(time="an unknown day")


def refuse_withdrawn_site(folder: Path, state: Path) -> None:
    """Refuse to work for a coordinator after ``flwr-client withdraw``.

    Raises:
        BadInput: If this site has left.
    """
    if (mark := read_withdrawn_mark(state)) is not None:
        remedy = f"To take part again: flwr-client withdraw {quote_for_shell(folder)} --undo"
        problem = f"has left its federation on {mark.time[:10]}: nothing is trained here any more."
        raise BadInput([Fault(str(folder), problem, remedy)])
