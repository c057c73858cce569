"""Start the fork server and go on as another program: ``python -m ...own_ray.start_fork_server SOCKET THREADS MODULE``.

A program of its own, so that the fork server imports torch while the other one imports Ray.
"""

import os
import runpy
import subprocess
import sys

FORK_SERVER = "server.simulation.backends.own_ray.fork_server"
MODULES = ("server.simulation.backends.inline", "client.simulation")
"""What a worker imports that takes long; not Ray."""
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""NumPy's library starts threads at import, and a fork copies none; torch starts none before it works."""


def main() -> None:
    """Start both; each worker's libraries use as many threads as a site may, as Ray itself has it."""
    _, path, threads, module, *arguments = sys.argv
    command = [sys.executable, "-P", "-m", FORK_SERVER, str(os.getpid()), path, *MODULES]
    environment = {"OMP_NUM_THREADS": threads, **os.environ, **ONE_THREAD}
    subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    sys.argv[:] = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
