"""Code that the coordinator's and the hospitals' processes share: label contract, records, models, data, metrics.

The three programs import this package first, so that Ctrl-C during their imports ends them without a traceback. Later
:mod:`polyclinic.common.system.stopping` handles signals. Other processes keep Python's default signal handler.
"""

import os
import signal
import sys

__version__ = "0.2.0"

# Set before gRPC is imported: its core would write traces, and unescaped text from the other machine, to stderr.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

_PROGRAMS = ("flwr-sim", "flwr-server", "flwr-client")

if os.path.basename(sys.argv[0] if getattr(sys, "argv", None) else "") in _PROGRAMS:
    # Set before torch is imported, whose idle threads would otherwise keep a core busy for some milliseconds after each
    # operation. Where other processes use the cores, a test of 10,000 images then takes nine times the CPU time.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
