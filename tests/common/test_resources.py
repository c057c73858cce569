"""Imports are left out of garbage collection, and a process gives unused memory back where its model is large."""

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


LEAVE_GAPS = """
import sys
import numpy as np
from polyclinic.common.system import resources

def resident_mb():
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * 4096 // 2**20

resources.reuse_large_buffers()
buffers = [np.ones(2**20) for _ in range(40)]  # 8 MB each
del buffers[:-1]  # the last one keeps malloc from giving back what lies below it
print(resident_mb())
resources.release_free_memory_of_large_model(resources.LARGE_MODEL_BYTES - 1)
print(resident_mb())
resources.release_free_memory_of_large_model(resources.LARGE_MODEL_BYTES)
print(resident_mb())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_unused_memory_goes_back_with_a_large_model_and_is_kept_with_a_small_one() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVE_GAPS], capture_output=True, text=True, check=True)
    kept, with_small_model, with_large_model = map(int, done.stdout.split())
    assert abs(with_small_model - kept) < 20
    assert with_large_model < kept - 250
