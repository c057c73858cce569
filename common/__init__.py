"""What both sides of the wire must agree on: label contract, records, models, data, metrics, config schemas.

The three programs import it before all else: Ctrl-C while they import the rest ends them without a traceback. Once that
is done :mod:`common.system.stopping` takes over. In any other process Python's own way stays.
"""

import os
import signal
import sys

__version__ = "0.1.0"

# Before gRPC is imported, whose core would write to stderr itself: words of the other end as they are, and traces.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

_PROGRAMS = ("flwr-sim", "flwr-server", "flwr-client")

if (
    os.path.basename(sys.argv[0] if getattr(sys, "argv", None) else "") in _PROGRAMS
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
