"""End the fork server of :mod:`polyclinic.studies.runner` when ``flwr-sim`` ends.

The fork server imports this module first. Python also ends it, but only after all of its imports, seconds later.
"""

import os

from polyclinic.common.system.stopping import PROGRAM_VARIABLE, end_process_with_parent

end_process_with_parent(int(os.environ[PROGRAM_VARIABLE]) if PROGRAM_VARIABLE in os.environ else None)
