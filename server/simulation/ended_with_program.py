"""Imported first by the process that runs are forked from: it ends with the program, also while it imports the rest.

Python ends that process where it finds the program gone, but it looks only once all is imported, seconds later.
"""

from common.system.stopping import end_with_parent

end_with_parent()
