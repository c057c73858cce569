"""What a program imports is left out of garbage collection, and nothing that it makes later."""

import gc
import subprocess
import sys

import pytest

from polyclinic.common.system.resources import exclude_imports_from_gc

PROGRAM = """
import gc, weakref
from polyclinic.common.system.resources import exclude_imports_from_gc

with exclude_imports_from_gc():
    at_rest = not gc.isenabled()
    import decimal, email.message
frozen = gc.get_freeze_count()

class Node:
    pass

node = Node()
node.itself = node
alive = weakref.ref(node)
with exclude_imports_from_gc():
    import fractions
del node
gc.collect()
print(at_rest, gc.isenabled(), frozen > 1000, gc.get_freeze_count() == frozen, alive() is None)
"""


def test_imports_are_frozen_once_and_what_is_made_later_is_collected() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 5


def test_an_import_that_fails_leaves_the_collector_at_work() -> None:
    with pytest.raises(ImportError), exclude_imports_from_gc():
        import no_such_module  # noqa: F401
    assert gc.isenabled()
