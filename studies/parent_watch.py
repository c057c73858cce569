"""The first import of the fork server of :mod:`studies.runner`, which makes that process end with the program.

Python itself ends a fork server whose program has ended, but only after all imports, seconds later.
"""

import os

from common.system.stopping import PROGRAM, end_with_parent

end_with_parent(int(os.environ[PROGRAM]) if PROGRAM in os.environ else None)
