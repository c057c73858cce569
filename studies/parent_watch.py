"""Make the fork server of :mod:`studies.runner`, which imports this module first, end when ``flwr-sim`` ends.

Python itself ends such a fork server too, but only after all of its imports, seconds later.
"""

import os

from common.system.stopping import PROGRAM, end_process_with_parent

end_process_with_parent(int(os.environ[PROGRAM]) if PROGRAM in os.environ else None)
