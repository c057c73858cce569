"""Imported first by the process that runs are forked from: it ends with the program, also while it imports the rest.

Python ends that process where it finds the program gone, but it looks only once all is imported, seconds later.
"""

import os

from common.system.stopping import PROGRAM, end_with_parent

end_with_parent(int(os.environ[PROGRAM]) if PROGRAM in os.environ else None)
