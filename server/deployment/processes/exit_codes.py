"""How the process that leads a run ends: each way with a line for a person and an exit code for a supervisor."""

import shlex
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common.errors import BadInput, CannotGoOn
from common.system.files import is_disk_full
from server.deployment.processes.supervisor import RunExit
from strategies.engine.events import RunStopped

Tell = Callable[[str], None]


def led(lead: Callable[[], dict[str, Any]], out: Path, again: Sequence[str], tell: Tell) -> dict[str, Any]:
    """Lead a run to its end; return its summary.

    Args:
        out: The run folder.
        again: The command line that goes on with the run.

    Raises:
        RunStopped: If it cannot go on; a disk without room included, for the run can go on once there is some.
        SystemExit: If it was stopped on request, or if we made a mistake.
    """
    line = shlex.join(again)
    try:
        return lead()
    except (BadInput, CannotGoOn):
        raise
    except (SystemExit, KeyboardInterrupt):
        tell(f"stopped on request; to go on: {line}")
        raise SystemExit(int(RunExit.ON_REQUEST)) from None
    except Exception as error:  # the process's edge
        if is_disk_full(error):
            raise RunStopped(f"no room on the disk of {out}: free some, then go on with: {line}") from None
        traceback.print_exception(error)
        raise SystemExit(int(RunExit.CRASHED)) from None
