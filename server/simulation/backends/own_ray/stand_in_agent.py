"""Stands in for an agent of Ray's: ``python stand_in_agent.py FILE...``.

The raylet wants two agents that live as long as it does, for metrics and for the environments of single tasks. Neither
is used on one machine, and each takes half a second of a processor at every start. The raylet waits until each has
written its ports into files; nothing listens on them.
"""

import os
import sys
import time
from pathlib import Path

NOBODY = "9"
"""The port of the discard protocol."""
EVERY_S = 1.0
RAYLET = "RAY_RAYLET_PID"
"""A variable of the environment that Ray gives its agents."""


def main(files: list[str]) -> None:
    """Write the port into each file, and live as long as the raylet."""
    raylet = int(os.environ.get(RAYLET) or os.getppid())
    for name in files:
        ready = Path(f"{name}.{os.getpid()}")
        ready.write_text(NOBODY, encoding="ascii")
        ready.replace(name)
    while os.getppid() == raylet:
        time.sleep(EVERY_S)


if __name__ == "__main__":
    main(sys.argv[1:])
