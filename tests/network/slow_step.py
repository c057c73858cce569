"""flwr-client whose training has one call of C that lasts longer than a program may take to stop.

    python -m tests.network.slow_step start DIR

It stands for a large batch on few cores: no signal handler of Python runs before such a call returns.
"""

import hashlib
import sys
from typing import Any

ITERATIONS = 40_000_000
"""Some 15 s or more on the machines of today."""


def main() -> None:
    """Do what the command line says."""
    import polyclinic.client.app as app
    from polyclinic.client.cli import main as client_main

    train = app.train_with_privacy_layers

    def train_slowly(*arguments: Any, **options: Any) -> Any:
        hashlib.pbkdf2_hmac("sha256", b"password", b"salt", ITERATIONS)
        return train(*arguments, **options)

    app.train_with_privacy_layers = train_slowly
    client_main(sys.argv[1:])


if __name__ == "__main__":
    main()
