"""The secret by which a PACS knows this hospital's program: from a file or the environment, into one header."""

import base64
import os
import re
from collections.abc import Mapping
from pathlib import Path

from common.data.base.spec_tables import DicomwebSpec
from common.errors import BadInput, Fault

_LONGEST = 16384


def authorization(spec: DicomwebSpec, base: Path, environment: Mapping[str, str] = os.environ) -> str:
    """Return the value of the header ``Authorization``, empty where none is sent.

    Raises:
        BadInput: If there is no such file or variable, others may read the file, or it holds no secret.
    """
    if spec.authentication is None:
        return ""
    where, text = (
        ("data.secret_env", _of_variable(spec.secret_env, environment))
        if spec.secret_env
        else ("data.secret_file", _of_file(base / str(spec.secret_file)))
    )
    secret = text.strip()
    if not re.fullmatch(r"[!-~](?:[ -~]*[!-~])?", secret):
        # Nothing of it is repeated in the message.
        raise BadInput([Fault(where, "must hold one line of letters, digits and signs (ASCII).")])
    if spec.authentication == "bearer":
        return f"Bearer {secret}"
    if ":" not in secret:
        raise BadInput([Fault(where, 'must hold NAME:PASSWORD, because data.authentication is "basic".')])
    return f"Basic {base64.b64encode(secret.encode()).decode()}"


def _of_variable(name: str | None, environment: Mapping[str, str]) -> str:
    if not (text := environment.get(str(name), "")):
        problem = f"the environment variable {name} is not set, or is empty."
        raise BadInput([Fault("data.secret_env", problem, "Set it where this program is started.")])
    return text


def _of_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = b"" if mode & 0o077 else file.read(_LONGEST + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no file can have this name"
        problem = f"{path} cannot be read: {reason}."
        raise BadInput([Fault("data.secret_file", problem, "Paths are relative to the folder of this file.")]) from None
    if mode & 0o077:
        problem = f"{path} may be read by others (mode {mode & 0o777:o})."
        raise BadInput([Fault("data.secret_file", problem, f"Run: chmod 600 {path.name}")])
    if len(content) > _LONGEST:
        raise BadInput([Fault("data.secret_file", f"{path} is too large for a secret.")])
    return content.decode("ascii", errors="replace")
