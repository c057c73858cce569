"""``flwr-server``, whose runs draw no report and no model card: that takes longer than to run a test's federation.

python -m tests.network.without_pages run ...
"""

import sys
from pathlib import Path

import polyclinic.server.cli
import polyclinic.server.federation.set_up
from polyclinic.server.deployment import supervisor


def no_pages(out: Path) -> None:
    """Draw nothing."""


if __name__ == "__main__":
    supervisor.LEADER_COMMAND = (
        sys.executable,
        "-m",
        "tests.network.without_pages",
    )  # what leads the run is a child of this
    polyclinic.server.federation.set_up.write_run_pages = no_pages
    polyclinic.server.cli.main()
